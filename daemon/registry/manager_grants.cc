// Sessions, leases, and those who wait for a version to become READY.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/registry/manager_impl.h"
#include "daemon/registry/swap_policy.h"
#include "proto/abi/catalogue_page.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

constexpr size_t kMostPendingPerSession = 64;
constexpr size_t kMostPendingPerUid = 1024;

}  // namespace

// What waiting may cure. A missing model may be published, an unloaded one loaded.
bool ModelManager::Impl::MayBecomeReady(const absl::Status& status, WaitFor wait_for) const {
  if (absl::IsNotFound(status)) return wait_for == WaitFor::kAnything || !scanned;
  return absl::IsFailedPrecondition(status) && !NeverOnDevice(status);
}

bool ModelManager::Impl::MayRead(const ModelBook& book, const Peer& peer) const {
  // A model's read_groups stand in for those of [access]; who may command may read everything.
  if (deps.access.MayCommand(peer)) return true;
  return book.access == nullptr ? deps.access.MayRead(peer) : book.access->MayRead(peer);
}

bool ModelManager::MayReadSome(const Peer& peer) const {
  if (impl_->deps.access.MayRead(peer)) return true;
  return std::ranges::any_of(impl_->models, [&](const auto& entry) {
    return entry.second.access != nullptr && entry.second.access->MayRead(peer);
  });
}

bool ModelManager::MayReadModel(const Peer& peer, const std::string& model) const {
  const auto book = impl_->models.find(model);
  return book == impl_->models.end() ? impl_->deps.access.MayRead(peer)
                                     : impl_->MayRead(book->second, peer);
}

SessionId ModelManager::BeginSession(const Peer& peer, const std::string& transport) {
  Impl& impl = *impl_;
  const SessionId session = impl.leases.BeginSession(peer, transport, impl.deps.clock.Wall());
  impl.deps.loader.SetClients(impl.leases.sessions().size());
  return session;
}

void ModelManager::AnnounceSession(SessionId session, std::string comm) {
  Impl& impl = *impl_;
  const Session* named = impl.leases.NameSession(session, std::move(comm));
  if (named == nullptr) return;
  impl.Tell([&](Observer& observer) { observer.OnSession(*named, true, ""); });
}

void ModelManager::EndSession(SessionId session, const std::string& why) {
  Impl& impl = *impl_;
  const auto it = impl.leases.sessions().find(session);
  if (it == impl.leases.sessions().end()) return;
  impl.DropImages(impl.leases.TakeKept(session));
  const Session copy = it->second;
  if (impl.pending_by_session.contains(session)) {
    std::vector<uint64_t> waiting;
    for (const auto& [id, pending] : impl.pending_acquires) {
      if (pending.session == session) waiting.push_back(id);
    }
    for (const uint64_t id : waiting) impl.TakePending(id);
  }
  std::vector<Lease> ended = impl.leases.EndSession(session);
  impl.deps.loader.SetClients(impl.leases.sessions().size());
  impl.Tell([&](Observer& observer) { observer.OnSession(copy, false, why); });
  for (Lease& lease : ended) impl.LeaseEnded(std::move(lease), LeaseChange::kSessionEnded);
}

absl::StatusOr<VersionKey> ModelManager::Impl::ResolveRef(const AcquireRef& ref, bool near) const {
  const auto book = models.find(ref.model);
  if (book == models.end()) {
    if (!scanned) {
      return absl::FailedPreconditionError(
          absl::StrCat(ref.model, ": the daemon is still reading its store (wait, or try again)"));
    }
    return NoSuchModel(ref.model, near);
  }
  if (ref.version != 0) return VersionKey{ref.model, ref.version};
  if (withdrawn.contains({ref.model, ref.label})) return WithdrawnError(ref.model, ref.label);
  const uint64_t version = LabelVersion(ref.model, ref.label);
  if (version != 0) return VersionKey{ref.model, version};
  std::vector<std::string> names;
  for (auto it = labels.labels.lower_bound({ref.model, ""});
       near && it != labels.labels.end() && it->first.first == ref.model; ++it) {
    if (it->second.version != 0) names.push_back(it->first.second);
  }
  const auto nearest = NearestName(ref.label, names);
  return absl::NotFoundError(absl::StrCat(
      ref.model, ":", ref.label, ": no such label (",
      nearest.has_value() ? absl::StrCat("did you mean ", *nearest, "?")
                          : absl::StrCat("set it with `modelctl swap ", ref.model, " --version N"),
      nearest.has_value()          ? ")"
      : ref.label == kDefaultLabel ? "`)"
                                   : absl::StrCat(" --label ", ref.label, "`)")));
}

