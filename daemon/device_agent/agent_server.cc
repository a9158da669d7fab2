#include "daemon/device_agent/agent_server.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/device_agent/agent_wire.h"
#include "daemon/device_agent/device_mode.h"
#include "daemon/device_agent/device_probe.h"
#include "daemon/device_agent/upload.h"
#include "proto/handle/mapping.h"

namespace modelhost {
namespace {

using agent::Frame;
using agent::Reply;
using agent::Request;

// Making a context and pinning a ring cost a tenth of a second and more; loads often come together.
constexpr std::chrono::seconds kKeepContext{10};
constexpr std::chrono::seconds kIdleWait{60};
constexpr std::chrono::milliseconds kProgressEvery{200};
constexpr std::chrono::seconds kReplyPatience{10};
constexpr uint64_t kGlanceBytes = 64;

template <size_t kBytes>
void SetText(char (&to)[kBytes], std::string_view text) {
  const size_t bytes = std::min(text.size(), kBytes - 1);
  std::memcpy(to, text.data(), bytes);
  to[bytes] = '\0';
}

template <size_t kBytes>
std::string_view TextOf(const char (&text)[kBytes]) {
  return {text, ::strnlen(text, kBytes)};
}

// A context and the ring in it, as long as there is work.
struct Session {
  explicit Session(cuda::PrimaryContext made) : context(std::move(made)) {}
  cuda::PrimaryContext context;
  std::unique_ptr<UploadRing> ring;
  uint64_t ring_bytes = 0;
  uint32_t threads = 0;
};

class Server {
 public:
  Server(UniqueFd socket, const char* library) : socket_(std::move(socket)), library_(library) {}
  int Run();

 private:
  Result<void> Answer(const Request& request, Frame frame, std::vector<UniqueFd> fds, Reply& reply,
                      std::vector<UniqueFd>& out);
  Result<void> List(const Request& request, Reply& reply);
  Result<void> Open(const Request& request, Reply& reply);
  Result<void> Create(const Request& request, Reply& reply, std::vector<UniqueFd>& out);
  Result<void> Fill(const Request& request, std::vector<UniqueFd> fds, Reply& reply);
  Result<void> Verify(const Request& request, const std::vector<UniqueFd>& fds, Reply& reply);
  Result<void> Check(const Request& request, const std::vector<UniqueFd>& fds);
  Result<void> Memory(Reply& reply);

  Result<void> Begin();
  Result<UploadRing*> Ring(const Request& request);
  // Where a request's segment is mapped; `hold` keeps it there.
  Result<cuda::DevicePtr> Reach(const Request& request, const std::vector<UniqueFd>& fds,
                                cuda::Access access, std::optional<cuda::ImportedSegment>& hold);
  bool Report(uint64_t done, uint32_t request_id);
  Result<void> Send(const Reply& reply, const std::vector<UniqueFd>& fds);

