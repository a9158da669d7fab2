// The low-level objects under modelhost.Client, Handle, Live and LiveSet (modelhost/_client.py and
// its neighbours), which have the interface for users. Methods that wait release the GIL.
//
// An mh_live is for one thread at a time: the GIL is held while one is used, but for Remap, and
// meanwhile other threads are refused.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/python/native/session.h"

namespace modelhost::python {

// One reference to a version, until Close. The name outlives it.
class Handle {
 public:
  explicit Handle(HeldPtr held) : held_(std::move(held)), name_(held_->Name()) {}
  // Raises MH_FAILED_PRECONDITION when closed.
  const HeldPtr& held() const;
  const mh_handle* get() const { return held()->get(); }
  bool closed() const { return held_ == nullptr; }
  const std::string& name() const { return name_; }
  void Close() { held_ = nullptr; }
  bool SameVersionAs(const mh_handle* handle) const {
    return held_ != nullptr && held_->get() == handle;
  }

 private:
  HeldPtr held_;
  const std::string name_;
};

// A model that follows its label.
class Live {
 public:
  Live(mh_live* live, std::shared_ptr<Session> session)
      : session_(std::move(session)), live_(live) {}
  Live(const Live&) = delete;
  Live& operator=(const Live&) = delete;
  ~Live() { mh_live_release(live_); }
  // Where to put what follows, once.
  mh_live** place() { return &live_; }

  // The newest version, held; the same object until there is a newer one.
  HeldPtr Adopt();
  // The same with same_addresses; raises errors of mh_live_remap.
  HeldPtr Remap();
  HeldPtr current() const { return current_; }
  mh_status Status(mh_error* error) const;
  void Close();
  bool closed() const { return live_ == nullptr; }

 private:
  // Raises MH_FAILED_PRECONDITION when closed, or while another thread is in Remap.
  void CheckUsable() const;
  HeldPtr Keep(const mh_handle* newest);

  std::shared_ptr<Session> session_;
  mh_live* live_;
  HeldPtr current_;
  bool remapping_ = false;  // By some thread, without the GIL.
};

class LiveSet {
 public:
  LiveSet(mh_live_set* live, size_t count, std::shared_ptr<Session> session)
      : session_(std::move(session)), live_(live), current_(count) {}
  LiveSet(const LiveSet&) = delete;
  LiveSet& operator=(const LiveSet&) = delete;
  ~LiveSet() { mh_live_set_release(live_); }
  // Where to put what follows, once.
  mh_live_set** place() { return &live_; }

  // Members that did not change stay the same objects.
  std::vector<HeldPtr> Adopt();
  mh_status Status(mh_error* error) const;
  void Close();
  bool closed() const { return live_ == nullptr; }

 private:
  std::shared_ptr<Session> session_;
  mh_live_set* live_;
  std::vector<HeldPtr> current_;
};

void BindHandle(pybind11::module_& module);
void BindLive(pybind11::module_& module);
void BindClient(pybind11::module_& module);

}  // namespace modelhost::python
