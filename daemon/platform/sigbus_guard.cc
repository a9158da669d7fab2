#include "daemon/platform/sigbus_guard.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <utility>

#include "daemon/platform/linux_os.h"

namespace modelhost {
namespace {

// A signal handler is given no argument of ours, so what it needs must be global: the guards of the
// thread, and what InstallSigbusHandler wrote before any guard was made.
thread_local SigbusGuard* innermost = nullptr;
struct sigaction previous_action;
uintptr_t page_bytes = 4096;

}  // namespace

struct SigbusHandler {
  static bool Handle(void* address) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    for (SigbusGuard* guard = innermost; guard != nullptr; guard = guard->outer_) {
      for (const std::span<const std::byte>& range : guard->ranges_) {
        const auto begin = reinterpret_cast<uintptr_t>(range.data());
        if (at < begin || at - begin >= range.size()) continue;
        if (!MapZeroPage(address, page_bytes)) return false;
        guard->hit_ = true;
        return true;
      }
    }
    return false;
  }

  static void OnSignal(int /*signal*/, siginfo_t* info, void* /*context*/) {
    const int saved_errno = errno;
    // Sent by kill(), not by a fault: no address, nobody's page.
    const bool fault = info->si_code == BUS_ADRERR || info->si_code == BUS_OBJERR ||
                       info->si_code == BUS_MCEERR_AR;
    if (!fault || !Handle(info->si_addr)) {
      // What was there before decides: the fault comes again, to it.
      ::sigaction(SIGBUS, &previous_action, nullptr);
      if (!fault) ::raise(SIGBUS);
    }
    errno = saved_errno;
  }
};

void InstallSigbusHandler() {
  struct sigaction action {};
  action.sa_sigaction = &SigbusHandler::OnSignal;
  action.sa_flags = SA_SIGINFO;
  ::sigemptyset(&action.sa_mask);
  static std::atomic<bool> installed{false};
  if (installed.exchange(true)) return;
  page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  ::sigaction(SIGBUS, &action, &previous_action);
}

SigbusGuard::SigbusGuard(std::span<const std::byte> range)
    : SigbusGuard(std::vector<std::span<const std::byte>>{range}) {}

SigbusGuard::SigbusGuard(std::vector<std::span<const std::byte>> ranges)
    : ranges_(std::move(ranges)), outer_(innermost) {
  // The handler runs on this thread: the compiler, not the processor, must keep the order.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  innermost = this;
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

SigbusGuard::~SigbusGuard() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  innermost = outer_;
}

bool SigbusGuard::hit() const {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  return hit_;
}

}  // namespace modelhost
