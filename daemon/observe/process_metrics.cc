#include "daemon/observe/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace modelhost {
namespace {

std::string ReadText(const char* path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// "btime <seconds>" of /proc/stat.
std::optional<double> BootTime() {
  const std::string text = ReadText("/proc/stat");
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    double seconds = 0;
    if (absl::ConsumePrefix(&line, "btime ") && absl::SimpleAtod(line, &seconds)) return seconds;
  }
  return std::nullopt;
}

std::optional<double> OpenFds() {
  std::error_code error;
  std::filesystem::directory_iterator it("/proc/self/fd", error);
  double count = 0;
  for (; !error && it != std::filesystem::directory_iterator(); it.increment(error)) ++count;
  if (error || count == 0) return std::nullopt;
  return count - 1;  // Not the one that is being looked through.
}

double Limit(rlim_t limit) {
  return limit == RLIM_INFINITY ? std::numeric_limits<double>::infinity()
                                : static_cast<double>(limit);
}

void Add(std::vector<prometheus::MetricFamily>& out, const char* name, const char* help,
         prometheus::MetricType type, double value) {
  prometheus::ClientMetric metric;
  if (type == prometheus::MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  out.push_back({name, help, type, {metric}});
}

}  // namespace

std::optional<ProcessStat> ParseProcessStat(absl::string_view text, double ticks_per_second,
                                            double page_bytes) {
  // "pid (comm) state ppid ...": comm may have spaces and parentheses, so count from the last one.
  const size_t comm_end = text.rfind(')');
  if (comm_end == absl::string_view::npos) return std::nullopt;
  const std::vector<absl::string_view> fields =
      absl::StrSplit(text.substr(comm_end + 1), absl::ByAnyChar(" \n"), absl::SkipEmpty());
  // Numbers as in proc(5), where `state` is 3.
  const auto field = [&](size_t number) -> double {
    double value = -1;
    if (number - 3 >= fields.size() || !absl::SimpleAtod(fields[number - 3], &value)) return -1;
    return value;
  };
  const double user = field(14);
  const double system = field(15);
  const double threads = field(20);
  const double start = field(22);
  const double virtual_bytes = field(23);
  const double resident_pages = field(24);
  if (user < 0 || system < 0 || threads < 0 || start < 0 || virtual_bytes < 0 ||
      resident_pages < 0) {
    return std::nullopt;
  }
  return ProcessStat{.cpu_seconds = (user + system) / ticks_per_second,
                     .resident_bytes = resident_pages * page_bytes,
                     .virtual_bytes = virtual_bytes,
                     .threads = threads,
                     .started_after_boot_seconds = start / ticks_per_second};
}

std::vector<prometheus::MetricFamily> ProcessCollector::Collect() const {
  using prometheus::MetricType;
  std::vector<prometheus::MetricFamily> out;
  const auto stat =
      ParseProcessStat(ReadText("/proc/self/stat"), static_cast<double>(sysconf(_SC_CLK_TCK)),
                       static_cast<double>(sysconf(_SC_PAGESIZE)));
  if (stat.has_value()) {
    Add(out, "process_cpu_seconds_total", "User and system CPU time used.", MetricType::Counter,
        stat->cpu_seconds);
    Add(out, "process_resident_memory_bytes", "Resident memory, mapped weights included.",
        MetricType::Gauge, stat->resident_bytes);
    Add(out, "process_virtual_memory_bytes", "Virtual memory.", MetricType::Gauge,
        stat->virtual_bytes);
    Add(out, "process_threads", "Threads of the process.", MetricType::Gauge, stat->threads);
    if (const auto boot = BootTime(); boot.has_value()) {
      Add(out, "process_start_time_seconds", "When the process started, in Unix time.",
          MetricType::Gauge, *boot + stat->started_after_boot_seconds);
    }
  }
  if (const auto fds = OpenFds(); fds.has_value()) {
    Add(out, "process_open_fds", "Open file descriptors.", MetricType::Gauge, *fds);
  }
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    Add(out, "process_max_fds", "Limit of open file descriptors.", MetricType::Gauge,
        Limit(limit.rlim_cur));
  }
  return out;
}

}  // namespace modelhost
