#include "daemon/observe/http_endpoint.h"

#include <prometheus/exposer.h>

#include <exception>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"

namespace modelhost {
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
