// The rclcpp node of client/ros on the fake beside this file, driven as
// client/examples/lifecycle_node.cc is: the same lines in, the same lines out. A `tick` fires the
// node's timers once.
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "client/examples/arguments.h"
#include "client/ros/modelhost_lifecycle/model_node.h"

namespace {

using modelhost_lifecycle::ModelNode;
using Return = ModelNode::CallbackReturn;

const char* NameOf(Return code) {
  switch (code) {
    case Return::SUCCESS:
      return "SUCCESS";
    case Return::FAILURE:
      return "FAILURE";
    case Return::ERROR:
      return "ERROR";
  }
  return "REFUSED";
}

void Answer(const std::string& verb, const char* outcome, const ModelNode& node,
            const std::string& detail) {
  std::printf("%s %s %s: %s\n", verb.c_str(), outcome, node.get_current_state().label().c_str(),
              detail.c_str());
  std::fflush(stdout);
}

void Tick(ModelNode& node) {
  const std::string before = ModelNames(node.models());
  const int fired = node.fake_fire_timers();
  const bool active = node.get_current_state().label() == "active";
  if (fired != (active ? 1 : 0)) {
    std::printf("tick: %d timers while %s\n", fired, node.get_current_state().label().c_str());
  }
  const std::string now = ModelNames(node.models());
  Answer("tick", now == before ? "KEPT" : "ADOPTED", node,
         now + " sum " + std::to_string(SumOfBytes(node.models())));
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments(argc, argv);
  rclcpp::NodeOptions options;
  options.append_parameter_override("runtime_dir", arguments.Value("--runtime-dir", ""));
  const std::vector<std::string> refs = arguments.Values("--model");
  if (!refs.empty()) options.append_parameter_override("models", refs);
  options.append_parameter_override(
      "deadline_s", static_cast<double>(arguments.Number("--deadline-ms", 5000)) / 1000);
  if (arguments.Switch("--mistyped")) options.append_parameter_override("period_ms", "thirty");
  arguments.Done("ros_node_driver [--runtime-dir DIR] [--model REF]... [--deadline-ms N]");

  std::shared_ptr<ModelNode> node;
  try {
    node = std::make_shared<ModelNode>(options);
  } catch (const rclcpp::exceptions::InvalidParameterTypeException& thrown) {
    std::fprintf(stderr, "error: parameter '%s' has another type\n", thrown.what());
    return 3;
  }
  std::string verb;
  while (std::getline(std::cin, verb)) {
    Return code{};  // What is refused leaves it as it is.
    if (verb == "configure") {
      node->configure(code);
    } else if (verb == "activate") {
      node->activate(code);
    } else if (verb == "deactivate") {
      node->deactivate(code);
    } else if (verb == "cleanup") {
      node->cleanup(code);
    } else if (verb == "shutdown") {
      node->shutdown(code);
    } else if (verb == "tick") {
      Tick(*node);
      continue;
    } else {
      std::fprintf(stderr, "error: '%s': no such transition\n", verb.c_str());
      return 2;
    }
    Answer(verb, NameOf(code), *node,
           code == Return::SUCCESS ? ModelNames(node->models()) : node->models().error());
  }
  return 0;
}
