#include "client/modelctl/upload.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/modelctl/render.h"
#include "proto/abi/handle_frame.h"
#include "proto/handle/fault_point.h"
#include "proto/handle/fd_channel.h"

namespace modelhost::modelctl {
namespace {

using std::chrono::steady_clock;

constexpr auto kReplyLimit = std::chrono::seconds(30);
constexpr auto kHelloLimit = std::chrono::seconds(3);
constexpr auto kSendPause = std::chrono::milliseconds(5);
constexpr size_t kChunkBytes = size_t{1} << 20;

// The reply to `request`: its frame when it is of type `want`.
Outcome<ReceivedFrame> Receive(const UniqueFd& socket, std::span<std::byte> buffer,
                               uint32_t request, abi::FrameType want, SteadyTime deadline) {
  while (true) {
    Result<ReceivedFrame> frame =
        ReceiveFrame(socket, buffer, ReceiveWait::kUntilDeadline, deadline);
    if (!frame.ok()) return FromError(frame.error(), "handles.sock");
    if (frame->header.request_id != request) continue;  // An event.
    if (frame->header.type == static_cast<uint16_t>(want)) return *std::move(frame);
    abi::Error error{};
    if (frame->header.type == static_cast<uint16_t>(abi::FrameType::kError) &&
        frame->bytes >= sizeof(error)) {
      std::memcpy(&error, buffer.data(), sizeof(error));
      const size_t length = std::min(
          {size_t{error.length}, frame->bytes - sizeof(error), size_t{abi::kMaxErrorText}});
      return FromFailure(
          static_cast<int>(error.code),
          absl::string_view(reinterpret_cast<const char*>(buffer.data()) + sizeof(error), length),
          "handles.sock");
    }
    return Fail(ExitCode::kOther, "handles.sock: an answer that nobody asked for");
  }
}

Exit Send(const UniqueFd& socket, const abi::Upload& frame, const std::vector<UniqueFd>& fds) {
  std::vector<const UniqueFd*> lent;
  for (const UniqueFd& fd : fds) lent.push_back(&fd);
  const auto deadline = steady_clock::now() + kReplyLimit;
  while (true) {
    const Result<void> sent = SendFrame(socket, AsBytes(frame), {}, lent);
    if (sent.ok()) return Exit::Ok();
    // The daemon has yet to take earlier descriptors; it will.
    if (sent.error().code != Code::kResourceExhausted || steady_clock::now() > deadline) {
      return FromError(sent.error(), "handles.sock");
    }
    std::this_thread::sleep_for(kSendPause);
  }
}

}  // namespace

Outcome<UniqueFd> ConnectHandles(const std::string& path) {
  Result<UniqueFd> socket = ConnectSeqpacket(path);
  if (!socket.ok()) {
    Exit exit = FromError(socket.error(), path);
    if (exit.code == ExitCode::kNotFound) exit.code = ExitCode::kUnreachable;
    return exit;
  }
  constexpr uint32_t kRequest = 1;
  abi::Hello hello{};
  hello.header = MakeHeader(abi::FrameType::kHello, sizeof(hello), kRequest, 0);
  hello.abi_min = abi::kFrameAbiMin;
  hello.abi_max = abi::kFrameAbi;
  if (const Result<void> sent = SendFrame(*socket, AsBytes(hello), {}, {}); !sent.ok()) {
    return FromError(sent.error(), path);
  }
  std::vector<std::byte> buffer(abi::kMaxFrameBytes);
  const Outcome<ReceivedFrame> reply = Receive(
      *socket, buffer, kRequest, abi::FrameType::kHelloReply, steady_clock::now() + kHelloLimit);
  if (!reply.ok()) return reply.exit();
  FaultPoint("ctl.connected");
  return *std::move(socket);
}

Exit SendDescriptors(const UniqueFd& socket, const SourceSet& files, const std::string& ticket,
                     Interrupts& interrupts) {
  if (ticket.size() != abi::kTicketBytes) {
    return Fail(ExitCode::kOther, absl::StrCat("publish: the daemon's ticket has ", ticket.size(),
                                               " bytes instead of 16"));
  }
  std::vector<std::byte> buffer(abi::kMaxFrameBytes);
  uint32_t request = 2;  // 1 was the hello.
  for (size_t first = 0; first < files.files.size(); first += abi::kMaxFdsPerFrame, ++request) {
    if (interrupts.Take()) return Exit{ExitCode::kInterrupted, ""};
    const size_t end = std::min(files.files.size(), first + abi::kMaxFdsPerFrame);
    std::vector<UniqueFd> fds;
    for (size_t i = first; i < end; ++i) {
      Outcome<UniqueFd> fd = OpenSource(files.files[i]);
      if (!fd.ok()) return fd.exit();
      fds.push_back(*std::move(fd));
    }
    abi::Upload frame{};
    frame.header = MakeHeader(abi::FrameType::kUpload, sizeof(frame), request, fds.size());
    std::memcpy(frame.ticket, ticket.data(), sizeof(frame.ticket));
    frame.first = static_cast<uint32_t>(first);
    frame.last = end == files.files.size() ? 1 : 0;
    if (Exit exit = Send(socket, frame, fds); !exit.ok()) return exit;
    const Outcome<ReceivedFrame> ack =
        Receive(socket, buffer, request, abi::FrameType::kAck, steady_clock::now() + kReplyLimit);
    if (!ack.ok()) return ack.exit();
    if (frame.last == 0) FaultPoint("ctl.some_sent");
  }
  FaultPoint("ctl.all_sent");
  return Exit::Ok();
}

namespace {

// One streamed publish under way.
class Stream {
 public:
  Stream(Context& context, Interrupts& interrupts, const std::string& what,
         v1::Control::StubInterface& stub)
      : context_(context),
        interrupts_(interrupts),
        what_(what),
        progress_(context.MakeProgress(what)) {
    if (context.globals().timeout.has_value()) {
      call_.set_deadline(std::chrono::system_clock::now() +
                         absl::ToChronoMilliseconds(*context.globals().timeout));
    }
    writer_ = stub.Publish(&call_, &response_);
  }

