// modelhost-reader: reads models as a client would, and says what it saw. For trying things out,
// for tests and for measuring.
//
//   modelhost-reader --ref planner --checksum            one line per tensor, then one per version
//   modelhost-reader --ref a --ref b --set --loops 100   both from one snapshot, in every loop anew
//   modelhost-reader --ref planner --follow --loops 1000 --checksum   adopts when it can, and
//   checks
//                                                        that a version always has the same bytes
//
// Every loop acquires its references (or, with --follow, adopts) and reads them. `bad_reads` counts
// versions whose checksum was not what it had been before in this process: 0 unless bytes of two
// versions were mixed or changed. Exit 0; 1 on an error, which is one line on stderr; 3 when
// bad_reads is not 0.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "client/examples/arguments.h"
#include "modelhost/modelhost.hpp"

namespace {

using std::chrono::steady_clock;

constexpr char kUsage[] =
    "modelhost-reader [--runtime-dir DIR] [--deadline MS] --ref REF [--ref REF]... [--set] "
    "[--follow] [--wait MS] [--loops N] [--period MS] [--checksum] [--tensors] [--file PATH] "
    "[--pss] [--attach N] [--hold MS] [--hold-stdin] [--ready-fd N] [--json]";

double Microseconds(steady_clock::duration time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

// Sixty-four bits of all bytes, their order and their number. Not cryptographic; runs at the speed
// of memory.
uint64_t Checksum(const void* data, uint64_t nbytes) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint64_t lanes[4] = {0x9e3779b97f4a7c15U, 0xbf58476d1ce4e5b9U, 0x94d049bb133111ebU, nbytes};
  uint64_t at = 0;
  for (; at + 32 <= nbytes; at += 32) {
    for (int i = 0; i < 4; ++i) {
      uint64_t word = 0;
      std::memcpy(&word, bytes + at + static_cast<uint64_t>(i) * 8, sizeof(word));
      lanes[i] = (lanes[i] ^ word) * 0x100000001b3U;
    }
  }
  uint64_t sum = 0xcbf29ce484222325U;
  for (const uint64_t lane : lanes) sum = (sum ^ lane ^ (lane >> 29)) * 0x100000001b3U;
  for (; at < nbytes; ++at) sum = (sum ^ bytes[at]) * 0x100000001b3U;
  return sum;
}

std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", c);
      quoted += escape;
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string Hex(uint64_t number) {
  char text[20];
  std::snprintf(text, sizeof(text), "%016" PRIx64, number);
  return text;
}

// One line of output: "kind key=value ...", or a JSON object with the same keys.
class Line {
 public:
  Line(bool json, const char* kind) : json_(json) {
    text_ = json ? "{\"kind\":" + Quoted(kind) : std::string(kind);
  }
  Line& Text(const char* key, std::string_view value) { return Add(key, value, true); }
  template <typename T>
  Line& Number(const char* key, T value) {
    std::ostringstream out;
    out << std::fixed;
    out.precision(2);
    out << value;
    return Add(key, out.str(), false);
  }
  void Print() {
    std::printf("%s%s\n", text_.c_str(), json_ ? "}" : "");
    std::fflush(stdout);
  }

 private:
  Line& Add(const char* key, std::string_view value, bool quote) {
    if (json_) {
      text_ += "," + Quoted(key) + ":" + (quote ? Quoted(value) : std::string(value));
    } else {
      text_ += " " + std::string(key) + "=" + std::string(value);
    }
    return *this;
  }
  bool json_;
  std::string text_;
};

// Sums of /proc/self/smaps over the mappings that hold weights: kPss is this process's share.
struct MappedBytes {
  uint64_t size = 0;
  uint64_t rss = 0;
  uint64_t pss = 0;
};
MappedBytes MeasureMapped(const std::vector<modelhost::ModelHandle>& models) {
  std::vector<uintptr_t> places;
  for (const auto& model : models) {
    for (size_t i = 0; i < model.tensor_count(); ++i) {
      const auto tensor = model.TensorAt(i);
      if (tensor.ok() && tensor->data() != nullptr) {
        places.push_back(reinterpret_cast<uintptr_t>(tensor->data()));
      }
    }
  }
  std::sort(places.begin(), places.end());
  MappedBytes sum;
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool ours = false;
  while (std::getline(smaps, line)) {
    uintptr_t first = 0;
    uintptr_t last = 0;
    uint64_t kilobytes = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &first, &last) == 2) {
      const auto at = std::lower_bound(places.begin(), places.end(), first);
      ours = at != places.end() && *at < last;
    } else if (!ours) {
      continue;
    } else if (std::sscanf(line.c_str(), "Size: %" SCNu64, &kilobytes) == 1) {
      sum.size += kilobytes * 1024;
    } else if (std::sscanf(line.c_str(), "Rss: %" SCNu64, &kilobytes) == 1) {
      sum.rss += kilobytes * 1024;
    } else if (std::sscanf(line.c_str(), "Pss: %" SCNu64, &kilobytes) == 1) {
      sum.pss += kilobytes * 1024;
    }
  }
  return sum;
}

