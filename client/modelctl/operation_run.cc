#include "client/modelctl/operation_run.h"

#include <algorithm>
#include <chrono>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/modelctl/render.h"

namespace modelhost::modelctl {
namespace {

constexpr absl::Duration kSecondCtrlC = absl::Seconds(2);
constexpr absl::Duration kCancelLimit = absl::Seconds(10);
constexpr absl::Duration kTick = absl::Milliseconds(50);

class Follower {
 public:
  Follower(Context& context, Interrupts& interrupts, const std::string& what,
           const FollowOptions& options)
      : context_(context),
        interrupts_(interrupts),
        what_(what),
        options_(options),
        id_(options.known_id),
        progress_(context.MakeProgress(what)),
        give_up_(context.globals().timeout.has_value() ? absl::Now() + *context.globals().timeout
                                                       : absl::InfiniteFuture()) {}

  OperationEnd Run(const OperationStarter& start) {
    Outcome<v1::Control::StubInterface*> stub = context_.Control();
    if (!stub.ok()) return {stub.exit(), std::nullopt};
    stub_ = *stub;
    grpc::CompletionQueue queue;
    OperationStream stream = start(*stub_, &call_, &queue, Tag(Step::kStart));
    std::optional<Exit> end;
    while (!end.has_value()) end = Next(queue, *stream);
    progress_.Finish(absl::Now());
    call_.TryCancel();
    queue.Shutdown();
    void* tag = nullptr;
    bool good = false;
    while (queue.Next(&tag, &good)) {
    }
    return {*std::move(end), std::move(last_)};
  }

 private:
  enum class Step : intptr_t { kStart = 1, kRead, kFinish };
  static void* Tag(Step step) { return reinterpret_cast<void*>(static_cast<intptr_t>(step)); }

  // One event or one tick. An Exit ends it.
  std::optional<Exit> Next(grpc::CompletionQueue& queue,
                           grpc::ClientAsyncReaderInterface<v1::OperationEvent>& stream) {
    void* tag = nullptr;
    bool good = false;
    const auto got = queue.AsyncNext(
        &tag, &good, std::chrono::system_clock::now() + absl::ToChronoMilliseconds(kTick));
    const absl::Time now = absl::Now();
    if (got == grpc::CompletionQueue::GOT_EVENT) {
      if (tag == Tag(Step::kFinish)) return AtEnd();
      if (!good) {
        stream.Finish(&status_, Tag(Step::kFinish));
      } else {
        if (tag == Tag(Step::kRead) && OnEvent(now)) return Exit::Ok();
        stream.Read(&event_, Tag(Step::kRead));
      }
    }
    progress_.Tick(now);
    if (interrupts_.Take()) {
      if (std::optional<Exit> end = OnInterrupt(now)) return end;
    }
    if (now >= detach_at_) {
      return cancelling_ ? Fail(ExitCode::kTimeout,
                                absl::StrCat(what_, ": ", id_,
                                             " was told to "
                                             "stop and has not yet (`modelctl ops show ",
                                             id_, "` says how it went)"))
                         : Exit{ExitCode::kInterrupted, ""};
    }
    if (now >= give_up_ && !cancelling_ && detach_at_ == absl::InfiniteFuture()) {
      return AtTimeout();
    }
    return std::nullopt;
  }

  // True: nothing more to follow.
  bool OnEvent(absl::Time now) {
    last_ = event_.operation();
    if (!last_->id().empty()) id_ = last_->id();
    if (!options_.wait) return true;
    progress_.Update(*last_, now);
    return false;  // The stream's own end comes next, with its status.
  }

  Exit AtEnd() {
    // Also in a state that only a newer daemon knows.
    if (last_.has_value() && (IsFinished(last_->state()) || last_->has_finished())) {
      return Exit::Ok();
    }
    if (!status_.ok() && !last_.has_value()) return context_.RpcExit(status_, what_);
    if (!status_.ok() && status_.error_code() != grpc::StatusCode::UNAVAILABLE) {
      return context_.RpcExit(status_, what_);
    }
    return Fail(
        ExitCode::kUnreachable,
        absl::StrCat(what_, ": the daemon went away while ", id_.empty() ? "it" : id_,
                     " ran (its operations end with it; when it is back, `modelctl ops ",
                     id_.empty() ? "ls" : absl::StrCat("show ", id_), "` says what came of it)"));
  }

