#include "daemon/observe/logger.h"

#include <limits.h>
#include <poll.h>
#include <spdlog/async_logger.h>
#include <spdlog/details/thread_pool.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/base_sink.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>

namespace modelhost {
namespace {

constexpr size_t kQueueLines = 8192;

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

// stderr, which may be a pipe that nobody reads: waits for room, but not for ever once the end has
// come. At most PIPE_BUF bytes at a time: what poll calls writable takes those without waiting.
class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  // From now on waiting has an end. Any thread.
  void EndSoon(absl::Duration limit) {
    end_ =
        (std::chrono::steady_clock::now() + absl::ToChronoMilliseconds(limit)).time_since_epoch();
  }

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    const char* at = line.data();
    size_t left = line.size();
    while (left > 0) {
      if (!WaitForRoom()) return;
      const ssize_t wrote = ::write(STDERR_FILENO, at, std::min<size_t>(left, PIPE_BUF));
      if (wrote < 0 && errno != EINTR && errno != EAGAIN) return;  // Nowhere left to say it.
      if (wrote <= 0) continue;
      at += wrote;
      left -= static_cast<size_t>(wrote);
    }
  }
  void flush_() override {}

 private:
  bool WaitForRoom() const {
    constexpr int kLookMs = 100;
    while (true) {
      const bool ended = std::chrono::steady_clock::now().time_since_epoch() >= end_.load();
      pollfd stream{.fd = STDERR_FILENO, .events = POLLOUT, .revents = 0};
      // Errors are "ready" too: the write says which.
      if (::poll(&stream, 1, ended ? 0 : kLookMs) > 0) return true;
      if (ended) return false;
    }
  }

  std::atomic<std::chrono::steady_clock::duration> end_{std::chrono::steady_clock::duration::max()};
};

}  // namespace

absl::StatusOr<LogLevel> ParseLogLevel(absl::string_view name) {
  if (name == "debug") return LogLevel::kDebug;
  if (name == "info") return LogLevel::kInfo;
  if (name == "warning" || name == "warn") return LogLevel::kWarning;
  if (name == "error") return LogLevel::kError;
  return absl::InvalidArgumentError(absl::StrCat(
      "log level \"", name.substr(0, 32), "\": unknown (use debug, info, warning or error)"));
}

struct Logger::Sink {
  std::shared_ptr<spdlog::details::thread_pool> writer;
  std::shared_ptr<StderrSink> out;
  std::shared_ptr<spdlog::async_logger> logger;
  std::atomic<size_t> lost{0};
};

Logger::Logger(LogLevel level) : sink_(std::make_unique<Sink>()) {
  sink_->writer = std::make_shared<spdlog::details::thread_pool>(kQueueLines, 1);
  sink_->out = std::make_shared<StderrSink>();
  sink_->logger = std::make_shared<spdlog::async_logger>(
      "modelhost", sink_->out, sink_->writer, spdlog::async_overflow_policy::overrun_oldest);
  sink_->logger->set_formatter(std::make_unique<spdlog::pattern_formatter>(
      "ts=%Y-%m-%dT%H:%M:%S.%eZ level=%l %v", spdlog::pattern_time_type::utc));
  sink_->logger->set_error_handler([](const std::string&) {});  // Nowhere left to say it.
  sink_->logger->set_level(ToSpdlog(level));
}

// The logger holds the writer weakly: the writer's destructor drains the queue and joins.
Logger::~Logger() { sink_->out->EndSoon(kLastWords); }

void Logger::Write(LogLevel level, const LogLine& line) {
  const size_t lost = sink_->writer->overrun_counter();
  const size_t before = sink_->lost.exchange(lost);
  if (lost > before) {
    sink_->logger->log(spdlog::level::warn,
                       LogLine("log_lines_lost").Add("count", lost - before).text());
  }
  sink_->logger->log(ToSpdlog(level), line.text());
}

bool Logger::Enabled(LogLevel level) const { return sink_->logger->should_log(ToSpdlog(level)); }

void Logger::SetLevel(LogLevel level) { sink_->logger->set_level(ToSpdlog(level)); }

}  // namespace modelhost
