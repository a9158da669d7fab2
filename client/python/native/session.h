// What Python objects share: a client (Session) and one reference to a handle (Held).
//
//   Tensor, File, DLPack capsules, torch storages --shared_ptr--> Held --shared_ptr--> Session
//
// The last of them, in whatever order they are freed, by any thread, with or without the GIL and
// also after the interpreter has ended, gives the handle back and then disconnects: destructors
// here touch nothing of Python. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "modelhost/modelhost.h"

namespace modelhost::python {

class Session;

class Held {
 public:
  // Takes over one reference.
  Held(mh_handle* handle, std::shared_ptr<Session> session)
      : session_(std::move(session)), handle_(handle) {}
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { mh_release(handle_); }

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
  uint64_t deadline_ms = 0;  // 0: the client's.
  std::string device;        // "": host only; "cuda", "auto", or a GPU's UUID.
};

// Options of the C API. They point into `request`.
mh_acquire_options OptionsOf(const Request& request);

class Session : public std::enable_shared_from_this<Session> {
 public:
  // Waits. Null on failure.
  static std::shared_ptr<Session> Connect(const std::optional<std::string>& runtime_dir,
                                          uint64_t deadline_ms, mh_error* error);
  explicit Session(mh_client* client) : client_(client) {}
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session();

  // Disconnects; while calls of other threads are under way, the last of them does.
  void Close();

  // The client for the time of one call: nobody disconnects it meanwhile.
  class Use {
   public:
    explicit Use(std::shared_ptr<Session> session);
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use();
    // Null after Close.
    mh_client* get() const { return client_; }

   private:
    const std::shared_ptr<Session> session_;
    mh_client* client_ = nullptr;
  };

  // These wait, and want no GIL.
  mh_status Acquire(const std::string& ref, const Request& request, HeldPtr* held, mh_error* error);
  mh_status AcquireSet(const std::vector<std::string>& refs, const Request& request,
                       std::vector<HeldPtr>* held, mh_error* error);
  mh_status Follow(const std::string& ref, const Request& request, mh_live** live, mh_error* error);
  mh_status FollowSet(const std::vector<std::string>& refs, const Request& request,
                      mh_live_set** live, mh_error* error);

 private:
  std::mutex mutex_;
  mh_client* client_;  // Null once disconnected.
  int users_ = 0;
  bool closed_ = false;
};

// MH_FAILED_PRECONDITION, with what to do about a closed client.
mh_status ClientIsClosed(mh_error* error);

}  // namespace modelhost::python
