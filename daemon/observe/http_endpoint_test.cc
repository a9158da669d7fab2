#include "daemon/observe/http_endpoint.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "daemon/observe/metrics_test_exposition.h"
#include "daemon/observe/process_metrics.h"
#include "daemon/platform/peer.h"  // UniqueFd

namespace modelhost {
namespace {

using ::testing::HasSubstr;

// One GET, as curl would.
std::string Get(uint16_t port, const std::string& path) {
  UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
    return "";
  const std::string request =
      absl::StrCat("GET ", path, " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
  if (::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL) < 0) return "";
  std::string reply;
  char buffer[4096];
  for (ssize_t n; (n = ::recv(socket.get(), buffer, sizeof buffer, 0)) > 0;) {
    reply.append(buffer, static_cast<size_t>(n));
  }
  return reply;
}

std::unique_ptr<HttpEndpoint> Listen() {
  auto endpoint = HttpEndpoint::Listen("127.0.0.1:0", {std::make_shared<ProcessCollector>()});
  EXPECT_TRUE(endpoint.ok()) << endpoint.status();
  return endpoint.ok() ? *std::move(endpoint) : nullptr;
}

uint16_t PortOf(const HttpEndpoint& endpoint) { return ParseHttpAddress(endpoint.address())->port; }

TEST(HttpEndpointTest, ServesTheMetricsAsText) {
  const auto endpoint = Listen();
  const std::string reply = Get(PortOf(*endpoint), "/metrics");
  EXPECT_THAT(reply, HasSubstr("200 OK"));
  EXPECT_THAT(reply, HasSubstr("Content-Type: text/plain"));
  EXPECT_THAT(reply, HasSubstr("process_open_fds"));
}

TEST(HttpEndpointTest, ServesNothingElse) {
  const auto endpoint = Listen();
  EXPECT_THAT(Get(PortOf(*endpoint), "/"), HasSubstr(" 404 "));
  EXPECT_THAT(Get(PortOf(*endpoint), "/../../etc/passwd"), Not(HasSubstr("200 OK")));
}

TEST(HttpEndpointTest, APortInUseIsAnErrorThatSaysWhatToDo) {
  const auto endpoint = Listen();
  const auto second = HttpEndpoint::Listen(endpoint->address(), {});
  ASSERT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr(endpoint->address()));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("--metrics"));
}

TEST(HttpEndpointTest, ThePortIsFreeAgainAfterwards) {
  auto endpoint = Listen();
  const std::string address = endpoint->address();
  endpoint.reset();
  EXPECT_TRUE(HttpEndpoint::Listen(address, {}).ok());
}

TEST(HttpAddressTest, TakesAddressesOfBothKinds) {
  EXPECT_EQ(ParseHttpAddress("127.0.0.1:9464")->port, 9464);
  EXPECT_EQ(ParseHttpAddress("localhost:1")->host, "127.0.0.1");
  EXPECT_EQ(ParseHttpAddress("[::1]:9464")->host, "[::1]");
}

TEST(HttpAddressTest, RefusesWhatTheServerWouldMisread) {
  for (const char* bad : {"", "9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:70000", "127.0.0.1:9s",
                          "127.0.0.1:-1", "256.0.0.1:1", "1.2.3:1", "example.org:9464", "::1:9464",
                          "127.0.0.1:1,127.0.0.1:2", "+80", "[]:1", "127.0.0.1:9464r"}) {
    EXPECT_EQ(ParseHttpAddress(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace modelhost