int Fail(const modelhost::Error& error) {
  std::fprintf(stderr, "error: %s\n", error.ToString().c_str());
  return 1;
}

struct Settings {
  modelhost::Client::Options connect;
  modelhost::AcquireOptions acquire;
  std::vector<std::string> refs;
  std::string file;
  long loops = 1;
  long period_ms = 0;
  long attach = 0;
  long hold_ms = 0;
  long ready_fd = -1;
  bool set = false;
  bool follow = false;
  bool checksum = false;
  bool tensors = false;
  bool pss = false;
  bool hold_stdin = false;
  bool json = false;
};

Settings ReadSettings(int argc, char** argv) {
  Arguments arguments(argc, argv);
  Settings settings;
  settings.connect.runtime_dir = arguments.Value("--runtime-dir", "");
  settings.connect.deadline = std::chrono::milliseconds(arguments.Number("--deadline", 0));
  settings.refs = arguments.Values("--ref");
  const long wait_ms = arguments.Number("--wait", 0);
  settings.acquire.wait = wait_ms > 0;
  settings.acquire.deadline = std::chrono::milliseconds(wait_ms);
  settings.loops = arguments.Number("--loops", 1);
  settings.period_ms = arguments.Number("--period", 0);
  settings.attach = arguments.Number("--attach", 0);
  settings.hold_ms = arguments.Number("--hold", 0);
  settings.ready_fd = arguments.Number("--ready-fd", -1);
  settings.file = arguments.Value("--file", "");
  settings.set = arguments.Switch("--set");
  settings.follow = arguments.Switch("--follow");
  settings.checksum = arguments.Switch("--checksum");
  settings.tensors = arguments.Switch("--tensors");
  settings.pss = arguments.Switch("--pss");
  settings.hold_stdin = arguments.Switch("--hold-stdin");
  settings.json = arguments.Switch("--json");
  arguments.Done(kUsage);
  if (settings.refs.empty()) {
    std::fprintf(stderr, "error: no --ref\nusage: %s\n", kUsage);
    std::exit(2);
  }
  return settings;
}

// From connect to the first tensor's pointer, `count` times in this process.
int MeasureAttach(const Settings& settings) {
  std::vector<double> times;
  for (long i = 0; i < settings.attach; ++i) {
    const auto before = steady_clock::now();
    auto client = modelhost::Client::Connect(settings.connect);
    if (!client.ok()) return Fail(client.error());
    auto model = client->Acquire(settings.refs[0], settings.acquire);
    if (!model.ok()) return Fail(model.error());
    const auto tensor = model->TensorAt(0);
    if (!tensor.ok()) return Fail(tensor.error());
    times.push_back(Microseconds(steady_clock::now() - before));
  }
  std::sort(times.begin(), times.end());
  const auto at = [&](double part) {
    return times[std::min(times.size() - 1, static_cast<size_t>(part * double(times.size())))];
  };
  Line(settings.json, "attach")
      .Number("count", times.size())
      .Number("p50_us", at(0.5))
      .Number("p99_us", at(0.99))
      .Number("max_us", times.back())
      .Print();
  return 0;
}

class Reader {
 public:
  explicit Reader(const Settings& settings) : settings_(settings) {}

  void Read(const modelhost::ModelHandle& model, bool say) {
    uint64_t sum = 0;
    uint64_t nbytes = 0;
    for (size_t i = 0; i < model.tensor_count(); ++i) {
      const auto tensor = model.TensorAt(i);
      if (!tensor.ok()) {
        Fail(tensor.error());
        ++bad_reads_;
        return;
      }
      nbytes += tensor->nbytes();
      if (!settings_.checksum || tensor->data() == nullptr) continue;
      const uint64_t own = Checksum(tensor->data(), tensor->nbytes());
      sum = (sum ^ own) * 0x100000001b3U;
      if (say && settings_.tensors) {
        Line(settings_.json, "tensor")
            .Text("model", model.name())
            .Text("name", tensor->name())
            .Text("dtype", tensor->dtype())
            .Number("nbytes", tensor->nbytes())
            .Text("checksum", Hex(own))
            .Print();
      }
    }
    const std::string key = model.name() + " " + std::string(model.digest());
    const auto [known, first] = checksums_.try_emplace(key, sum);
    if (!first && known->second != sum) ++bad_reads_;
    ++reads_;
    if (!say && !first) return;
    Line line(settings_.json, "version");
    line.Text("model", model.model())
        .Number("version", model.version())
        .Text("label", model.label())
        .Number("generation", model.generation())
        .Text("digest", model.digest())
        .Text("format", model.format())
        .Number("tensors", model.tensor_count())
        .Number("nbytes", nbytes);
    if (settings_.checksum) line.Text("checksum", Hex(sum));
    line.Print();
  }

