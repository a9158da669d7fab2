// mh_handle: one acquired version. Counted references; the last one unmaps, then gives the lease
// back: where it is dropped, or on the background thread.
//
// Thread-safe, but for dropping the last reference while another thread uses it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "client/src/model.h"
#include "client/src/process.h"
#include "client/src/session.h"

struct mh_handle {
  mh_handle(std::shared_ptr<modelhost::Session> owner, modelhost::Held held)
      : session(std::move(owner)), lease(std::move(held.lease)), model(std::move(held.model)) {}
  mh_handle(const mh_handle&) = delete;
  ~mh_handle() {
    model.reset();
    session->Release(lease);
  }

  const std::shared_ptr<modelhost::Session> session;
  const std::shared_ptr<modelhost::Lease> lease;
  std::unique_ptr<modelhost::Model> model;
  mutable std::atomic<uint32_t> references{1};
  mh_handle* next_dropped = nullptr;  // Process's.
};

namespace modelhost {

inline mh_handle* Retain(const mh_handle* handle) {
  handle->references.fetch_add(1, std::memory_order_relaxed);
  return const_cast<mh_handle*>(handle);  // The C API's handles are not const to their owner.
}

inline void Drop(const mh_handle* handle) {
  if (handle->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete handle;
}

// Unmapping gigabytes takes time: the background thread does it, where there is one. Not where the
// driver has a part in it: another thread must not call that while the process exits.
inline void DropLater(mh_handle* handle) {
  if (handle->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (handle->model->image() != nullptr) {
    delete handle;
  } else {
    Process::Get().DeleteLater(handle);
  }
}

struct HandleDropper {
  void operator()(mh_handle* handle) const { DropLater(handle); }
};
// One reference.
using HandleRef = std::unique_ptr<mh_handle, HandleDropper>;

}  // namespace modelhost
