// The daemon while it runs, and its end.
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/app_impl.h"

namespace modelhost {
namespace {

// Who may do what is decided by the kernel's credentials.
constexpr absl::Duration kRpcGrace = absl::Seconds(1);
// A disk that hangs must not hold up the stop: nothing on disk needs an orderly end. Well below the
// TimeoutStopSec= of the unit.
constexpr absl::Duration kStopTime = absl::Seconds(15);
constexpr absl::Duration kShortageInterval = absl::Seconds(10);
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
constexpr int kMostAccepts = 64;  // Of one turn of the loop: others are served in between.
// Of one turn of the loop: others are served in between.
// Told to systemd again and again while the required models load.
constexpr absl::Duration kStartTime = absl::Minutes(2);
constexpr absl::Duration kStartTimeInterval = absl::Minutes(1);
constexpr size_t kMostUnclosed = 4096;  // Sockets and descriptors of peers; more are not accepted.

}  // namespace

void App::Run() {
  impl_->loop->Run();
  if (impl_->parking != nullptr && !impl_->parking->Settle(kStopTime)) {
    impl_->logger.Write(LogLevel::kError,
                        LogLine("stop_forced").Add("note", "systemd takes no messages"));
    std::_Exit(EXIT_FAILURE);
  }
  impl_->logger.Write(LogLevel::kInfo, LogLine("stopped"));
}

void App::Impl::AcceptControl() {
  // Who is left waits for the next turn: the watch is level-triggered.
  for (int accepted = 0; accepted < kMostAccepts && !stopping; ++accepted) {
    auto socket = closer.waiting() < kMostUnclosed
                      ? control_listener->Accept()
                      : absl::ResourceExhaustedError("too many descriptors of peers hang in close");
    if (absl::IsResourceExhausted(socket.status())) {
      // Out of descriptors: the listener would be ready again and again. Others are served
      // meanwhile.
      TellOfShortage("control", socket.status());
      loop->ChangeWatch(control_watch, 0);
      loop->PostDelayed(kAcceptPause, [this] {
        if (!stopping) loop->ChangeWatch(control_watch, EPOLLIN);
      });
      return;
    }
    if (!socket.ok()) return;
    auto peer = PeerOf(*socket);
    if (peer.ok()) {
      peer->comm = CommOf(peer->pid);
      // Who may do nothing is told so by every RPC: a closed connection would look like no daemon.
      server->AddConnection(*socket, *peer);
    }
    closer.Close(peer.ok() ? peer->uid : FdCloser::kNobody, *std::move(socket));
  }
}

// The shortage may last, and accepting is tried ten times a second: one line in a while.
void App::Impl::TellOfShortage(const std::string& socket, const absl::Status& why) {
  const absl::Duration now = clock.Monotonic();
  const auto [told, first] = shortage_told.try_emplace(socket, now);
  if (!first && now - told->second < kShortageInterval) return;
  told->second = now;
  logger.Write(LogLevel::kWarning, LogLine("accept").Add("socket", socket).AddError(why));
}

void App::Impl::OnSignal() {
  signalfd_siginfo info{};
  while (::read(options.signals.get(), &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo == SIGHUP) {
      reloader->Reload([](const absl::StatusOr<ReloadReport>&) {});  // Its log line is the answer.
    } else {
      BeginStop(static_cast<int>(info.ssi_signo));
    }
  }
}

void App::Impl::BeginStop(int signal_number) {
  if (stopping) return;
  stopping = true;
  logger.Write(LogLevel::kInfo, LogLine("stopping").Add("signal", signal_number));
  NotifyStopping();
  // Withdraw first: no new grants, and readers of the page learn that another one will follow.
  catalogue->Close();
  loop->Unwatch(control_watch);
  closer.Close(FdCloser::kNobody, control_listener->TakeFd());
  // Before leases end: what is freed from here on stays in the fd store for the next daemon.
  if (parking != nullptr) parking->Leave();
  broker->Stop();
  // Before anything waits: who loads stops, and RPCs that wait for a load are answered.
  manager->CancelWork();
  devices->Stop();  // A driver that hangs holds up nobody.
  reloader->Stop();
  loop->PostDelayed(kStopTime, [this] {
    logger.Write(
        LogLevel::kError,
        LogLine("stop_forced")
            .Add("note", "work did not end in time (does a disk hang?); ended without it"));
    std::_Exit(EXIT_FAILURE);
  });
  // RPCs wait for the control thread, so it must go on turning while they end.
  pool->Post([this] {
    server->Shutdown(kRpcGrace);
    loop->Post([this] {
      manager->Stop([this] {
        watcher.reset();
        desired_watcher.reset();
        loop->Quit();
      });
    });
  });
}

void App::Impl::FeedWatchdog() {
  const absl::Duration interval = WatchdogInterval();
  if (interval == absl::InfiniteDuration()) return;
  // From the control thread itself: a loop that hangs stops feeding.
  NotifyWatchdog();
  loop->PostDelayed(interval, [this] { FeedWatchdog(); });
}

std::string App::Impl::StatusLine() const {
  const StatusSnapshot status = manager->Status();
  return status.ready
             ? absl::StrCat("ready, ", status.models, " models, ", status.leases, " leases")
             : absl::StrCat("not ready: ", status.not_ready.front());
}

void App::Impl::OnReady(bool ready) {
  if (stopping) return;
  if (ready && !told_ready) {
    told_ready = true;
    NotifyReady(StatusLine());
  } else {
    NotifyStatus(StatusLine());
  }
}

// The start may take as long as the required models do: while they are awaited, and this thread
// turns, systemd does not give up.
void App::Impl::AskForTime() {
  if (told_ready || stopping) return;
  NotifyExtendTimeout(kStartTime);
  loop->PostDelayed(kStartTimeInterval, [this] { AskForTime(); });
}

void App::Impl::TellOfDevices() {
  const DeviceTierSnapshot found = devices->Snapshot();
  if (found.gpus.empty()) {
    logger.Write(LogLevel::kInfo, LogLine("host_only").Add("reason", found.reason));
  }
  for (const DeviceTierSnapshot::Gpu& gpu : found.gpus) {
    LogLine line("gpu");
    line.Add("uuid", gpu.report.info.uuid)
        .Add("name", gpu.report.info.name)
        .Add("mode", abi::DeviceModeName(gpu.mode))
        .Add("reason", gpu.usable ? gpu.report.reason : gpu.problem)
        .Add("budget_bytes", gpu.limit_bytes);
    logger.Write(gpu.usable ? LogLevel::kInfo : LogLevel::kWarning, line);
  }
}

void App::Impl::OnScan(uint64_t /*added*/, uint64_t /*invalid*/) { RefreshWatches(); }

void App::Impl::OnDesiredFile(const DesiredFileReport& report) {
  if (desired_watcher == nullptr || (report.watch.empty() && !report.file.empty())) return;
  if (auto status = desired_watcher->SetPaths(report.watch); !status.ok()) {
    logger.Write(LogLevel::kDebug, LogLine("watch").AddError(status));
  }
}

void App::Impl::RefreshWatches() {
  if (watcher == nullptr) return;
  pool->Post([this] {
    auto paths = store->WatchPaths();
    loop->Post([this, paths = std::move(paths)] {
      if (watcher == nullptr) return;
      if (auto status = watcher->SetPaths(paths); !status.ok()) {
        logger.Write(LogLevel::kWarning, LogLine("watch").AddError(status));
      }
    });
  });
}

}  // namespace modelhost
