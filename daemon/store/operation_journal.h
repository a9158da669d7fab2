// <state>/operations.jsonl: what was asked of the daemon, and what came of it.
//
// The first line is {"schema": 1, "next": N}, N being the next operation's number. Each other line
// is one operation as it was then, so the last line of a number holds: one when it begins, one when
// it ends. Lines are appended and fsynced; the file is written anew (temporary, fsync, rename) at
// the first write of a process, when much of it is out of date, and after a failed write.
//
// The end of the file may be torn: that is what a crash leaves. A file that is broken elsewhere
// or cannot be read is moved aside (operations.jsonl.broken), and what could be read of it is kept:
// nothing that stands in it is worth not starting for.
//
// ParseJournal and the Serialize functions are pure; OperationJournal blocks, one thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/platform/os.h"

namespace modelhost {

struct JournalRecord {
  struct Change {
    std::string model;
    std::string label;
    uint64_t from = 0;
    uint64_t to = 0;
    uint64_t generation = 0;
  };

  uint64_t id = 0;
  std::string kind;   // "load", ...
  std::string state;  // "RUNNING", "SUCCEEDED", ...
  std::string model;
  uint64_t version = 0;
  std::string label;
  uint32_t uid = 0;
  absl::Time started;
  // The rest only when it has ended.
  absl::Time finished;
  uint32_t code = 0;    // Canonical.
  std::string message;  // Of an end that is not SUCCEEDED.
  uint64_t successor = 0;
  bool unchanged = false;
  std::vector<Change> changes;
  int64_t load_ns = 0;
  int64_t flip_ns = 0;
  uint64_t draining_leases = 0;
  std::string digest;
  uint64_t bytes = 0;
  uint64_t linked_bytes = 0;
  uint64_t removed = 0;
  uint64_t freed_bytes = 0;

  bool ended() const { return finished != absl::Time(); }
};

struct JournalContents {
  std::vector<JournalRecord> records;  // By number, one each.
  uint64_t next_id = 1;                // Above all that were ever given, as far as is known.
  uint64_t bad_lines = 0;
  std::string first_bad;  // Of which the first, with its byte offset.
};

// Takes what can be read. An incomplete last line is not counted as bad.
JournalContents ParseJournal(absl::string_view text);
// One line each, with its newline. Texts are cut to a length that a line may have.
std::string SerializeJournalHeader(uint64_t next_id);
std::string SerializeJournalRecord(const JournalRecord& record);

class OperationJournal {
 public:
  // Both outlive it.
  OperationJournal(Os& os, const UniqueFd& state_dir) : os_(os), state_dir_(state_dir) {}

  // What an earlier daemon left. `problem` says what was wrong with it and what was done; OK when
  // nothing was. Never fails.
  JournalContents Read(absl::Status* problem);

  // True when the next write has to be a Rewrite: the first one, after an error, or much is old.
  bool wants_rewrite() const { return !file_.valid() || lines_ > kMostLines; }
  // Durable when it returns OK.
  absl::Status Append(const std::vector<JournalRecord>& records);
  absl::Status Rewrite(const std::vector<JournalRecord>& all, uint64_t next_id);

 private:
  static constexpr uint64_t kMostLines = 4000;

  Os& os_;
  const UniqueFd& state_dir_;
  UniqueFd file_;  // Open for writing; not valid when it must be written anew.
  uint64_t bytes_ = 0;
  uint64_t lines_ = 0;
};

}  // namespace modelhost
