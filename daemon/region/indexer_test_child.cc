// A program in the place of modelhost-indexer that goes wrong as the first file's name says.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "absl/strings/numbers.h"
#include "daemon/format/index_codec.h"

namespace {

int Run(int first) {
  std::string text(65536, '\0');
  const ssize_t bytes = ::read(first, text.data(), text.size());
  text.resize(bytes < 0 ? 0 : static_cast<size_t>(bytes));
  const auto request = modelhost::DecodeIndexRequest(std::as_bytes(std::span<const char>(text)));
  if (!request.ok() || request->files.empty()) return 3;
  const std::string& how = request->files[0].name;
  if (how == "crash") ::raise(SIGSEGV);
  if (how == "forbidden") ::raise(SIGSYS);
  if (how == "killed") ::raise(SIGKILL);
  if (how == "told to end") ::raise(SIGTERM);
  if (how == "status") return 7;
  if (how == "hang") ::pause();
  if (how == "bus") {  // The file is empty by now.
    void* at = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, first + 2, 0);
    return *static_cast<volatile char*>(at);
  }
  const std::string answer = "no answer of ours";
  if (how == "garbage") return ::write(first + 1, answer.data(), answer.size()) < 0 ? 1 : 0;
  return how == "silence" ? 0 : 4;
}

}  // namespace

int main(int, char** argv) {
  int first = 0;
  if (!absl::SimpleAtoi(argv[1], &first)) return 5;
  // Sanitizers make an exit status of them.
  for (const int number : {SIGSEGV, SIGBUS, SIGABRT, SIGSYS}) ::signal(number, SIG_DFL);
  return Run(first);
}
