// A fake of rclcpp_lifecycle::LifecycleNode: its state machine as rcl_lifecycle has it, its
// callbacks as rclcpp calls them. See rclcpp/rclcpp.hpp beside it for what it can and cannot show.
//
//   a transition that the state does not have   refused, no callback is called, nothing changes
//   SUCCESS, FAILURE of a callback              the next state, or the one before
//   ERROR, or an exception                      on_error, then unconfigured (SUCCESS) or finalized
//   shutdown                                    finalized, whether it succeeds or fails
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <rclcpp/rclcpp.hpp>
#include <string>
#include <utility>
#include <vector>

namespace lifecycle_msgs::msg {
struct State {
  enum : uint8_t {
    PRIMARY_STATE_UNKNOWN = 0,
    PRIMARY_STATE_UNCONFIGURED = 1,
    PRIMARY_STATE_INACTIVE = 2,
    PRIMARY_STATE_ACTIVE = 3,
    PRIMARY_STATE_FINALIZED = 4,
  };
};
struct Transition {
  enum : uint8_t {
    TRANSITION_CONFIGURE = 1,
    TRANSITION_CLEANUP = 2,
    TRANSITION_ACTIVATE = 3,
    TRANSITION_DEACTIVATE = 4,
    TRANSITION_UNCONFIGURED_SHUTDOWN = 5,
    TRANSITION_INACTIVE_SHUTDOWN = 6,
    TRANSITION_ACTIVE_SHUTDOWN = 7,
    TRANSITION_CALLBACK_SUCCESS = 97,
    TRANSITION_CALLBACK_FAILURE = 98,
    TRANSITION_CALLBACK_ERROR = 99,
  };
};
}  // namespace lifecycle_msgs::msg

namespace rclcpp_lifecycle {

class State {
 public:
  State() : State(lifecycle_msgs::msg::State::PRIMARY_STATE_UNKNOWN, "unknown") {}
  State(uint8_t id, const std::string& label) : id_(id), label_(label) {}
  virtual ~State() = default;
  State(const State&) = default;
  State& operator=(const State&) = default;
  uint8_t id() const { return id_; }
  std::string label() const { return label_; }

 private:
  uint8_t id_;
  std::string label_;
};

namespace node_interfaces {
class LifecycleNodeInterface {
 protected:
  LifecycleNodeInterface() = default;

 public:
  enum class CallbackReturn : uint8_t {
    SUCCESS = lifecycle_msgs::msg::Transition::TRANSITION_CALLBACK_SUCCESS,
    FAILURE = lifecycle_msgs::msg::Transition::TRANSITION_CALLBACK_FAILURE,
    ERROR = lifecycle_msgs::msg::Transition::TRANSITION_CALLBACK_ERROR,
  };
  virtual ~LifecycleNodeInterface() = default;
  virtual CallbackReturn on_configure(const State&) { return CallbackReturn::SUCCESS; }
  virtual CallbackReturn on_cleanup(const State&) { return CallbackReturn::SUCCESS; }
  virtual CallbackReturn on_shutdown(const State&) { return CallbackReturn::SUCCESS; }
  virtual CallbackReturn on_activate(const State&) { return CallbackReturn::SUCCESS; }
  virtual CallbackReturn on_deactivate(const State&) { return CallbackReturn::SUCCESS; }
  virtual CallbackReturn on_error(const State&) { return CallbackReturn::FAILURE; }
};
}  // namespace node_interfaces

class LifecycleNode : public node_interfaces::LifecycleNodeInterface,
                      public std::enable_shared_from_this<LifecycleNode> {
 public:
  explicit LifecycleNode(const std::string& node_name,
                         const rclcpp::NodeOptions& options = rclcpp::NodeOptions(),
                         bool enable_communication_interface = true)
      : name_(node_name), base_(std::make_shared<rclcpp::node_interfaces::NodeBaseInterface>()) {
    (void)enable_communication_interface;
    for (const rclcpp::Parameter& each : options.parameter_overrides()) {
      overrides_.insert_or_assign(each.get_name(), each.get_parameter_value());
    }
  }
  LifecycleNode(const LifecycleNode&) = delete;
  LifecycleNode& operator=(const LifecycleNode&) = delete;
  ~LifecycleNode() override = default;

  const char* get_name() const { return name_.c_str(); }
  rclcpp::Logger get_logger() const { return rclcpp::Logger(name_); }
  rclcpp::node_interfaces::NodeBaseInterface::SharedPtr get_node_base_interface() { return base_; }

  template <typename ParameterT>
  auto declare_parameter(const std::string& name, const ParameterT& default_value,
                         const rcl_interfaces::msg::ParameterDescriptor& descriptor =
                             rcl_interfaces::msg::ParameterDescriptor(),
                         bool ignore_override = false) {
    rclcpp::ParameterValue value(default_value);
    const auto given = overrides_.find(name);
    if (given != overrides_.end() && !ignore_override) {
      if (!descriptor.dynamic_typing && !given->second.same_type(value)) {
        throw rclcpp::exceptions::InvalidParameterTypeException(name);
      }
      value = given->second;
    }
    if (!parameters_.emplace(name, value).second) {
      throw rclcpp::exceptions::ParameterAlreadyDeclaredException(name);
    }
    return value.as<ParameterT>(name);
  }
  rclcpp::Parameter get_parameter(const std::string& name) const {
    const auto found = parameters_.find(name);
    if (found == parameters_.end()) {
      throw rclcpp::exceptions::ParameterNotDeclaredException(name);
    }
    return rclcpp::Parameter(name, found->second);
  }

  template <typename DurationRepT = int64_t, typename DurationT = std::milli, typename CallbackT>
  typename rclcpp::WallTimer<CallbackT>::SharedPtr create_wall_timer(
      std::chrono::duration<DurationRepT, DurationT> period, CallbackT callback,
      rclcpp::CallbackGroup::SharedPtr group = nullptr) {
    (void)group;
    auto timer = std::make_shared<rclcpp::WallTimer<CallbackT>>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(period), std::move(callback));
    timers_.push_back(timer);
    return timer;
  }

