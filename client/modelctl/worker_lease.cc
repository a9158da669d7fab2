#include "client/modelctl/worker_lease.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/modelctl/render.h"

namespace modelhost::modelctl {
namespace {

// Without --timeout: for a daemon to be there at all, and for one that is there and slow (or goes
// meanwhile: it may be restarting).
constexpr absl::Duration kPresentLimit = absl::Milliseconds(250);
constexpr absl::Duration kSlowLimit = absl::Seconds(10);
// For an answer of a daemon that we are connected to.
constexpr absl::Duration kAnswerLimit = absl::Seconds(30);

Exit FromLibrary(const mh_error& error, const std::string& what) {
  if (error.status == MH_CANCELLED) return {ExitCode::kInterrupted, ""};
  return FromError(Error{static_cast<Code>(error.status), error.message, 0}, what);
}

uint64_t Milliseconds(absl::Duration limit) {
  return static_cast<uint64_t>(absl::ToInt64Milliseconds(std::max(limit, absl::Milliseconds(1))));
}

int Ask(void* interrupted) {
  return (*static_cast<const std::function<bool()>*>(interrupted))() ? 1 : 0;
}

}  // namespace

Outcome<WorkerLease> WorkerLease::Take(Context& context, const Ref& ref,
                                       std::function<bool()> interrupted) {
  Outcome<Sockets> sockets = context.sockets();
  if (!sockets.ok()) return sockets.exit();
  const auto& timeout = context.globals().timeout;
  const absl::Time until = absl::Now() + timeout.value_or(kSlowLimit);
  const std::string name = ref.ToString();

  WorkerLease lease;
  lease.interrupted_ = std::make_unique<std::function<bool()>>(std::move(interrupted));
  mh_error error{};
  mh_options options = MH_OPTIONS_INIT;
  options.runtime_dir = sockets->runtime_dir.c_str();
  options.interrupted = Ask;
  options.context = lease.interrupted_.get();
  const auto connect = [&](absl::Duration limit) {
    options.deadline_ms = Milliseconds(limit);
    lease.client_.reset(mh_connect(&options, &error));
    return lease.client_ != nullptr;
  };
  // The limit is also the client's for each later answer, files among them: again, with more.
  if ((!connect(timeout.value_or(kPresentLimit)) &&
       (error.status != MH_DEADLINE_EXCEEDED || !connect(until - absl::Now()))) ||
      !connect(kAnswerLimit)) {
    Exit exit = FromLibrary(error, name);
    if (error.status == MH_DEADLINE_EXCEEDED || error.status == MH_UNAVAILABLE) {
      exit.code = ExitCode::kUnreachable;
    }
    return exit;
  }
  mh_acquire_options acquire = MH_ACQUIRE_OPTIONS_INIT;
  acquire.wait = timeout.has_value() ? 1 : 0;
  if (acquire.wait == 1) acquire.deadline_ms = Milliseconds(until - absl::Now());
  mh_handle* handle = nullptr;
  if (mh_acquire(lease.client_.get(), name.c_str(), &acquire, &handle, &error) != MH_OK) {
    return FromLibrary(error, name);
  }
  lease.handle_.reset(handle);
  return lease;
}

Outcome<std::vector<LeasedFile>> WorkerLease::Files() const {
  std::vector<LeasedFile> files;
  const size_t count = mh_file_count(handle_.get());
  for (size_t i = 0; i < count; ++i) {
    // The library asks while it waits; there may be many short waits.
    if ((*interrupted_)()) return Exit{ExitCode::kInterrupted, ""};
    mh_error error{};
    mh_file_view view = MH_FILE_VIEW_INIT;
    view.error = &error;
    if (mh_file_at(handle_.get(), i, &view) != MH_OK) return FromLibrary(error, "files");
    const std::string path = view.path;
    view = MH_FILE_VIEW_INIT;
    view.error = &error;
    if (mh_file(handle_.get(), path.c_str(), &view) != MH_OK) return FromLibrary(error, path);
    files.push_back({path, view.fd, {static_cast<const std::byte*>(view.data), view.nbytes}});
    if (view.data == nullptr) files.back().bytes = {};
  }
  return files;
}

}  // namespace modelhost::modelctl
