// What Python objects share: a client (Session) and one reference to a handle (Held).
//
//   Tensor, File, DLPack capsules, torch storages --shared_ptr--> Held --shared_ptr--> Session
//
// The last of them, in whatever order they are freed, by any thread, with or without the GIL and
// also after the interpreter has ended, gives the handle back and then disconnects: destructors
// here touch nothing of Python, and wait for nothing: the library's thread unmaps (but for handles
// with memory of a GPU). Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "modelhost/modelhost.h"

namespace modelhost::python {

class Session;

// The thread that runs signal handlers, as PyThread_get_thread_ident has it.
struct MainThread {
  unsigned long ident = 0;
};

class Held {
 public:
  // Takes over one reference.
  Held(mh_handle* handle, std::shared_ptr<Session> session)
      : session_(std::move(session)), handle_(handle) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { mh_release_later(handle_); }

  const mh_handle* get() const { return handle_; }
  // "planner@7"
  std::string Name() const;

 private:
  const std::shared_ptr<Session> session_;  // Its lease lasts as long as a view of it.
  mh_handle* const handle_;
};
using HeldPtr = std::shared_ptr<const Held>;

// How to acquire; the names are those of the Python call.
struct Request {
  bool wait = false;
  uint64_t deadline_ms = 0;     // 0: the client's.
  std::string device;           // "": host only; "cuda", "auto", or a GPU's UUID.
  bool same_addresses = false;  // Of Follow.
};

// Options of the C API. They point into `request`.
mh_acquire_options OptionsOf(const Request& request);

class Session : public std::enable_shared_from_this<Session> {
 public:
  // Waits. Null on failure. `interrupted` is as that of mh_options, with a MainThread.
  static std::shared_ptr<Session> Connect(const std::optional<std::string>& runtime_dir,
                                          uint64_t deadline_ms, int (*interrupted)(void*),
                                          MainThread main_thread, mh_error* error);
  Session(mh_client* client, std::unique_ptr<MainThread> main_thread)
      : main_thread_(std::move(main_thread)), client_(client) {}
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() { mh_disconnect(client_); }

  // Ends the session, and the calls of other threads that wait.
  void Close();
  bool closed() const { return closed_.load(std::memory_order_acquire); }
  // The client itself, also when closed: it lasts as long as this object.
  mh_client* get() const { return client_; }

  // These wait, and want no GIL.
  mh_status Acquire(const std::string& ref, const Request& request, HeldPtr* held, mh_error* error);
  mh_status AcquireSet(const std::vector<std::string>& refs, const Request& request,
                       std::vector<HeldPtr>* held, mh_error* error);
  mh_status Follow(const std::string& ref, const Request& request, mh_live** live, mh_error* error);
  mh_status FollowSet(const std::vector<std::string>& refs, const Request& request,
                      mh_live_set** live, mh_error* error);

 private:
  const std::unique_ptr<MainThread> main_thread_;  // The client's context.
  mh_client* const client_;
  std::atomic<bool> closed_{false};
};

}  // namespace modelhost::python
