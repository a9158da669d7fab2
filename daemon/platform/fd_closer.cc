#include "daemon/platform/fd_closer.h"

#include <pthread.h>

#include <algorithm>
#include <deque>
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace modelhost {

struct FdCloser::State {
  struct Lane {
    std::deque<UniqueFd> fds;
    bool busy = false;  // A thread is closing the first of `fds`.
  };

  // A lane that has work and no thread; the next after the one served last, so that all get turns.
  std::map<uint32_t, Lane>::iterator Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    const auto free = [](const auto& entry) { return !entry.second.busy; };
    auto found = std::find_if(lanes.upper_bound(last_uid), lanes.end(), free);
    if (found == lanes.end()) found = std::find_if(lanes.begin(), lanes.end(), free);
    return found;
  }
  bool MayProceed() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    return stopping || Next() != lanes.end();
  }
  bool NoneLeft() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return threads == 0; }

  // What a thread does until it is stopped and nothing is left for it.
  void Work();
  static void Start(const std::shared_ptr<State>& state);

  absl::Mutex mutex;
  // Those with something to close, which is never empty.
  std::map<uint32_t, Lane> lanes ABSL_GUARDED_BY(mutex);
  uint32_t last_uid ABSL_GUARDED_BY(mutex) = 0;
  size_t waiting ABSL_GUARDED_BY(mutex) = 0;
  size_t busy_lanes ABSL_GUARDED_BY(mutex) = 0;
  size_t threads ABSL_GUARDED_BY(mutex) = 0;
  size_t idle ABSL_GUARDED_BY(mutex) = 0;
  bool stopping ABSL_GUARDED_BY(mutex) = false;
};

void FdCloser::State::Work() {
  absl::MutexLock lock(&mutex);
  while (true) {
    ++idle;
    mutex.Await(absl::Condition(this, &State::MayProceed));
    --idle;
    const auto lane = Next();
    if (lane == lanes.end()) break;  // Stopping.
    last_uid = lane->first;
    lane->second.busy = true;
    ++busy_lanes;
    UniqueFd& first = lane->second.fds.front();  // Stays where it is: a deque grows at its ends.
    mutex.Unlock();
    first.Reset();
    mutex.Lock();
    lane->second.busy = false;
    --busy_lanes;
    lane->second.fds.pop_front();
    --waiting;
    if (lane->second.fds.empty()) lanes.erase(lane);
  }
  --threads;
}

void FdCloser::State::Start(const std::shared_ptr<State>& state) {
  try {
    std::thread thread([state] { state->Work(); });
    ::pthread_setname_np(thread.native_handle(), "mh-close");
    thread.detach();  // lint: allow(detach) what hangs in close() cannot be joined; see ~FdCloser.
  } catch (const std::system_error&) {
    // No thread can be had: those that are there go on, and the next Close tries again.
    absl::MutexLock lock(&state->mutex);
    --state->threads;
  }
}

FdCloser::FdCloser() : state_(std::make_shared<State>()) {
  {
    absl::MutexLock lock(&state_->mutex);
    ++state_->threads;
  }
  State::Start(state_);
}

FdCloser::~FdCloser() {
  absl::MutexLock lock(&state_->mutex);
  state_->stopping = true;
  state_->mutex.AwaitWithTimeout(absl::Condition(state_.get(), &State::NoneLeft), kPatience);
}

void FdCloser::Close(uint32_t uid, UniqueFd fd) {
  if (!fd.valid()) return;
  std::vector<UniqueFd> one;
  one.push_back(std::move(fd));
  Close(uid, std::move(one));
}

void FdCloser::Close(uint32_t uid, std::vector<UniqueFd> fds) {
  if (fds.empty()) return;
  bool more = false;
  {
    absl::MutexLock lock(&state_->mutex);
    std::deque<UniqueFd>& lane = state_->lanes[uid].fds;
    for (UniqueFd& fd : fds) lane.push_back(std::move(fd));
    state_->waiting += fds.size();
    // A thread for every lane, as far as they go. Those that are idle may be on their way to one.
    const size_t free_lanes = state_->lanes.size() - state_->busy_lanes;
    more = free_lanes > state_->idle && state_->threads < kMostThreads;
    if (more) ++state_->threads;
  }
  if (more) State::Start(state_);
}

size_t FdCloser::waiting() const {
  absl::MutexLock lock(&state_->mutex);
  return state_->waiting;
}

size_t FdCloser::waiting(uint32_t uid) const {
  absl::MutexLock lock(&state_->mutex);
  const auto lane = state_->lanes.find(uid);
  return lane == state_->lanes.end() ? 0 : lane->second.fds.size();
}

}  // namespace modelhost
