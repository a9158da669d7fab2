#include "daemon/service/worker_sessions.h"

namespace modelhost {

void WorkerSessions::With(Key key, absl::FunctionRef<void(WorkerSession&)> call) {
  const auto found = sessions_.find(key);
  if (found == sessions_.end()) return;
  const std::shared_ptr<WorkerSession> session = found->second;
  call(*session);
  if (session->finished()) sessions_.erase(key);
}

void WorkerSessions::StopAll() {
  for (const auto& [key, session] : sessions_) session->Stop();
  std::erase_if(sessions_, [](const auto& entry) { return entry.second->finished(); });
}

void WorkerSessions::OnLabelsMoved(std::span<const LabelChange> changes, absl::Duration /*flip*/) {
  for (const auto& [key, session] : sessions_) {
    for (const LabelChange& change : changes) session->OnLabelMoved(change);
  }
}

void WorkerSessions::OnDraining(const VersionKey& version) {
  for (const auto& [key, session] : sessions_) session->OnDraining(version);
}

void WorkerSessions::OnLease(const Lease& lease, LeaseChange change) {
  if (change == LeaseChange::kGranted) return;
  for (const auto& [key, session] : sessions_) {
    if (session->id() == lease.session) return session->OnLeaseEnded(lease.id, change);
  }
}

}  // namespace modelhost