absl::StatusOr<std::vector<Grant>> ModelManager::Impl::TryAcquire(SessionId session,
                                                                  std::span<const AcquireRef> refs,
                                                                  bool near) {
  if (stopping) {
    return absl::UnavailableError("the daemon is stopping (connect again when it is back)");
  }
  const auto holder = leases.sessions().find(session);
  if (holder == leases.sessions().end()) {
    return absl::FailedPreconditionError("acquire: the session is over");
  }
  // All are checked before one is granted: all or none.
  std::vector<VersionRecord*> records;
  std::vector<const DeviceImage*> images;
  for (const AcquireRef& ref : refs) {
    // Who may not have the model hears nothing of its labels.
    const auto book = models.find(ref.model);
    if (book != models.end() && !MayRead(book->second, holder->second.peer)) {
      Tell([&](Observer& observer) {
        observer.OnRefused(holder->second.peer, absl::StrCat("acquire ", ref.model),
                           RefusedFor::kNoRight);
      });
      return absl::PermissionDeniedError(
          absl::StrCat(ref.model, ": uid ", holder->second.peer.uid,
                       " is in none of the groups that may read it",
                       " (read_groups of the model, or of [access] when the model has none)"));
    }
    const auto key = ResolveRef(ref, near);
    if (!key.ok()) return key.status();
    VersionRecord* record = Find(*key);
    if (record == nullptr && !scanned) {
      return absl::FailedPreconditionError(absl::StrCat(
          key->ToString(), ": the daemon is still reading its store (wait, or try again)"));
    }
    if (record == nullptr) return NoSuchVersion(*key);
    if (!ref.digest.IsZero() && record->digest.has_value() && *record->digest != ref.digest) {
      return absl::NotFoundError(absl::StrCat(key->ToString(), ": has digest ",
                                              record->digest->Short(), ", not ", ref.digest.Short(),
                                              " as asked"));
    }
    const Verdict may_grant = MayGrant(FactsOf(*record));
    if (may_grant == Verdict::kSuspect) return SuspectError(*record);
    if (may_grant != Verdict::kYes) {
      return absl::FailedPreconditionError(
          absl::StrCat(key->ToString(), ": not READY but ", PhaseName(record->phase),
                       record->error.ok() ? "" : ": ", record->error.message(),
                       record->phase == Phase::kLoading || record->phase == Phase::kReserved
                           ? " (wait for it)"
                           : absl::StrCat(" (`modelctl load ", key->ToString(), "`)")));
    }
    if (auto may = MayServe(*record); !may.ok()) return may;
    const auto image = DeviceFor(*record, ref);
    if (!image.ok()) return image.status();
    images.push_back(*image);
    records.push_back(record);
  }
  const Peer& peer = holder->second.peer;
  if (const uint64_t held = leases.CountOfUid(peer.uid);
      held + refs.size() > options.max_leases_per_uid) {
    Tell([&](Observer& observer) {
      observer.OnRefused(peer, absl::StrCat("acquire ", refs.front().model), RefusedFor::kLeases);
    });
    return absl::ResourceExhaustedError(absl::StrCat(
        "acquire: uid ", peer.uid, " holds ", held, " leases, and may hold ",
        options.max_leases_per_uid, " (release some, or raise max_leases_per_uid in [access])"));
  }
  std::vector<Grant> grants;
  for (size_t i = 0; i < refs.size(); ++i) {
    VersionRecord& record = *records[i];
    if (record.phase == Phase::kDraining) StopDrain(record, 0);
    record.last_used = deps.clock.Wall();
    const AcquireRef& ref = refs[i];
    Grant grant;
    grant.key = record.key;
    grant.slot = abi::kNoSlot;
    if (ref.version == 0) {
      grant.label = ref.label;
      grant.generation = labels.labels.at({ref.model, ref.label}).generation;
      grant.slot = deps.labels.SlotOf(ref.model, ref.label);
    }
    grant.resident = record.resident;
    grant.device = images[i];
    // A declared lease says under which label it was asked for, for people to see.
    const std::string transport = grant.device != nullptr ? DeviceTransport(grant.device->mode)
                                  : PolicyOf(ref.model).residency == Residency::kSealed
                                      ? "host_memfd"
                                      : "host_file";
    grant.lease = leases.Grant(session, record.key, ref.label, transport, deps.clock.Wall(),
                               grant.device == nullptr ? "" : grant.device->gpu);
    if (grant.device != nullptr) leases.Hand(grant.lease, *grant.device);
    if (ref.device == AcquireRef::Device::kRequired) leases.RequireGpu(grant.lease);
    // A fixed version that no label names, or a declared lease whose label has moved on.
    if (ref.version != 0 && IsStale(*leases.Find(session, grant.lease))) {
      leases.MarkStale(grant.lease, deps.clock.Monotonic());
    }
    const Lease lease = *leases.Find(session, grant.lease);
    Tell([&](Observer& observer) { observer.OnLease(lease, LeaseChange::kGranted); });
    grants.push_back(std::move(grant));
  }
  FaultPoint("grant.noted");
  return grants;
}

