#include "daemon/region/load_pacer.h"

#include <algorithm>

#include "absl/time/clock.h"

namespace modelhost {
namespace {

// How long a rest goes on without a look at the token.
constexpr absl::Duration kRestSlice = absl::Milliseconds(20);

}  // namespace

absl::Duration RestAfter(absl::Duration worked, int workers, int cores) {
  const double allowed = cores > 1 ? cores - 1 : 0.5;
  const double wanted = std::max(workers, 1);
  if (worked <= absl::ZeroDuration() || wanted <= allowed) return absl::ZeroDuration();
  return std::min(worked * (wanted / allowed - 1), LoadPacer::kLongestRest);
}

absl::Duration RestForRate(uint64_t bytes, uint64_t bytes_per_second, absl::Duration now,
                           absl::Duration& free_at) {
  const absl::Duration takes =
      absl::Seconds(static_cast<double>(bytes) / static_cast<double>(bytes_per_second));
  free_at = std::max(free_at, now) + takes;
  return free_at - now;
}

LoadPacer::LoadPacer(Os& os, Clock& clock, LoadPace pace, int cores)
    : os_(os), clock_(clock), pace_(pace), cores_(cores) {}

absl::Duration LoadPacer::RestOf(absl::Duration worked, uint64_t bytes) {
  switch (pace_.kind) {
    case LoadPace::Kind::kOff:
      return absl::ZeroDuration();
    case LoadPace::Kind::kAuto:
      return Disturbs() ? RestAfter(worked, workers_.load(), cores_) : absl::ZeroDuration();
    case LoadPace::Kind::kRate:
      break;
  }
  const absl::Duration now = clock_.Monotonic();
  absl::MutexLock lock(&mutex_);
  return RestForRate(bytes, pace_.bytes_per_second, now, free_at_);
}

// The place in the line of a load that was cancelled.
void LoadPacer::GiveBack(absl::Duration rest) {
  if (rest <= absl::ZeroDuration()) return;
  absl::MutexLock lock(&mutex_);
  free_at_ -= rest;
}

LoadPacer::Worker::Worker(LoadPacer& pacer) : pacer_(pacer), cpu_(pacer.os_.ThreadCpuTime()) {
  pacer_.workers_.fetch_add(1);
}

LoadPacer::Worker::~Worker() { pacer_.workers_.fetch_sub(1); }

void LoadPacer::Worker::Rest(uint64_t bytes, const CancelToken& cancel) {
  // The time that a core was used: waiting for a disk, or for a core, disturbs nobody.
  const absl::Duration cpu = pacer_.os_.ThreadCpuTime();
  const absl::Duration rest = pacer_.RestOf(cpu - cpu_, bytes);
  if (rest > absl::ZeroDuration()) {
    const absl::Duration until = pacer_.clock_.Monotonic() + rest;
    const bool by_rate = pacer_.pace_.kind == LoadPace::Kind::kRate;
    while (!cancel.cancelled() && (by_rate || pacer_.Disturbs())) {
      const absl::Duration left = until - pacer_.clock_.Monotonic();
      if (left <= absl::ZeroDuration()) break;
      absl::SleepFor(std::min(left, kRestSlice));
    }
    if (by_rate && cancel.cancelled()) pacer_.GiveBack(until - pacer_.clock_.Monotonic());
  }
  cpu_ = pacer_.os_.ThreadCpuTime();
}

}  // namespace modelhost
