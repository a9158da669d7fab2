#include "daemon/region/progress_meter.h"

namespace modelhost {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(100);

}  // namespace

void ProgressMeter::Begin(const std::string& phase, uint64_t bytes_total) {
  if (!tell_) return;
  absl::MutexLock lock(&mutex_);
  progress_ = {phase, 0, bytes_total};
  told_at_ = clock_.Monotonic();
  tell_(progress_);
}

void ProgressMeter::Add(uint64_t bytes) {
  if (!tell_) return;
  absl::MutexLock lock(&mutex_);
  progress_.bytes_done += bytes;
  TellIfDue();
}

void ProgressMeter::SetDone(uint64_t bytes_done) {
  if (!tell_) return;
  absl::MutexLock lock(&mutex_);
  progress_.bytes_done = bytes_done;
  TellIfDue();
}

void ProgressMeter::TellIfDue() {
  const absl::Duration now = clock_.Monotonic();
  if (now - told_at_ < kInterval) return;
  told_at_ = now;
  tell_(progress_);
}

}  // namespace modelhost
