// Loads that failed for a reason that may pass: tried again, ever more slowly. What a label names
// is tried for as long as the label does, the rest a few times for those who asked.
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {

void ModelManager::Impl::UpdateWaiting(const VersionRecord& record,
                                       const std::function<void(OperationSnapshot&)>& change) {
  for (const auto& waiter : record.waiters) {
    if (waiter.operation != 0 && waiter.wants_load) operations.Update(waiter.operation, change);
  }
}

bool ModelManager::Impl::RetryLater(VersionRecord& record, const absl::Status& status) {
  const bool labelled = !LabelsOf(record.key).empty();
  const bool wanted = labelled || !record.waiters.empty();
  if (stopping || !wanted || options.retry.most == 0 || !IsTransient(status, ErrnoOf(status))) {
    record.attempts = 0;
    return false;
  }
  const double dice = std::uniform_real_distribution<double>(0, 1)(random);
  if (record.attempts >= options.retry.most) {
    // Who asked is told. The label stays, and so does the wish.
    if (labelled) {
      RetryPolicy slow = options.retry;
      slow.first = slow.longest;
      ScheduleRetry(record, RetryDelay(slow, 1, dice));
    } else {
      record.attempts = 0;
    }
    return false;
  }
  ++record.attempts;
  const absl::Duration delay = RetryDelay(options.retry, record.attempts, dice);
  ScheduleRetry(record, delay);
  const VersionKey key = record.key;
  Note(key, "retry",
       absl::StrCat(record.attempts, " of ", options.retry.most, " in ",
                    absl::FormatDuration(absl::Trunc(delay, absl::Milliseconds(1)))));
  Tell([&](Observer& observer) { observer.OnLoadRetry(key, record.attempts, delay, status); });
  UpdateWaiting(record, [&](OperationSnapshot& operation) {
    operation.phase = "retry";
    operation.attempts = static_cast<uint32_t>(record.attempts);
    operation.next_try = deps.clock.Wall() + delay;
    operation.message = absl::StrCat(
        "try ", record.attempts, " of ", options.retry.most, " failed: ", status.message(),
        "; the next one in ", absl::FormatDuration(absl::Trunc(delay, absl::Milliseconds(100))));
  });
  return true;
}

void ModelManager::Impl::ScheduleRetry(VersionRecord& record, absl::Duration delay) {
  record.retry_timer = deps.loop.PostDelayed(delay, [this, key = record.key] {
    VersionRecord* found = Find(key);
    if (found == nullptr || found->retry_timer == 0) return;
    found->retry_timer = 0;
    if (stopping || found->phase != Phase::kFailed || found->deleting != 0) return;
    if (found->waiters.empty()) {
      if (LabelsOf(key).empty()) {
        found->attempts = 0;
        return;
      }
      found->waiters.push_back({0, [this](const absl::Status&) { UpdateReady(); }});
    }
    if (Move(*found, Phase::kStaged)) AskForRoom(*found);
  });
}

void ModelManager::Impl::RetryNow(VersionRecord& record) {
  if (record.retry_timer == 0 || record.phase != Phase::kFailed) return;
  StopRetrying(record);
  if (Move(record, Phase::kStaged)) AskForRoom(record);
}

void ModelManager::Impl::StopRetrying(VersionRecord& record) {
  record.attempts = 0;
  if (record.retry_timer != 0) deps.loop.CancelTimer(std::exchange(record.retry_timer, 0));
}

}  // namespace modelhost