  uint64_t reads() const { return reads_; }
  uint64_t bad_reads() const { return bad_reads_; }

 private:
  const Settings& settings_;
  std::map<std::string, uint64_t> checksums_;
  uint64_t reads_ = 0;
  uint64_t bad_reads_ = 0;
};

void PrintMemory(const Settings& settings, const std::vector<modelhost::ModelHandle>& models) {
  const MappedBytes mapped = MeasureMapped(models);
  Line(settings.json, "memory")
      .Number("size", mapped.size)
      .Number("rss", mapped.rss)
      .Number("pss", mapped.pss)
      .Print();
}

// Keeps the models until the time is over and stdin has ended. With --pss every line on stdin asks
// for a measurement: this process's share is only right while all the others hold theirs.
void Hold(const Settings& settings, const std::vector<modelhost::ModelHandle>& models) {
  if (settings.ready_fd >= 0) {
    (void)!::write(static_cast<int>(settings.ready_fd), "ready\n", 6);
    ::close(static_cast<int>(settings.ready_fd));
  }
  if (settings.hold_ms > 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(settings.hold_ms));
  }
  char buffer[256];
  while (settings.hold_stdin && ::read(0, buffer, sizeof(buffer)) > 0) {
    if (settings.pss) PrintMemory(settings, models);
  }
}

int Run(const Settings& settings) {
  const auto before = steady_clock::now();
  auto client = modelhost::Client::Connect(settings.connect);
  if (!client.ok()) return Fail(client.error());
  Reader reader(settings);
  std::vector<modelhost::ModelHandle> models;
  std::vector<modelhost::LiveSet> live;
  uint64_t adopted = 0;
  if (settings.follow) {
    auto followed = client->FollowSet(settings.refs, settings.acquire);
    if (!followed.ok()) return Fail(followed.error());
    live.push_back(std::move(*followed));
  }
  const auto take = [&]() -> modelhost::Result<bool> {
    models.clear();
    if (settings.follow) {
      if (live[0].Adopt()) ++adopted;
      for (size_t i = 0; i < live[0].size(); ++i) models.push_back(live[0][i]);
      return true;
    }
    if (settings.set) {
      auto acquired = client->AcquireSet(settings.refs, settings.acquire);
      if (!acquired.ok()) return acquired.error();
      models = std::move(*acquired);
      return true;
    }
    for (const std::string& ref : settings.refs) {
      auto acquired = client->Acquire(ref, settings.acquire);
      if (!acquired.ok()) return acquired.error();
      models.push_back(std::move(*acquired));
    }
    return true;
  };

  auto next = steady_clock::now();
  for (long loop = 0; loop < settings.loops; ++loop) {
    const auto taken = take();
    if (!taken.ok()) return Fail(taken.error());
    if (loop == 0) {
      const auto tensor = models[0].TensorAt(0);
      Line(settings.json, "attached")
          .Number("attach_us", Microseconds(steady_clock::now() - before))
          .Text("first_tensor", tensor.ok() ? tensor->name() : "")
          .Number("epoch", client->state().epoch)
          .Print();
    }
    for (const auto& model : models) reader.Read(model, loop == 0);
    if (loop == 0 && !settings.file.empty()) {
      for (const auto& model : models) {
        const auto file = model.File(settings.file);
        if (!file.ok()) return Fail(file.error());
        Line(settings.json, "file")
            .Text("model", model.name())
            .Text("path", file->path())
            .Number("nbytes", file->nbytes())
            .Text("fd_path", file->fd_path())
            .Text("checksum", Hex(Checksum(file->text().data(), file->nbytes())))
            .Print();
      }
    }
    if (settings.period_ms > 0) {
      next += std::chrono::milliseconds(settings.period_ms);
      std::this_thread::sleep_until(next);
    }
  }
  if (settings.pss) PrintMemory(settings, models);
  Hold(settings, models);
  Line(settings.json, "done")
      .Number("reads", reader.reads())
      .Number("bad_reads", reader.bad_reads())
      .Number("adopted", adopted)
      .Number("reconnects", client->state().reconnects)
      .Print();
  return reader.bad_reads() == 0 ? 0 : 3;
}

}  // namespace

int main(int argc, char** argv) {
  const Settings settings = ReadSettings(argc, argv);
  return settings.attach > 0 ? MeasureAttach(settings) : Run(settings);
}
