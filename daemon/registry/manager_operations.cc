// Looking at operations, and stopping them.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {

absl::StatusOr<OperationSnapshot> ModelManager::GetOperation(OperationId operation) const {
  const OperationSnapshot* found = impl_->operations.Find(operation);
  if (found == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("op-", operation, ": no such operation (`modelctl ops ls`)"));
  }
  return *found;
}

std::vector<OperationSnapshot> ModelManager::ListOperations() const {
  return impl_->operations.List();
}

absl::Status ModelManager::CancelOperation(OperationId operation) {
  Impl& impl = *impl_;
  const OperationSnapshot* found = impl.operations.Find(operation);
  if (found == nullptr) return GetOperation(operation).status();
  const std::string name = absl::StrCat("op-", operation);
  if (found->finished_state()) {
    return absl::FailedPreconditionError(
        absl::StrCat(name, ": already ", OperationStateName(found->state)));
  }
  const absl::Status cancelled = absl::CancelledError(absl::StrCat(name, ": cancelled"));
  switch (found->kind) {
    case OperationKind::kLoad:
      impl.DropWaiters(operation, cancelled);
      return absl::OkStatus();
    case OperationKind::kSwap:
    case OperationKind::kRollback: {
      const auto it = impl.swaps.find(operation);
      if (it != impl.swaps.end() && it->second.flipping) {
        return absl::FailedPreconditionError(
            absl::StrCat(name, ": its labels are being written, it cannot be stopped any more"));
      }
      if (it != impl.swaps.end() && it->second.restoring) {
        return absl::FailedPreconditionError(absl::StrCat(
            name, ": it has failed, the old versions are coming back (`modelctl ops watch ", name,
            "`)"));
      }
      impl.FinishSwap(operation, cancelled);
      return absl::OkStatus();
    }
    case OperationKind::kPublish:
      if (const auto it = impl.uploads.find(operation); it != impl.uploads.end()) {
        impl.deps.loop.CancelTimer(it->second.timer);
        impl.DropUpload(operation);
        impl.operations.Finish(operation, cancelled);
        return absl::OkStatus();
      }
      if (const auto running = impl.publishes.find(operation);
          running != impl.publishes.end() && running->second.gate->Close()) {
        // Its worker may hang in the kernel, but puts nothing in place any more.
        const VersionKey key{running->second.request.model, running->second.request.version};
        running->second.cancel->Cancel();
        impl.publishes.erase(running);
        impl.operations.Finish(operation, cancelled);
        impl.StartNextPublish(key);
        return absl::OkStatus();
      }
      return absl::FailedPreconditionError(
          absl::StrCat(name, ": the version is being put in place, it cannot be stopped any more"));
    case OperationKind::kVerify:
      if (const auto it = impl.verifies.find(operation); it != impl.verifies.end()) {
        it->second.cancel->Cancel();
        impl.deps.loop.CancelTimer(it->second.retry_timer);
        impl.verifies.erase(it);
      }
      impl.operations.Finish(operation, cancelled);
      return absl::OkStatus();
    case OperationKind::kDelete:
      return impl.CancelDelete(operation, cancelled);
    case OperationKind::kGc:
      if (const auto it = impl.gcs.find(operation); it != impl.gcs.end()) {
        it->second.cancel->Cancel();
      }
      impl.operations.Finish(
          operation,
          absl::CancelledError(absl::StrCat(
              name, ": cancelled (a version whose removal has begun goes all the same)")));
      return absl::OkStatus();
    case OperationKind::kUnload:
      for (auto& [key, record] : impl.versions) {
        if (record.unload == operation && record.phase == Phase::kDraining) {
          record.unload = 0;
          impl.StopDrain(record, 0);
          impl.operations.Finish(operation, cancelled);
          return absl::OkStatus();
        }
        const bool waits = std::ranges::any_of(record.waiters, [&](const auto& waiter) {
          return waiter.operation == operation && !waiter.wants_load;
        });
        if (waits) {  // For a load to come to rest, whose worker may hang.
          impl.operations.Finish(operation, cancelled);
          impl.DropWaiters(operation, cancelled);
          return absl::OkStatus();
        }
      }
      return absl::FailedPreconditionError(
          absl::StrCat(name, ": the memory is being freed, it cannot be stopped any more"));
  }
  return absl::InternalError("an operation of no known kind");
}

absl::StatusOr<ModelManager::OperationWatch> ModelManager::SubscribeOperation(
    OperationId operation, std::function<void(const OperationSnapshot&)> on_change) {
  if (impl_->operations.Find(operation) == nullptr) return GetOperation(operation).status();
  return impl_->operations.Watch(operation, std::move(on_change));
}

void ModelManager::UnsubscribeOperation(OperationWatch watch) { impl_->operations.Unwatch(watch); }

}  // namespace modelhost
