#include "client/src/live_model.h"

#include <algorithm>
#include <utility>

namespace modelhost {
namespace {

std::string TensorName(const IndexTensor& tensor) {
  return std::string(tensor.component) + "/" + std::string(tensor.name);
}

// What of a tensor's kernels would notice; empty: nothing.
std::string TensorDifference(const IndexTensor& a, const IndexTensor& b) {
  if (a.name != b.name || a.component != b.component) return "is " + TensorName(b) + " now";
  if ((a.entry->flags & abi::kTensorOnDevice) != (b.entry->flags & abi::kTensorOnDevice)) {
    return "is on the GPU in one of them alone";
  }
  if ((a.entry->flags & abi::kTensorOnDevice) == 0) return "";
  if (a.entry->dtype != b.entry->dtype) return "has another type";
  if (a.entry->nbytes != b.entry->nbytes) {
    return "has " + std::to_string(b.entry->nbytes) + " bytes, not " +
           std::to_string(a.entry->nbytes);
  }
  const bool strided = a.strides != nullptr;
  if (!std::equal(a.shape, a.shape + a.entry->rank, b.shape, b.shape + b.entry->rank) ||
      strided != (b.strides != nullptr) ||
      (strided && !std::equal(a.strides, a.strides + a.entry->rank, b.strides))) {
    return "has another shape";
  }
  if (a.entry->device_segment != b.entry->device_segment ||
      a.entry->device_offset != b.entry->device_offset) {
    return "lies at another place";
  }
  return "";
}

// Between the device layouts of two versions; empty: kernels that run on one run on the other.
std::string FirstDifference(const Model& before, const Model& after) {
  const std::vector<uint64_t>& old_segments = before.image()->segment_bytes();
  const std::vector<uint64_t>& new_segments = after.image()->segment_bytes();
  if (after.image()->mode() != before.image()->mode()) {
    return std::string("its device memory is ") + DeviceModeText(after.image()->mode());
  }
  if (old_segments.size() != new_segments.size()) {
    return std::to_string(new_segments.size()) + " device segments, not " +
           std::to_string(old_segments.size());
  }
  for (size_t i = 0; i < old_segments.size(); ++i) {
    if (old_segments[i] == new_segments[i]) continue;
    return "device segment " + std::to_string(i) + " has " + std::to_string(new_segments[i]) +
           " bytes, not " + std::to_string(old_segments[i]);
  }
  const size_t count = std::min(before.index().tensor_count(), after.index().tensor_count());
  for (size_t i = 0; i < count; ++i) {
    IndexTensor a;
    IndexTensor b;
    if (!before.index().Tensor(i, &a) || !after.index().Tensor(i, &b)) return "a broken index";
    const std::string difference = TensorDifference(a, b);
    if (!difference.empty()) return "tensor " + TensorName(a) + " " + difference;
  }
  if (before.index().tensor_count() != after.index().tensor_count()) {
    return std::to_string(after.index().tensor_count()) + " tensors, not " +
           std::to_string(before.index().tensor_count());
  }
  return "";
}

}  // namespace

Result<std::shared_ptr<LiveModels>> LiveModels::Start(std::shared_ptr<Session> session,
                                                      std::vector<abi::Ref> refs, bool wait,
                                                      SteadyTime deadline, DeviceRequest device) {
  auto held = session->Acquire(refs, wait, deadline, device);
  if (!held.ok()) return std::move(held).error();
  std::shared_ptr<LiveModels> live(
      new LiveModels(std::move(session), std::move(refs), std::move(device)));
  live->current_ = live->MakeSet(*std::move(held));
  if (live->device_.same_addresses) {
    if (auto reserved = live->ReservePlaces(); !reserved.ok()) return std::move(reserved).error();
  }
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

Result<void> LiveModels::ReservePlaces() {
  CudaImage& image = *current_->handles[0]->model->image();
  if (image.mode() == abi::DeviceMode::kVmmFd) {
    auto places = CudaPlaces::Reserve(image.device(), image.segment_bytes());
    if (!places.ok()) return std::move(places).error();
    places_ = *std::move(places);
  }
  return image.MapAt(places_);  // It says why, for other modes.
}

bool LiveModels::Adopt() {
  // In a forked child there is nobody to drop the old set, and no newer one comes.
  if (session_->forked() || device_.same_addresses) return false;
  std::unique_ptr<Set> newer(prepared_.exchange(nullptr, std::memory_order_acq_rel));
  if (newer == nullptr) return false;
  MakeCurrent(std::move(newer));
  return true;
}

Result<void> LiveModels::Remap() {
  if (!device_.same_addresses) {
    return Error{Code::kFailedPrecondition,
                 "remap: this live model does not keep its device addresses (follow it with "
                 "MH_DEVICE_SAME_ADDRESSES)",
                 0};
  }
  if (session_->forked()) {
    return Error{Code::kFailedPrecondition, "remap: device memory stays with the parent after fork",
                 0};
  }
  std::unique_ptr<Set> newer(prepared_.exchange(nullptr, std::memory_order_acq_rel));
  if (newer == nullptr) {
    CudaImage& image = *current_->handles[0]->model->image();
    if (image.mapped()) return {};
    return image.MapAt(places_);  // What an earlier call could not.
  }
  const Model& before = *current_->handles[0]->model;
  const Model& after = *newer->handles[0]->model;
  // For the next call, unless the background thread has something newer still.
  const auto keep = [&] {
    Set* none = nullptr;
    if (prepared_.compare_exchange_strong(none, newer.get(), std::memory_order_acq_rel)) {
      (void)newer.release();
    }
  };
  if (auto difference = FirstDifference(before, after); !difference.empty()) {
    keep();
    return Error{Code::kFailedPrecondition,
                 "remap " + before.Name() + " to " + after.Name() + ": " + difference +
                     " (mh_follow it again)",
                 0};
  }
  before.image()->Unmap();
  auto mapped = after.image()->MapAt(places_);
  if (!mapped.ok()) {
    auto back = before.image()->MapAt(places_);
    keep();
    Error error = std::move(mapped).error();
    if (!back.ok()) {
      error.code = Code::kDataLoss;
      error.text += "; and the old version cannot be put back: " + back.error().text;
    }
    return error;
  }
  MakeCurrent(std::move(newer));
  return {};
}

void LiveModels::MakeCurrent(std::unique_ptr<Set> newer) {
  Set* old = std::exchange(current_, std::move(newer)).release();
  old->next_retired = retired_.load(std::memory_order_relaxed);
  while (!retired_.compare_exchange_weak(old->next_retired, old, std::memory_order_release,
                                         std::memory_order_relaxed)) {
  }
  housekeeper_->Wake();
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

bool LiveModels::OnAcquired(Result<std::vector<Held>> held) {
  std::unique_ptr<Set> set;
  std::optional<Error> failure;
  if (held.ok()) {
    auto attached = Session::AttachDevices(*held, device_);
    if (!attached.ok()) failure = std::move(attached).error();
    set = MakeSet(*std::move(held));  // Which gives the leases back if it is of no use.
  } else {
    failure = std::move(held).error();
  }
  {
    const MutexLock lock(mutex_);
    error_ = std::move(failure);
    if (error_.has_value()) return false;
  }
  // Where the page could not tell, the daemon was asked in vain.
  const bool same =
      std::equal(set->handles.begin(), set->handles.end(), newest_.begin(), newest_.end(),
                 [](const HandleRef& a, const HandleRef& b) { return a.get() == b.get(); });
  if (same) return true;
  newest_.clear();
  for (const HandleRef& handle : set->handles) newest_.emplace_back(Retain(handle.get()));
  // One that was prepared before and never adopted goes.
  delete prepared_.exchange(set.release(), std::memory_order_acq_rel);
  session_->SignalEvents();
  return true;
}

void LiveModels::CollectGarbage() {
  Set* set = retired_.exchange(nullptr, std::memory_order_acquire);
  while (set != nullptr) delete std::exchange(set, set->next_retired);
}

}  // namespace modelhost
