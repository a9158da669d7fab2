// Tells WatchModels streams which models have changed.
//
// A stream that reads slowly finds each changed model once, however often it changed: what waits
// for it is bounded by the number of models. Observer calls come on the control thread, the rest on
// the threads of the streams.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/registry/events.h"

namespace modelhost {

class ModelWatcher final : public Observer {
 public:
  class Subscription {
   public:
    // The models that changed since the last call; empty when none did within `timeout`.
    std::set<std::string> Take(absl::Duration timeout);

   private:
    friend class ModelWatcher;
    void Mark(const std::string& model);
    bool HasChanges() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !changed_.empty(); }

    absl::Mutex mutex_;
    std::set<std::string> changed_ ABSL_GUARDED_BY(mutex_);
  };

  // Ends when the last reference goes.
  std::shared_ptr<Subscription> Subscribe();

  void OnVersion(const VersionSnapshot& version) override { Mark(version.key.model); }
  void OnVersionGone(const VersionKey& key) override { Mark(key.model); }
  void OnLabelsMoved(std::span<const LabelChange> changes, absl::Duration flip) override;
  void OnLease(const Lease& lease, LeaseChange change) override;

 private:
  void Mark(const std::string& model);

  absl::Mutex mutex_;
  std::vector<std::weak_ptr<Subscription>> subscriptions_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
