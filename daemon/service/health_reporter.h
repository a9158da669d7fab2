// Keeps grpc.health.v1.Health true to the registry.
//
//   ""                    every required model is served
//   "modelhost.liveness"  the daemon answers
//   "model/<name>"        `stable` (or any label, where there is no `stable`) names a READY version
//                         that is not SUSPECT
//
// Observer calls come on the control thread, Attach and Detach on any; what was observed before
// Attach is not lost.
#pragma once

#include <grpcpp/health_check_service_interface.h>

#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "daemon/registry/events.h"

namespace modelhost {

class HealthReporter final : public Observer {
 public:
  // `service` is used until Detach.
  void Attach(grpc::HealthCheckServiceInterface* service);
  // Everything turns NOT_SERVING and stays so.
  void Detach();

  // Whether "model/<name>" is served.
  bool Serves(const std::string& model) const;

  void OnReady(bool ready) override;
  void OnVersion(const VersionSnapshot& version) override;
  void OnVersionGone(const VersionKey& key) override;
  void OnLabelsMoved(std::span<const LabelChange> changes, absl::Duration flip) override;

 private:
  struct Book {
    std::map<uint64_t, bool> usable;         // By version: READY and not SUSPECT.
    std::map<std::string, uint64_t> labels;  // What each names.
  };
  static bool Serves(const Book& book);
  void Tell(const std::string& model, const Book& book) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  grpc::HealthCheckServiceInterface* service_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool ready_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<std::string, Book> models_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
