// How an operation is shown while it runs, on stderr.
//
//   bar    the operation's name, then one line, redrawn; a phase leaves its line behind unless it
//   was
//          over before anybody could read it
//   plain  a line when the phase changes, and one every 5 s
//   json   one `OperationEvent` object per line and event
//   none   nothing
//
// Time is given by the caller. Not thread-safe.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/modelctl/json.h"
#include "modelhost/v1/types.pb.h"

namespace modelhost::modelctl {

enum class ProgressMode { kAuto, kBar, kPlain, kJson, kNone };

class Progress {
 public:
  // `mode` is not kAuto. `what` names the operation ("swap planner@8").
  Progress(ProgressMode mode, std::ostream& out, int columns, std::string what);

  void Update(const v1::Operation& operation, absl::Time now);
  // When nothing came for a while.
  void Tick(absl::Time now);
  // Leaves the cursor at the start of a line. Before anything else is written, and at the end.
  void Finish(absl::Time now);

 private:
  void Plain(absl::Time now);
  void Draw(absl::Time now);
  void LeaveLine(absl::Time now);
  std::string Amount(absl::Time now) const;

  const ProgressMode mode_;
  std::ostream& out_;
  const int columns_;
  const std::string what_;

  v1::Operation last_;
  bool seen_ = false;
  bool line_open_ = false;
  absl::Time phase_began_ = absl::InfinitePast();
  uint64_t phase_first_bytes_ = 0;
  absl::Time last_line_ = absl::InfinitePast();
};

// The fields of an operation, inside an open object.
void WriteOperation(JsonWriter& json, const v1::Operation& operation);
std::string KindName(v1::OperationKind kind);     // "swap"
std::string StateName(v1::OperationState state);  // "running", "failed"
bool IsFinished(v1::OperationState state);

}  // namespace modelhost::modelctl
