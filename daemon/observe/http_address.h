// Where /metrics listens, as text: the one place that says what is an address. Pure.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace modelhost {

struct HttpAddress {
  std::string host;   // "127.0.0.1", "[::1]"
  uint16_t port = 0;  // 0: any that is free.
};

// "ADDR:PORT" with an IPv4 address, an IPv6 address in brackets, or "localhost".
absl::StatusOr<HttpAddress> ParseHttpAddress(absl::string_view text);

}  // namespace modelhost
