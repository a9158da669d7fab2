#include "client/modelctl/worker_lease.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/modelctl/render.h"

namespace modelhost::modelctl {
namespace {

// A wait is cut into pieces so that Ctrl-C is noticed; they grow while a busy daemon is silent.
constexpr absl::Duration kPiece = absl::Milliseconds(250);
constexpr absl::Duration kLongestPiece = absl::Seconds(4);
// Without --timeout: for a daemon that is there, and slow.
constexpr absl::Duration kLeaseConnectLimit = absl::Seconds(10);
// For an answer of a daemon that we are connected to.
constexpr absl::Duration kAnswerLimit = absl::Seconds(30);

Exit FromLibrary(const mh_error& error, const std::string& what) {
  return FromError(Error{static_cast<Code>(error.status), error.message, 0}, what);
}

uint64_t PieceMs(absl::Time until, absl::Duration piece) {
  const absl::Duration left = std::clamp(until - absl::Now(), absl::Milliseconds(1), piece);
  return static_cast<uint64_t>(absl::ToInt64Milliseconds(left));
}

}  // namespace

Outcome<WorkerLease> WorkerLease::Take(Context& context, const Ref& ref,
                                       const std::function<bool()>& interrupted) {
  Outcome<Sockets> sockets = context.sockets();
  if (!sockets.ok()) return sockets.exit();
  const auto& timeout = context.globals().timeout;
  const absl::Time until = absl::Now() + timeout.value_or(kLeaseConnectLimit);
  const std::string name = ref.ToString();
  const Exit stop{ExitCode::kInterrupted, ""};

  WorkerLease lease;
  mh_error error{};
  mh_options options = MH_OPTIONS_INIT;
  options.runtime_dir = sockets->runtime_dir.c_str();
  absl::Duration piece = kPiece;
  while (lease.client_ == nullptr) {
    options.deadline_ms = PieceMs(until, piece);
    lease.client_.reset(mh_connect(&options, &error));
    if (lease.client_ != nullptr) break;
    if (interrupted()) return stop;
    const bool slow = error.status == MH_DEADLINE_EXCEEDED;
    const bool may_come = slow || error.status == MH_UNAVAILABLE;
    if (!may_come || (!slow && !timeout.has_value()) || absl::Now() >= until) {
      Exit exit = FromLibrary(error, name);
      if (may_come) exit.code = ExitCode::kUnreachable;
      return exit;
    }
    if (slow) piece = std::min(piece * 2, kLongestPiece);
  }
  // A piece is also what the client waits for each later answer, files among them: again, with
  // more.
  options.deadline_ms = static_cast<uint64_t>(absl::ToInt64Milliseconds(kAnswerLimit));
  lease.client_.reset(mh_connect(&options, &error));
  if (lease.client_ == nullptr) return FromLibrary(error, name);
  mh_acquire_options acquire = MH_ACQUIRE_OPTIONS_INIT;
  acquire.wait = timeout.has_value() ? 1 : 0;
  while (true) {
    mh_handle* handle = nullptr;
    acquire.deadline_ms = acquire.wait == 1 ? PieceMs(until, kPiece) : 0;
    const mh_status status =
        mh_acquire(lease.client_.get(), name.c_str(), &acquire, &handle, &error);
    if (status == MH_OK) {
      lease.handle_.reset(handle);
      return lease;
    }
    if (interrupted()) return stop;
    if (status != MH_DEADLINE_EXCEEDED || acquire.wait == 0 || absl::Now() >= until) {
      return FromLibrary(error, name);
    }
  }
}

Outcome<std::vector<LeasedFile>> WorkerLease::Files() const {
  std::vector<LeasedFile> files;
  const size_t count = mh_file_count(handle_.get());
  for (size_t i = 0; i < count; ++i) {
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
