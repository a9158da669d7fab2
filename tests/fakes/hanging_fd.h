// A descriptor that hangs in close(), as a stranger can make one: a TCP socket that lingers over
// bytes which nobody reads. Any thread.
#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <vector>

#include "proto/handle/unique_fd.h"

namespace modelhost {

// A descriptor whose close waits until `peer` is closed, for an hour at most.
struct Hanging {
  UniqueFd fd;
  UniqueFd peer;
};

inline Hanging MakeHanging() {
  const UniqueFd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  EXPECT_EQ(::bind(listener.get(), generic, length), 0);
  EXPECT_EQ(::listen(listener.get(), 1), 0);
  EXPECT_EQ(::getsockname(listener.get(), generic, &length), 0);
  Hanging made;
  made.fd = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(made.fd.get(), generic, length), 0);
  made.peer = UniqueFd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  const std::vector<char> bytes(size_t{1} << 20);
  while (::send(made.fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
  }
  const linger wait{1, 3600};
  EXPECT_EQ(::setsockopt(made.fd.get(), SOL_SOCKET, SO_LINGER, &wait, sizeof(wait)), 0);
  return made;
}

}  // namespace modelhost
