#include "daemon/platform/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace modelhost {

ThreadPool::ThreadPool(const std::string& name, int threads, std::function<void()> begin) {
  for (int i = 0; i < std::max(threads, 1); ++i) {
    threads_.emplace_back([this, begin] {
      if (begin) begin();
      Work();
    });
    ::pthread_setname_np(threads_.back().native_handle(), name.substr(0, 15).c_str());
  }
}

ThreadPool::~ThreadPool() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Post(Task task) {
  absl::MutexLock lock(&mutex_);
  tasks_.push_back(std::move(task));
}

void ThreadPool::Work() {
  const auto due = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return !tasks_.empty() || (stopping_ && running_ == 0);
  };
  while (true) {
    Task task;
    {
      absl::MutexLock lock(&mutex_);
      // A running task may still post, so the last one to finish lets everybody go.
      mutex_.Await(absl::Condition(&due));
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
      ++running_;
    }
    std::move(task)();
    task = nullptr;  // What it owns goes before the pool may look idle.
    absl::MutexLock lock(&mutex_);
    --running_;
  }
}

}  // namespace modelhost
