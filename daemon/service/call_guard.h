// What the calls in flight may hold, so that nobody keeps the daemon's gRPC threads from others.
//
// A synchronous call has a thread until its last byte has gone out, and how long that takes is the
// caller's doing. So every call takes a place of its kind when it is admitted (Enter) and keeps it
// until gRPC destroys it: a uid has a share, those who may only look have a share together, and
// commands have places of their own. A call whose caller takes no byte for `most_send`, and
// a reflection stream older than `most_reflection`, is cancelled.
//
// The interceptor tells of the beginning, the sends and the end of each call; health checks hold no
// thread and are left alone. Thread-safe; must outlive the server.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_interceptor.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/peer.h"
#include "daemon/platform/task_runner.h"

namespace modelhost {

class CallGuard {
 public:
  enum class Kind { kCall, kWatch, kCommand, kPublish, kReflection, kSession, kIndex };
  struct Limit {
    int of_uid;      // Of one uid that may not command.
    int of_readers;  // Of all such together.
    int in_all;
  };
  static Limit LimitOf(Kind kind);
  // Threads enough for all that has one; a session of Worker has none.
  static int MostThreads();

  struct Options {
    absl::Duration most_send = absl::Seconds(20);
    absl::Duration most_reflection = absl::Seconds(10);
  };
  // Both outlive the guard.
  CallGuard(ControlLoop& loop, Clock& clock, Options options);

  // Once for a call, from its handler. RESOURCE_EXHAUSTED says what there is too much of.
  absl::Status Enter(const grpc::ServerContextBase& context, Kind kind, const Peer& peer,
                     bool may_command);

  // For the server. `admit_reflection` is asked at the beginning of a reflection call, which is
  // cancelled unless OK: that service is gRPC's own and asks nobody.
  using AdmitReflection = std::function<absl::Status(const grpc::ServerContextBase&)>;
  std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeInterceptors(
      AdmitReflection admit_reflection);

 private:
  class Interceptor;
  class Factory;
  struct Call {
    grpc::ServerContextBase* context = nullptr;  // Null when the call is over for gRPC.
    bool entered = false;
    Kind kind = Kind::kCall;
    uint32_t uid = 0;
    bool may_command = false;
    absl::Duration end = absl::InfiniteDuration();       // Of its life.
    absl::Duration send_end = absl::InfiniteDuration();  // Of what it sends now.
  };
  struct Tally {
    int readers = 0;
    int all = 0;
    std::map<uint32_t, int> of_uid;  // Readers'.
  };
  // Looks at all calls once a second while there is one that could be late.
  struct Book {
    absl::Mutex mutex;
    std::unordered_map<const grpc::ServerContextBase*, Call> calls ABSL_GUARDED_BY(mutex);
    std::array<Tally, 7> tallies ABSL_GUARDED_BY(mutex);
    bool ticking ABSL_GUARDED_BY(mutex) = false;
  };

  void Began(grpc::ServerContextBase* context);
  void Sends(const grpc::ServerContextBase* context);
  void Sent(const grpc::ServerContextBase* context);
  void Closed(const grpc::ServerContextBase* context);
  void Gone(const grpc::ServerContextBase* context);
  void Tick(Book& book) ABSL_EXCLUSIVE_LOCKS_REQUIRED(book.mutex);
  static void Look(const std::shared_ptr<Book>& book, ControlLoop& loop, Clock& clock);

  ControlLoop& loop_;
  Clock& clock_;
  const Options options_;
  const std::shared_ptr<Book> book_ = std::make_shared<Book>();  // Shared with the timer.
};

}  // namespace modelhost
