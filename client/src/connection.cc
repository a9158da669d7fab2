#include "client/src/connection.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "client/src/other_abi.h"
#include "client/src/process.h"
#include "proto/handle/fault_point.h"

namespace modelhost {

Error ExplainLimit(Error error) {
  if (error.sys_errno == EMFILE) {
    error.text += " (raise RLIMIT_NOFILE (ulimit -n) of this process)";
  }
  return error;
}

Error ErrorInFrame(std::span<const std::byte> bytes) {
  abi::Error head{};
  const Error broken{Code::kInternal, "modelhostd broke the protocol: a bad Error frame", 0};
  if (bytes.size() < sizeof(head)) return broken;
  std::memcpy(&head, bytes.data(), sizeof(head));
  const std::span<const std::byte> text = bytes.subspan(sizeof(head));
  if (head.length != text.size() || head.length > abi::kMaxErrorText || head.code == 0) {
    return broken;
  }
  const bool known = head.code <= static_cast<uint32_t>(Code::kDataLoss);
  return Error{known ? static_cast<Code>(head.code) : Code::kUnknown,
               std::string(reinterpret_cast<const char*>(text.data()), text.size()), 0};
}

Result<std::unique_ptr<Connection>> Connection::Open(const std::string& path,
                                                     std::atomic<int>& copy,
                                                     std::span<std::byte> buffer,
                                                     SteadyTime deadline,
                                                     const std::function<bool()>& give_up) {
  auto socket = Process::Get().OpenSocket(path, copy);
  if (!socket.ok()) return ExplainLimit(std::move(socket).error());
  std::unique_ptr<Connection> connection(new Connection(*std::move(socket), copy));
  if (auto greeted = connection->Greet(buffer, deadline, give_up); !greeted.ok()) {
    Error error = std::move(greeted).error();
    error.text = path + ": " + error.text;
    return error;
  }
  return connection;
}

Connection::~Connection() { Process::Get().CloseSocket(std::move(socket_), copy_); }

Result<void> Connection::Greet(std::span<std::byte> buffer, SteadyTime deadline,
                               const std::function<bool()>& give_up) {
  constexpr uint32_t kRequest = 1;
  const auto next_ask = [&] {
    return std::min(deadline, std::chrono::steady_clock::now() + kAskEvery);
  };
  abi::Hello hello{};
  hello.header = MakeHeader(abi::FrameType::kHello, sizeof(hello), kRequest, 0);
  hello.abi_min = abi::kFrameAbiMin;
  hello.abi_max = abi::kFrameAbi;
  // A daemon that refuses us says why and hangs up, perhaps before we have said anything: whether
  // or not the hello goes out, there may be an answer to read.
  const auto sent = SendFrame(socket_, AsBytes(hello), {}, {});
  FaultPoint("client.hello_sent");
  auto frame = ReceiveFrame(socket_, buffer, ReceiveWait::kUntilDeadline, next_ask());
  while (!frame.ok() && frame.error().code == Code::kDeadlineExceeded &&
         std::chrono::steady_clock::now() < deadline) {
    if (give_up()) return Error{Code::kCancelled, "interrupted", 0};
    frame = ReceiveFrame(socket_, buffer, ReceiveWait::kUntilDeadline, next_ask());
  }
  if (!frame.ok() && frame.error().sys_errno == ECONNRESET) {
    frame = ReceiveFrame(socket_, buffer, ReceiveWait::kNo, deadline);
  }
  if (!frame.ok() && !sent.ok()) return sent;
  if (!frame.ok()) {
    Error error = std::move(frame).error();
    if (error.code == Code::kDeadlineExceeded) {
      error.text = "modelhostd accepts connections but does not answer (look at its log)";
    }
    return error;
  }
  if (frame->header.type == static_cast<uint16_t>(abi::FrameType::kError)) {
    return ErrorInFrame(buffer.first(frame->bytes));
  }
  abi::HelloReply reply{};
  const Error broken{Code::kInternal, "modelhostd broke the protocol: a bad HelloReply", 0};
  if (frame->header.type != static_cast<uint16_t>(abi::FrameType::kHelloReply) ||
      frame->header.request_id != kRequest || frame->bytes != sizeof(reply) ||
      frame->fds.size() != 1) {
    return broken;
  }
  std::memcpy(&reply, buffer.data(), sizeof(reply));
  if (reply.abi < abi::kFrameAbiMin || reply.abi > abi::kFrameAbi) {
    return OtherAbi("handle protocol: the daemon answered in", reply.abi, abi::kFrameAbi);
  }
  auto page = CatalogueReader::Map(frame->fds[0], reply.page_bytes, reply.epoch);
  if (!page.ok()) return std::move(page).error();
  page_ = *std::move(page);
  abi_ = reply.abi;
  FaultPoint("client.connected");
  return {};
}

}  // namespace modelhost
