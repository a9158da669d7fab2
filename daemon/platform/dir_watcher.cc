#include "daemon/platform/dir_watcher.h"

#include <sys/epoll.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"

namespace modelhost {
namespace {

constexpr uint32_t kMask = IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_DELETE_SELF |
                           IN_MOVE_SELF | IN_ATTRIB | IN_ONLYDIR;

}  // namespace

absl::StatusOr<std::unique_ptr<DirWatcher>> DirWatcher::Create(ControlLoop& loop, Clock& clock,
                                                               Options options,
                                                               std::function<void()> changed) {
  UniqueFd inotify(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
  if (!inotify.valid()) {
    return ErrnoStatus(errno, "watch directories (see sysctl fs.inotify.max_user_instances)");
  }
  return std::unique_ptr<DirWatcher>(
      new DirWatcher(loop, clock, options, std::move(changed), std::move(inotify)));
}

DirWatcher::DirWatcher(ControlLoop& loop, Clock& clock, Options options,
                       std::function<void()> changed, UniqueFd inotify)
    : loop_(loop),
      clock_(clock),
      options_(options),
      changed_(std::move(changed)),
      inotify_(std::move(inotify)) {
  watch_ = loop_.Watch(inotify_.get(), EPOLLIN, [this](uint32_t) { Drain(); });
}

DirWatcher::~DirWatcher() {
  loop_.Unwatch(watch_);
  loop_.CancelTimer(timer_);
}

absl::Status DirWatcher::SetPaths(const std::vector<std::string>& paths) {
  absl::Status status;
  std::map<std::string, int> now;
  bool added = false;
  for (const std::string& path : paths) {
    // Adding a path again gives the number that its directory has already, or a new one when
    // another directory took the path.
    const int number = ::inotify_add_watch(inotify_.get(), path.c_str(),
                                           kMask | (options_.contents ? IN_CLOSE_WRITE : 0U));
    if (number >= 0) {
      now[path] = number;
      const auto before = watched_.find(path);
      added = added || before == watched_.end() || before->second != number;
    } else if (errno == ENOSPC || errno == ENOMEM) {
      status.Update(ErrnoStatus(
          errno, absl::StrCat("watch ", path, " (see sysctl fs.inotify.max_user_watches)")));
    } else if (errno != ENOENT && errno != ENOTDIR) {
      status.Update(ErrnoStatus(errno, absl::StrCat("watch ", path)));
    }
  }
  for (const auto& [path, number] : watched_) {
    const bool kept = std::any_of(now.begin(), now.end(),
                                  [n = number](const auto& item) { return item.second == n; });
    if (!kept) (void)::inotify_rm_watch(inotify_.get(), number);  // EINVAL: it went by itself.
  }
  watched_ = std::move(now);
  // What came into a directory after the caller had read it, and before it was watched, made no
  // event. Once: the next call finds nothing new to watch.
  if (added) Settle();
  return status;
}

void DirWatcher::Drain() {
  alignas(inotify_event) char events[16384];
  bool any = false;
  // What happened does not matter, and an overflow of the queue is a change like any other.
  while (true) {
    const ssize_t got = ::read(inotify_.get(), events, sizeof(events));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    for (ssize_t at = 0; at < got;) {
      const auto* event = reinterpret_cast<const inotify_event*>(events + at);
      // IN_IGNORED only follows our own removal of a watch, or IN_DELETE_SELF.
      if ((event->mask & IN_IGNORED) == 0) any = true;
      at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
    }
  }
  if (any) Settle();
}

void DirWatcher::Settle() {
  const absl::Duration now = clock_.Monotonic();
  if (timer_ == 0) {
    first_ = now;
  } else {
    loop_.CancelTimer(timer_);
  }
  const absl::Duration due = std::min(now + options_.settle, first_ + options_.settle * 10);
  timer_ = loop_.PostDelayed(std::max(due - now, absl::ZeroDuration()), [this] {
    timer_ = 0;
    changed_();  // May destroy this object.
  });
}

}  // namespace modelhost
