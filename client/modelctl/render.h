// Numbers and tables for people: IEC units, short durations, aligned columns.
//
// Pure; any thread.
#pragma once

#include <google/protobuf/duration.pb.h>
#include <google/protobuf/timestamp.pb.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace modelhost::modelctl {

absl::Duration ToAbsl(const google::protobuf::Duration& duration);
absl::Time ToAbsl(const google::protobuf::Timestamp& time);
google::protobuf::Duration ToProto(absl::Duration duration);

// "0 B", "1.5 KiB", "3.7 GiB", "120 GiB".
std::string FormatBytes(uint64_t bytes);
// "2.0 GiB/s"; "-" when no time passed.
std::string FormatRate(uint64_t bytes, absl::Duration duration);
// "850 ns", "4.1 us", "38 us", "12 ms", "1.84 s", "42.5 s", "2 min 5 s", "3 h 2 min", "4 d 1 h".
std::string HumanDuration(absl::Duration duration);
// For a column: "3s", "12m", "5h", "9d"; "-" for no time.
std::string FormatAge(absl::Duration age);
// "2026-01-31T12:00:00.250Z"
std::string Rfc3339(absl::Time time);
// "sha256:ab12cd34ef56.."; "-" when there is none.
std::string ShortDigest(absl::string_view hex);
// "1 lease", "3 leases".
std::string Plural(uint64_t count, absl::string_view noun);
// `width` characters of '#' and '.', `part` of `whole` filled.
std::string Bar(uint64_t part, uint64_t whole, int width);

// The columns a text takes on a terminal (code points; names here are not wide).
size_t DisplayWidth(absl::string_view text);

enum class Align { kLeft, kRight };
enum class Tint { kNone, kGood, kWarn, kBad, kDim };

struct Cell {
  std::string text;
  Tint tint = Tint::kNone;
  Cell(std::string value)
      : text(std::move(value)) {}  // NOLINT(google-explicit-constructor): rows are lists of texts
  Cell(const char* value) : text(value) {}  // NOLINT(google-explicit-constructor): as above
  Cell(std::string value, Tint colour) : text(std::move(value)), tint(colour) {}
};

// Good for what is well, bad for what needs somebody: phases and health.
Tint TintOf(absl::string_view state);

// Rows under upper-case headers, two spaces apart; the last column is not padded. Control
// characters in cells are replaced; an empty cell shows as "-".
class Table {
 public:
  struct Column {
    std::string name;
    Align align = Align::kLeft;
  };
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void Add(std::vector<Cell> row) { rows_.push_back(std::move(row)); }
  bool empty() const { return rows_.empty(); }
  // `indent` spaces before each line. Without `header` the rows alone.
  std::string Render(bool colour, bool header = true, int indent = 0) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace modelhost::modelctl
