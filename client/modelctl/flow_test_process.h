// Runs the real modelctl beside a test and collects what it says.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "proto/handle/unique_fd.h"

namespace modelhost::modelctl::testing {

struct Ended {
  int code = -1;  // 128 + the signal when one ended it.
  std::string out;
  std::string err;
  int64_t most_kib = 0;  // Of memory in this process at a time: its own and what it had mapped.
};

class Process {
 public:
  // `environment` replaces the test's own, but for PATH.
  Process(std::vector<std::string> command, const std::map<std::string, std::string>& environment);
  ~Process();  // Kills it if it still runs.

  void Signal(int signal);
  // False: it did not say so within 20 s.
  bool WaitForErr(const std::string& text);
  bool WaitForOut(const std::string& text);
  Ended Wait();

 private:
  void Collect(int fd, std::string* into);
  bool WaitFor(const std::string& text, const std::string* in);

  pid_t pid_ = -1;
  bool ended_ = false;
  UniqueFd out_, err_;
  std::mutex lock_;
  std::condition_variable more_;
  std::string out_text_, err_text_;  // Under lock_.
  std::thread out_reader_, err_reader_;
};

}  // namespace modelhost::modelctl::testing
