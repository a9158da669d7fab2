// A set of models that follows its labels: the background thread prepares, the caller adopts.
//
//   background   a label moved -> acquire all from one snapshot -> `prepared_`
//   caller       Adopt: `prepared_` -> current, the old set -> `retired_`
//   background   drops what is retired: unmapping gigabytes takes longer than a control loop has
//
// A model that keeps its device addresses (DeviceRequest::same_addresses) is never adopted: Remap
// takes the old version off the GPU's addresses and puts the new one there, while the caller's
// kernels are at rest.
//
// Adopt takes no lock and waits for nothing. It and current() are for one thread at a time; all
// else is thread-safe. Members whose version did not change keep their handle from set to set.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "client/src/handle.h"
#include "client/src/housekeeper.h"
#include "client/src/mutex.h"
#include "client/src/session.h"

namespace modelhost {

class LiveModels final : public Follower {
 public:
  // Acquires the first set and starts to follow. Errors as Session::Acquire and AddFollower.
  static Result<std::shared_ptr<LiveModels>> Start(std::shared_ptr<Session> session,
                                                   std::vector<abi::Ref> refs, bool wait,
                                                   SteadyTime deadline, DeviceRequest device);
  ~LiveModels() override;
  // Follows no more. The handles stay.
  void Stop();

  // True when a newer set took the place of the current one.
  bool Adopt();
  // Of a single model with same_addresses. OK too when nothing newer is there. On failure the old
  // version is current, and mapped where it was unless the error says otherwise.
  //   FAILED_PRECONDITION  the newer version is laid out in another way; or not such a model
  //   RESOURCE_EXHAUSTED, DATA_LOSS  the driver did not map it
  Result<void> Remap();
  size_t size() const { return refs_.size(); }
  const mh_handle* current(size_t number) const { return current_->handles[number].get(); }
  // Why the last try to get a newer set failed; empty once one succeeded.
  std::optional<Error> status() const MH_EXCLUDES(mutex_);

  // Follower
  std::span<const abi::Ref> refs() const override { return refs_; }
  const DeviceRequest& device() const override { return device_; }
  bool Behind() const override;
  void OnAsked() override;
  bool OnAcquired(Result<std::vector<Held>> held) override;
  void CollectGarbage() override;

 private:
  struct Set {
    std::vector<HandleRef> handles;
    Set* next_retired = nullptr;
  };

  LiveModels(std::shared_ptr<Session> session, std::vector<abi::Ref> refs, DeviceRequest device)
      : session_(std::move(session)), refs_(std::move(refs)), device_(std::move(device)) {}
  Result<void> ReservePlaces();
  void MakeCurrent(std::unique_ptr<Set> newer);
  std::unique_ptr<Set> MakeSet(std::vector<Held> held) const;

  const std::shared_ptr<Session> session_;
  const std::vector<abi::Ref> refs_;
  const DeviceRequest device_;
  std::shared_ptr<Housekeeper> housekeeper_;  // Fixed by Start.
  std::unique_ptr<Set> current_;              // Of the thread that adopts.
  std::shared_ptr<const CudaPlaces> places_;  // With same_addresses. Fixed by Start.
  std::vector<HandleRef> newest_;             // Of the background thread: the set made last.
  std::atomic<Set*> prepared_{nullptr};
  std::atomic<Set*> retired_{nullptr};  // A stack.
  mutable Mutex mutex_;
  std::optional<Error> error_ MH_GUARDED_BY(mutex_);
};

}  // namespace modelhost