  const UniqueFd socket_;
  const char* const library_;
  cuda::DriverLoad load_;
  bool loaded_ = false;
  std::string uuid_;
  cuda::Device device_ = 0;
  DeviceMode mode_ = DeviceMode::kHostOnly;
  // In this order: memory goes before its context.
  std::optional<Session> session_;
  std::map<uint64_t, std::pair<cuda::LegacyMemory, uint64_t>> legacy_;  // With its bytes.
  uint64_t next_segment_ = 1;
  std::chrono::steady_clock::time_point reported_{};
  bool gone_ = false;  // The daemon is, while an upload ran.
};

Result<void> Server::List(const Request& request, Reply& reply) {
  if (load_.driver == nullptr) {
    SetText(reply.text, load_.text);
    return {};
  }
  const cuda::Driver& driver = *load_.driver;
  reply.devices = static_cast<uint32_t>(driver.device_count());
  reply.device.driver_version = driver.version();
  if (request.index >= reply.devices) return {};
  cuda::Device device = 0;
  cuda::Rc rc = driver.call().cuDeviceGet(&device, static_cast<int>(request.index));
  if (rc != cuda::Rc::kSuccess) return driver.ToError(rc, "find a GPU");
  const auto uuid = driver.UuidText(device);
  if (!uuid.ok()) return uuid.error();
  SetText(reply.device.uuid, *uuid);
  rc = driver.call().cuDeviceGetName(reply.device.name, sizeof(reply.device.name), device);
  size_t total = 0;
  if (rc == cuda::Rc::kSuccess) rc = driver.call().cuDeviceTotalMem(&total, device);
  if (rc != cuda::Rc::kSuccess) return driver.ToError(rc, "the name and size of " + *uuid);
  reply.device.name[sizeof(reply.device.name) - 1] = '\0';
  reply.device.total_bytes = total;
  return {};
}

Result<void> Server::Open(const Request& request, Reply& reply) {
  if (load_.driver == nullptr) return Error{Code::kUnavailable, load_.text, 0};
  const cuda::Driver& driver = *load_.driver;
  const std::string uuid(TextOf(request.uuid));
  const auto device = driver.FindDevice(uuid);
  if (!device.ok()) return device.error();
  legacy_.clear();
  session_.reset();
  device_ = *device;
  uuid_ = uuid;
  DeviceFacts facts = FactsOf(driver, device_);
  if (auto begun = Begin(); !begun.ok()) return begun;
  TestDevice(driver, device_, facts);
  const DeviceModeChoice choice = ChooseDeviceMode(facts, request.allow_registered != 0);
  mode_ = choice.mode;
  Request same = request;
  same.index = static_cast<uint32_t>(device_);
  if (auto listed = List(same, reply); !listed.ok()) return listed;
  reply.device.mode = static_cast<uint32_t>(mode_);
  SetText(reply.device.reason, choice.reason);
  if (mode_ == DeviceMode::kVmmFd) {
    const auto granularity = cuda::MinimumGranularity(driver, device_);
    if (!granularity.ok()) return granularity.error();
    reply.device.granularity = *granularity;
  }
  return {};
}

Result<void> Server::Begin() {
  if (!session_.has_value()) {
    auto context = cuda::PrimaryContext::Retain(*load_.driver, device_);
    if (!context.ok()) return std::move(context).error();
    session_.emplace(*std::move(context));
  }
  return session_->context.MakeCurrent();
}

Result<UploadRing*> Server::Ring(const Request& request) {
  if (auto begun = Begin(); !begun.ok()) return std::move(begun).error();
  if (session_->ring == nullptr || session_->ring_bytes != request.ring_bytes ||
      session_->threads != request.threads) {
    session_->ring.reset();
    auto ring =
        UploadRing::Create(*load_.driver, session_->context, request.ring_bytes, request.threads);
    if (!ring.ok()) return std::move(ring).error();
    session_->ring = *std::move(ring);
    session_->ring_bytes = request.ring_bytes;
    session_->threads = request.threads;
  }
  return session_->ring.get();
}

Result<void> Server::Create(const Request& request, Reply& reply, std::vector<UniqueFd>& out) {
  const cuda::Driver& driver = *load_.driver;
  if (mode_ == DeviceMode::kVmmFd) {
    const auto allocation = cuda::CreateAllocation(driver, device_, request.bytes);
    if (!allocation.ok()) return allocation.error();
    auto fd = cuda::ExportAllocation(driver, *allocation);
    if (!fd.ok()) return fd.error();
    out.push_back(*std::move(fd));
  } else if (mode_ == DeviceMode::kCudaIpc) {
    if (auto begun = Begin(); !begun.ok()) return begun;
    auto memory = cuda::AllocateLegacy(driver, request.bytes);
    if (!memory.ok()) return std::move(memory).error();
    const auto handle = cuda::ExportLegacy(driver, *memory);
    if (!handle.ok()) return handle.error();
    std::memcpy(reply.ipc, handle->bytes, sizeof(reply.ipc));
    reply.segment = next_segment_++;
    legacy_.emplace(reply.segment, std::pair(*std::move(memory), request.bytes));
  } else {
    return Error{Code::kFailedPrecondition,
                 std::string("this GPU holds no copies in mode ") + DeviceModeName(mode_), 0};
  }
  reply.bytes = request.bytes;
  return {};
}

Result<cuda::DevicePtr> Server::Reach(const Request& request, const std::vector<UniqueFd>& fds,
                                      cuda::Access access,
                                      std::optional<cuda::ImportedSegment>& hold) {
  if (mode_ == DeviceMode::kVmmFd) {
    if (fds.empty()) return Error{Code::kInvalidArgument, "no segment came with the request", 0};
    auto imported = cuda::ImportSegment(*load_.driver, fds.front(), request.bytes, device_, access);
    if (!imported.ok()) return std::move(imported).error();
    hold.emplace(*std::move(imported));
    return hold->range().at;
  }
  const auto found = legacy_.find(request.segment);
  if (found == legacy_.end() || found->second.second != request.bytes) {
    return Error{Code::kNotFound, "the agent does not have that segment", 0};
  }
  return found->second.first.get();
}

bool Server::Report(uint64_t done, uint32_t request_id) {
  const auto now = std::chrono::steady_clock::now();
  if (now - reported_ >= kProgressEvery) {
    reported_ = now;
    Reply progress{};
    progress.header =
        MakeHeader(static_cast<abi::FrameType>(Frame::kProgress), sizeof(progress), request_id, 0);
    progress.bytes = done;
    // A daemon that does not read them now misses nothing.
    (void)SendFrame(socket_, AsBytes(progress), {}, {});
  }
  std::array<std::byte, abi::kMaxFrameBytes> buffer;
  const auto heard = ReceiveFrame(socket_, buffer, ReceiveWait::kNo, now);
  if (heard.ok()) return false;  // kCancel; nothing else may come now.
  gone_ = heard.error().code == Code::kUnavailable;
  return !gone_;
}

Result<void> Server::Fill(const Request& request, std::vector<UniqueFd> fds, Reply& reply) {
  auto ring = Ring(request);
  if (!ring.ok()) return std::move(ring).error();
  std::optional<cuda::ImportedSegment> hold;
  const auto at = Reach(request, fds, cuda::Access::kReadWrite, hold);
  if (!at.ok()) return at.error();
  const size_t plan_at = mode_ == DeviceMode::kVmmFd ? 1 : 0;
  if (fds.size() <= plan_at || request.items > agent::kMaxItems) {
    return Error{Code::kInvalidArgument, "no plan came with the upload, or too large a one", 0};
  }
  const auto plan = ReadOnlyMapping::MapSealed(
      fds[plan_at], request.items * sizeof(agent::UploadItem), Align::kPage);
  if (!plan.ok()) return plan.error();
  std::vector<agent::UploadItem> items(request.items);
  if (!items.empty()) std::memcpy(items.data(), plan->bytes().data(), plan->bytes().size());
  std::vector<SourceFile> sources;
  for (size_t i = plan_at + 1; i < fds.size(); ++i) {
    sources.push_back(OpenSource(std::move(fds[i]), request.direct != 0));
  }
  if (auto good = CheckPlan(items, sources.size(), request.bytes); !good.ok()) return good;
  const auto sum = (*ring)->Upload(*at, request.bytes, items, sources, [&](uint64_t done) {
    return Report(done, request.header.request_id);
  });
  if (!sum.ok()) return sum.error();
  reply.checksum = *sum;
  reply.bytes = request.bytes;
  return {};
}

Result<void> Server::Verify(const Request& request, const std::vector<UniqueFd>& fds,
                            Reply& reply) {
  auto ring = Ring(request);
  if (!ring.ok()) return std::move(ring).error();
  std::optional<cuda::ImportedSegment> hold;
  const auto at = Reach(request, fds, cuda::Access::kRead, hold);
  if (!at.ok()) return at.error();
  const auto sum = (*ring)->Sum(
      *at, request.bytes, [&](uint64_t done) { return Report(done, request.header.request_id); });
  if (!sum.ok()) return sum.error();
  reply.checksum = *sum;
  if (*sum != request.expected) {
    return Error{Code::kDataLoss, "the device memory does not hold what was uploaded", 0};
  }
  return {};
}

Result<void> Server::Check(const Request& request, const std::vector<UniqueFd>& fds) {
  if (auto begun = Begin(); !begun.ok()) return begun;
  std::optional<cuda::ImportedSegment> hold;
  const auto at = Reach(request, fds, cuda::Access::kRead, hold);
  Result<void> good = at.ok() ? Result<void>() : Result<void>(at.error());
  const uint64_t bytes = std::min(request.bytes, kGlanceBytes);
  for (const uint64_t offset : {uint64_t{0}, request.bytes - bytes}) {
    if (!good.ok()) break;
    std::array<std::byte, kGlanceBytes> glance;
    good =
        load_.driver->Check(load_.driver->call().cuMemcpyDtoH(glance.data(), *at + offset, bytes),
                            "read device memory at offset " + std::to_string(offset));
  }
  if (good.ok() || good.error().code == Code::kUnavailable ||
      good.error().code == Code::kResourceExhausted) {
    return good;
  }
  // The driver answers: is it the segment or the context?
  const cuda::Rc rc = load_.driver->call().cuCtxSynchronize();
  if (rc != cuda::Rc::kSuccess) return load_.driver->ToError(rc, "the context");
  return Error{Code::kDataLoss, "the segment is no longer there: " + good.error().text, 0};
}

Result<void> Server::Memory(Reply& reply) {
  if (auto begun = Begin(); !begun.ok()) return begun;
  const auto memory = cuda::MemoryInfo(*load_.driver);
  if (!memory.ok()) return memory.error();
  reply.free_bytes = memory->free_bytes;
  reply.total_bytes = memory->total_bytes;
  return {};
}

Result<void> Server::Answer(const Request& request, Frame frame, std::vector<UniqueFd> fds,
                            Reply& reply, std::vector<UniqueFd>& out) {
  if (!std::exchange(loaded_, true)) load_ = cuda::Driver::Load(library_);
  if (frame == Frame::kList) return List(request, reply);
  if (frame == Frame::kOpen) return Open(request, reply);
  if (uuid_.empty()) return Error{Code::kFailedPrecondition, "no GPU was opened", 0};
  switch (frame) {
    case Frame::kCreate:
      return Create(request, reply, out);
    case Frame::kUpload:
      return Fill(request, std::move(fds), reply);
    case Frame::kVerify:
      return Verify(request, fds, reply);
    case Frame::kCheck:
      return Check(request, fds);
    case Frame::kRelease:
      legacy_.erase(request.segment);
      return {};
    case Frame::kMemory:
      return Memory(reply);
    default:
      return Error{Code::kInvalidArgument, "a request that no agent knows", 0};
  }
}

Result<void> Server::Send(const Reply& reply, const std::vector<UniqueFd>& fds) {
  std::vector<const UniqueFd*> lent;
  for (const UniqueFd& fd : fds) lent.push_back(&fd);
  return SendFrame(socket_, AsBytes(reply), {}, lent);
}

int Server::Run() {
  std::array<std::byte, abi::kMaxFrameBytes> buffer;
  while (true) {
    const bool keep = session_.has_value() && legacy_.empty();
    auto frame = ReceiveFrame(
        socket_, buffer, ReceiveWait::kUntilDeadline,
        std::chrono::steady_clock::now() + (keep ? std::chrono::seconds(kKeepContext) : kIdleWait));
    if (!frame.ok()) {
      if (frame.error().code == Code::kDeadlineExceeded) {
        if (legacy_.empty()) session_.reset();
        continue;
      }
      return frame.error().code == Code::kUnavailable ? 0 : 4;
    }
    const auto type = static_cast<Frame>(frame->header.type);
    if (frame->bytes != sizeof(Request)) return 4;
    if (type == Frame::kCancel) continue;  // What it was for has ended.
    Request request{};
    std::memcpy(&request, buffer.data(), sizeof(request));
    Reply reply{};
    std::vector<UniqueFd> out;
    const auto answered = Answer(request, type, std::move(frame->fds), reply, out);
    if (gone_) return 0;
    if (!answered.ok()) {
      out.clear();
      reply.code = static_cast<uint32_t>(answered.error().code);
      SetText(reply.text, answered.error().text);
    }
    // A dead context says so to whatever is asked next, and in this process for good.
    bool dead = false;
    if (session_.has_value()) {
      const cuda::Rc rc = load_.driver->call().cuCtxSynchronize();
      dead = cuda::IsSticky(rc);
      if (dead && answered.ok()) {
        reply.code = static_cast<uint32_t>(Code::kUnavailable);
        SetText(reply.text, load_.driver->ToError(rc, "the context").text);
      }
    }
    reply.dead = dead ? 1 : 0;
    reply.header = MakeHeader(static_cast<abi::FrameType>(Frame::kReply), sizeof(reply),
                              request.header.request_id, out.size());
    auto sent = Send(reply, out);
    const auto give_up = std::chrono::steady_clock::now() + kReplyPatience;
    while (!sent.ok() && sent.error().code == Code::kResourceExhausted &&
           std::chrono::steady_clock::now() < give_up) {
      // Progress that the daemon has not read yet fills the socket.
      (void)ReceiveFrame(socket_, buffer, ReceiveWait::kUntilDeadline,
                         std::chrono::steady_clock::now() + std::chrono::milliseconds(5));
      sent = Send(reply, out);
    }
    if (!sent.ok()) return 0;
    if (dead) return 3;
  }
}

}  // namespace

int RunDeviceAgent(UniqueFd socket, const char* library) {
  return Server(std::move(socket), library).Run();
}

}  // namespace modelhost
