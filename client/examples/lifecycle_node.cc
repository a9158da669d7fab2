// A managed node without ROS: its transitions are lines on standard input.
//
//   configure | activate | deactivate | cleanup | shutdown | tick
//
// Each is answered by one line, `VERB OUTCOME STATE: DETAIL`, where DETAIL is the models in use, or
// why it did not succeed. `tick` is the node's own work: it adopts where that is due, and reads all
// weights:
//
//   configure SUCCESS inactive: planner@7
//   tick ADOPTED active: planner@8 sum 81264640
#include "client/examples/lifecycle_node.h"

#include <cstdio>
#include <iostream>
#include <string>

#include "client/examples/arguments.h"

namespace {

using modelhost_examples::ModelLifecycle;

constexpr char kUsage[] =
    "modelhost-lifecycle [--runtime-dir DIR] [--model REF]... [--deadline-ms N]";

void Answer(const std::string& verb, const char* outcome, const ModelLifecycle& node,
            const std::string& detail) {
  std::printf("%s %s %s: %s\n", verb.c_str(), outcome, ModelLifecycle::Name(node.state()),
              detail.c_str());
  std::fflush(stdout);
}

void Tick(ModelLifecycle& node) {
  const bool adopted = node.Tick();
  Answer("tick", adopted ? "ADOPTED" : "KEPT", node,
         ModelNames(node) + " sum " + std::to_string(SumOfBytes(node)));
}

// False: there is no such command.
bool Run(const std::string& verb, ModelLifecycle& node, const ModelLifecycle::Options& options) {
  ModelLifecycle::Outcome outcome;
  if (verb == "configure") {
    outcome = node.Configure(options);
  } else if (verb == "activate") {
    outcome = node.Activate();
  } else if (verb == "deactivate") {
    outcome = node.Deactivate();
  } else if (verb == "cleanup") {
    outcome = node.Cleanup();
  } else if (verb == "shutdown") {
    outcome = node.Shutdown();
  } else if (verb == "tick") {
    Tick(node);
    return true;
  } else {
    return false;
  }
  const bool done = outcome == ModelLifecycle::Outcome::kSuccess;
  const std::string detail = done ? ModelNames(node) : node.error();
  if (outcome == ModelLifecycle::Outcome::kError) (void)node.HandleError();
  Answer(verb, modelhost_examples::Name(outcome), node, detail);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments(argc, argv);
  ModelLifecycle::Options options;
  options.runtime_dir = arguments.Value("--runtime-dir", "");
  options.refs = arguments.Values("--model");
  if (options.refs.empty()) options.refs = {"planner"};
  options.deadline = std::chrono::milliseconds(arguments.Number("--deadline-ms", 5000));
  arguments.Done(kUsage);

  ModelLifecycle node;
  std::string verb;
  while (std::getline(std::cin, verb)) {
    if (!Run(verb, node, options)) {
      std::fprintf(stderr,
                   "error: '%s': no such transition (they are at the top of this program)\n",
                   verb.c_str());
      return 2;
    }
  }
  return 0;
}
