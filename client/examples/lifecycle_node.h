// Models in the life of a managed node: what each transition of ROS 2's lifecycle does with them.
// It needs no ROS; client/ros/modelhost_lifecycle is an rclcpp node around it.
//
//   unconfigured --configure--> inactive --activate--> active
//        ^  acquires, follows     | ^  adopts the newest  | Tick adopts at your safe point
//        |                        | '-----deactivate------'
//        '--------cleanup---------'       keeps what it has
//           gives all back            shutdown: gives all back, from anywhere, for good
//
// Outcomes are those of rclcpp_lifecycle's CallbackReturn:
//   success   the transition is done
//   failure   the node is as it was; a later try may succeed (no daemon, not READY in time, no
//   model
//             of that name yet). error() says why and what to do
//   error     no try will succeed as things are (a reference that is none, a library of another
//             ABI, broken bytes). All is given back, and HandleError ends where it may be
//             configured again
//
// Threads   one at a time for everything here: one mutually exclusive callback group.
// Time      Configure waits, up to its deadline, for the daemon and for the models. Nothing else
//           waits.
// Errors    nothing throws. The daemon's death is no error: what is mapped stays, and the library
//           comes back to the daemon by itself.
// Owner     of a session (modelhost::Client) and of a lease for each model, from configure to
//           cleanup. Copies of a ModelHandle keep the bytes mapped for longer.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "modelhost/modelhost.hpp"

namespace modelhost_examples {

class ModelLifecycle {
 public:
  enum class State { kUnconfigured, kInactive, kActive, kFinalized };
  enum class Outcome { kSuccess, kFailure, kError };

  struct Options {
    std::string runtime_dir;                   // Empty: the library looks for the daemon by itself.
    std::vector<std::string> refs;             // "planner", "detector:canary". All change together.
    std::chrono::milliseconds deadline{5000};  // Of Configure, for everything.
  };

  Outcome Configure(const Options& options) {
    if (state_ != State::kUnconfigured) return Refuse("configure", "clean it up first");
    if (options.deadline.count() <= 0) {
      return Fail({MH_INVALID_ARGUMENT, "the deadline must be more than 0 ms"});
    }
    const auto end = std::chrono::steady_clock::now() + options.deadline;
    modelhost::Client::Options connect;
    connect.runtime_dir = options.runtime_dir;
    connect.deadline = options.deadline;
    auto client = modelhost::Client::Connect(connect);
    if (!client.ok()) return Fail(client.error());
    modelhost::AcquireOptions acquire;
    acquire.wait = true;
    // What is left of the deadline. 0 would mean the client's own.
    acquire.deadline = std::max(std::chrono::milliseconds(1),
                                std::chrono::duration_cast<std::chrono::milliseconds>(
                                    end - std::chrono::steady_clock::now()));
    auto models = client->FollowSet(options.refs, acquire);
    if (!models.ok()) return Fail(models.error());
    client_.emplace(std::move(*client));
    models_.emplace(std::move(*models));
    return Enter(State::kInactive);
  }

  Outcome Activate() {
    if (state_ != State::kInactive) return Refuse("activate", "configure it first");
    (void)models_->Adopt();
    return Enter(State::kActive);
  }

  Outcome Deactivate() {
    if (state_ != State::kActive) return Refuse("deactivate", "it does not run");
    return Enter(State::kInactive);
  }

  Outcome Cleanup() {
    if (state_ != State::kInactive) return Refuse("clean up", "only an inactive one can");
    GiveBack();
    return Enter(State::kUnconfigured);
  }

  Outcome Shutdown() {
    if (state_ == State::kFinalized) return Refuse("shut down", "make another one");
    GiveBack();
    return Enter(State::kFinalized);
  }

  // ROS calls it (as on_error) after any outcome kError. The error's text is kept.
  Outcome HandleError() {
    GiveBack();
    state_ = State::kUnconfigured;
    return Outcome::kSuccess;
  }

  // At a moment when nothing uses what model() gave. True: there are newer models now, all of them
  // at once. Never waits. Does nothing unless active.
  bool Tick() { return state_ == State::kActive && models_->Adopt(); }

  State state() const { return state_; }
  // Why the last transition was no success; empty when it was.
  const std::string& error() const { return error_; }
  size_t model_count() const { return models_.has_value() ? models_->size() : 0; }
  // In the order of Options::refs. Requires number < model_count().
  modelhost::ModelHandle model(size_t number) const { return (*models_)[number]; }
  // False while the daemon is away, and without a session. For diagnostics: nothing depends on it.
  bool connected() const { return client_.has_value() && client_->state().connected != 0; }
  // Why newer models could not be attached; empty when they could. They are tried again.
  std::string trouble() const {
    if (!models_.has_value()) return "";
    const modelhost::Error status = models_->status();
    return status.status == MH_OK ? "" : status.ToString();
  }

  static const char* Name(State state) {
    switch (state) {
      case State::kUnconfigured:
        return "unconfigured";
      case State::kInactive:
        return "inactive";
      case State::kActive:
        return "active";
      case State::kFinalized:
        return "finalized";
    }
    return "unknown";
  }

 private:
  Outcome Enter(State state) {
    state_ = state;
    error_.clear();
    return Outcome::kSuccess;
  }

  Outcome Refuse(const char* what, const char* remedy) {
    error_ = std::string("cannot ") + what + ": the node is " + Name(state_) + " (" + remedy + ")";
    return Outcome::kFailure;
  }

  Outcome Fail(const modelhost::Error& error) {
    error_ = error.ToString();
    switch (error.status) {
      case MH_UNAVAILABLE:          // The daemon may start yet,
      case MH_DEADLINE_EXCEEDED:    // the model become READY,
      case MH_FAILED_PRECONDITION:  //
      case MH_NOT_FOUND:            // or be published,
      case MH_PERMISSION_DENIED:    // its groups change,
      case MH_RESOURCE_EXHAUSTED:   // and others leave.
        return Outcome::kFailure;
      default:
        return Outcome::kError;
    }
  }

  void GiveBack() {
    models_.reset();
    client_.reset();
  }

  State state_ = State::kUnconfigured;
  std::string error_;
  std::optional<modelhost::Client> client_;
  std::optional<modelhost::LiveSet> models_;  // After its client: it goes first.
};

inline const char* Name(ModelLifecycle::Outcome outcome) {
  switch (outcome) {
    case ModelLifecycle::Outcome::kSuccess:
      return "SUCCESS";
    case ModelLifecycle::Outcome::kFailure:
      return "FAILURE";
    case ModelLifecycle::Outcome::kError:
      return "ERROR";
  }
  return "UNKNOWN";
}

// "planner@8 detector@3"
inline std::string ModelNames(const ModelLifecycle& node) {
  std::string names;
  for (size_t i = 0; i < node.model_count(); ++i) {
    names += (i == 0 ? "" : " ") + node.model(i).name();
  }
  return names;
}

// Stands for inference: every byte of every tensor.
inline unsigned long long SumOfBytes(const ModelLifecycle& node) {
  unsigned long long sum = 0;
  for (size_t i = 0; i < node.model_count(); ++i) {
    const modelhost::ModelHandle model = node.model(i);
    for (size_t k = 0; k < model.tensor_count(); ++k) {
      const auto tensor = model.TensorAt(k);
      if (!tensor.ok()) continue;
      for (const std::byte byte : tensor->bytes()) sum += std::to_integer<unsigned>(byte);
    }
  }
  return sum;
}

}  // namespace modelhost_examples
