// The one thread that libmodelhost runs in a process, whatever the number of clients.
//
// It sleeps until a session's socket has something to say that no call is waiting for, or until a
// session asked to be looked at, and then calls Session::OnReadable and Session::Tick. It unmaps
// the handles that nobody is to wait for. It starts
// with the first lease or event descriptor of the process and ends some time after the last client
// is gone. All signals are blocked in it: the program's handlers never run there.
//
// Thread-safe. Sockets are known by the session's id, never by their number.
#pragma once

#include <sys/epoll.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>

#include "proto/handle/error.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

class Process;

class Housekeeper {
 public:
  // RESOURCE_EXHAUSTED: no descriptor or no thread can be had. The thread keeps the object alive.
  static Result<std::shared_ptr<Housekeeper>> Start(Process& process);

  // `socket` belongs to session `id`. While not armed, what comes does not wake the thread. An
  // armed socket wakes it once and is then not armed.
  void Watch(const UniqueFd& socket, uint64_t id, bool armed);
  void Arm(const UniqueFd& socket, uint64_t id, bool armed);
  void Unwatch(const UniqueFd& socket);
  // Makes the thread look at all sessions.
  void Wake();

  // In a forked child: closes what is shared with the parent. The object is of no use afterwards.
  void CloseAfterFork();

 private:
  Housekeeper(Process& process, UniqueFd epoll, UniqueFd wake)
      : process_(process), epoll_(std::move(epoll)), wake_(std::move(wake)) {}
  static void* ThreadMain(void* self);
  void Run();
  // Calls the sessions: those named by `events`, then all. Returns when to look again, and whether
  // there are any.
  struct Look {
    std::chrono::steady_clock::time_point next;
    bool alone = false;
  };
  Look LookAtSessions(std::span<const epoll_event> events);

  Process& process_;
  UniqueFd epoll_;
  UniqueFd wake_;
};

}  // namespace modelhost
