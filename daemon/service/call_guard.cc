#include "daemon/service/call_guard.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace modelhost {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::InterceptorBatchMethods;
using grpc::experimental::ServerRpcInfo;

constexpr absl::Duration kLookInterval = absl::Seconds(1);
constexpr int kCommandersCalls = 16;  // Their short calls have no limit but the threads.

absl::string_view CallKindName(CallGuard::Kind kind) {
  switch (kind) {
    case CallGuard::Kind::kCall:
      return "calls";
    case CallGuard::Kind::kWatch:
      return "watching streams";
    case CallGuard::Kind::kCommand:
      return "commands";
    case CallGuard::Kind::kPublish:
      return "publishes";
    case CallGuard::Kind::kReflection:
      return "reflection streams";
    case CallGuard::Kind::kSession:
      return "sessions of workers";
    case CallGuard::Kind::kIndex:
      return "reads of an index";
  }
  return "calls";
}

}  // namespace

CallGuard::Limit CallGuard::LimitOf(Kind kind) {
  constexpr int kNoLimit = 1'000'000;
  switch (kind) {
    case Kind::kCall:
      return {.of_uid = 16, .of_readers = 24, .in_all = kNoLimit};
    case Kind::kWatch:
      return {.of_uid = 12, .of_readers = 24, .in_all = 32};
    case Kind::kCommand:
      return {.of_uid = 0, .of_readers = 0, .in_all = 24};
    case Kind::kPublish:
      return {.of_uid = 0, .of_readers = 0, .in_all = 8};
    case Kind::kReflection:
      return {.of_uid = 2, .of_readers = 4, .in_all = 6};
    case Kind::kSession:
      return {.of_uid = 256, .of_readers = 768, .in_all = 1024};
    case Kind::kIndex:  // As slow as its reader: not in the places of what is answered at once.
      return {.of_uid = 16, .of_readers = 24, .in_all = 32};
  }
  return {};
}

int CallGuard::MostThreads() {
  int threads = LimitOf(Kind::kCall).of_readers + kCommandersCalls;
  for (const Kind kind :
       {Kind::kWatch, Kind::kCommand, Kind::kPublish, Kind::kReflection, Kind::kIndex}) {
    threads += LimitOf(kind).in_all;
  }
  return threads;
}

CallGuard::CallGuard(ControlLoop& loop, Clock& clock, Options options)
    : loop_(loop), clock_(clock), options_(options) {}

absl::Status CallGuard::Enter(const grpc::ServerContextBase& context, Kind kind, const Peer& peer,
                              bool may_command) {
  const Limit limit = LimitOf(kind);
  absl::MutexLock lock(&book_->mutex);
  const auto found = book_->calls.find(&context);
  if (found == book_->calls.end()) return absl::CancelledError("the call is over");
  Call& call = found->second;
  if (call.entered) return absl::OkStatus();
  Tally& tally = book_->tallies[static_cast<size_t>(kind)];
  const auto refuse = [&](absl::string_view whose, int most) {
    return absl::ResourceExhaustedError(
        absl::StrCat(most, " ", CallKindName(kind), whose,
                     " are under way, as many as there may be (try again later)"));
  };
  if (tally.all >= limit.in_all) return refuse("", limit.in_all);
  if (!may_command) {
    if (tally.readers >= limit.of_readers) {
      return refuse(" of users who may not command", limit.of_readers);
    }
    int& own = tally.of_uid[peer.uid];
    if (own >= limit.of_uid) return refuse(absl::StrCat(" of uid ", peer.uid), limit.of_uid);
    ++own;
    ++tally.readers;
  }
  ++tally.all;
  call.entered = true;
  call.kind = kind;
  call.uid = peer.uid;
  call.may_command = may_command;
  if (kind == Kind::kReflection) {
    call.end = clock_.Monotonic() + options_.most_reflection;
    Tick(*book_);
  }
  return absl::OkStatus();
}

void CallGuard::Began(grpc::ServerContextBase* context) {
  absl::MutexLock lock(&book_->mutex);
  book_->calls[context] = Call{.context = context};
}

void CallGuard::Sends(const grpc::ServerContextBase* context) {
  absl::MutexLock lock(&book_->mutex);
  const auto call = book_->calls.find(context);
  if (call == book_->calls.end()) return;
  call->second.send_end = clock_.Monotonic() + options_.most_send;
  Tick(*book_);
}

