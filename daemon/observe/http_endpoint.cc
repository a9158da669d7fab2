#include "daemon/observe/http_endpoint.h"

#include <prometheus/exposer.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/memory/memory.h"
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

struct HttpEndpoint::Server {
  std::unique_ptr<prometheus::Exposer> exposer;
  std::vector<std::shared_ptr<prometheus::Collectable>> collectables;
};

absl::StatusOr<std::unique_ptr<HttpEndpoint>> HttpEndpoint::Listen(
    absl::string_view address, std::vector<std::shared_ptr<prometheus::Collectable>> collectables) {
  auto parsed = ParseHttpAddress(address);
  if (!parsed.ok()) return parsed.status();

  auto server = std::make_unique<Server>();
  server->collectables = std::move(collectables);
  std::string listening = absl::StrCat(parsed->host, ":", parsed->port);
  // The library throws; its exceptions end here.
  try {
    server->exposer = std::make_unique<prometheus::Exposer>(
        std::vector<std::string>{"listening_ports", listening, "num_threads", "2",
                                 "request_timeout_ms", "5000", "enable_keep_alive", "no"});
    for (const auto& collectable : server->collectables) {
      server->exposer->RegisterCollectable(collectable, "/metrics");
    }
    const std::vector<int> ports = server->exposer->GetListeningPorts();
    if (!ports.empty()) listening = absl::StrCat(parsed->host, ":", ports.front());
  } catch (const std::exception&) {
    return absl::FailedPreconditionError(absl::StrCat(
        "metrics on ", listening,
        ": cannot listen there: the port is in use, the address is not of this machine, or a port "
        "below 1024 needs rights (stop the other program, or choose with --metrics ADDR:PORT, or "
        "--metrics off)"));
  }
  return absl::WrapUnique(new HttpEndpoint(std::move(server), std::move(listening)));
}

HttpEndpoint::HttpEndpoint(std::unique_ptr<Server> server, std::string address)
    : server_(std::move(server)), address_(std::move(address)) {}

// The exposer goes first: it stops its threads and then looks at nothing any more.
HttpEndpoint::~HttpEndpoint() { server_->exposer.reset(); }

}  // namespace modelhost
