#include "client/src/live_model.h"

#include <algorithm>
#include <utility>

namespace modelhost {

Result<std::shared_ptr<LiveModels>> LiveModels::Start(std::shared_ptr<Session> session,
                                                      std::vector<abi::Ref> refs, bool wait,
                                                      SteadyTime deadline) {
  auto held = session->Acquire(refs, wait, deadline);
  if (!held.ok()) return std::move(held).error();
  std::shared_ptr<LiveModels> live(new LiveModels(std::move(session), std::move(refs)));
  live->current_ = live->MakeSet(*std::move(held));
  for (const HandleRef& handle : live->current_->handles) {
    live->newest_.emplace_back(Retain(handle.get()));
  }
  auto added = live->session_->AddFollower(live);
  if (!added.ok()) return std::move(added).error();
  // The background thread may call the follower already, but never reads this.
  live->housekeeper_ = *std::move(added);
  return live;
}

LiveModels::~LiveModels() {
  delete prepared_.exchange(nullptr);
  CollectGarbage();
}

void LiveModels::Stop() { session_->RemoveFollower(this); }

bool LiveModels::Adopt() {
  // In a forked child there is nobody to drop the old set, and no newer one comes.
  if (session_->forked()) return false;
  std::unique_ptr<Set> newer(prepared_.exchange(nullptr, std::memory_order_acq_rel));
  if (newer == nullptr) return false;
  Set* old = std::exchange(current_, std::move(newer)).release();
  old->next_retired = retired_.load(std::memory_order_relaxed);
  while (!retired_.compare_exchange_weak(old->next_retired, old, std::memory_order_release,
                                         std::memory_order_relaxed)) {
  }
  housekeeper_->Wake();
  return true;
}

std::optional<Error> LiveModels::status() const {
  if (session_->forked()) return std::nullopt;
  const MutexLock lock(mutex_);
  return error_;
}

bool LiveModels::Behind() const {
  for (const HandleRef& handle : newest_) {
    if (handle->lease->Superseded() || handle->lease->look) return true;
  }
  return false;
}

void LiveModels::OnAsked() {
  for (const HandleRef& handle : newest_) handle->lease->look = false;
}

std::unique_ptr<LiveModels::Set> LiveModels::MakeSet(std::vector<Held> held) const {
  auto set = std::make_unique<Set>();
  set->handles.reserve(held.size());
  for (size_t i = 0; i < held.size(); ++i) {
    HandleRef fresh(new mh_handle(session_, std::move(held[i])));
    // The same version under the same generation: keep the handle, and with it the addresses.
    if (i < newest_.size() && newest_[i]->lease->generation == fresh->lease->generation &&
        newest_[i]->lease->fixed.version == fresh->lease->fixed.version &&
        newest_[i]->model->digest_hex() == fresh->model->digest_hex()) {
      fresh.reset(Retain(newest_[i].get()));
    }
    set->handles.push_back(std::move(fresh));
  }
  return set;
}

void LiveModels::OnAcquired(Result<std::vector<Held>> held) {
  {
    const MutexLock lock(mutex_);
    error_.reset();
    if (!held.ok()) error_ = std::move(held).error();
    if (error_.has_value()) return;
  }
  std::unique_ptr<Set> set = MakeSet(*std::move(held));
  // Where the page could not tell, the daemon was asked in vain.
  const bool same =
      std::equal(set->handles.begin(), set->handles.end(), newest_.begin(), newest_.end(),
                 [](const HandleRef& a, const HandleRef& b) { return a.get() == b.get(); });
  if (same) return;
  newest_.clear();
  for (const HandleRef& handle : set->handles) newest_.emplace_back(Retain(handle.get()));
  // One that was prepared before and never adopted goes.
  delete prepared_.exchange(set.release(), std::memory_order_acq_rel);
  session_->SignalEvents();
}

void LiveModels::CollectGarbage() {
  Set* set = retired_.exchange(nullptr, std::memory_order_acquire);
  while (set != nullptr) delete std::exchange(set, set->next_retired);
}

}  // namespace modelhost
