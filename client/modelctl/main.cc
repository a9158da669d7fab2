// modelctl: what an operator types. Parses, runs one verb, and ends by the rules of exit_code.h.
#include <grpc/support/log.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <new>

#include "absl/strings/str_cat.h"
#include "client/modelctl/commands.h"
#include "client/modelctl/context.h"
#include "client/modelctl/exit_code.h"

namespace modelhost::modelctl {
namespace {

int End(const Exit& exit, const std::string& output) {
  if (!exit.error.empty()) {
    std::cerr << "error: " << exit.error << '\n' << std::flush;
    return static_cast<int>(exit.code);
  }
  const int error = WriteAll(STDOUT_FILENO, output);
  // A reader that has seen enough (head) is no failure.
  if (error != 0 && error != EPIPE) {
    std::cerr << "error: standard output: " << std::strerror(error) << '\n' << std::flush;
    return static_cast<int>(ExitCode::kOther);
  }
  return static_cast<int>(exit.code);
}

int Main(const std::vector<std::string>& arguments) {
  const Outcome<Command> command = ParseCommandLine(arguments);
  if (!command.ok()) return End(command.exit(), "");
  if (!command->run) return End(Exit::Ok(), command->text);
  Context context(command->globals, Terminal::Detect(), std::cerr);
  const Exit exit = command->run(context);
  // A probe that was told to be quiet wants the code alone.
  if (exit.code != ExitCode::kUsage && command->silent) return static_cast<int>(exit.code);
  return End(exit, std::move(context).TakeOutput());
}

}  // namespace
}  // namespace modelhost::modelctl

int main(int argc, char** argv) {
  // Before any thread. A closed pipe is an error code of write, and gRPC's own log lines would
  // break the promise of one error line.
  std::signal(SIGPIPE, SIG_IGN);
  if (std::getenv("GRPC_VERBOSITY") == nullptr) gpr_set_log_function([](gpr_log_func_args*) {});
  // Verbs that follow an operation block it and ask; the others have nothing to put in order.
  if (std::signal(SIGINT, [](int) { ::_exit(130); }) == SIG_IGN) std::signal(SIGINT, SIG_IGN);
  try {
    return modelhost::modelctl::Main(std::vector<std::string>(argv + 1, argv + argc));
  } catch (const std::bad_alloc&) {
    std::cerr << "error: modelctl: not enough memory (raise the limit of this process)" << '\n'
              << std::flush;
    return static_cast<int>(modelhost::modelctl::ExitCode::kResources);
  } catch (const std::exception& error) {
    std::cerr << "error: modelctl: " << error.what() << '\n' << std::flush;
    return static_cast<int>(modelhost::modelctl::ExitCode::kOther);
  }
}