absl::StatusOr<std::vector<Grant>> ModelManager::Acquire(SessionId session,
                                                         std::span<const AcquireRef> refs) {
  return impl_->TryAcquire(session, refs);
}

void ModelManager::AcquireOrWait(SessionId session, std::vector<AcquireRef> refs,
                                 absl::Duration timeout, AcquireDone done, WaitFor wait_for) {
  Impl& impl = *impl_;
  const bool waits = timeout > absl::ZeroDuration();
  auto grants = impl.TryAcquire(session, refs, /*near=*/!waits);
  if (grants.ok() || !waits || !impl.MayBecomeReady(grants.status(), wait_for)) {
    return done(std::move(grants));
  }
  const auto holder = impl.leases.sessions().find(session);
  if (holder == impl.leases.sessions().end()) return done(std::move(grants));
  if (wait_for == WaitFor::kKnownVersions) impl.LoadDeclared(session, refs);
  const uint32_t uid = holder->second.peer.uid;
  size_t& of_session = impl.pending_by_session[session];
  size_t& of_uid = impl.pending_by_uid[uid];
  if (of_session >= kMostPendingPerSession || of_uid >= kMostPendingPerUid) {
    const std::string limit =
        of_session >= kMostPendingPerSession
            ? absl::StrCat(kMostPendingPerSession, " requests of this connection")
            : absl::StrCat(kMostPendingPerUid, " requests of uid ", uid);
    if (of_session == 0) impl.pending_by_session.erase(session);
    const Peer peer = holder->second.peer;
    ReportRefused(peer, "acquire: too many wait", RefusedFor::kWaiting);
    return done(absl::ResourceExhaustedError(
        absl::StrCat("acquire: ", limit, " wait already (let some end first)")));
  }
  ++of_session;
  ++of_uid;
  const uint64_t id = impl.next_pending++;
  for (const AcquireRef& ref : refs) impl.pending_by_model[ref.model].insert(id);
  PendingAcquire pending;
  pending.session = session;
  pending.uid = uid;
  pending.wait_for = wait_for;
  pending.refs = std::move(refs);
  pending.done = std::move(done);
  pending.timer = impl.deps.loop.PostDelayed(timeout, [&impl, id] {
    if (!impl.pending_acquires.contains(id)) return;
    PendingAcquire late = impl.TakePending(id);
    auto last = impl.TryAcquire(late.session, late.refs);
    if (!last.ok() && impl.MayBecomeReady(last.status(), late.wait_for)) {
      last = absl::DeadlineExceededError(absl::StrCat("waited in vain: ", last.status().message()));
    }
    late.done(std::move(last));
  });
  impl.pending_acquires.emplace(id, std::move(pending));
}

PendingAcquire ModelManager::Impl::TakePending(uint64_t id) {
  PendingAcquire taken = std::move(pending_acquires.extract(id).mapped());
  deps.loop.CancelTimer(taken.timer);
  for (const AcquireRef& ref : taken.refs) {
    const auto it = pending_by_model.find(ref.model);
    if (it == pending_by_model.end()) continue;  // Named twice.
    it->second.erase(id);
    if (it->second.empty()) pending_by_model.erase(it);
  }
  const auto one_less = [](auto& counts, const auto& key) {
    const auto it = counts.find(key);
    if (--it->second == 0) counts.erase(it);
  };
  one_less(pending_by_session, taken.session);
  one_less(pending_by_uid, taken.uid);
  return taken;
}

void ModelManager::Impl::RetryPendingAcquires(const std::string& model) {
  const auto waiting = pending_by_model.find(model);
  if (waiting == pending_by_model.end()) return;
  // Copied: an answer may bring new requests.
  Retry(std::vector<uint64_t>(waiting->second.begin(), waiting->second.end()));
}

void ModelManager::Impl::RetryAfterScan() {
  std::vector<uint64_t> ids;
  for (const auto& [id, pending] : pending_acquires) {
    if (pending.wait_for == WaitFor::kKnownVersions) ids.push_back(id);
  }
  Retry(ids);
  for (const uint64_t id : ids) {
    const auto it = pending_acquires.find(id);
    // Copied: a load that fails at once may answer it.
    if (it != pending_acquires.end())
      LoadDeclared(it->second.session, std::vector(it->second.refs));
  }
}

