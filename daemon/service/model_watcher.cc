#include "daemon/service/model_watcher.h"

#include <utility>

namespace modelhost {

std::set<std::string> ModelWatcher::Subscription::Take(absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(this, &Subscription::HasChanges), timeout);
  return std::exchange(changed_, {});
}

void ModelWatcher::Subscription::Mark(const std::string& model) {
  absl::MutexLock lock(&mutex_);
  changed_.insert(model);
}

std::shared_ptr<ModelWatcher::Subscription> ModelWatcher::Subscribe() {
  auto subscription = std::make_shared<Subscription>();
  absl::MutexLock lock(&mutex_);
  subscriptions_.push_back(subscription);
  return subscription;
}

void ModelWatcher::OnLabelsMoved(std::span<const LabelChange> changes, absl::Duration /*flip*/) {
  for (const LabelChange& change : changes) Mark(change.model);
}

void ModelWatcher::OnLease(const Lease& lease, LeaseChange /*change*/) { Mark(lease.key.model); }

void ModelWatcher::Mark(const std::string& model) {
  absl::MutexLock lock(&mutex_);
  std::erase_if(subscriptions_, [&](const std::weak_ptr<Subscription>& weak) {
    const std::shared_ptr<Subscription> subscription = weak.lock();
    if (subscription != nullptr) subscription->Mark(model);
    return subscription == nullptr;
  });
}

}  // namespace modelhost
