// For test programs only, in the place of fault_point_none.cc:
//
//   MODELHOST_FAULT_POINT=NAME[:NTH]  the process kills itself (SIGKILL) when it passes NAME for
//   the
//                                     NTH time (from 1, the default)
//   MODELHOST_FAULT_LIST=FILE         the name of each point that is passed is appended to FILE
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

class Armed {
 public:
  Armed() {
    if (const char* point = std::getenv("MODELHOST_FAULT_POINT")) {
      name_ = point;
      if (const size_t colon = name_.rfind(':'); colon != std::string::npos) {
        nth_ = static_cast<int>(std::strtol(name_.c_str() + colon + 1, nullptr, 10));
        name_.resize(colon);
      }
    }
    if (const char* file = std::getenv("MODELHOST_FAULT_LIST")) {
      list_ = ::open(file, O_WRONLY | O_APPEND | O_CLOEXEC);
    }
  }

  void Pass(const char* name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (list_ >= 0) {
      const std::string line = std::string(name) + "\n";
      if (::write(list_, line.data(), line.size()) < 0) list_ = -1;
    }
    if (name == name_ && --nth_ == 0) {
      ::kill(::getpid(), SIGKILL);
      while (true) ::pause();
    }
  }

 private:
  std::mutex mutex_;
  std::string name_;
  int nth_ = 1;
  int list_ = -1;
};

}  // namespace

void FaultPoint(FaultName name) {
  static Armed& armed = *new Armed;  // Never destroyed: threads may still run at exit.
  armed.Pass(name.c_str());
}

}  // namespace modelhost
