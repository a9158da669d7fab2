// The journal of operations: what an earlier daemon left, and each begin and end made durable, in
// order, off this thread. An operation never waits for it: a disk that is full costs the record,
// not the work.
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {
namespace {

constexpr absl::Duration kJournalRetry = absl::Seconds(10);

JournalRecord RecordOf(const OperationSnapshot& operation) {
  JournalRecord record;
  record.id = operation.id;
  record.kind = std::string(OperationKindName(operation.kind));
  record.state = std::string(OperationStateName(operation.state));
  record.model = operation.model;
  record.version = operation.version;
  record.label = operation.label;
  record.uid = operation.requested_by_uid;
  record.started = operation.started;
  if (!operation.finished_state()) return record;
  record.finished = operation.finished;
  record.code = static_cast<uint32_t>(operation.status.code());
  record.message = std::string(operation.status.message());
  record.successor = operation.successor;
  const OperationResult& result = operation.result;
  record.unchanged = result.unchanged;
  for (const LabelChange& change : result.changes) {
    record.changes.push_back(
        {change.model, change.label, change.from, change.to, change.generation});
  }
  record.load_ns = absl::ToInt64Nanoseconds(result.load);
  record.flip_ns = absl::ToInt64Nanoseconds(result.flip);
  record.draining_leases = result.draining_leases;
  record.digest = result.digest;
  record.bytes = result.bytes;
  record.linked_bytes = result.linked_bytes;
  record.removed = result.removed;
  record.freed_bytes = result.freed_bytes;
  return record;
}

// Nothing for what a newer build wrote and this one does not know.
std::optional<OperationSnapshot> SnapshotOf(const JournalRecord& record) {
  const auto kind = OperationKindOf(record.kind);
  const auto state = OperationStateOf(record.state);
  if (!kind.has_value() || !state.has_value()) return std::nullopt;
  OperationSnapshot operation;
  operation.id = record.id;
  operation.kind = *kind;
  operation.state = *state;
  operation.model = record.model;
  operation.version = record.version;
  operation.label = record.label;
  operation.requested_by_uid = record.uid;
  operation.started = record.started;
  operation.sequence = 1;
  if (operation.finished_state() != record.ended()) return std::nullopt;
  if (!record.ended()) return operation;
  operation.sequence = 2;
  operation.phase = "done";
  operation.finished = record.finished;
  operation.status = absl::Status(static_cast<absl::StatusCode>(record.code), record.message);
  operation.successor = record.successor;
  OperationResult& result = operation.result;
  result.unchanged = record.unchanged;
  for (const JournalRecord::Change& change : record.changes) {
    result.changes.push_back(
        {change.model, change.label, change.from, change.to, change.generation});
  }
  result.load = absl::Nanoseconds(record.load_ns);
  result.flip = absl::Nanoseconds(record.flip_ns);
  result.draining_leases = record.draining_leases;
  result.digest = record.digest;
  result.bytes = record.bytes;
  result.linked_bytes = record.linked_bytes;
  result.removed = record.removed;
  result.freed_bytes = record.freed_bytes;
  return operation;
}

// What became of it, as far as the disk tells, and what to do.
std::string AfterDeath(const OperationSnapshot& operation, const LabelFile& labels) {
  const std::string name = absl::StrCat(operation.model, "@", operation.version);
  switch (operation.kind) {
    case OperationKind::kSwap:
    case OperationKind::kRollback: {
      const auto label = labels.labels.find({operation.model, operation.label});
      const uint64_t now = label == labels.labels.end() ? 0 : label->second.version;
      if (now == operation.version) {
        return absl::StrCat("but ", operation.model, ":", operation.label, " is at ", now,
                            ", as it was asked for");
      }
      return absl::StrCat(operation.model, ":", operation.label, " is ",
                          now == 0 ? "not set" : absl::StrCat("at ", now),
                          "; ask for it again to have it moved");
    }
    case OperationKind::kLoad:
      return absl::StrCat("`modelctl load ", name, "` loads it");
    case OperationKind::kUnload:
      return "nothing of it is in memory now, unless a label names it";
    case OperationKind::kVerify:
      return absl::StrCat("`modelctl verify ", name, "` verifies it");
    case OperationKind::kPublish:
      return absl::StrCat("`modelctl versions ", operation.model, " --all` says whether ", name,
                          " is there; publish it again if not");
    case OperationKind::kDelete:
      return absl::StrCat("`modelctl versions ", operation.model, " --all` says whether ", name,
                          " is gone; delete it again if not");
    case OperationKind::kGc:
      return "`modelctl gc` goes on with it";
  }
  return "ask for it again";
}

}  // namespace

void ModelManager::Impl::RestoreOperations() {
  JournalContents contents = journal.Read(&journal_status);
  std::vector<OperationSnapshot> restored;
  for (const JournalRecord& record : contents.records) {
    std::optional<OperationSnapshot> operation = SnapshotOf(record);
    if (!operation.has_value()) continue;
    if (!operation->finished_state()) {
      operation->state = OperationState::kAborted;
      operation->finished = deps.clock.Wall();
      operation->phase = "done";
      operation->sequence = 2;
      operation->status = absl::AbortedError(
          absl::StrCat("the daemon ended before it did (", AfterDeath(*operation, labels), ")"));
    }
    restored.push_back(*std::move(operation));
  }
  restored_some = !restored.empty();
  operations.Restore(std::move(restored), contents.next_id);
}

void ModelManager::Impl::TellRestored() {
  if (!journal_status.ok()) {
    Tell([&](Observer& observer) { observer.OnJournalError(journal_status); });
  }
  if (restored_some) FlushJournal();
}

void ModelManager::Impl::JournalOperation(const OperationSnapshot& operation) {
  if (operation.sequence > 1 && !operation.finished_state()) return;
  unwritten.push_back(RecordOf(operation));
  if (journal_timer == 0) FlushJournal();
}

void ModelManager::Impl::FlushJournal() {
  if (writing_journal) return;
  writing_journal = true;
  const auto written = [this](const absl::Status& status) { JournalWritten(status); };
  // The journal itself is used by one piece of work at a time, and here only in between.
  if (!journal.wants_rewrite()) {
    OnShortPool([this, records = std::exchange(unwritten, {})] { return journal.Append(records); },
                written);
    return;
  }
  unwritten.clear();
  std::vector<JournalRecord> all;
  const std::vector<OperationSnapshot> newest_first = operations.List();
  for (auto it = newest_first.rbegin(); it != newest_first.rend(); ++it) {
    all.push_back(RecordOf(*it));
  }
  OnShortPool([this, all = std::move(all),
               next = operations.next_id()] { return journal.Rewrite(all, next); },
              written);
}

void ModelManager::Impl::JournalWritten(const absl::Status& status) {
  writing_journal = false;
  journal_status = status;
  if (status.ok()) {
    if (!unwritten.empty()) FlushJournal();
    return;
  }
  Tell([&](Observer& observer) { observer.OnJournalError(status); });
  // What was to be written is in the log of operations, which the next write writes whole.
  if (stopping) return;
  journal_timer = deps.loop.PostDelayed(kJournalRetry, [this] {
    journal_timer = 0;
    FlushJournal();
  });
}

}  // namespace modelhost
