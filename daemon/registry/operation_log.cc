#include "daemon/registry/operation_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

constexpr absl::string_view kSuccessorPayload = "modelhost/successor";

}  // namespace

absl::Status SupersededBy(absl::string_view what, OperationId by) {
  absl::Status status = absl::AbortedError(absl::StrCat(what, ": superseded by op-", by));
  if (by == 0) return absl::AbortedError(absl::StrCat(what, ": superseded by the daemon itself"));
  status.SetPayload(kSuccessorPayload, absl::Cord(absl::StrCat(by)));
  return status;
}

OperationId SuccessorOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kSuccessorPayload);
  OperationId id = 0;
  return payload.has_value() && absl::SimpleAtoi(std::string(*payload), &id) ? id : 0;
}

absl::string_view OperationKindName(OperationKind kind) {
  switch (kind) {
    case OperationKind::kLoad:
      return "load";
    case OperationKind::kUnload:
      return "unload";
    case OperationKind::kSwap:
      return "swap";
    case OperationKind::kRollback:
      return "rollback";
    case OperationKind::kVerify:
      return "verify";
    case OperationKind::kPublish:
      return "publish";
    case OperationKind::kDelete:
      return "delete";
    case OperationKind::kGc:
      return "gc";
  }
  return "unknown";
}

absl::string_view OperationStateName(OperationState state) {
  switch (state) {
    case OperationState::kQueued:
      return "QUEUED";
    case OperationState::kRunning:
      return "RUNNING";
    case OperationState::kSucceeded:
      return "SUCCEEDED";
    case OperationState::kFailed:
      return "FAILED";
    case OperationState::kCancelled:
      return "CANCELLED";
    case OperationState::kAborted:
      return "ABORTED";
  }
  return "UNKNOWN";
}

std::optional<OperationKind> OperationKindOf(absl::string_view name) {
  for (const OperationKind kind :
       {OperationKind::kLoad, OperationKind::kUnload, OperationKind::kSwap,
        OperationKind::kRollback, OperationKind::kVerify, OperationKind::kPublish,
        OperationKind::kDelete, OperationKind::kGc}) {
    if (OperationKindName(kind) == name) return kind;
  }
  return std::nullopt;
}

std::optional<OperationState> OperationStateOf(absl::string_view name) {
  for (const OperationState state :
       {OperationState::kQueued, OperationState::kRunning, OperationState::kSucceeded,
        OperationState::kFailed, OperationState::kCancelled, OperationState::kAborted}) {
    if (OperationStateName(state) == name) return state;
  }
  return std::nullopt;
}

void OperationLog::Restore(std::vector<OperationSnapshot> operations, OperationId next_id) {
  next_id_ = std::max(next_id_, next_id);
  for (OperationSnapshot& operation : operations) {
    const OperationId id = operation.id;
    next_id_ = std::max(next_id_, id + 1);
    operations_[id] = std::move(operation);
  }
}

OperationId OperationLog::Begin(OperationKind kind, const std::string& model, uint64_t version,
                                const std::string& label, uint32_t by) {
  Prune();
  const OperationId id = next_id_++;
  OperationSnapshot& operation = operations_[id];
  operation.id = id;
  operation.kind = kind;
  operation.state = OperationState::kRunning;
  operation.model = model;
  operation.version = version;
  operation.label = label;
  operation.requested_by_uid = by;
  operation.started = clock_.Wall();
  operation.phase = "queued";
  operation.sequence = 1;
  Tell(operation);
  return id;
}

const OperationSnapshot* OperationLog::Find(OperationId id) const {
  const auto it = operations_.find(id);
  return it == operations_.end() ? nullptr : &it->second;
}

bool OperationLog::IsRunning(OperationId id) const {
  const OperationSnapshot* operation = Find(id);
  return operation != nullptr && !operation->finished_state();
}

void OperationLog::Update(OperationId id, const std::function<void(OperationSnapshot&)>& change) {
  const auto it = operations_.find(id);
  if (it == operations_.end() || it->second.finished_state()) return;
  change(it->second);
  ++it->second.sequence;
  Tell(it->second);
}

void OperationLog::Finish(OperationId id, const absl::Status& status) {
  Update(id, [&](OperationSnapshot& operation) {
    operation.status = status;
    operation.finished = clock_.Wall();
    operation.phase = "done";
    operation.message.clear();
    operation.next_try = absl::Time();
    operation.successor = SuccessorOf(status);
    operation.state = status.ok()                 ? OperationState::kSucceeded
                      : absl::IsCancelled(status) ? OperationState::kCancelled
                      : absl::IsAborted(status)   ? OperationState::kAborted
                                                  : OperationState::kFailed;
  });
}

std::vector<OperationSnapshot> OperationLog::List() const {
  std::vector<OperationSnapshot> list;
  list.reserve(operations_.size());
  for (auto it = operations_.rbegin(); it != operations_.rend(); ++it) list.push_back(it->second);
  return list;
}

uint64_t OperationLog::Watch(OperationId id, OnChange on_change) {
  const uint64_t watch = next_watch_++;
  on_change(operations_.at(id));
  watchers_.emplace(watch, Watcher{id, std::move(on_change)});
  return watch;
}

void OperationLog::Unwatch(uint64_t watch) { watchers_.erase(watch); }

void OperationLog::Tell(const OperationSnapshot& operation) {
  const OperationSnapshot copy = operation;  // A watcher may start another operation.
  on_any_(copy);
  std::vector<uint64_t> ids;
  for (const auto& [id, watcher] : watchers_) {
    if (watcher.id == copy.id) ids.push_back(id);
  }
  for (const uint64_t id : ids) {
    const auto it = watchers_.find(id);
    if (it == watchers_.end()) continue;
    const OnChange on_change = it->second.on_change;
    on_change(copy);
  }
}

void OperationLog::Prune() {
  size_t finished = 0;
  for (const auto& [id, operation] : operations_) finished += operation.finished_state() ? 1 : 0;
  const absl::Time old = clock_.Wall() - kKept;
  for (auto it = operations_.begin(); it != operations_.end();) {
    const bool drop =
        it->second.finished_state() && (finished > kMostFinished || it->second.finished < old);
    if (drop) {
      --finished;
      it = operations_.erase(it);
    } else {
      ++it;
    }
  }
}

}  // namespace modelhost
