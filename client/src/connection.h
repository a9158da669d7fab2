// One connection to the daemon, greeted: its socket and the catalogue page of its epoch.
//
// Thread-compatible. The socket is opened and closed through Process, for fork.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "client/src/catalogue_reader.h"
#include "proto/handle/error.h"
#include "proto/handle/fd_channel.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// How often a call that waits asks whether it still should.
inline constexpr std::chrono::milliseconds kAskEvery{100};

class Connection {
 public:
  // Connects to one socket and says hello. `copy` is for the fork handler (Process::OpenSocket) and
  // outlives the connection; `buffer` as ReceiveFrame wants it.
  //   NOT_FOUND, UNAVAILABLE  nobody is there (now)
  //   DEADLINE_EXCEEDED       somebody is, and does not answer
  //   CANCELLED               `give_up`, which is asked now and then, said so
  //   RESOURCE_EXHAUSTED, PERMISSION_DENIED, UNIMPLEMENTED, DATA_LOSS, INTERNAL
  static Result<std::unique_ptr<Connection>> Open(const std::string& path, std::atomic<int>& copy,
                                                  std::span<std::byte> buffer, SteadyTime deadline,
                                                  const std::function<bool()>& give_up);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const UniqueFd& socket() const { return socket_; }
  const std::shared_ptr<const CatalogueReader>& page() const { return page_; }
  uint32_t abi() const { return abi_; }  // kFrameAbi of this connection.

 private:
  Connection(UniqueFd socket, std::atomic<int>& copy) : socket_(std::move(socket)), copy_(copy) {}
  Result<void> Greet(std::span<std::byte> buffer, SteadyTime deadline,
                     const std::function<bool()>& give_up);

  UniqueFd socket_;
  std::atomic<int>& copy_;
  std::shared_ptr<const CatalogueReader> page_;
  uint32_t abi_ = 0;
};

// The error that an Error frame carries. `bytes` is the whole frame.
Error ErrorInFrame(std::span<const std::byte> bytes);
// The same error, with what to do when a descriptor could not be had.
Error ExplainLimit(Error error);

}  // namespace modelhost
