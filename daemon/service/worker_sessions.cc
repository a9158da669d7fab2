#include "daemon/service/worker_sessions.h"

namespace modelhost {

void WorkerSessions::Add(Key key, std::shared_ptr<WorkerSession> session) {
  keys_[session->id()] = key;
  sessions_.emplace(key, std::move(session));
}

void WorkerSessions::With(Key key, absl::FunctionRef<void(WorkerSession&)> call) {
  const auto found = sessions_.find(key);
  if (found == sessions_.end()) return;
  const std::shared_ptr<WorkerSession> session = found->second;
  call(*session);
  if (session->finished()) EraseFinished(key);
}

void WorkerSessions::EraseFinished(Key key) {
  sessions_.erase(key);
  std::erase_if(keys_, [&](const auto& entry) { return entry.second == key; });
}

void WorkerSessions::StopAll() {
  for (const auto& [key, session] : sessions_) session->Stop();
  std::vector<Key> finished;
  for (const auto& [key, session] : sessions_) {
    if (session->finished()) finished.push_back(key);
  }
  for (const Key key : finished) EraseFinished(key);
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
  const auto found = keys_.find(lease.session);
  if (found == keys_.end()) return;
  WorkerSession& session = *sessions_.at(found->second);
  if (session.id() == lease.session) session.OnLeaseEnded(lease.id, change);  // Not over yet.
}

}  // namespace modelhost
