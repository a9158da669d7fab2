#include "client/src/process.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "client/src/handle.h"
#include "client/src/housekeeper.h"
#include "client/src/session.h"
#include "proto/handle/fd_channel.h"

namespace modelhost {

Process& Process::Get() {
  static Process* const process = new Process();
  return *process;
}

Process::Process() { pthread_atfork(&BeforeFork, &InParent, &InChild); }

void Process::BeforeFork() { Get().mutex_.Lock(); }

void Process::InParent() { Get().mutex_.Unlock(); }

// Only this thread exists here; `mutex_` is ours, all other locks may be held by threads that are
// gone. Allocation is allowed: glibc resets its own locks.
void Process::InChild() {
  Process& self = Get();
  self.forks_.fetch_add(1, std::memory_order_release);
  for (std::shared_ptr<Session>& session : self.sessions_) {
    session->AbandonAfterFork();
    self.abandoned_sessions_.push_back(std::move(session));
  }
  self.sessions_.clear();
  if (self.housekeeper_ != nullptr) {
    self.housekeeper_->CloseAfterFork();
    self.abandoned_threads_.push_back(std::move(self.housekeeper_));
    self.housekeeper_ = nullptr;
    self.dropped_ = nullptr;  // The parent's to delete; here their memory stays as it is.
  }
  self.mutex_.Unlock();
}

void Process::AddSession(std::shared_ptr<Session> session) {
  const MutexLock lock(mutex_);
  sessions_.push_back(std::move(session));
}

void Process::RemoveSession(const Session* session) {
  std::shared_ptr<Session> last;  // Dropped without the lock: a destructor may do anything.
  const MutexLock lock(mutex_);
  const auto it = std::find_if(sessions_.begin(), sessions_.end(),
                               [&](const auto& each) { return each.get() == session; });
  if (it == sessions_.end()) return;
  last = std::move(*it);
  sessions_.erase(it);
}

std::shared_ptr<Session> Process::FindSession(uint64_t id) {
  const MutexLock lock(mutex_);
  for (const auto& session : sessions_) {
    if (session->id() == id) return session;
  }
  return nullptr;
}

std::vector<std::shared_ptr<Session>> Process::Sessions() {
  const MutexLock lock(mutex_);
  return sessions_;
}

Result<std::shared_ptr<Housekeeper>> Process::EnsureHousekeeper() {
  const MutexLock lock(mutex_);
  if (housekeeper_ == nullptr) {
    auto started = Housekeeper::Start(*this);
    if (!started.ok()) return std::move(started).error();
    housekeeper_ = *std::move(started);
  }
  return housekeeper_;
}

bool Process::EndHousekeeper(const Housekeeper* housekeeper) {
  std::shared_ptr<Housekeeper> last;
  const MutexLock lock(mutex_);
  if (housekeeper_.get() != housekeeper) return true;
  if (!sessions_.empty() || dropped_ != nullptr) return false;
  last = std::move(housekeeper_);
  return true;
}

void Process::DeleteLater(mh_handle* handle) {
  {
    const MutexLock lock(mutex_);
    if (housekeeper_ != nullptr) {
      handle->next_dropped = std::exchange(dropped_, handle);
      housekeeper_->Wake();
      return;
    }
  }
  delete handle;
}

void Process::DeleteDropped() {
  mh_handle* handle = nullptr;
  {
    const MutexLock lock(mutex_);
    handle = std::exchange(dropped_, nullptr);
  }
  while (handle != nullptr) delete std::exchange(handle, handle->next_dropped);
}

Result<UniqueFd> Process::OpenSocket(const std::string& path, std::atomic<int>& copy) {
  const MutexLock lock(mutex_);
  auto socket = ConnectSeqpacket(path);
  if (socket.ok()) copy.store(socket->get(), std::memory_order_relaxed);
  return socket;
}

void Process::CloseSocket(UniqueFd socket, std::atomic<int>& copy) {
  const MutexLock lock(mutex_);
  copy.store(-1, std::memory_order_relaxed);
  socket.Reset();
}

}  // namespace modelhost
