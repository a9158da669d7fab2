// Ctrl-C as something to ask for instead of something that strikes.
//
// While one exists, SIGINT (and what else is asked for) is blocked in the thread that made it and
// in every thread started from there afterwards; it must therefore be made before the first gRPC
// call of a process. One at a time. Not thread-safe.
#pragma once

#include <csignal>
#include <initializer_list>

#include "proto/handle/unique_fd.h"

namespace modelhost::modelctl {

class Interrupts {
 public:
  explicit Interrupts(std::initializer_list<int> signals = {SIGINT});
  ~Interrupts();  // A Ctrl-C that nobody took strikes now.
  Interrupts(const Interrupts&) = delete;
  Interrupts& operator=(const Interrupts&) = delete;

  // True once for each Ctrl-C or other signal asked for since the last call. Never blocks.
  bool Take();

 private:
  sigset_t before_;
  UniqueFd signals_;
};

}  // namespace modelhost::modelctl