  Outcome<v1::PublishResponse> Run(const v1::PublishBegin& begin, const SourceSet& files) {
    Exit exit = Write(begin, files);
    progress_.Finish(absl::Now());
    if (!exit.ok()) {
      call_.TryCancel();
      (void)writer_->Finish();
      return exit;
    }
    const grpc::Status status = Finish();
    if (interrupted_) return Interrupted();
    if (!status.ok()) return context_.RpcExit(status, what_);
    return response_;
  }

 private:
  Exit Write(const v1::PublishBegin& begin, const SourceSet& files) {
    v1::PublishRequest request;
    *request.mutable_begin() = begin;
    if (!writer_->Write(request)) return Exit::Ok();  // The status says why.
    v1::Operation shown;
    shown.set_kind(v1::PUBLISH);
    shown.set_state(v1::RUNNING);
    shown.set_phase("send");
    shown.set_bytes_total(files.bytes);
    for (size_t i = 0; i < files.files.size(); ++i) {
      const SourceFile& file = files.files[i];
      const Outcome<UniqueFd> fd = OpenSource(file);
      if (!fd.ok()) return fd.exit();
      v1::PublishChunk& chunk = *request.mutable_chunk();
      chunk.set_file(static_cast<uint32_t>(i));
      uint64_t sent = 0;
      while (true) {
        std::string& data = *chunk.mutable_data();
        data.resize(kChunkBytes);
        const ssize_t got = ::read(fd->get(), data.data(), data.size());
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return FromError(ErrnoError(errno, file.source), what_);
        data.resize(static_cast<size_t>(got));
        sent += static_cast<uint64_t>(got);
        if (sent > file.bytes || (got == 0 && sent != file.bytes)) {
          return Fail(ExitCode::kConflict,
                      absl::StrCat(file.source, ": changed while it was sent"));
        }
        if (got == 0) break;
        if (!writer_->Write(request)) return Exit::Ok();
        shown.set_bytes_done(shown.bytes_done() + static_cast<uint64_t>(got));
        progress_.Update(shown, absl::Now());
        if (interrupts_.Take()) return Interrupted();
      }
    }
    return Exit::Ok();
  }

  // The daemon hashes and syncs now, which may take long; Ctrl-C still works.
  grpc::Status Finish() {
    grpc::Status status;
    std::atomic<bool> done{false};
    std::thread waiter([&] {
      writer_->WritesDone();
      status = writer_->Finish();
      done = true;
    });
    while (!done) {
      if (interrupts_.Take()) {
        interrupted_ = true;
        call_.TryCancel();
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    waiter.join();
    return status;
  }

  Exit Interrupted() {
    context_.Warn(absl::StrCat(what_, ": interrupted; nothing was published"));
    return Exit{ExitCode::kInterrupted, ""};
  }

  Context& context_;
  Interrupts& interrupts_;
  const std::string what_;
  Progress progress_;
  grpc::ClientContext call_;
  v1::PublishResponse response_;
  std::unique_ptr<grpc::ClientWriterInterface<v1::PublishRequest>> writer_;
  bool interrupted_ = false;
};

}  // namespace

Outcome<v1::PublishResponse> StreamFiles(Context& context, Interrupts& interrupts,
                                         const std::string& what, const v1::PublishBegin& begin,
                                         const SourceSet& files) {
  Outcome<v1::Control::StubInterface*> stub = context.Control();
  if (!stub.ok()) return stub.exit();
  return Stream(context, interrupts, what, **stub).Run(begin, files);
}

}  // namespace modelhost::modelctl