void CallGuard::Sent(const grpc::ServerContextBase* context) {
  absl::MutexLock lock(&book_->mutex);
  const auto call = book_->calls.find(context);
  if (call != book_->calls.end()) call->second.send_end = absl::InfiniteDuration();
}

void CallGuard::Closed(const grpc::ServerContextBase* context) {
  absl::MutexLock lock(&book_->mutex);
  const auto call = book_->calls.find(context);
  if (call != book_->calls.end()) call->second.context = nullptr;
}

void CallGuard::Gone(const grpc::ServerContextBase* context) {
  absl::MutexLock lock(&book_->mutex);
  const auto found = book_->calls.find(context);
  if (found == book_->calls.end()) return;
  const Call& call = found->second;
  if (call.entered) {
    Tally& tally = book_->tallies[static_cast<size_t>(call.kind)];
    --tally.all;
    if (!call.may_command) {
      --tally.readers;
      const auto own = tally.of_uid.find(call.uid);
      if (--own->second == 0) tally.of_uid.erase(own);
    }
  }
  book_->calls.erase(found);
}

void CallGuard::Tick(Book& book) {
  if (book.ticking) return;
  book.ticking = true;
  loop_.Post([book = book_, &loop = loop_, &clock = clock_] {
    loop.PostDelayed(kLookInterval, [book, &loop, &clock] { Look(book, loop, clock); });
  });
}

void CallGuard::Look(const std::shared_ptr<Book>& book, ControlLoop& loop, Clock& clock) {
  absl::MutexLock lock(&book->mutex);
  const absl::Duration now = clock.Monotonic();
  book->ticking = false;
  for (auto& [key, call] : book->calls) {
    const absl::Duration end = std::min(call.end, call.send_end);
    if (call.context == nullptr || end == absl::InfiniteDuration()) continue;
    if (end > now) {
      book->ticking = true;
      continue;
    }
    // Under the lock: Closed comes before the context goes.
    call.context->TryCancel();
    call.context = nullptr;
  }
  if (book->ticking) {
    loop.PostDelayed(kLookInterval, [book, &loop, &clock] { Look(book, loop, clock); });
  }
}

class CallGuard::Interceptor final : public grpc::experimental::Interceptor {
 public:
  Interceptor(CallGuard& guard, const AdmitReflection* admit, ServerRpcInfo* info)
      : guard_(guard), admit_(admit), context_(info->server_context()) {}

  // Not before the handler has returned.
  ~Interceptor() override { guard_.Gone(context_); }

  void Intercept(InterceptorBatchMethods* methods) override {
    const auto at = [&](InterceptionHookPoints point) {
      return methods->QueryInterceptionHookPoint(point);
    };
    if (at(InterceptionHookPoints::PRE_SEND_CANCEL)) return;  // From Look, under its lock.
    if (at(InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      guard_.Began(context_);
      if (admit_ != nullptr && !(*admit_)(*context_).ok()) context_->TryCancel();
    }
    if (at(InterceptionHookPoints::PRE_SEND_MESSAGE) ||
        at(InterceptionHookPoints::PRE_SEND_STATUS)) {
      guard_.Sends(context_);
    }
    if (at(InterceptionHookPoints::POST_SEND_MESSAGE)) guard_.Sent(context_);
    if (at(InterceptionHookPoints::POST_RECV_CLOSE)) guard_.Closed(context_);
    methods->Proceed();
  }

 private:
  CallGuard& guard_;
  const AdmitReflection* const admit_;  // Null unless it is a reflection call.
  grpc::ServerContextBase* const context_;
};

class CallGuard::Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  Factory(CallGuard& guard, AdmitReflection admit) : guard_(guard), admit_(std::move(admit)) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(ServerRpcInfo* info) override {
    const absl::string_view method = info->method() == nullptr ? "" : info->method();
    if (absl::StartsWith(method, "/grpc.health.")) return nullptr;
    const bool reflection = absl::StartsWith(method, "/grpc.reflection.");
    return std::make_unique<Interceptor>(guard_, reflection ? &admit_ : nullptr, info)
        .release();  // gRPC owns it.
  }

 private:
  CallGuard& guard_;
  const AdmitReflection admit_;
};

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> CallGuard::MakeInterceptors(
    AdmitReflection admit_reflection) {
  return std::make_unique<Factory>(*this, std::move(admit_reflection));
}

}  // namespace modelhost
