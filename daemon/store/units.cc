// Durations and sizes as people write them.
#include "absl/numeric/int128.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"
#include "daemon/store/model_policy.h"

namespace modelhost {

absl::StatusOr<absl::Duration> ParseDuration(absl::string_view text) {
  absl::Duration duration;
  if (!absl::ParseDuration(text, &duration) || duration == absl::InfiniteDuration() ||
      duration < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        Quoted(AsStd(text)), ": expected a duration such as \"90s\", \"10m\" or \"1h30m\""));
  }
  return duration;
}

absl::StatusOr<uint64_t> ParseBytes(absl::string_view text) {
  auto refuse = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat(Quoted(AsStd(text)), ": ", why,
                     " (expected a size such as \"12GiB\", \"128MiB\" or \"4096\")"));
  };
  constexpr size_t kMaxDigits = 20;
  absl::string_view rest = text;
  auto take_digits = [&](absl::uint128* value, size_t* count) {
    for (*count = 0; !rest.empty() && absl::ascii_isdigit(rest[0]); ++*count) {
      if (*count == kMaxDigits) return false;
      *value = *value * 10 + static_cast<unsigned>(rest[0] - '0');
      rest.remove_prefix(1);
    }
    return *count > 0;
  };
  absl::uint128 whole = 0;
  size_t digits = 0;
  if (!take_digits(&whole, &digits)) return refuse("not a size");
  absl::uint128 fraction = 0;
  absl::uint128 scale = 1;
  if (!rest.empty() && rest[0] == '.') {
    rest.remove_prefix(1);
    if (!take_digits(&fraction, &digits) || digits > 9) return refuse("not a size");
    for (size_t i = 0; i < digits; ++i) scale *= 10;
  }
  const absl::string_view unit = absl::StripAsciiWhitespace(rest);
  int shift = 0;
  if (unit == "KiB") {
    shift = 10;
  } else if (unit == "MiB") {
    shift = 20;
  } else if (unit == "GiB") {
    shift = 30;
  } else if (unit == "TiB") {
    shift = 40;
  } else if (!unit.empty() && unit != "B") {
    return refuse("the unit is not one of B, KiB, MiB, GiB, TiB");
  }
  if (shift == 0 && scale != 1) return refuse("not a whole number of bytes");
  // At most 20 digits and 40 bits: no overflow in 128.
  const absl::uint128 bytes = (whole << shift) + (fraction << shift) / scale;
  if (absl::Uint128High64(bytes) != 0) return refuse("more than 2^64-1 bytes");
  return absl::Uint128Low64(bytes);
}

}  // namespace modelhost
