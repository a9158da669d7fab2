#include "client/modelctl/render.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/modelctl/exit_code.h"

namespace modelhost::modelctl {
namespace {

absl::string_view Escape(Tint tint) {
  switch (tint) {
    case Tint::kNone:
      return "";
    case Tint::kGood:
      return "\x1b[32m";
    case Tint::kWarn:
      return "\x1b[33m";
    case Tint::kBad:
      return "\x1b[31m";
    case Tint::kDim:
      return "\x1b[2m";
  }
  return "";
}

constexpr char kPlain[] = "\x1b[0m";

}  // namespace

absl::Duration ToAbsl(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

absl::Time ToAbsl(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
}

google::protobuf::Duration ToProto(absl::Duration duration) {
  google::protobuf::Duration out;
  absl::Duration rest;
  out.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &rest));
  out.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(rest)));
  return out;
}

std::string FormatBytes(uint64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  constexpr std::array<const char*, 6> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  // 1023.5 would be shown as 1024.
  while (value >= 1023.5 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  return value >= 99.95 ? absl::StrFormat("%.0f %s", value, kUnits[unit])
                        : absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string FormatRate(uint64_t bytes, absl::Duration duration) {
  if (duration <= absl::ZeroDuration() || bytes == 0) return "-";
  const double rate = static_cast<double>(bytes) / absl::ToDoubleSeconds(duration);
  if (rate > 1e18) return "-";
  return absl::StrCat(FormatBytes(static_cast<uint64_t>(rate)), "/s");
}

std::string HumanDuration(absl::Duration duration) {
  if (duration < absl::ZeroDuration()) duration = absl::ZeroDuration();
  const double ns = absl::ToDoubleNanoseconds(duration);
  if (ns < 999.5) return absl::StrFormat("%.0f ns", ns);
  const auto small = [](double value, const char* unit) {
    return value < 9.95 ? absl::StrFormat("%.1f %s", value, unit)
                        : absl::StrFormat("%.0f %s", value, unit);
  };
  if (ns < 999.5e3) return small(ns / 1e3, "us");
  if (ns < 999.5e6) return small(ns / 1e6, "ms");
  const double s = ns / 1e9;
  if (s < 9.995) return absl::StrFormat("%.2f s", s);
  if (s < 59.95) return absl::StrFormat("%.1f s", s);
  const auto whole = static_cast<int64_t>(s + 0.5);
  const auto two = [](int64_t big, const char* big_unit, int64_t rest, const char* rest_unit) {
    return rest == 0 ? absl::StrCat(big, " ", big_unit)
                     : absl::StrCat(big, " ", big_unit, " ", rest, " ", rest_unit);
  };
  if (whole < 3600) return two(whole / 60, "min", whole % 60, "s");
  if (whole < 86400) return two(whole / 3600, "h", whole % 3600 / 60, "min");
  return two(whole / 86400, "d", whole % 86400 / 3600, "h");
}

std::string FormatAge(absl::Duration age) {
  const int64_t s = std::max<int64_t>(0, absl::ToInt64Seconds(age));
  if (s < 60) return absl::StrCat(s, "s");
  if (s < 3600) return absl::StrCat(s / 60, "m");
  if (s < 86400) return absl::StrCat(s / 3600, "h");
  return absl::StrCat(s / 86400, "d");
}

std::string Rfc3339(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E3SZ", time, absl::UTCTimeZone());
}

std::string ShortDigest(absl::string_view hex) {
  if (hex.empty()) return "-";
  return absl::StrCat("sha256:", hex.substr(0, 12), hex.size() > 12 ? ".." : "");
}

std::string Plural(uint64_t count, absl::string_view noun) {
  return absl::StrCat(count, " ", noun, count == 1 ? "" : "s");
}

std::string Bar(uint64_t part, uint64_t whole, int width) {
  int filled = 0;
  if (whole > 0) {
    const double share = static_cast<double>(part) / static_cast<double>(whole);
    filled = std::clamp(static_cast<int>(share * width + 0.5), 0, width);
    if (part > 0 && filled == 0 && width > 0) filled = 1;
  }
  return absl::StrCat(std::string(static_cast<size_t>(filled), '#'),
                      std::string(static_cast<size_t>(width - filled), '.'));
}

size_t DisplayWidth(absl::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

Tint TintOf(absl::string_view state) {
  if (state == "READY" || state == "OK" || state == "ok") return Tint::kGood;
  if (state == "LOADING" || state == "RESERVED" || state == "DRAINING" || state == "DEGRADED" ||
      state == "warn") {
    return Tint::kWarn;
  }
  if (state == "FAILED" || state == "QUARANTINED" || state == "INVALID" || state == "SUSPECT" ||
      state == "NOT_READY" || state == "fail") {
    return Tint::kBad;
  }
  return Tint::kNone;
}

std::string Table::Render(bool colour, bool header, int indent) const {
  std::vector<std::vector<Cell>> lines;
  if (header) {
    std::vector<Cell> names;
    for (const Column& column : columns_) names.emplace_back(column.name, Tint::kDim);
    lines.push_back(std::move(names));
  }
  for (const auto& row : rows_) {
    std::vector<Cell> line;
    for (const Cell& cell : row) {
      std::string text = Printable(cell.text);
      line.emplace_back(text.empty() ? "-" : std::move(text), cell.tint);
    }
    lines.push_back(std::move(line));
  }
  std::vector<size_t> widths(columns_.size(), 0);
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size() && i < widths.size(); ++i) {
      widths[i] = std::max(widths[i], DisplayWidth(line[i].text));
    }
  }
  std::string out;
  for (const auto& line : lines) {
    out.append(static_cast<size_t>(indent), ' ');
    for (size_t i = 0; i < line.size() && i < widths.size(); ++i) {
      const Cell& cell = line[i];
      const bool last = i + 1 == line.size();
      const std::string pad(widths[i] - DisplayWidth(cell.text), ' ');
      const bool tinted = colour && cell.tint != Tint::kNone;
      if (columns_[i].align == Align::kRight) out.append(pad);
      absl::StrAppend(&out, tinted ? Escape(cell.tint) : "", cell.text, tinted ? kPlain : "");
      if (columns_[i].align == Align::kLeft && !last) out.append(pad);
      if (!last) out.append("  ");
    }
    out.push_back('\n');
  }
  return out;
}

}  // namespace modelhost::modelctl
