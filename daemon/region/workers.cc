#include "daemon/region/workers.h"

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace modelhost {
namespace {

// Outlives the call: a helper may get its thread long after the work is done.
struct Crew {
  absl::Mutex mutex;
  int working ABSL_GUARDED_BY(mutex) = 0;
  bool closed ABSL_GUARDED_BY(mutex) = false;
};

}  // namespace

void RunOnWorkers(Executor& executor, int threads, absl::FunctionRef<void()> body) {
  const auto crew = std::make_shared<Crew>();
  for (int i = 1; i < threads; ++i) {
    executor.Post([crew, body] {
      {
        absl::MutexLock lock(&crew->mutex);
        if (crew->closed) return;  // `body` is gone.
        ++crew->working;
      }
      body();
      absl::MutexLock lock(&crew->mutex);
      --crew->working;
    });
  }
  body();
  absl::MutexLock lock(&crew->mutex);
  crew->closed = true;
  const auto idle = [&crew]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return crew->working == 0; };
  crew->mutex.Await(absl::Condition(&idle));
}

ScopedIoPriority::ScopedIoPriority(Os& os, const std::string& io_class)
    : os_(os), set_(io_class != "none" && os.SetIoPriority(io_class).ok()) {}

ScopedIoPriority::~ScopedIoPriority() {
  if (set_) (void)os_.SetIoPriority("none");
}

}  // namespace modelhost
