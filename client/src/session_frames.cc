// Frames of a session: out under the lock, in by whoever has the reader's role.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>

#include "client/src/reference.h"
#include "client/src/session.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

Error BrokenFrame(const char* why) {
  return Error{Code::kInternal, std::string("modelhostd broke the protocol: ") + why, 0};
}

}  // namespace

bool Session::Interrupted() const {
  return options_.interrupted != nullptr && options_.interrupted(options_.context) != 0;
}

bool Session::AskInterrupted() {
  if (options_.interrupted == nullptr) return false;
  mutex_.Unlock();
  const bool interrupted = Interrupted();
  mutex_.Lock();
  return interrupted;
}

SteadyTime Session::NextAsk(SteadyTime deadline) const {
  if (options_.interrupted == nullptr) return deadline;
  return std::min(deadline, std::chrono::steady_clock::now() + kAskEvery);
}

uint32_t Session::NextId() {
  if (++last_id_ == 0) ++last_id_;
  return last_id_;
}

Result<Session::AcquireFrame> Session::MakeAcquire(std::span<const abi::Ref> refs,
                                                   const std::string& gpu, bool required) const {
  AcquireFrame frame;
  frame.head.count = static_cast<uint32_t>(refs.size());
  const auto bytes = std::as_bytes(refs);
  frame.tail.assign(bytes.begin(), bytes.end());
  // One that is gone meanwhile is found out when it is sent to.
  const uint32_t abi = connection_ == nullptr ? abi::kFrameAbi : connection_->abi();
  if (!gpu.empty() && abi < abi::kFrameAbiDevice && required) {
    return Error{Code::kUnimplemented,
                 "device memory: this modelhostd speaks version " + std::to_string(abi) +
                     " of the handle protocol, which has none (update modelhostd)",
                 0};
  }
  if (!gpu.empty() && abi >= abi::kFrameAbiDevice) {
    frame.device = true;
    frame.head.flags = required ? abi::kAcquireDevice : abi::kAcquireDeviceIfAny;
    abi::DeviceWant want{};
    gpu.copy(want.gpu, sizeof(want.gpu) - 1);
    frame.tail.insert(frame.tail.end(), AsBytes(want).begin(), AsBytes(want).end());
  }
  frame.head.header =
      MakeHeader(abi::FrameType::kAcquire, sizeof(frame.head) + frame.tail.size(), 0, 0);
  return frame;
}

Result<void> Session::Send(std::span<const std::byte> head, std::span<const std::byte> tail) {
  auto sent = SendFrame(connection_->socket(), head, tail, {});
  if (!sent.ok() && sent.error().code != Code::kResourceExhausted) {
    Break(sent.error(), /*lost=*/true);
  }
  return sent;
}

void Session::SendRelease(uint64_t lease_id) {
  if (!connected()) return;  // It ended with the connection.
  unsent_releases_.push_back(lease_id);
  FlushReleases();
}

void Session::FlushReleases() {
  while (connected() && !unsent_releases_.empty()) {
    abi::Release release{};
    release.header = MakeHeader(abi::FrameType::kRelease, sizeof(release), NextId(), 0);
    release.lease_id = unsent_releases_.back();
    // When the buffer is full, a later call or the background thread sends them.
    if (!Send(AsBytes(release), {}).ok()) return;
    FaultPoint("client.released");
    unsent_releases_.pop_back();
  }
}

bool Session::ReadOne(ReceiveWait wait, SteadyTime deadline) {
  reading_ = true;
  const UniqueFd& socket = connection_->socket();  // Only the reader closes it.
  Result<ReceivedFrame> frame = Error{Code::kResourceExhausted, "out of memory", 0};
  mutex_.Unlock();
  try {
    frame = ReceiveFrame(socket, buffer_, wait, deadline);
  } catch (const std::bad_alloc&) {
    // The frame is lost, and with it the connection; the role and the lock must not be.
  }
  mutex_.Lock();
  reading_ = false;
  bool came = true;
  if (!frame.ok()) {
    came = frame.error().code != Code::kDeadlineExceeded;
    if (came) {
      const bool lost = frame.error().code == Code::kUnavailable;
      Break(frame.error(), lost);
    }
  } else {
    Result<void> done;
    try {
      done = Dispatch(std::span(buffer_).first(frame->bytes), *frame);
    } catch (const std::bad_alloc&) {
      // What the frame was to bring is not there, and others may wait for it.
      done = Error{Code::kResourceExhausted, "out of memory", 0};
    }
    if (!done.ok()) Break(done.error(), /*lost=*/false);
  }
  if (dead_) CloseConnection();
  if (sleepers_ != 0) changed_.NotifyAll();
  return came;
}

