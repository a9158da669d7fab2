// All Session streams, as the observer that tells them what is about their leases.
//
// Control thread only. An observer of the manager: whoever makes the manager adds it, and it
// outlives the server.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>

#include "absl/functional/function_ref.h"
#include "daemon/registry/events.h"
#include "daemon/service/worker_session.h"

namespace modelhost {

class WorkerSessions final : public Observer {
 public:
  using Key = uint64_t;  // Of a stream; never reused.

  // A started one, which is kept until it is finished.
  void Add(Key key, std::shared_ptr<WorkerSession> session);
  // Nothing happens when the stream is over. Not from inside the manager.
  void With(Key key, absl::FunctionRef<void(WorkerSession&)> call);
  // Ends them all; each is told.
  void StopAll();
  size_t size() const { return sessions_.size(); }

  void OnLabelsMoved(std::span<const LabelChange> changes, absl::Duration flip) override;
  void OnDraining(const VersionKey& key) override;
  void OnLease(const Lease& lease, LeaseChange change) override;

 private:
  void EraseFinished(Key key);

  std::map<Key, std::shared_ptr<WorkerSession>> sessions_;
  std::map<SessionId, Key> keys_;  // Of those in sessions_.
};

}  // namespace modelhost
