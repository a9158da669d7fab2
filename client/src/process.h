// What libmodelhost keeps per process, and nothing else of it is global: the list of sessions, the
// background thread, the CUDA driver, and what happens at fork.
//
// At fork the child has copies of the session sockets. It must not keep them: a lease ends with its
// connection, and the connection with its last descriptor. So sockets are opened and closed only
// under the lock that the fork handlers take, and the child closes its copies before fork returns.
// The sessions themselves are then left as they are, for ever: another thread may have been
// anywhere in them. A CUDA driver does not survive a fork either: what was made with it is dead in
// the child, and never given back there. Thread-safe. The lock is never held across a wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/src/cuda_device.h"
#include "client/src/mutex.h"
#include "proto/handle/error.h"
#include "proto/handle/unique_fd.h"

struct mh_handle;

namespace modelhost {

class Housekeeper;
class Session;

class Process {
 public:
  // Made at the first call and never destroyed: handles may outlive static destructors.
  static Process& Get();

  // Names sessions within this process; never 0, never used again.
  uint64_t NextSessionId() { return next_session_id_.fetch_add(1, std::memory_order_relaxed); }
  void AddSession(std::shared_ptr<Session> session) MH_EXCLUDES(mutex_);
  void RemoveSession(const Session* session) MH_EXCLUDES(mutex_);
  std::shared_ptr<Session> FindSession(uint64_t id) MH_EXCLUDES(mutex_);
  std::vector<std::shared_ptr<Session>> Sessions() MH_EXCLUDES(mutex_);

  // Starts the thread if it does not run. RESOURCE_EXHAUSTED.
  Result<std::shared_ptr<Housekeeper>> EnsureHousekeeper() MH_EXCLUDES(mutex_);
  // The thread asks to end: true unless it is needed after all.
  bool EndHousekeeper(const Housekeeper* housekeeper) MH_EXCLUDES(mutex_);

  // Deletes a handle without references on the background thread; here where none runs.
  void DeleteLater(mh_handle* handle) MH_EXCLUDES(mutex_);
  // For the background thread.
  void DeleteDropped() MH_EXCLUDES(mutex_);

  // How many forks lie between this process and the one that loaded the library. Lock-free.
  uint64_t forks() const { return forks_.load(std::memory_order_acquire); }
  CudaLibrary& cuda() { return cuda_; }

  // Connects, and notes the number in `copy` for the fork handler. Errors as ConnectSeqpacket.
  Result<UniqueFd> OpenSocket(const std::string& path, std::atomic<int>& copy) MH_EXCLUDES(mutex_);
  void CloseSocket(UniqueFd socket, std::atomic<int>& copy) MH_EXCLUDES(mutex_);

 private:
  Process();
  static void BeforeFork() MH_THREAD_ATTRIBUTE(no_thread_safety_analysis);
  static void InParent() MH_THREAD_ATTRIBUTE(no_thread_safety_analysis);
  static void InChild() MH_THREAD_ATTRIBUTE(no_thread_safety_analysis);

  std::atomic<uint64_t> next_session_id_{1};
  std::atomic<uint64_t> forks_{0};
  CudaLibrary cuda_;
  Mutex mutex_;
  std::vector<std::shared_ptr<Session>> sessions_ MH_GUARDED_BY(mutex_);
  std::shared_ptr<Housekeeper> housekeeper_ MH_GUARDED_BY(mutex_);
  mh_handle* dropped_ MH_GUARDED_BY(mutex_) = nullptr;  // A list, only while the thread runs.
  // Of the parent, in a child.
  std::vector<std::shared_ptr<Session>> abandoned_sessions_ MH_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Housekeeper>> abandoned_threads_ MH_GUARDED_BY(mutex_);
};

}  // namespace modelhost
