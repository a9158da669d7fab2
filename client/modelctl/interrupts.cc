#include "client/modelctl/interrupts.h"

#include <pthread.h>
#include <sys/signalfd.h>
#include <unistd.h>

namespace modelhost::modelctl {

Interrupts::Interrupts(std::initializer_list<int> signals) {
  sigset_t interrupt;
  sigemptyset(&interrupt);
  for (const int signal : signals) {
    // What nohup and the like have this process ignore would come through all the same.
    struct sigaction now {};
    if (::sigaction(signal, nullptr, &now) != 0 || now.sa_handler != SIG_IGN) {
      sigaddset(&interrupt, signal);
    }
  }
  pthread_sigmask(SIG_BLOCK, &interrupt, &before_);
  signals_ = UniqueFd(::signalfd(-1, &interrupt, SFD_CLOEXEC | SFD_NONBLOCK));
  // Without a descriptor to ask, Ctrl-C had better strike.
  if (!signals_.valid()) pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

Interrupts::~Interrupts() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

bool Interrupts::Take() {
  signalfd_siginfo info;
  return signals_.valid() && ::read(signals_.get(), &info, sizeof(info)) == sizeof(info);
}

}  // namespace modelhost::modelctl
