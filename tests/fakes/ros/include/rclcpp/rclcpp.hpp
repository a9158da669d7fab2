// A fake of the few parts of rclcpp that client/ros uses: names, signatures and refusals are those
// of ROS 2 (Humble to Rolling), behaviour only as far as a node without a network can tell.
//
// Strict where the real one is: a parameter is declared once and has one type, what was not
// declared cannot be read, log formats are checked by the compiler. What it cannot show: executors,
// threads, services, time, remapping, and whether real headers agree.
//
// Not thread-safe, as nothing of it runs by itself.
#pragma once

#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace rcl_interfaces::msg {
struct ParameterDescriptor {
  std::string description;
  bool read_only = false;
  bool dynamic_typing = false;
};
}  // namespace rcl_interfaces::msg

namespace rclcpp {

namespace exceptions {
struct ParameterAlreadyDeclaredException : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct ParameterNotDeclaredException : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct InvalidParameterTypeException : std::runtime_error {
  using std::runtime_error::runtime_error;
};
}  // namespace exceptions
struct ParameterTypeException : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// --- Parameters

class ParameterValue {
 public:
  ParameterValue() = default;
  explicit ParameterValue(bool value) : value_(value) {}
  explicit ParameterValue(int value) : value_(int64_t{value}) {}
  explicit ParameterValue(int64_t value) : value_(value) {}
  explicit ParameterValue(double value) : value_(value) {}
  explicit ParameterValue(const std::string& value) : value_(value) {}
  explicit ParameterValue(const char* value) : value_(std::string(value)) {}
  explicit ParameterValue(const std::vector<std::string>& value) : value_(value) {}

  bool same_type(const ParameterValue& other) const {
    return value_.index() == other.value_.index();
  }
  template <typename T>
  const T& as(const std::string& name) const {
    if (const T* held = std::get_if<T>(&value_)) return *held;
    throw ParameterTypeException("parameter '" + name + "' has another type");
  }

 private:
  std::variant<std::monostate, bool, int64_t, double, std::string, std::vector<std::string>> value_;
};

class Parameter {
 public:
  Parameter(const std::string& name, const ParameterValue& value) : name_(name), value_(value) {}
  template <typename T>
  Parameter(const std::string& name, T value) : Parameter(name, ParameterValue(value)) {}

  const std::string& get_name() const { return name_; }
  const ParameterValue& get_parameter_value() const { return value_; }
  bool as_bool() const { return value_.as<bool>(name_); }
  int64_t as_int() const { return value_.as<int64_t>(name_); }
  double as_double() const { return value_.as<double>(name_); }
  const std::string& as_string() const { return value_.as<std::string>(name_); }
  const std::vector<std::string>& as_string_array() const {
    return value_.as<std::vector<std::string>>(name_);
  }

 private:
  std::string name_;
  ParameterValue value_;
};

class NodeOptions {
 public:
  NodeOptions() = default;
  std::vector<Parameter>& parameter_overrides() { return overrides_; }
  const std::vector<Parameter>& parameter_overrides() const { return overrides_; }
  template <typename ParameterT>
  NodeOptions& append_parameter_override(const std::string& name, const ParameterT& value) {
    overrides_.emplace_back(name, ParameterValue(value));
    return *this;
  }

 private:
  std::vector<Parameter> overrides_;
};

// --- Logging

class Logger {
 public:
  explicit Logger(std::string name) : name_(std::move(name)) {}
  const char* get_name() const { return name_.c_str(); }

 private:
  std::string name_;
};

namespace fake {
__attribute__((format(printf, 3, 4))) inline void Log(const char* level, const Logger& logger,
                                                      const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::fprintf(stderr, "[%s] [%s]: ", level, logger.get_name());
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
}
}  // namespace fake

// --- Timers

class CallbackGroup {
 public:
  using SharedPtr = std::shared_ptr<CallbackGroup>;
};

class TimerBase {
 public:
  using SharedPtr = std::shared_ptr<TimerBase>;
  TimerBase() = default;
  TimerBase(const TimerBase&) = delete;
  virtual ~TimerBase() = default;
  void cancel() { canceled_ = true; }
  bool is_canceled() { return canceled_; }
  void reset() { canceled_ = false; }
  virtual void execute_callback() = 0;

 private:
  bool canceled_ = false;
};

template <typename FunctorT>
class WallTimer : public TimerBase {
 public:
  using SharedPtr = std::shared_ptr<WallTimer<FunctorT>>;
  static_assert(std::is_invocable_v<FunctorT> || std::is_invocable_v<FunctorT, TimerBase&>,
                "a timer's callback takes nothing, or the timer");
  WallTimer(std::chrono::nanoseconds period, FunctorT&& callback)
      : period_(period), callback_(std::forward<FunctorT>(callback)) {
    if (period.count() < 0) throw std::invalid_argument("timer period cannot be negative");
  }
  void execute_callback() override {
    if constexpr (std::is_invocable_v<FunctorT>) {
      callback_();
    } else {
      callback_(*this);
    }
  }

 private:
  std::chrono::nanoseconds period_;
  FunctorT callback_;
};

namespace node_interfaces {
class NodeBaseInterface {
 public:
  using SharedPtr = std::shared_ptr<NodeBaseInterface>;
};
}  // namespace node_interfaces

}  // namespace rclcpp

#define RCLCPP_DEBUG(logger, ...) ::rclcpp::fake::Log("DEBUG", logger, __VA_ARGS__)
#define RCLCPP_INFO(logger, ...) ::rclcpp::fake::Log("INFO", logger, __VA_ARGS__)
#define RCLCPP_WARN(logger, ...) ::rclcpp::fake::Log("WARN", logger, __VA_ARGS__)
#define RCLCPP_ERROR(logger, ...) ::rclcpp::fake::Log("ERROR", logger, __VA_ARGS__)
