#include "client/ros/modelhost_lifecycle/model_node.h"

#include <chrono>
#include <cstdint>
#include <rclcpp_components/register_node_macro.hpp>
#include <string>
#include <vector>

namespace modelhost_lifecycle {
namespace {

using modelhost_examples::ModelLifecycle;
using Return = rclcpp_lifecycle::node_interfaces::LifecycleNodeInterface::CallbackReturn;

constexpr double kLongestDeadlineS = 24 * 3600;

Return ToRos(ModelLifecycle::Outcome outcome) {
  switch (outcome) {
    case ModelLifecycle::Outcome::kSuccess:
      return Return::SUCCESS;
    case ModelLifecycle::Outcome::kFailure:
      return Return::FAILURE;
    case ModelLifecycle::Outcome::kError:
      return Return::ERROR;
  }
  return Return::ERROR;
}

}  // namespace

ModelNode::ModelNode(const rclcpp::NodeOptions& options) : LifecycleNode("model_node", options) {
  declare_parameter("models", std::vector<std::string>{"planner"});
  declare_parameter("runtime_dir", std::string());
  declare_parameter("deadline_s", 5.0);
  declare_parameter("period_ms", int64_t{30});
}

ModelNode::CallbackReturn ModelNode::on_configure(const rclcpp_lifecycle::State&) {
  ModelLifecycle::Options options;
  options.refs = get_parameter("models").as_string_array();
  options.runtime_dir = get_parameter("runtime_dir").as_string();
  const double deadline_s = get_parameter("deadline_s").as_double();
  const int64_t period_ms = get_parameter("period_ms").as_int();
  if (!(deadline_s > 0 && deadline_s <= kLongestDeadlineS) || period_ms <= 0) {
    RCLCPP_ERROR(get_logger(),
                 "configure: deadline_s is %g and period_ms %lld: both must be more than 0, and a "
                 "deadline at most a day (set the parameters and configure again)",
                 deadline_s, static_cast<long long>(period_ms));
    return CallbackReturn::FAILURE;
  }
  period_ = std::chrono::milliseconds(period_ms);
  options.deadline = std::chrono::milliseconds(static_cast<int64_t>(deadline_s * 1000) + 1);
  return Report("configure", models_.Configure(options));
}

ModelNode::CallbackReturn ModelNode::on_activate(const rclcpp_lifecycle::State& previous) {
  const auto outcome = models_.Activate();
  if (outcome == ModelLifecycle::Outcome::kSuccess) {
    timer_ = create_wall_timer(period_, [this] { Turn(); });
    (void)LifecycleNode::on_activate(previous);  // Lets managed publishers publish.
  }
  return Report("activate", outcome);
}

ModelNode::CallbackReturn ModelNode::on_deactivate(const rclcpp_lifecycle::State& previous) {
  timer_.reset();
  (void)LifecycleNode::on_deactivate(previous);
  return Report("deactivate", models_.Deactivate());
}

ModelNode::CallbackReturn ModelNode::on_cleanup(const rclcpp_lifecycle::State&) {
  return Report("cleanup", models_.Cleanup());
}

ModelNode::CallbackReturn ModelNode::on_shutdown(const rclcpp_lifecycle::State&) {
  timer_.reset();
  return Report("shutdown", models_.Shutdown());
}

ModelNode::CallbackReturn ModelNode::on_error(const rclcpp_lifecycle::State&) {
  timer_.reset();
  return ToRos(models_.HandleError());
}

void ModelNode::Turn() {
  if (models_.Tick()) {
    RCLCPP_INFO(get_logger(), "adopted %s", modelhost_examples::ModelNames(models_).c_str());
  }
  const std::string trouble = models_.trouble();
  if (trouble != trouble_ && !trouble.empty()) {
    RCLCPP_WARN(get_logger(), "goes on with %s: %s",
                modelhost_examples::ModelNames(models_).c_str(), trouble.c_str());
  }
  trouble_ = trouble;
  // Your work on models_.model(0), models_.model(1), ...
}

ModelNode::CallbackReturn ModelNode::Report(const char* what, ModelLifecycle::Outcome outcome) {
  if (outcome == ModelLifecycle::Outcome::kSuccess) {
    RCLCPP_INFO(get_logger(), "%s: %s", what, modelhost_examples::ModelNames(models_).c_str());
  } else {
    RCLCPP_ERROR(get_logger(), "%s: %s", what, models_.error().c_str());
  }
  return ToRos(outcome);
}

}  // namespace modelhost_lifecycle

RCLCPP_COMPONENTS_REGISTER_NODE(modelhost_lifecycle::ModelNode)