  const State& get_current_state() const { return state_; }
  const State& trigger_transition(uint8_t transition_id, CallbackReturn& cb_return_code) {
    using lifecycle_msgs::msg::Transition;
    switch (transition_id) {
      case Transition::TRANSITION_CONFIGURE:
        return Change(kUnconfigured, kInactive, &LifecycleNode::on_configure, cb_return_code);
      case Transition::TRANSITION_CLEANUP:
        return Change(kInactive, kUnconfigured, &LifecycleNode::on_cleanup, cb_return_code);
      case Transition::TRANSITION_ACTIVATE:
        return Change(kInactive, kActive, &LifecycleNode::on_activate, cb_return_code);
      case Transition::TRANSITION_DEACTIVATE:
        return Change(kActive, kInactive, &LifecycleNode::on_deactivate, cb_return_code);
      case Transition::TRANSITION_UNCONFIGURED_SHUTDOWN:
        return Change(kUnconfigured, kFinalized, &LifecycleNode::on_shutdown, cb_return_code);
      case Transition::TRANSITION_INACTIVE_SHUTDOWN:
        return Change(kInactive, kFinalized, &LifecycleNode::on_shutdown, cb_return_code);
      case Transition::TRANSITION_ACTIVE_SHUTDOWN:
        return Change(kActive, kFinalized, &LifecycleNode::on_shutdown, cb_return_code);
      default:
        return Refuse(transition_id);
    }
  }
  const State& configure(CallbackReturn& code) { return trigger_transition(1, code); }
  const State& cleanup(CallbackReturn& code) { return trigger_transition(2, code); }
  const State& activate(CallbackReturn& code) { return trigger_transition(3, code); }
  const State& deactivate(CallbackReturn& code) { return trigger_transition(4, code); }
  const State& shutdown(CallbackReturn& code) {
    return trigger_transition(static_cast<uint8_t>(4 + state_.id()), code);
  }

  CallbackReturn on_activate(const State&) override { return CallbackReturn::SUCCESS; }
  CallbackReturn on_deactivate(const State&) override { return CallbackReturn::SUCCESS; }

  // For tests: runs every timer that lives and is not canceled, once. How many there were.
  int fake_fire_timers() {
    int fired = 0;
    for (const std::weak_ptr<rclcpp::TimerBase>& each : std::vector(timers_)) {
      const std::shared_ptr<rclcpp::TimerBase> timer = each.lock();
      if (timer == nullptr || timer->is_canceled()) continue;
      timer->execute_callback();
      ++fired;
    }
    return fired;
  }

 private:
  enum Primary : uint8_t { kUnconfigured = 1, kInactive = 2, kActive = 3, kFinalized = 4 };
  using Callback = CallbackReturn (LifecycleNode::*)(const State&);

  static State Of(Primary primary) {
    static const char* const labels[] = {"unknown", "unconfigured", "inactive", "active",
                                         "finalized"};
    return State(primary, labels[primary]);
  }

  // As rclcpp: what no state has is logged, and the caller's code is left as it was.
  const State& Refuse(uint8_t transition_id) {
    RCLCPP_ERROR(get_logger(), "Unable to start transition %u from current state %s", transition_id,
                 state_.label().c_str());
    return state_;
  }

  CallbackReturn Call(Callback callback, const State& previous) {
    try {
      return (this->*callback)(previous);
    } catch (const std::exception& thrown) {
      RCLCPP_ERROR(get_logger(), "Original error: %s", thrown.what());
      return CallbackReturn::ERROR;
    }
  }

  const State& Change(Primary from, Primary to, Callback callback, CallbackReturn& code) {
    if (state_.id() != from) return Refuse(static_cast<uint8_t>(to));
    if (changing_) throw std::logic_error("a transition within a transition");
    changing_ = true;
    const State previous = state_;
    code = Call(callback, previous);
    if (code == CallbackReturn::SUCCESS || to == kFinalized) state_ = Of(to);
    if (code == CallbackReturn::ERROR) {
      const bool recovered = Call(&LifecycleNode::on_error, previous) == CallbackReturn::SUCCESS;
      state_ = Of(recovered ? kUnconfigured : kFinalized);
    }
    changing_ = false;
    return state_;
  }

  std::string name_;
  rclcpp::node_interfaces::NodeBaseInterface::SharedPtr base_;
  std::map<std::string, rclcpp::ParameterValue> overrides_;
  std::map<std::string, rclcpp::ParameterValue> parameters_;
  std::vector<std::weak_ptr<rclcpp::TimerBase>> timers_;
  State state_ = Of(kUnconfigured);
  bool changing_ = false;
};

}  // namespace rclcpp_lifecycle
