// For test programs only, in the place of fault_point_none.cc:
//
//   MODELHOST_FAULT_POINT=NAME[:NTH]  the process kills itself (SIGKILL) when it passes NAME for
//                                     the NTH time; from 1, the default
//   MODELHOST_FAULT_FILE=FILE         the same, from when FILE is there, which has NAME[:NTH]
//   MODELHOST_FAULT_LIST=FILE         each name that is passed is appended to FILE, once that is
//                                     there
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <string>
#include <utility>

#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

class Armed {
 public:
  Armed() {
    if (const char* point = std::getenv("MODELHOST_FAULT_POINT")) SetPoint(point);
  }

  void Pass(const char* name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const char* file = std::getenv("MODELHOST_FAULT_LIST")) {
      const int list = ::open(file, O_WRONLY | O_APPEND | O_CLOEXEC);
      const std::string line = std::string(name) + "\n";
      if (list >= 0) (void)!::write(list, line.data(), line.size());
      if (list >= 0) ::close(list);
    }
    if (const char* file = std::getenv("MODELHOST_FAULT_FILE"); file != nullptr && name_.empty()) {
      const int point = ::open(file, O_RDONLY | O_CLOEXEC);
      char text[128];
      const ssize_t bytes = point < 0 ? -1 : ::read(point, text, sizeof(text));
      if (bytes > 0) SetPoint(std::string(text, static_cast<size_t>(bytes)));
      if (point >= 0) ::close(point);
    }
    if (name == name_ && --nth_ == 0) {
      ::kill(::getpid(), SIGKILL);
      while (true) ::pause();
    }
  }

 private:
  void SetPoint(std::string point) {
    if (const size_t colon = point.rfind(':'); colon != std::string::npos) {
      nth_ = static_cast<int>(std::strtol(point.c_str() + colon + 1, nullptr, 10));
      point.resize(colon);
    }
    name_ = std::move(point);
  }

  std::mutex mutex_;
  std::string name_;
  int nth_ = 1;
};

}  // namespace

void FaultPoint(FaultName name) {
  static Armed& armed = *new Armed;  // Never destroyed: threads may still run at exit.
  armed.Pass(name.c_str());
}

}  // namespace modelhost
