// The one moment at which work on another thread can no longer be stopped, agreed upon by who does
// it and who wants to stop it: the first of them decides.
//
// A worker passes the gate right before what it does can show, and not before; so who closes it
// knows that nothing will ever show, however long the worker still hangs. Any thread.
#pragma once

#include <atomic>

namespace modelhost {

class CommitGate {
 public:
  // The worker: true when it may go on; again true when asked again.
  bool Pass() { return Decide(State::kPassed); }
  // Who stops it: true when nothing will show.
  bool Close() { return Decide(State::kClosed); }

 private:
  enum class State { kOpen, kPassed, kClosed };
  bool Decide(State wanted) {
    State now = State::kOpen;
    return state_.compare_exchange_strong(now, wanted) || now == wanted;
  }
  std::atomic<State> state_{State::kOpen};
};

}  // namespace modelhost
