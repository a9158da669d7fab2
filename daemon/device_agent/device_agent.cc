#include "daemon/device_agent/device_agent.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/device_agent/agent_frames.h"
#include "daemon/device_agent/device_mode.h"
#include "daemon/platform/errno_status.h"
#include "proto/handle/region.h"

namespace modelhost {
namespace {

constexpr absl::Duration kEndPatience = absl::Milliseconds(500);

DeviceInfo InfoOf(const agent::DeviceRecord& record) {
  DeviceInfo info;
  info.uuid = std::string(agent::TextOf(record.uuid));
  info.name = std::string(agent::TextOf(record.name));
  info.driver_version = record.driver_version;
  info.total_bytes = record.total_bytes;
  return info;
}

// The copies, for the agent to map.
absl::StatusOr<SealedRegion> MakePlan(const std::vector<DeviceCopy>& copies) {
  auto region = WritableRegion::Create("modelhost:device-plan",
                                       copies.size() * sizeof(agent::UploadItem), HugePages::kOff);
  if (!region.ok()) return ToStatus(region.error());
  for (size_t i = 0; i < copies.size(); ++i) {
    const agent::UploadItem item{copies[i].device_offset, copies[i].bytes, copies[i].source_offset,
                                 copies[i].source, 0};
    std::memcpy(region->bytes().data() + i * sizeof(item), &item, sizeof(item));
  }
  return ToStatusOr(std::move(*region).Seal());
}

}  // namespace

DeviceAgent::DeviceAgent(const UniqueFd& program, Clock& clock, std::string uuid,
                         DeviceAgentOptions options)
    : program_(program), clock_(clock), uuid_(std::move(uuid)), options_(std::move(options)) {}

DeviceAgent::~DeviceAgent() = default;

absl::StatusOr<DeviceAgent::Running> DeviceAgent::Start(const UniqueFd& program,
                                                        const DeviceAgentOptions& options) {
  auto ends = MakeSeqpacketPair();
  if (!ends.ok()) return ToStatus(ends.error());
  auto child = ChildProcess::Start(
      program, {.name = "modelhostd", .arguments = options.arguments, .keep_environment = true},
      {&ends->second});
  if (!child.ok()) return child.status();
  return Running{*std::move(child), AgentLink(std::move(ends->first))};
}

absl::StatusOr<std::vector<DeviceInfo>> DeviceAgent::List(const UniqueFd& program, Clock& clock,
                                                          const DeviceAgentOptions& options) {
  (void)clock;
  const AgentPatience patience{absl::ToChronoMilliseconds(options.stall),
                               absl::ToChronoMilliseconds(options.cancel), options.ended};
  auto running = Start(program, options);
  if (!running.ok()) return running.status();
  std::vector<DeviceInfo> devices;
  for (uint32_t index = 0;; ++index) {
    agent::Request request{};
    request.index = index;
    const auto answer = running->link.Ask(agent::Frame::kList, request, {}, patience);
    if (!answer.ok()) return ToStatus(answer.error(), "look for GPUs");
    const agent::Reply& reply = answer->reply;
    if (reply.devices == 0) {
      return absl::UnavailableError(std::string(agent::TextOf(reply.text)));
    }
    if (index >= reply.devices) return devices;
    devices.push_back(InfoOf(reply.device));
  }
}

agent::Request DeviceAgent::NewRequest() const {
  agent::Request request{};
  request.allow_registered = options_.allow_registered ? 1 : 0;
  request.ring_bytes = options_.ring_bytes;
  request.threads = options_.threads;
  std::memcpy(request.uuid, uuid_.data(), std::min(uuid_.size(), sizeof(request.uuid) - 1));
  return request;
}

absl::StatusOr<AgentAnswer> DeviceAgent::Ask(agent::Frame frame, const agent::Request& request,
                                             const std::vector<const UniqueFd*>& fds,
                                             const Progress& progress) {
  auto answer = running_->link.Ask(frame, request, fds, PatienceOf(held_), progress);
  refused_ = !answer.ok() && running_->link.answered();
  if (!running_->link.broken()) {
    if (!answer.ok()) return ToStatus(answer.error(), uuid_);
    return *std::move(answer);
  }
  // How it ended says more than that it did.
  std::string how;
  if (!answer.ok() && answer.error().code == Code::kUnavailable) {
    const auto end = running_->child.Wait(clock_, kEndPatience, [] { return true; });
    if (end.ok()) {
      how = absl::StrCat(" (", end->signalled ? "signal " : "status ", end->code, ")");
    }
  }
  const bool hurry = !answer.ok() && answer.error().code == Code::kCancelled;
  Drop(hurry ? options_.cancel : ChildProcess::kKillPatience);
  if (!answer.ok())
    return ToStatus(Error{answer.error().code, answer.error().text + how, 0}, uuid_);
  return *std::move(answer);
}

void DeviceAgent::Drop(absl::Duration patience) {
  running_->child.Kill(patience);
  late_.Keep(std::move(running_->child));
  running_.reset();
  held_ = 0;
}

AgentPatience DeviceAgent::PatienceOf(uint64_t held) const {
  const auto stall = absl::ToChronoMilliseconds(options_.stall);
  return {stall, held > 0 ? stall : absl::ToChronoMilliseconds(options_.cancel), options_.ended};
}

absl::Status DeviceAgent::Ready(const Progress& progress) {
  if (running_.has_value()) return absl::OkStatus();
  if (options_.ended != nullptr && *options_.ended) {
    return absl::CancelledError(absl::StrCat(uuid_, ": the daemon ends"));
  }
  (void)late_.Reap();
  auto started = Start(program_, options_);
  if (!started.ok()) return started.status();
  running_.emplace(*std::move(started));
  ++incarnation_;
  agent::Request open = NewRequest();
  while (true) {
    auto answer = Ask(agent::Frame::kOpen, open, {}, progress);
    // What is tried in another process comes back with the next question, once each.
    absl::StatusOr<bool> more = answer.ok() ? TryElsewhere(answer->reply, open, progress)
                                            : absl::StatusOr<bool>(answer.status());
    absl::Status taken = more.status();
    if (taken.ok() && !running_.has_value()) {
      taken = absl::UnavailableError(absl::StrCat(uuid_, ": the device agent has ended"));
    }
    if (taken.ok() && *more) continue;
    if (taken.ok()) taken = Take(answer->reply.device);
    if (!taken.ok() && running_.has_value()) {
      Drop(absl::IsCancelled(taken) ? options_.cancel : ChildProcess::kKillPatience);
    }
    return taken;
  }
}

absl::Status DeviceAgent::Take(const agent::DeviceRecord& record) {
  const auto mode = static_cast<DeviceMode>(record.mode);
  DeviceReport report{.info = InfoOf(record),
                      .mode = DeviceModeName(mode),
                      .reason = std::string(agent::TextOf(record.reason)),
                      .limits = DeviceModeLimits(mode),
                      .granularity = record.granularity};
  if (report_.has_value() &&
      (report.mode != report_->mode || report.granularity != report_->granularity)) {
    return absl::UnavailableError(absl::StrCat(
        uuid_, ": it was ", report_->mode, " with granularity ", report_->granularity,
        " at first, a new device agent finds ", report.mode, " with granularity ",
        report.granularity, ": ", report.reason, " (restart the daemon to work with that)"));
  }
  report_ = std::move(report);
  return absl::OkStatus();
}

absl::StatusOr<bool> DeviceAgent::TryElsewhere(const agent::Reply& reply, agent::Request& open,
                                               const Progress& progress) {
  const auto untried = [](uint32_t test) {
    return test == static_cast<uint32_t>(TestResult::kNotRun);
  };
  const auto mode = static_cast<DeviceMode>(reply.device.mode);
  const bool direct = mode == DeviceMode::kHostDirect && untried(open.direct_test);
  const bool import = mode == DeviceMode::kCudaIpc && untried(open.ipc_test) && reply.segment != 0;
  if (!direct && !import) return false;
  agent::Request request = NewRequest();
  std::memcpy(request.ipc, reply.ipc, sizeof(request.ipc));
  auto other = Start(program_, options_);
  if (!other.ok()) return other.status();
  const auto tried = other->link.Ask(direct ? agent::Frame::kTryHostRead : agent::Frame::kTryImport,
                                     request, {}, PatienceOf(0), progress);
  const bool cancelled = !tried.ok() && tried.error().code == Code::kCancelled;
  other->child.Kill(cancelled ? options_.cancel : ChildProcess::kKillPatience);
  late_.Keep(std::move(other->child));
  if (cancelled) return ToStatus(tried.error(), uuid_);  // Nothing is known of the device.
  TestResult result = TestResult::kPassed;
  if (!tried.ok()) {
    const Code code = tried.error().code;
    result = code == Code::kUnimplemented || code == Code::kResourceExhausted
                 ? TestResult::kNotPossible
                 : TestResult::kFailed;
  }
  (direct ? open.direct_test : open.ipc_test) = static_cast<uint32_t>(result);
  if (!tried.ok()) {
    agent::CopyText(direct ? open.direct_failure : open.ipc_failure, tried.error().text);
  }
  return true;
}

absl::StatusOr<DeviceReport> DeviceAgent::Report() {
  const absl::MutexLock lock(&mutex_);
  if (running_.has_value()) {
    // It may have died, or its driver, since it was asked last: then another one says what there
    // is. One that holds segments stays, and says what is wrong.
    const auto asked = Ask(agent::Frame::kMemory, NewRequest(), {}, nullptr);
    if (absl::IsUnavailable(asked.status()) && running_.has_value()) return asked.status();
  }
  if (const absl::Status ready = Ready(nullptr); !ready.ok()) return ready;
  return *report_;
}

absl::StatusOr<DeviceSegment> DeviceAgent::Create(uint64_t bytes, const Progress& progress) {
  const absl::MutexLock lock(&mutex_);
  if (const absl::Status ready = Ready(progress); !ready.ok()) return ready;
  agent::Request request = NewRequest();
  request.bytes = bytes;
  auto answer = Ask(agent::Frame::kCreate, request, {}, progress);
  if (!answer.ok()) return answer.status();
  DeviceSegment segment;
  segment.bytes = bytes;
  segment.id = answer->reply.segment;
  segment.incarnation = incarnation_;
  std::memcpy(segment.handle.data(), answer->reply.ipc, segment.handle.size());
  if (!answer->fds.empty()) segment.fd = std::move(answer->fds.front());
  if (!segment.fd.valid() && segment.id == 0) {
    return absl::InternalError(absl::StrCat(uuid_, ": the agent made a segment and gave nothing"));
  }
  if (!segment.fd.valid() && running_.has_value()) ++held_;
  return segment;
}

absl::Status DeviceAgent::CheckHeld(const DeviceSegment& segment) {
  if (segment.fd.valid() || segment.incarnation == incarnation_) return absl::OkStatus();
  return absl::NotFoundError(
      absl::StrCat(uuid_, ": the segment was lost with the agent that held it (load it again)"));
}

absl::StatusOr<uint64_t> DeviceAgent::Upload(const DeviceSegment& segment,
                                             const std::vector<DeviceCopy>& copies,
                                             const std::vector<const UniqueFd*>& sources,
                                             bool direct, const Progress& progress) {
  if (sources.size() > agent::kMaxSources || copies.size() > agent::kMaxItems) {
    return absl::InvalidArgumentError(absl::StrCat(uuid_, ": an upload of ", copies.size(),
                                                   " pieces from ", sources.size(), " files"));
  }
  const auto plan = MakePlan(copies);
  if (!plan.ok()) return plan.status();
  const absl::MutexLock lock(&mutex_);
  if (const absl::Status ready = Ready(progress); !ready.ok()) return ready;
  if (const absl::Status held = CheckHeld(segment); !held.ok()) return held;
  agent::Request request = NewRequest();
  request.bytes = segment.bytes;
  request.segment = segment.id;
  request.items = copies.size();
  request.direct = direct ? 1 : 0;
  std::vector<const UniqueFd*> fds;
  if (segment.fd.valid()) fds.push_back(&segment.fd);
  fds.push_back(&plan->fd);
  fds.insert(fds.end(), sources.begin(), sources.end());
  const auto answer = Ask(agent::Frame::kUpload, request, fds, progress);
  if (!answer.ok()) return answer.status();
  return answer->reply.checksum;
}

absl::Status DeviceAgent::Verify(const DeviceSegment& segment, uint64_t checksum,
                                 const Progress& progress) {
  const absl::MutexLock lock(&mutex_);
  if (const absl::Status ready = Ready(progress); !ready.ok()) return ready;
  if (const absl::Status held = CheckHeld(segment); !held.ok()) return held;
  agent::Request request = NewRequest();
  request.bytes = segment.bytes;
  request.segment = segment.id;
  request.expected = checksum;
  std::vector<const UniqueFd*> fds;
  if (segment.fd.valid()) fds.push_back(&segment.fd);
  return Ask(agent::Frame::kVerify, request, fds, progress).status();
}

absl::Status DeviceAgent::Check(const DeviceSegment& segment) {
  const absl::MutexLock lock(&mutex_);
  if (!segment.fd.valid() && (!running_.has_value() || segment.incarnation != incarnation_)) {
    return absl::DataLossError(
        absl::StrCat(uuid_, ": the segment was lost with the agent that held it (load it again)"));
  }
  refused_ = false;
  const absl::Status found = Look(segment);
  const bool told = found.ok() || absl::IsResourceExhausted(found) || absl::IsCancelled(found) ||
                    absl::IsDeadlineExceeded(found) || (refused_ && absl::IsDataLoss(found));
  if (told) return found;
  // Also where other GPUs are left, and this one is not.
  return refused_ ? absl::UnavailableError(found.message()) : absl::AbortedError(found.message());
}

absl::Status DeviceAgent::Look(const DeviceSegment& segment) {
  if (const absl::Status ready = Ready(nullptr); !ready.ok()) return ready;
  agent::Request request = NewRequest();
  request.bytes = segment.bytes;
  request.segment = segment.id;
  std::vector<const UniqueFd*> fds;
  if (segment.fd.valid()) fds.push_back(&segment.fd);
  return Ask(agent::Frame::kCheck, request, fds, nullptr).status();
}

absl::Status DeviceAgent::Release(const DeviceSegment& segment) {
  const absl::MutexLock lock(&mutex_);
  if (segment.fd.valid() || !running_.has_value() || segment.incarnation != incarnation_) {
    return absl::OkStatus();
  }
  agent::Request request = NewRequest();
  request.segment = segment.id;
  if (held_ > 0) --held_;
  return Ask(agent::Frame::kRelease, request, {}, nullptr).status();
}

absl::StatusOr<DeviceMemoryUse> DeviceAgent::Memory() {
  const absl::MutexLock lock(&mutex_);
  if (const absl::Status ready = Ready(nullptr); !ready.ok()) return ready;
  const auto answer = Ask(agent::Frame::kMemory, NewRequest(), {}, nullptr);
  if (!answer.ok()) return answer.status();
  return DeviceMemoryUse{answer->reply.free_bytes, answer->reply.total_bytes};
}

uint64_t DeviceAgent::incarnation() const {
  const absl::MutexLock lock(&mutex_);
  return incarnation_;
}

}  // namespace modelhost
