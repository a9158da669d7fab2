#include "daemon/format/pickle_number.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace modelhost {
namespace {

bool IsNegative(std::string_view number) {
  return !number.empty() && (static_cast<uint8_t>(number.back()) & 0x80) != 0;
}

}  // namespace

std::string_view TrimSignBytes(std::string_view number) {
  const char sign = IsNegative(number) ? '\xff' : '\0';
  while (!number.empty() && number.back() == sign) {
    const std::string_view shorter = number.substr(0, number.size() - 1);
    if (IsNegative(shorter) != IsNegative(number)) break;
    number = shorter;
  }
  return number;
}

std::string DecimalDigits(std::string_view number) {
  const bool negative = IsNegative(number);
  // The absolute value, the highest byte first.
  std::vector<uint8_t> value;
  value.reserve(number.size());
  unsigned carry = negative ? 1 : 0;
  for (const char c : number) {
    const auto byte = static_cast<uint8_t>(c);
    const unsigned sum = (negative ? uint8_t(~byte) : byte) + carry;
    value.push_back(static_cast<uint8_t>(sum));
    carry = sum >> 8;
  }
  std::reverse(value.begin(), value.end());
  // Divided by 10 until nothing is left.
  std::string digits;
  for (size_t first = 0; first < value.size();) {
    unsigned rest = 0;
    for (size_t i = first; i < value.size(); ++i) {
      const unsigned part = rest << 8 | value[i];
      value[i] = static_cast<uint8_t>(part / 10);
      rest = part % 10;
    }
    digits += static_cast<char>('0' + rest);
    while (first < value.size() && value[first] == 0) ++first;
  }
  if (digits.empty()) digits = "0";
  if (negative) digits += '-';
  std::reverse(digits.begin(), digits.end());
  return digits;
}

}  // namespace modelhost