void ModelManager::Impl::Retry(const std::vector<uint64_t>& ids) {
  for (const uint64_t id : ids) {
    const auto it = pending_acquires.find(id);
    if (it == pending_acquires.end()) continue;
    auto grants = TryAcquire(it->second.session, it->second.refs, /*near=*/false);
    if (!grants.ok() && MayBecomeReady(grants.status(), it->second.wait_for)) continue;
    TakePending(id).done(std::move(grants));
  }
}

bool ModelManager::Impl::IsStale(const Lease& lease) const {
  if (lease.released) return true;
  if (lease.label.empty()) return LabelsOf(lease.key).empty();
  return withdrawn.contains({lease.key.model, lease.label}) ||
         LabelVersion(lease.key.model, lease.label) != lease.key.version;
}

void ModelManager::Impl::ReviewStale(const std::string& model) {
  leases.ReviewStale(
      model, [this](const Lease& lease) { return IsStale(lease); }, deps.clock.Monotonic());
}

std::vector<Lease> ModelManager::Leases() const {
  const absl::Duration now = impl_->deps.clock.Monotonic();
  std::vector<Lease> list;
  for (const auto& [id, lease] : impl_->leases.leases()) {
    list.push_back(lease);
    list.back().device_memory.clear();  // The list may outlive the lease, on any thread.
    if (lease.stale_since == absl::InfiniteDuration()) continue;
    list.back().stale_for = std::max(absl::ZeroDuration(), now - lease.stale_since);
  }
  return list;
}

void ModelManager::Impl::LeaseEnded(Lease lease, LeaseChange change) {
  EndTicket(lease.id);
  Tell([&](Observer& observer) { observer.OnLease(lease, change); });
  VersionRecord* record = Find(lease.key);
  std::erase_if(lease.device_memory, [&](const auto& image) { return IsCurrent(record, *image); });
  DropImages(std::move(lease.device_memory));
  if (record == nullptr) return;
  record->last_used = deps.clock.Wall();
  MaybeUnload(*record);
  ForgetIfGone(lease.key);
}

absl::Status ModelManager::Release(SessionId session, LeaseId lease) {
  auto ended = impl_->leases.Release(session, lease);
  if (!ended.ok()) {
    // One that was evicted is given back when its holder has unmapped it.
    if (auto kept = impl_->leases.TakeKept(session, lease); !kept.empty()) {
      impl_->DropImages(std::move(kept));
    }
    return ended.status();
  }
  impl_->LeaseEnded(*std::move(ended), LeaseChange::kReleased);
  return absl::OkStatus();
}

absl::Status ModelManager::Evict(LeaseId lease) {
  auto ended = impl_->leases.Evict(lease);
  if (!ended.ok()) return ended.status();
  impl_->Note(ended->key, "evicted", absl::StrCat("lease ", lease));
  impl_->LeaseEnded(*std::move(ended), LeaseChange::kEvicted);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const ResidentVersion>> ModelManager::Leased(SessionId session,
                                                                            LeaseId lease) {
  const Lease* found = impl_->leases.Find(session, lease);
  if (found == nullptr && impl_->lease_tickets.HasRedeemed(lease, session)) {
    found = &impl_->leases.leases().at(lease);
  }
  if (found == nullptr) {
    return absl::NotFoundError(absl::StrCat("lease ", lease, ": not held by this connection"));
  }
  const VersionRecord* record = impl_->Find(found->key);
  if (found->released || record == nullptr || record->resident == nullptr) {
    return absl::NotFoundError(
        absl::StrCat(found->key.ToString(), ": the daemon has let go of it (drain deadline)"));
  }
  return record->resident;
}

void ModelManager::ReportAttach(const std::string& model, const std::string& transport,
                                absl::Duration took, const absl::Status& status) {
  impl_->Tell([&](Observer& observer) { observer.OnAttach(model, transport, took, status); });
}

void ModelManager::ReportRefused(const Peer& peer, const std::string& what, RefusedFor why) {
  impl_->Tell([&](Observer& observer) { observer.OnRefused(peer, what, why); });
}

absl::string_view RefusedForName(RefusedFor why) {
  switch (why) {
    case RefusedFor::kNoRight:
      return "no_right";
    case RefusedFor::kTicket:
      return "ticket";
    case RefusedFor::kLeases:
      return "leases";
    case RefusedFor::kConnections:
      return "connections";
    case RefusedFor::kDescriptors:
      return "descriptors";
    case RefusedFor::kCalls:
      return "calls";
    case RefusedFor::kWaiting:
      return "waiting";
  }
  return "unknown";
}

}  // namespace modelhost
