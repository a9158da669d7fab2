#include "daemon/observe/logger.h"

#include <spdlog/async_logger.h>
#include <spdlog/details/thread_pool.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_sinks.h>

#include <atomic>

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
  std::shared_ptr<spdlog::async_logger> logger;
  std::atomic<size_t> lost{0};
};

Logger::Logger(LogLevel level) : sink_(std::make_unique<Sink>()) {
  sink_->writer = std::make_shared<spdlog::details::thread_pool>(kQueueLines, 1);
  sink_->logger = std::make_shared<spdlog::async_logger>(
      "modelhost", std::make_shared<spdlog::sinks::stderr_sink_mt>(), sink_->writer,
      spdlog::async_overflow_policy::overrun_oldest);
  sink_->logger->set_formatter(std::make_unique<spdlog::pattern_formatter>(
      "ts=%Y-%m-%dT%H:%M:%S.%eZ level=%l %v", spdlog::pattern_time_type::utc));
  sink_->logger->set_error_handler([](const std::string&) {});  // Nowhere left to say it.
  sink_->logger->set_level(ToSpdlog(level));
}

// The logger holds the writer weakly: the writer's destructor drains the queue and joins.
Logger::~Logger() = default;

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
