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

#include "daemon/device_agent/agent_frames.h"
#include "daemon/device_agent/daemon_watch.h"
#include "daemon/device_agent/device_mode.h"
#include "daemon/device_agent/device_probe.h"
#include "daemon/device_agent/upload.h"
#include "proto/handle/mapping.h"

namespace modelhost {
namespace {

using agent::Frame;
using agent::Reply;
using agent::Request;

constexpr std::chrono::seconds kIdleWait{60};
constexpr std::chrono::milliseconds kProgressEvery{200};
constexpr std::chrono::seconds kReplyPatience{10};
constexpr uint64_t kGlanceBytes = 64;

// A context and the ring in it, as long as there is work.
struct Session {
  explicit Session(cuda::PrimaryContext made) : context(std::move(made)) {}
  cuda::PrimaryContext context;
  SteadyTime used = std::chrono::steady_clock::now();  // Looking at segments is no use.
  SteadyTime ring_used = used;
  std::unique_ptr<UploadRing> ring;
  uint64_t ring_bytes = 0;
  uint32_t threads = 0;
};

class Server {
 public:
  Server(UniqueFd socket, const char* library, std::chrono::milliseconds keep)
      : socket_(std::move(socket)), library_(library), keep_(keep) {}
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
  Result<void> Try(const Request& request, Frame frame);

  // Gives back what was not used for `keep_`. When there is more to give back.
  SteadyTime Expire();
  void NoteUse(Frame frame);
  // Whether another process may do better with what is asked next.
  bool IsDead(Frame frame, const Result<void>& answered, Reply& reply, std::vector<UniqueFd>& out);

  Result<void> Begin();
  Result<UploadRing*> Ring(const Request& request);
  // Where a request's segment is mapped; `hold` keeps it there.
  Result<cuda::DevicePtr> Reach(const Request& request, const std::vector<UniqueFd>& fds,
                                cuda::Access access, std::optional<cuda::ImportedSegment>& hold);
  // Keeps it until it is released.
  void HandOut(LegacyTry made, Reply& reply);
  bool Report(uint64_t done, uint32_t request_id);
  Result<void> Send(const Reply& reply, const std::vector<UniqueFd>& fds);

