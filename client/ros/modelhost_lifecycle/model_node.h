// A managed ROS 2 node that holds models of modelhostd: client/examples/lifecycle_node.h behind
// rclcpp_lifecycle. A start for a node of your own, or a component to load as it is.
//
// Parameters, read at each configure:
//   models       strings, default ["planner"]: references; several change together
//   runtime_dir  string, default "": where handles.sock is; empty: the library looks by itself
//   deadline_s   double, default 5.0, seconds: how long configure may wait
//   period_ms    integer, default 30: between two turns of the loop
//
// Threads   the timer and the services that change state are in the node's default callback group,
//           which is mutually exclusive: with any executor a turn and a transition never meet.
// Errors    in the log, and as the outcome of the transition. Nothing throws but what rclcpp throws
//           for parameters of a wrong type.
#pragma once

#include <chrono>
#include <cstddef>
#include <rclcpp/rclcpp.hpp>
#include <rclcpp_lifecycle/lifecycle_node.hpp>
#include <string>

#include "client/examples/lifecycle_node.h"

namespace modelhost_lifecycle {

class ModelNode : public rclcpp_lifecycle::LifecycleNode {
 public:
  explicit ModelNode(const rclcpp::NodeOptions& options);

  CallbackReturn on_configure(const rclcpp_lifecycle::State& previous) override;
  CallbackReturn on_activate(const rclcpp_lifecycle::State& previous) override;
  CallbackReturn on_deactivate(const rclcpp_lifecycle::State& previous) override;
  CallbackReturn on_cleanup(const rclcpp_lifecycle::State& previous) override;
  CallbackReturn on_shutdown(const rclcpp_lifecycle::State& previous) override;
  CallbackReturn on_error(const rclcpp_lifecycle::State& previous) override;

  const modelhost_examples::ModelLifecycle& models() const { return models_; }

 private:
  // One turn of the loop: adopts first, where no pointer into a model is in use.
  void Turn();
  CallbackReturn Report(const char* what, modelhost_examples::ModelLifecycle::Outcome outcome);

  modelhost_examples::ModelLifecycle models_;
  std::chrono::milliseconds period_{0};  // As read at the last configure.
  rclcpp::TimerBase::SharedPtr timer_;   // While active.
  std::string trouble_;                  // The last one logged.
};

}  // namespace modelhost_lifecycle