  Exit AtTimeout() {
    const std::string limit = HumanDuration(*context_.globals().timeout);
    if (id_.empty()) {
      return Fail(ExitCode::kTimeout, absl::StrCat(what_, ": nothing came back within ", limit,
                                                   " (`modelctl ops ls` says whether it runs)"));
    }
    return Fail(ExitCode::kTimeout,
                absl::StrCat(what_, ": not finished within ", limit, " (", id_,
                             " goes on; `modelctl ops watch ", id_, "` follows it)"));
  }

  std::optional<Exit> OnInterrupt(absl::Time now) {
    progress_.Finish(now);
    if (id_.empty()) {
      context_.err()
          << "interrupted before the operation had an id (`modelctl ops ls` says whether "
             "it runs)"
          << '\n'
          << std::flush;
      return Exit{ExitCode::kInterrupted, ""};
    }
    if (detach_at_ == absl::InfiniteFuture()) {
      detach_at_ = now + kSecondCtrlC;
      context_.err() << "detached: " << id_ << " goes on (`modelctl ops watch " << id_
                     << "` follows it; Ctrl-C again cancels it)" << '\n'
                     << std::flush;
      return std::nullopt;
    }
    if (cancelling_) return Exit{ExitCode::kInterrupted, ""};
    v1::GetOperationRequest request;
    request.set_id(id_);
    v1::Operation answer;
    grpc::ClientContext call;
    call.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(kCancelLimit));
    const grpc::Status status = stub_->CancelOperation(&call, request, &answer);
    // FAILED_PRECONDITION: it is over; the stream tells how.
    if (!status.ok() && status.error_code() != grpc::StatusCode::FAILED_PRECONDITION) {
      return context_.RpcExit(status, absl::StrCat("cancel ", id_));
    }
    context_.err() << "cancelling " << id_ << '\n' << std::flush;
    cancelling_ = true;
    detach_at_ = now + kCancelLimit;
    return std::nullopt;
  }

  Context& context_;
  Interrupts& interrupts_;
  const std::string what_;
  const FollowOptions options_;
  std::string id_;
  Progress progress_;
  const absl::Time give_up_;
  absl::Time detach_at_ = absl::InfiniteFuture();
  bool cancelling_ = false;
  v1::Control::StubInterface* stub_ = nullptr;
  grpc::ClientContext call_;
  grpc::Status status_;
  v1::OperationEvent event_;
  std::optional<v1::Operation> last_;
};

}  // namespace

OperationEnd FollowOperation(Context& context, Interrupts& interrupts, const std::string& what,
                             const OperationStarter& start, const FollowOptions& options) {
  return Follower(context, interrupts, what, options).Run(start);
}

OperationEnd WatchOperation(Context& context, Interrupts& interrupts, const std::string& what,
                            const std::string& id) {
  v1::GetOperationRequest request;
  request.set_id(id);
  FollowOptions options;
  options.known_id = id;
  return FollowOperation(
      context, interrupts, what,
      [&](v1::Control::StubInterface& stub, grpc::ClientContext* call, grpc::CompletionQueue* queue,
          void* tag) { return stub.AsyncWatchOperation(call, request, queue, tag); },
      options);
}

Exit FailureOf(const v1::Operation& operation, const std::string& what) {
  if (operation.state() == v1::SUCCEEDED) return Exit::Ok();
  if (operation.state() == v1::CANCELLED || operation.state() == v1::ABORTED) {
    const std::string& why = operation.failure().message();
    const char* how = operation.state() == v1::ABORTED ? ": aborted" : ": cancelled";
    return Fail(ExitCode::kSuperseded,
                absl::StrCat(what, how, why.empty() ? "" : ": ", why, " (", operation.id(), ")"));
  }
  return FromFailure(operation.failure().code(), operation.failure().message(), what);
}

}  // namespace modelhost::modelctl
