#include "daemon/observe/http_address.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace modelhost {
namespace {

bool IsIpv4(absl::string_view host) {
  const std::vector<absl::string_view> parts = absl::StrSplit(host, '.');
  return parts.size() == 4 && std::all_of(parts.begin(), parts.end(), [](absl::string_view part) {
           uint32_t number = 0;
           return !part.empty() && part.size() <= 3 &&
                  std::all_of(part.begin(), part.end(), absl::ascii_isdigit) &&
                  absl::SimpleAtoi(part, &number) && number <= 255;
         });
}

// What it means exactly is for the kernel to say; here it only has to be nothing else.
bool IsBracketedIpv6(absl::string_view host) {
  if (host.size() < 4 || host.front() != '[' || host.back() != ']') return false;
  host = host.substr(1, host.size() - 2);
  return host.size() <= 45 && host.find(':') != absl::string_view::npos &&
         std::all_of(host.begin(), host.end(), [](char c) {
           return absl::ascii_isxdigit(static_cast<unsigned char>(c)) || c == ':' || c == '.';
         });
}

}  // namespace

absl::StatusOr<HttpAddress> ParseHttpAddress(absl::string_view text) {
  const auto bad = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("metrics address \"", text.substr(0, 64), "\": ", why,
                     " (use ADDR:PORT, for example 127.0.0.1:9464, or \"off\")"));
  };
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return bad("it has no port");
  std::string host(text.substr(0, colon));
  const absl::string_view digits = text.substr(colon + 1);
  uint32_t port = 0;
  if (digits.empty() || digits.size() > 5 ||
      !std::all_of(digits.begin(), digits.end(), absl::ascii_isdigit) ||
      !absl::SimpleAtoi(digits, &port) || port > 65535) {
    return bad("the port is not a number from 0 to 65535");
  }
  if (host == "localhost") host = "127.0.0.1";
  if (!IsIpv4(host) && !IsBracketedIpv6(host)) {
    return bad("the host is neither an IPv4 address nor an IPv6 address in brackets");
  }
  return HttpAddress{std::move(host), static_cast<uint16_t>(port)};
}

}  // namespace modelhost
