// Sessions, leases, and those who wait for a version to become READY.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/registry/manager_impl.h"
#include "daemon/registry/swap_policy.h"
#include "proto/abi/catalogue_page.h"

namespace modelhost {
namespace {

constexpr size_t kMostPendingPerSession = 64;

// What waiting may cure. A missing model may be published, an unloaded one loaded.
bool MayBecomeReady(const absl::Status& status) {
  return status.code() == absl::StatusCode::kFailedPrecondition ||
         status.code() == absl::StatusCode::kNotFound;
}

}  // namespace

SessionId ModelManager::BeginSession(const Peer& peer, const std::string& transport) {
  Impl& impl = *impl_;
  return impl.leases.BeginSession(peer, transport, impl.deps.clock.Wall());
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
  const Session copy = it->second;
  for (auto pending = impl.pending_acquires.begin(); pending != impl.pending_acquires.end();) {
    if (pending->second.session == session) {
      impl.deps.loop.CancelTimer(pending->second.timer);
      pending = impl.pending_acquires.erase(pending);
    } else {
      ++pending;
    }
  }
  const std::vector<Lease> ended = impl.leases.EndSession(session);
  impl.Tell([&](Observer& observer) { observer.OnSession(copy, false, why); });
  for (const Lease& lease : ended) impl.LeaseEnded(lease, LeaseChange::kSessionEnded);
}

absl::StatusOr<VersionKey> ModelManager::Impl::ResolveRef(const AcquireRef& ref) const {
  const auto book = models.find(ref.model);
  if (book == models.end()) {
    if (!scanned) {
      return absl::FailedPreconditionError(
          absl::StrCat(ref.model, ": the daemon is still reading its store (wait, or try again)"));
    }
    return NoSuchModel(ref.model);
  }
  if (ref.version != 0) return VersionKey{ref.model, ref.version};
  const uint64_t version = LabelVersion(ref.model, ref.label);
  if (version != 0) return VersionKey{ref.model, version};
  std::vector<std::string> names;
  for (auto it = labels.labels.lower_bound({ref.model, ""});
       it != labels.labels.end() && it->first.first == ref.model; ++it) {
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

absl::StatusOr<std::vector<Grant>> ModelManager::Impl::TryAcquire(
    SessionId session, std::span<const AcquireRef> refs) {
  if (stopping) {
    return absl::UnavailableError("the daemon is stopping (connect again when it is back)");
  }
  const auto holder = leases.sessions().find(session);
  if (holder == leases.sessions().end()) {
    return absl::FailedPreconditionError("acquire: the session is over");
  }
  // All are checked before one is granted: all or none.
  std::vector<VersionRecord*> records;
  for (const AcquireRef& ref : refs) {
    const auto key = ResolveRef(ref);
    if (!key.ok()) return key.status();
    if (const auto& access = Book(ref.model).access;
        access != nullptr && !access->MayRead(holder->second.peer)) {
      Tell([&](Observer& observer) {
        observer.OnRefused(holder->second.peer, absl::StrCat("acquire ", ref.model));
      });
      return absl::PermissionDeniedError(absl::StrCat(ref.model, ": uid ", holder->second.peer.uid,
                                                      " is in none of the model's read_groups"));
    }
    VersionRecord* record = Find(*key);
    if (record == nullptr) return NoSuchVersion(*key);
    if (!ref.digest.IsZero() && record->digest.has_value() && *record->digest != ref.digest) {
      return absl::NotFoundError(absl::StrCat(key->ToString(), ": has digest ",
                                              record->digest->Short(), ", not ", ref.digest.Short(),
                                              " as asked"));
    }
    const bool leasable = record->phase == Phase::kReady ||
                          (record->phase == Phase::kDraining && record->unload == 0);
    if (!leasable) {
      return absl::FailedPreconditionError(
          absl::StrCat(key->ToString(), ": not READY but ", PhaseName(record->phase),
                       record->error.ok() ? "" : ": ", record->error.message(),
                       record->phase == Phase::kLoading || record->phase == Phase::kReserved
                           ? " (wait for it)"
                           : absl::StrCat(" (`modelctl load ", key->ToString(), "`)")));
    }
    if (record->health == Health::kSuspect) {
      return absl::FailedPreconditionError(
          absl::StrCat(key->ToString(), ": SUSPECT, ", HealthReasonName(record->health_reason),
                       ": its files changed under it (`modelctl verify ", key->ToString(),
                       "`, then swap to a good version)"));
    }
    records.push_back(record);
  }
  std::vector<Grant> grants;
  for (size_t i = 0; i < refs.size(); ++i) {
    VersionRecord& record = *records[i];
    if (record.phase == Phase::kDraining) StopDrain(record);
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
    const std::string transport =
        PolicyOf(ref.model).residency == Residency::kSealed ? "host_memfd" : "host_file";
    grant.lease = leases.Grant(session, record.key, grant.label, transport, deps.clock.Wall());
    const Lease lease = *leases.Find(session, grant.lease);
    Tell([&](Observer& observer) { observer.OnLease(lease, LeaseChange::kGranted); });
    grants.push_back(std::move(grant));
  }
  return grants;
}

absl::StatusOr<std::vector<Grant>> ModelManager::Acquire(SessionId session,
                                                         std::span<const AcquireRef> refs) {
  return impl_->TryAcquire(session, refs);
}

void ModelManager::AcquireOrWait(SessionId session, std::vector<AcquireRef> refs,
                                 absl::Duration timeout, AcquireDone done) {
  Impl& impl = *impl_;
  auto grants = impl.TryAcquire(session, refs);
  if (grants.ok() || !MayBecomeReady(grants.status()) || timeout <= absl::ZeroDuration()) {
    return done(std::move(grants));
  }
  const auto waiting = std::ranges::count_if(
      impl.pending_acquires, [&](const auto& entry) { return entry.second.session == session; });
  if (static_cast<size_t>(waiting) >= kMostPendingPerSession) {
    return done(absl::ResourceExhaustedError(absl::StrCat(
        "acquire: ", kMostPendingPerSession, " requests of this connection wait already")));
  }
  const uint64_t id = impl.next_pending++;
  PendingAcquire pending;
  pending.session = session;
  pending.refs = std::move(refs);
  pending.done = std::move(done);
  pending.timer = impl.deps.loop.PostDelayed(timeout, [&impl, id] {
    const auto it = impl.pending_acquires.find(id);
    if (it == impl.pending_acquires.end()) return;
    PendingAcquire late = std::move(it->second);
    impl.pending_acquires.erase(it);
    auto last = impl.TryAcquire(late.session, late.refs);
    if (!last.ok() && MayBecomeReady(last.status())) {
      last = absl::DeadlineExceededError(absl::StrCat("waited in vain: ", last.status().message()));
    }
    late.done(std::move(last));
  });
  impl.pending_acquires.emplace(id, std::move(pending));
}

void ModelManager::Impl::RetryPendingAcquires() {
  std::vector<uint64_t> ids;
  for (const auto& [id, pending] : pending_acquires) ids.push_back(id);
  for (const uint64_t id : ids) {
    const auto it = pending_acquires.find(id);
    if (it == pending_acquires.end()) continue;
    auto grants = TryAcquire(it->second.session, it->second.refs);
    if (!grants.ok() && MayBecomeReady(grants.status())) continue;
    PendingAcquire ready = std::move(it->second);
    pending_acquires.erase(it);
    deps.loop.CancelTimer(ready.timer);
    ready.done(std::move(grants));
  }
}

void ModelManager::Impl::LeaseEnded(const Lease& lease, LeaseChange change) {
  Tell([&](Observer& observer) { observer.OnLease(lease, change); });
  VersionRecord* record = Find(lease.key);
  if (record == nullptr) return;
  record->last_used = deps.clock.Wall();
  MaybeUnload(*record);
  ForgetIfGone(lease.key);
}

absl::Status ModelManager::Release(SessionId session, LeaseId lease) {
  const auto ended = impl_->leases.Release(session, lease);
  if (!ended.ok()) return ended.status();
  impl_->LeaseEnded(*ended, LeaseChange::kReleased);
  return absl::OkStatus();
}

absl::Status ModelManager::Evict(LeaseId lease) {
  const auto ended = impl_->leases.Evict(lease);
  if (!ended.ok()) return ended.status();
  impl_->Note(ended->key, "evicted", absl::StrCat("lease ", lease));
  impl_->LeaseEnded(*ended, LeaseChange::kEvicted);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const ResidentVersion>> ModelManager::Leased(SessionId session,
                                                                            LeaseId lease) {
  const Lease* found = impl_->leases.Find(session, lease);
  if (found == nullptr) {
    return absl::NotFoundError(absl::StrCat("lease ", lease, ": not held by this connection"));
  }
  const VersionRecord* record = impl_->Find(found->key);
  if (record == nullptr || record->resident == nullptr) {
    return absl::NotFoundError(
        absl::StrCat(found->key.ToString(), ": the daemon has let go of it (drain deadline)"));
  }
  return record->resident;
}

void ModelManager::ReportAttach(const std::string& model, const std::string& transport,
                                absl::Duration took, const absl::Status& status) {
  impl_->Tell([&](Observer& observer) { observer.OnAttach(model, transport, took, status); });
}

void ModelManager::ReportRefused(const Peer& peer, const std::string& what) {
  impl_->Tell([&](Observer& observer) { observer.OnRefused(peer, what); });
}

}  // namespace modelhost
