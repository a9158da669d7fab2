// The daemon's log: lines on stderr, written by a thread of its own.
//
// Write never blocks: a reader of stderr that has stopped (a full pipe, a stuck journal) costs the
// oldest queued lines, never the control thread; how many were lost is said in a line of its own.
// What is queued is written before the destructor returns, unless stderr takes nothing for
// kLastWords. Thread-safe.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/observe/log_line.h"

namespace modelhost {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// "debug", "info", "warning" (or "warn"), "error".
absl::StatusOr<LogLevel> ParseLogLevel(absl::string_view name);

class Logger {
 public:
  static constexpr absl::Duration kLastWords = absl::Seconds(2);

  explicit Logger(LogLevel level);
  ~Logger();

  // ts=2026-01-01T00:00:00.000Z level=info event=...
  void Write(LogLevel level, const LogLine& line);
  bool Enabled(LogLevel level) const;
  void SetLevel(LogLevel level);

 private:
  struct Sink;
  std::unique_ptr<Sink> sink_;
};

}  // namespace modelhost
