#include "client/modelctl/flow_test_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>

namespace modelhost::modelctl::testing {
namespace {

constexpr auto kLimit = std::chrono::seconds(20);

std::pair<UniqueFd, UniqueFd> Pipe() {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
  return {UniqueFd(ends[0]), UniqueFd(ends[1])};
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (std::string& text : texts) out.push_back(text.data());
  out.push_back(nullptr);
  return out;
}

}  // namespace

Process::Process(std::vector<std::string> command,
                 const std::map<std::string, std::string>& environment) {
  auto [out_read, out_write] = Pipe();
  auto [err_read, err_write] = Pipe();
  std::vector<std::string> env = {std::string("PATH=") + std::getenv("PATH")};
  for (const auto& [name, value] : environment) env.push_back(name + "=" + value);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out_write.get(), 1);
  posix_spawn_file_actions_adddup2(&actions, err_write.get(), 2);
  const int error = ::posix_spawnp(&pid_, command[0].c_str(), &actions, nullptr,
                                   Pointers(command).data(), Pointers(env).data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) std::abort();
  out_ = std::move(out_read);
  err_ = std::move(err_read);
  out_reader_ = std::thread([this] { Collect(out_.get(), &out_text_); });
  err_reader_ = std::thread([this] { Collect(err_.get(), &err_text_); });
}

Process::~Process() {
  if (!ended_) {
    ::kill(pid_, SIGKILL);
    (void)Wait();
  }
}

void Process::Signal(int signal) { ::kill(pid_, signal); }

bool Process::WaitForErr(const std::string& text) { return WaitFor(text, &err_text_); }
bool Process::WaitForOut(const std::string& text) { return WaitFor(text, &out_text_); }

Ended Process::Wait() {
  // A program that hangs is a failure of the test, not of the machine.
  const UniqueFd handle(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  pollfd entry{handle.get(), POLLIN, 0};
  const int limit_ms = static_cast<int>(std::chrono::milliseconds(kLimit).count());
  if (::poll(&entry, 1, limit_ms) != 1) ::kill(pid_, SIGKILL);
  int status = 0;
  rusage usage{};
  ::wait4(pid_, &status, 0, &usage);
  ended_ = true;
  out_reader_.join();
  err_reader_.join();
  Ended ended;
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  ended.most_kib = usage.ru_maxrss;
  ended.out = out_text_;
  ended.err = err_text_;
  return ended;
}

void Process::Collect(int fd, std::string* into) {
  char buffer[4096];
  while (true) {
    const ssize_t got = ::read(fd, buffer, sizeof(buffer));
    if (got <= 0) return;
    const std::lock_guard<std::mutex> hold(lock_);
    into->append(buffer, static_cast<size_t>(got));
    more_.notify_all();
  }
}

bool Process::WaitFor(const std::string& text, const std::string* in) {
  std::unique_lock<std::mutex> hold(lock_);
  return more_.wait_for(hold, kLimit, [&] { return in->find(text) != std::string::npos; });
}

}  // namespace modelhost::modelctl::testing
