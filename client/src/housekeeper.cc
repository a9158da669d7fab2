#include "client/src/housekeeper.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <new>

#include "client/src/process.h"
#include "client/src/session.h"

namespace modelhost {
namespace {

using std::chrono::steady_clock;

constexpr uint64_t kWakeId = 0;  // Sessions count from 1.
constexpr size_t kStackBytes = 512 << 10;
// How long the thread stays without any client, so that a program that connects again and again
// does not make a thread each time.
constexpr std::chrono::seconds kLinger{10};
constexpr std::chrono::seconds kLongestSleep{60};
constexpr std::chrono::seconds kOutOfMemoryPause{1};

void Control(const UniqueFd& epoll, int operation, const UniqueFd& socket, uint64_t id,
             bool armed) {
  epoll_event event{};
  event.events = armed ? (EPOLLIN | EPOLLONESHOT) : EPOLLONESHOT;
  event.data.u64 = id;
  (void)::epoll_ctl(epoll.get(), operation, socket.get(), &event);
}

}  // namespace

Result<std::shared_ptr<Housekeeper>> Housekeeper::Start(Process& process) {
  UniqueFd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoError(errno, "start the background thread: epoll");
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return ErrnoError(errno, "start the background thread: eventfd");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeId;
  if (::epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wake.get(), &event) != 0) {
    return ErrnoError(errno, "start the background thread: epoll_ctl");
  }
  std::shared_ptr<Housekeeper> self(new Housekeeper(process, std::move(epoll), std::move(wake)));

  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  auto* own = new std::shared_ptr<Housekeeper>(self);
  pthread_t thread{};
  const int failure = pthread_create(&thread, &attributes, &Housekeeper::ThreadMain, own);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (failure != 0) {
    delete own;
    Error error = ErrnoError(failure, "start the background thread");
    error.code = Code::kResourceExhausted;
    return error;
  }
  return self;
}

void* Housekeeper::ThreadMain(void* self) {
  const std::unique_ptr<std::shared_ptr<Housekeeper>> own(
      static_cast<std::shared_ptr<Housekeeper>*>(self));
  pthread_setname_np(pthread_self(), "modelhost");
  (*own)->Run();
  return nullptr;
}

Housekeeper::Look Housekeeper::LookAtSessions(std::span<const epoll_event> events) {
  for (const epoll_event& event : events) {
    if (event.data.u64 == kWakeId) {
      uint64_t ignored = 0;
      (void)!::read(wake_.get(), &ignored, sizeof(ignored));
      continue;
    }
    const auto session = process_.FindSession(event.data.u64);
    if (session != nullptr) session->OnReadable();
  }
  Look look{steady_clock::time_point::max(), true};
  for (const auto& session : process_.Sessions()) {
    look.alone = false;
    look.next = std::min(look.next, session->Tick(steady_clock::now()));
  }
  process_.DeleteDropped();
  return look;
}

void Housekeeper::Run() {
  std::array<epoll_event, 16> events{};
  auto next_look = steady_clock::now();
  auto alone_since = steady_clock::time_point::max();
  while (true) {
    const auto now = steady_clock::now();
    const auto wake_at = std::clamp(next_look, now, now + kLongestSleep);
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(wake_at - now);
    const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                   static_cast<int>(left.count()));
    Look look;
    try {
      look = LookAtSessions(std::span(events).first(static_cast<size_t>(std::max(count, 0))));
    } catch (const std::bad_alloc&) {
      look.next = steady_clock::now() + kOutOfMemoryPause;
    }
    next_look = look.next;
    if (!look.alone) {
      alone_since = steady_clock::time_point::max();
      continue;
    }
    if (alone_since == steady_clock::time_point::max()) alone_since = steady_clock::now();
    next_look = alone_since + kLinger;
    if (steady_clock::now() >= next_look && process_.EndHousekeeper(this)) return;
  }
}

void Housekeeper::Watch(const UniqueFd& socket, uint64_t id, bool armed) {
  Control(epoll_, EPOLL_CTL_ADD, socket, id, armed);
}

void Housekeeper::Arm(const UniqueFd& socket, uint64_t id, bool armed) {
  Control(epoll_, EPOLL_CTL_MOD, socket, id, armed);
}

void Housekeeper::Unwatch(const UniqueFd& socket) {
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket.get(), nullptr);
}

void Housekeeper::Wake() {
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
}

void Housekeeper::CloseAfterFork() {
  epoll_.Reset();
  wake_.Reset();
}

}  // namespace modelhost
