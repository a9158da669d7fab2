// GET /metrics, over plain HTTP, on an address of this machine's choice (loopback by default).
//
// Two threads of its own serve it; a client that is slow or silent is cut off after five seconds.
// The destructor stops them, so after it nothing is being collected: destroy it before what the
// collectables look at.
#pragma once

#include <prometheus/collectable.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/observe/http_address.h"

namespace modelhost {

class HttpEndpoint {
 public:
  // `address` as in ParseHttpAddress. The endpoint keeps the collectables alive.
  //   INVALID_ARGUMENT     not an address
  //   FAILED_PRECONDITION  it cannot be listened on: in use, not of this machine, or privileged
  static absl::StatusOr<std::unique_ptr<HttpEndpoint>> Listen(
      absl::string_view address,
      std::vector<std::shared_ptr<prometheus::Collectable>> collectables);
  ~HttpEndpoint();

  // "127.0.0.1:9464", with the real port.
  const std::string& address() const { return address_; }

 private:
  struct Server;
  HttpEndpoint(std::unique_ptr<Server> server, std::string address);
  std::unique_ptr<Server> server_;
  const std::string address_;
};

}  // namespace modelhost
