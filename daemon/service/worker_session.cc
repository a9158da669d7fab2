#include "daemon/service/worker_session.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/service/grpc_status.h"
#include "daemon/service/proto_convert.h"

namespace modelhost {
namespace {

constexpr absl::Duration kLongestWait = absl::Hours(24 * 24);

// How the bytes of a version reach a worker, as handles.sock says it.
const char* TransportName(const ResidentVersion& version) {
  const bool sealed =
      !version.regions.empty() && version.regions.front()->kind() == abi::RegionKind::kSealed;
  return sealed ? "host_memfd" : "host_file";
}

// Those that come along: a version may have a hundred thousand other files.
void DescribeRegions(const ResidentVersion& version, v1::Grant* out) {
  for (const uint32_t number : version.eager) {
    const HostRegion& region = *version.regions[number];
    v1::RegionDescriptor* added = out->add_regions();
    added->set_number(number);
    added->set_bytes(region.bytes());
    added->set_kind(region.kind() == abi::RegionKind::kSealed ? "sealed" : "file");
    added->set_sha256(region.digest().Hex());
    added->set_with_grant(true);
  }
}

void DescribeDevice(const Grant& grant, const std::string& gpu, v1::DeviceDescriptor* out) {
  out->set_gpu(SafeText(gpu));
  out->set_mode(
      abi::DeviceModeName(grant.device == nullptr ? abi::DeviceMode::kNone : grant.device->mode));
  if (grant.device == nullptr) return;
  for (const auto& region : grant.device->regions) {
    for (const DeviceSegment& segment : region->segments()) out->add_segment_bytes(segment.bytes);
  }
}

absl::StatusOr<std::vector<AcquireRef>> ToRefs(const v1::AcquireRequest& request) {
  if (request.refs().empty() || request.refs_size() > WorkerSession::kMostRefs) {
    return absl::InvalidArgumentError(absl::StrCat(
        "acquire: ", request.refs_size(), " references, expected 1 to ", WorkerSession::kMostRefs));
  }
  if (request.gpu().size() >= abi::kGpuUuidBytes ||
      (request.gpu_required() && request.gpu().empty())) {
    return absl::InvalidArgumentError(
        "acquire: the GPU has no name, or one that is none (\"GPU-\" and a UUID)");
  }
  std::vector<AcquireRef> refs;
  for (const v1::WorkerRef& ref : request.refs()) {
    auto checked = ToRef(ref, request.redeclare());
    if (!checked.ok()) return checked.status();
    if (!request.gpu().empty()) {
      checked->device =
          request.gpu_required() ? AcquireRef::Device::kRequired : AcquireRef::Device::kIfAny;
      checked->gpu = request.gpu();
    }
    refs.push_back(*std::move(checked));
  }
  return refs;
}

}  // namespace

absl::StatusOr<AcquireRef> ToRef(const v1::WorkerRef& ref, bool redeclare) {
  const auto name_error = [](absl::string_view what, const std::string& name) {
    return absl::InvalidArgumentError(absl::StrCat(what, " \"", SafeText(name, 64),
                                                   "\": not a name ([a-z0-9][a-z0-9._-]{0,63})"));
  };
  if (!IsValidModelName(ref.model())) return name_error("model", ref.model());
  if (!ref.label().empty() && !IsValidModelName(ref.label())) {
    return name_error("label", ref.label());
  }
  if (ref.version() != 0 && !ref.label().empty() && !redeclare) {
    return absl::InvalidArgumentError(
        absl::StrCat(ref.model(), ": both a version and a label (one of them, please)"));
  }
  AcquireRef out;
  out.model = ref.model();
  out.label = ref.label();
  out.version = ref.version();
  if (out.version == 0 && out.label.empty()) out.label = kDefaultLabel;
  if (!ref.digest().empty()) {
    auto digest = ParseDigest(ref.digest());
    if (!digest.ok()) return digest.status();
    out.digest = *digest;
  }
  return out;
}

void WorkerSession::Start(uint64_t epoch, const std::string& handles_socket) {
  id_ = deps_.manager.BeginSession(peer_, "grpc");
  deps_.manager.AnnounceSession(id_, CommOf(peer_.pid));
  v1::SessionEvent event;
  v1::SessionOpened* opened = event.mutable_opened();
  opened->set_session(id_);
  opened->set_epoch(epoch);
  opened->set_handles_socket(SafeText(handles_socket));
  Answer(std::move(event));
}

void WorkerSession::OnRead(const v1::SessionRequest* request) {
  reading_ = false;
  if (request == nullptr) {
    // What was asked before is still answered, but nothing is held any more.
    End(absl::OkStatus(), "closed");
  } else if (id_ != 0) {
    Handle(*request);
  }
  Go();
}

void WorkerSession::OnBadRequest(const absl::Status& status) {
  reading_ = false;
  End(status, "bad request");
  Go();
}

void WorkerSession::OnWritten() {
  writing_ = false;
  Go();
}

void WorkerSession::OnCancel() {
  answers_.clear();
  End(absl::CancelledError("the worker has gone, or did not read"), "closed");
  Go();
}

void WorkerSession::Stop() {
  tell_closing_ = id_ != 0;
  End(absl::UnavailableError("the daemon is stopping (what is mapped stays good; connect again)"),
      "stopping");
  Go();
}

void WorkerSession::Handle(const v1::SessionRequest& request) {
  switch (request.request_case()) {
    case v1::SessionRequest::kAcquire:
      return Acquire(request.request_id(), request.acquire());
    case v1::SessionRequest::kRelease:
      return Release(request.request_id(), request.release().lease());
    case v1::SessionRequest::REQUEST_NOT_SET:
      break;
  }
  AnswerError(request.request_id(),
              absl::InvalidArgumentError("session: a request that asks for nothing"));
}

void WorkerSession::Acquire(uint64_t request_id, const v1::AcquireRequest& request) {
  auto refs = ToRefs(request);
  if (!refs.ok()) return AnswerError(request_id, refs.status());
  Asked asked{request_id, {}, request.gpu(), request.redeclare(), deps_.clock.Monotonic()};
  for (const AcquireRef& ref : *refs) asked.refs.emplace_back(ref.model, ref.label);
  if (!request.has_timeout()) return FinishAcquire(asked, deps_.manager.Acquire(id_, *refs));
  const auto timeout = FromProto(request.timeout());
  if (!timeout.ok()) return AnswerError(request_id, timeout.status());
  // The manager limits how many may wait.
  deps_.manager.AcquireOrWait(
      id_, *std::move(refs), std::min(*timeout, kLongestWait),
      [weak = weak_from_this(),
       asked = std::move(asked)](absl::StatusOr<std::vector<Grant>> grants) {
        const auto self = weak.lock();
        if (self == nullptr || self->id_ == 0) return;
        self->FinishAcquire(asked, grants);
        self->Go();
      },
      request.redeclare() ? ModelManager::WaitFor::kKnownVersions
                          : ModelManager::WaitFor::kAnything);
}

void WorkerSession::FinishAcquire(const Asked& asked,
                                  const absl::StatusOr<std::vector<Grant>>& grants) {
  const absl::Duration took = deps_.clock.Monotonic() - asked.received;
  if (!grants.ok()) {
    AnswerError(asked.request_id, grants.status());
    for (const auto& [model, label] : asked.refs) {
      // A name that only the caller knows must not become a series of its own.
      const bool known = deps_.manager.Model(model).ok();
      deps_.manager.ReportAttach(known ? model : "", "none", took, grants.status());
    }
    return;
  }
  v1::SessionEvent event;
  event.set_request_id(asked.request_id);
  absl::Status told;
  for (size_t i = 0; i < grants->size(); ++i) {
    const Grant& grant = (*grants)[i];
    // One that is declared again has a version and the label that it was asked for under.
    leases_[grant.lease] = {grant.key, asked.redeclare ? asked.refs[i].second : grant.label};
    told.Update(ToProto(grant, asked, event.mutable_granted()->add_grants()));
  }
  if (!told.ok()) {  // No random numbers: then there is no lease either.
    for (const Grant& grant : *grants) {
      leases_.erase(grant.lease);
      (void)deps_.manager.Release(id_, grant.lease);
    }
    return AnswerError(asked.request_id, told);
  }
  if (asked.redeclare) {
    for (const Grant& grant : *grants) TellWhatWasMissed(leases_.at(grant.lease));
  }
  Answer(std::move(event));
  for (const Grant& grant : *grants) {
    deps_.manager.ReportAttach(grant.key.model, TransportName(*grant.resident), took,
                               absl::OkStatus());
  }
}

void WorkerSession::TellWhatWasMissed(const Held& held) {
  if (held.label.empty()) return;
  const auto model = deps_.manager.Model(held.key.model);
  if (!model.ok()) return;
  LabelChange change{held.key.model, held.label, held.key.version, 0, 0};
  if (const auto now = model->labels.find(held.label); now != model->labels.end()) {
    change.to = now->second.version;
    change.generation = now->second.generation;
  }
  if (change.to != held.key.version) moved_[{change.model, change.label}] = change;
}

absl::Status WorkerSession::ToProto(const Grant& grant, const Asked& asked, v1::Grant* out) {
  const ResidentVersion& version = *grant.resident;
  out->set_lease(grant.lease);
  out->set_model(grant.key.model);
  out->set_version(grant.key.version);
  out->set_label(grant.label);
  out->set_generation(grant.generation);
  out->set_digest(version.manifest->digest.Hex());
  out->set_format(SafeText(version.format));
  out->set_tensor_count(version.tensor_count);
  out->set_tensor_bytes(version.tensor_bytes);
  if (asked.redeclare) return absl::OkStatus();
  out->set_index_bytes(version.index.bytes);
  DescribeRegions(version, out);
  if (!asked.gpu.empty()) DescribeDevice(grant, asked.gpu, out->mutable_device());
  const auto ticket = deps_.manager.IssueTicket(id_, grant, !asked.gpu.empty());
  if (!ticket.ok()) return ticket.status();
  out->set_ticket(ticket->data(), ticket->size());
  modelhost::ToProto(deps_.manager.ticket_life(), out->mutable_ticket_life());
  return absl::OkStatus();
}

void WorkerSession::Release(uint64_t request_id, LeaseId lease) {
  if (auto released = deps_.manager.Release(id_, lease); !released.ok()) {
    return AnswerError(request_id, absl::NotFoundError(
                                       absl::StrCat("lease ", lease, ": not held by this stream")));
  }
  v1::SessionEvent event;
  event.set_request_id(request_id);
  event.mutable_released()->set_lease(lease);
  Answer(std::move(event));
}

void WorkerSession::Answer(v1::SessionEvent event) {
  if (end_.has_value()) return;
  answers_.push_back(std::move(event));
  Go();
}

void WorkerSession::AnswerError(uint64_t request_id, const absl::Status& status) {
  v1::SessionEvent event;
  event.set_request_id(request_id);
  *event.mutable_error() = FailureOf(status);
  Answer(std::move(event));
}

void WorkerSession::End(const absl::Status& status, const std::string& why) {
  if (!end_.has_value()) end_ = status;
  if (id_ == 0) return;
  const SessionId session = std::exchange(id_, 0);
  leases_.clear();
  moved_.clear();
  draining_.clear();
  evicted_.clear();
  deps_.manager.EndSession(session, why);
}

void WorkerSession::OnLabelMoved(const LabelChange& change) {
  const bool concerns = std::ranges::any_of(leases_, [&](const auto& held) {
    return held.second.key.model == change.model && held.second.label == change.label;
  });
  if (!concerns) return;
  moved_[{change.model, change.label}] = change;
  Go();
}

void WorkerSession::OnDraining(const VersionKey& key) {
  for (const auto& [lease, held] : leases_) {
    if (held.key == key) draining_.insert(lease);
  }
  if (!draining_.empty()) Go();
}

void WorkerSession::OnLeaseEnded(LeaseId lease, LeaseChange change) {
  leases_.erase(lease);
  draining_.erase(lease);
  if (change != LeaseChange::kEvicted) return;
  evicted_.insert(lease);
  Go();
}

std::optional<v1::SessionEvent> WorkerSession::NextEvent() {
  v1::SessionEvent event;
  if (!evicted_.empty()) {
    event.mutable_evicted()->set_lease(*evicted_.begin());
    evicted_.erase(evicted_.begin());
  } else if (!moved_.empty()) {
    const LabelChange& change = moved_.begin()->second;
    v1::GenerationChanged* changed = event.mutable_generation_changed();
    changed->set_model(change.model);
    changed->set_label(change.label);
    changed->set_version(change.to);
    changed->set_generation(change.generation);
    moved_.erase(moved_.begin());
  } else if (!draining_.empty()) {
    const LeaseId lease = *draining_.begin();
    const VersionKey& key = leases_.at(lease).key;
    v1::Draining* draining = event.mutable_draining();
    draining->set_lease(lease);
    draining->set_model(key.model);
    draining->set_version(key.version);
    draining_.erase(draining_.begin());
  } else if (std::exchange(tell_closing_, false)) {
    event.mutable_closing();
  } else {
    return std::nullopt;
  }
  return event;
}

void WorkerSession::Go() {
  if (finished_) return;
  if (!writing_) {
    if (!answers_.empty()) {
      writing_ = true;
      v1::SessionEvent answer = std::move(answers_.front());
      answers_.pop_front();
      stream_.Write(std::move(answer));
    } else if (auto event = NextEvent(); event.has_value()) {
      writing_ = true;
      stream_.Write(*std::move(event));
    } else if (end_.has_value()) {
      finished_ = true;
      stream_.Finish(*end_);
      return;
    }
  }
  if (!reading_ && !end_.has_value() && answers_.size() < kMostAnswers) {
    reading_ = true;
    stream_.Read();
  }
}

}  // namespace modelhost