  const UniqueFd socket_;
  const char* const library_;
  const std::chrono::milliseconds keep_;
  cuda::DriverLoad load_;
  bool loaded_ = false;
  std::string uuid_;
  cuda::Device device_ = 0;
  std::optional<DeviceFacts> facts_;
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
    agent::CopyText(reply.text, load_.text);
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
  agent::CopyText(reply.device.uuid, *uuid);
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
  const std::string uuid(agent::TextOf(request.uuid));
  const auto device = driver.FindDevice(uuid);
  if (!device.ok()) return device.error();
  legacy_.clear();
  const bool tried_elsewhere = request.direct_test != 0 || request.ipc_test != 0;
  if (!tried_elsewhere || uuid != uuid_ || !facts_.has_value()) {
    session_.reset();
    facts_.reset();
    device_ = *device;
    uuid_ = uuid;
    auto looked = FactsOf(driver, device_);
    if (!looked.ok()) return std::move(looked).error();
    if (auto begun = Begin(); !begun.ok()) return begun;
    TestDevice(driver, device_, *looked);
    facts_ = *std::move(looked);
  }
  DeviceFacts& facts = *facts_;
  facts.direct_test = static_cast<TestResult>(request.direct_test);
  facts.direct_failure = agent::TextOf(request.direct_failure);
  facts.ipc_test = static_cast<TestResult>(request.ipc_test);
  if (facts.ipc_test == TestResult::kFailed) {
    facts.ipc_failure = agent::TextOf(request.ipc_failure);
  }
  const DeviceModeChoice choice = ChooseDeviceMode(facts, request.allow_registered != 0);
  mode_ = choice.mode;
  Request same = request;
  same.index = static_cast<uint32_t>(device_);
  if (auto listed = List(same, reply); !listed.ok()) return listed;
  reply.device.mode = static_cast<uint32_t>(mode_);
  agent::CopyText(reply.device.reason, choice.reason);
  if (mode_ == DeviceMode::kVmmFd) {
    const auto granularity = cuda::MinimumGranularity(driver, device_);
    if (!granularity.ok()) return granularity.error();
    reply.device.granularity = *granularity;
  }
  if (mode_ == DeviceMode::kCudaIpc && facts.ipc_test == TestResult::kNotRun &&
      facts.ipc_export == TestResult::kPassed) {
    if (auto begun = Begin(); !begun.ok()) return begun;
    auto made = MakeLegacyTry(driver);
    if (!made.ok()) return std::move(made).error();
    reply.bytes = made->bytes;
    HandOut(*std::move(made), reply);
  }
  // What cannot be given back now never will be: the next process starts clean.
  if (driver.lost_handles() > 0) {
    return Error{Code::kUnavailable, "the driver did not take back what the self-test used", 0};
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
    HandOut({*std::move(memory), *handle, request.bytes}, reply);
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
  if (agent::SegmentIsDescriptor(request)) {
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
  const size_t plan_at = agent::SegmentIsDescriptor(request) ? 1 : 0;
  std::vector<agent::UploadItem> items;
  {
    const auto plan = ReadOnlyMapping::MapSealed(
        fds[plan_at], request.items * sizeof(agent::UploadItem), Align::kPage);
    if (!plan.ok()) return plan.error();
    auto parsed =
        agent::ParsePlan(plan->bytes(), request.items, fds.size() - plan_at - 1, request.bytes);
    if (!parsed.ok()) return std::move(parsed).error();
    items = *std::move(parsed);
  }
  std::vector<SourceFile> sources;
  for (size_t i = plan_at + 1; i < fds.size(); ++i) {
    auto opened = OpenSource(std::move(fds[i]), request.direct != 0);
    if (!opened.ok()) return std::move(opened).error();
    sources.push_back(*std::move(opened));
  }
  const auto sum = (*ring)->Upload(*at, request.bytes, items, sources, [&](uint64_t done) {
    return Report(done, request.header.request_id);
  });
  if (!sum.ok()) return sum.error();
  for (const SourceFile& source : sources) {
    if (auto same = CheckUnchanged(source); !same.ok()) return same;
  }
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

Result<void> Server::Try(const Request& request, Frame frame) {
  if (load_.driver == nullptr) return Error{Code::kUnavailable, load_.text, 0};
  const auto device = load_.driver->FindDevice(agent::TextOf(request.uuid));
  if (!device.ok()) return device.error();
  device_ = *device;
  if (auto begun = Begin(); !begun.ok()) return begun;
  if (frame == Frame::kTryHostRead) return TryHostRead(*load_.driver);
  cuda::IpcHandle handle{};
  std::memcpy(handle.bytes, request.ipc, sizeof(handle.bytes));
  return TryImport(*load_.driver, handle);
}

void Server::HandOut(LegacyTry made, Reply& reply) {
  reply.segment = next_segment_++;
  std::memcpy(reply.ipc, made.handle.bytes, sizeof(reply.ipc));
  legacy_.emplace(reply.segment, std::pair(std::move(made.memory), made.bytes));
}

Result<void> Server::Answer(const Request& request, Frame frame, std::vector<UniqueFd> fds,
                            Reply& reply, std::vector<UniqueFd>& out) {
  if (!std::exchange(loaded_, true)) load_ = cuda::Driver::Load(library_);
  if (frame == Frame::kList) return List(request, reply);
  if (frame == Frame::kOpen) return Open(request, reply);
  if (frame == Frame::kTryImport || frame == Frame::kTryHostRead) return Try(request, frame);
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

SteadyTime Server::Expire() {
  const SteadyTime now = std::chrono::steady_clock::now();
  SteadyTime next = now + kIdleWait;
  if (!session_.has_value()) return next;
  // With cuda_ipc the context holds the segments.
  if (legacy_.empty() && now - session_->used >= keep_) {
    session_.reset();
    return next;
  }
  if (now - session_->ring_used >= keep_) session_->ring.reset();
  if (session_->ring != nullptr) next = std::min(next, session_->ring_used + keep_);
  if (legacy_.empty()) next = std::min(next, session_->used + keep_);
  return next;
}

void Server::NoteUse(Frame frame) {
  if (!session_.has_value()) return;
  const bool ring = frame == Frame::kUpload || frame == Frame::kVerify;
  const SteadyTime now = std::chrono::steady_clock::now();
  if (ring) session_->ring_used = now;
  if (ring || frame == Frame::kCreate || frame == Frame::kOpen) session_->used = now;
}

bool Server::IsDead(Frame frame, const Result<void>& answered, Reply& reply,
                    std::vector<UniqueFd>& out) {
  const bool first = frame == Frame::kList || frame == Frame::kOpen || frame == Frame::kTryImport ||
                     frame == Frame::kTryHostRead;
  // A driver that fails without a context may fail in this process only.
  bool dead =
      !first && !answered.ok() && answered.error().code == Code::kUnavailable && legacy_.empty();
  if (!session_.has_value()) return dead;
  // A dead context says so to whatever is asked next, and in this process for good.
  const cuda::Rc rc = load_.driver->call().cuCtxSynchronize();
  // What the driver did not take back stays until this process ends, as legacy memory does.
  dead |= cuda::IsSticky(rc) || (load_.driver->lost_handles() > 0 && legacy_.empty());
  if (cuda::IsSticky(rc) && answered.ok()) {
    out.clear();
    reply.code = static_cast<uint32_t>(Code::kUnavailable);
    agent::CopyText(reply.text, load_.driver->ToError(rc, "the context").text);
  }
  return dead;
}

int Server::Run() {
  const DaemonWatch watch(socket_);
  std::array<std::byte, abi::kMaxFrameBytes> buffer;
  while (true) {
    auto frame = ReceiveFrame(socket_, buffer, ReceiveWait::kUntilDeadline, Expire());
    if (!frame.ok()) {
      if (frame.error().code == Code::kDeadlineExceeded) continue;
      return frame.error().code == Code::kUnavailable ? 0 : 4;
    }
    const auto type = static_cast<Frame>(frame->header.type);
    if (type == Frame::kCancel) continue;  // What it was for has ended.
    Reply reply{};
    std::vector<UniqueFd> out;
    const auto request =
        agent::ParseRequest(std::span(buffer).first(frame->bytes), frame->fds.size());
    const auto answered = request.ok() ? Answer(*request, type, std::move(frame->fds), reply, out)
                                       : Result<void>(request.error());
    if (gone_) return 0;
    if (!answered.ok()) {
      out.clear();
      reply.code = static_cast<uint32_t>(answered.error().code);
      agent::CopyText(reply.text, answered.error().text);
    }
    NoteUse(type);
    const bool dead = IsDead(type, answered, reply, out);
    reply.dead = dead ? 1 : 0;
    reply.header = MakeHeader(static_cast<abi::FrameType>(Frame::kReply), sizeof(reply),
                              frame->header.request_id, out.size());
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

int RunDeviceAgent(UniqueFd socket, const char* library, std::chrono::milliseconds keep) {
  return Server(std::move(socket), library, keep).Run();
}

}  // namespace modelhost