Result<void> Session::Dispatch(std::span<const std::byte> bytes, ReceivedFrame& frame) {
  if (dead_) return {};  // Another thread has ended the connection: nobody waits for this any more.
  if (frame.header.type == static_cast<uint16_t>(abi::FrameType::kEvent)) {
    if (!frame.fds.empty()) return BrokenFrame("an event with descriptors");
    return DispatchEvent(bytes);
  }
  const auto it = std::find_if(pending_.begin(), pending_.end(), [&](const Request* request) {
    return request->id == frame.header.request_id;
  });
  if (it != pending_.end()) return Answer(**it, bytes, frame);
  // The answer to a call that gave up: a lease that nobody wants goes back.
  if (frame.header.type == static_cast<uint16_t>(abi::FrameType::kGranted) &&
      bytes.size() >= sizeof(abi::Granted)) {
    abi::Granted head{};
    std::memcpy(&head, bytes.data(), sizeof(head));
    SendRelease(head.lease_id);
  }
  return {};
}

Result<void> Session::Answer(Request& request, std::span<const std::byte> bytes,
                             ReceivedFrame& frame) {
  switch (static_cast<abi::FrameType>(frame.header.type)) {
    case abi::FrameType::kError:
      if (!frame.fds.empty()) return BrokenFrame("an error with descriptors");
      ReleaseAll(request);
      request.error = ErrorInFrame(bytes);
      Finish(request);
      return {};
    case abi::FrameType::kDeviceFds: {
      if (!request.grants.has_value()) break;
      auto taken = request.grants->OnDeviceFds(bytes, frame);
      if (taken.ok() && request.grants->complete()) Finish(request);
      return taken;
    }
    case abi::FrameType::kGranted:
    case abi::FrameType::kRegionFds: {
      const bool granted = frame.header.type == static_cast<uint16_t>(abi::FrameType::kGranted);
      if (request.grants.has_value()) {
        auto taken = granted ? request.grants->OnGranted(bytes, frame)
                             : request.grants->OnRegionFds(bytes, frame);
        if (taken.ok() && request.grants->complete()) Finish(request);
        return taken;
      }
      if (granted || request.kind != Request::Kind::kFetch) break;
      if (bytes.size() != sizeof(abi::RegionFds) + sizeof(abi::RegionRef) ||
          frame.fds.size() != 1) {
        return BrokenFrame("the answer to a Fetch is not one region");
      }
      std::memcpy(&request.fetched.ref, bytes.data() + sizeof(abi::RegionFds),
                  sizeof(abi::RegionRef));
      request.fetched.fd = std::move(frame.fds[0]);
      Finish(request);
      return {};
    }
    case abi::FrameType::kAck:
      if (request.kind != Request::Kind::kSubscribe) break;
      // What happened before the daemon began to tell us must not be missed.
      LookWithoutSlots();
      SignalLocked();
      look_ = true;
      Finish(request);
      return {};
    default:
      break;
  }
  return BrokenFrame("an answer of the wrong type");
}

Result<void> Session::DispatchEvent(std::span<const std::byte> bytes) {
  if (bytes.size() != sizeof(abi::Event)) return BrokenFrame("an event of the wrong length");
  // Whatever it says, the page and the leases are what counts: look.
  PointAtMissingSlots();
  LookWithoutSlots();
  // Who failed to follow may succeed now.
  for (Following& following : followers_) following.retry_at = {};
  look_ = true;
  SignalLocked();
  return {};
}

void Session::SignalLocked() {
  if (!event_fd_.valid()) return;
  const uint64_t one = 1;
  (void)!::write(event_fd_.get(), &one, sizeof(one));
}

void Session::Finish(Request& request) {
  std::erase(pending_, &request);
  request.done = true;
  if (request.kind == Request::Kind::kRedeclare) OnDeclared(request);
  if (request.kind == Request::Kind::kFollow) look_ = true;
  if (sleepers_ != 0) changed_.NotifyAll();
}

// Its caller gives up; what it was given so far goes back, and what comes later will (Dispatch).
void Session::Forget(Request& request) {
  std::erase(pending_, &request);
  request.done = true;
  ReleaseAll(request);
}

void Session::Break(const Error& error, bool lost) {
  if (connection_ == nullptr || dead_) return;
  dead_ = true;
  const std::vector<Request*> pending = std::move(pending_);
  pending_.clear();
  unsent_releases_.clear();  // They ended with the connection.
  for (const auto& lease : leases_) {
    if (lease->state == Lease::State::kLost) continue;
    lease->state = Lease::State::kDue;
    lease->declare_at = {};
    lease->patience = {};
  }
  for (Request* request : pending) {
    request->lost = lost;
    try {
      request->error = error;
    } catch (const std::bad_alloc&) {
      request->error = Error{error.code, "out of memory", 0};
    }
    Finish(*request);
  }
  backoff_ = std::chrono::milliseconds(50);
  reconnect_at_ = std::chrono::steady_clock::now() + Jittered(backoff_);
  SignalLocked();
  if (housekeeper_ != nullptr && !closed_) housekeeper_->Wake();
  if (!reading_) CloseConnection();
}

void Session::CloseConnection() {
  if (housekeeper_ != nullptr) housekeeper_->Unwatch(connection_->socket());
  connection_.reset();
  dead_ = false;
  unsent_releases_.clear();  // They ended with the connection.
  if (sleepers_ != 0) changed_.NotifyAll();
}

}  // namespace modelhost
