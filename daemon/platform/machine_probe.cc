#include "daemon/platform/machine_probe.h"

#include <dlfcn.h>
#include <glob.h>
#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace modelhost {
namespace {

namespace fs = std::filesystem;

constexpr char kTensorRtPrefix[] = "libnvinfer.so.";
constexpr int kMostConfDepth = 8;
constexpr size_t kMostConfFiles = 256;
constexpr size_t kMostConfLines = 4096;
constexpr size_t kMostFolderEntries = 100'000;
constexpr int kMostGpus = 64;

// "10.3.0" of "libnvinfer.so.10.3.0"; empty for a name with fewer numbers.
std::string VersionOfLibrary(const std::string& name) {
  absl::string_view rest = name;
  if (!absl::ConsumePrefix(&rest, kTensorRtPrefix)) return "";
  const std::vector<absl::string_view> parts = absl::StrSplit(rest, '.');
  const bool numbers = parts.size() >= 3 && parts.size() <= 4 &&
                       std::all_of(parts.begin(), parts.end(), [](absl::string_view part) {
                         return !part.empty() && part.size() <= 9 &&
                                std::all_of(part.begin(), part.end(), absl::ascii_isdigit);
                       });
  return numbers ? std::string(rest) : "";
}

class LinkerConf {
 public:
  explicit LinkerConf(std::vector<std::string>& folders) : folders_(folders) {}

  void Read(const std::string& path, int depth) {
    if (depth > kMostConfDepth || ++files_ > kMostConfFiles) return;
    std::ifstream in(path);
    std::string line;
    for (size_t lines = 0; lines < kMostConfLines && std::getline(in, line); ++lines) {
      absl::string_view text = line;
      text = absl::StripAsciiWhitespace(text.substr(0, text.find('#')));
      if (absl::ConsumePrefix(&text, "include ") || absl::ConsumePrefix(&text, "include\t")) {
        Include(fs::path(path).parent_path() / std::string(absl::StripAsciiWhitespace(text)),
                depth);
      } else if (absl::StartsWith(text, "/")) {
        folders_.emplace_back(text);
      }
    }
  }

 private:
  void Include(const fs::path& pattern, int depth) {
    glob_t found{};
    if (::glob(pattern.c_str(), 0, nullptr, &found) == 0) {
      for (size_t i = 0; i < found.gl_pathc; ++i) Read(found.gl_pathv[i], depth + 1);
    }
    ::globfree(&found);
  }

  std::vector<std::string>& folders_;
  size_t files_ = 0;
};

// The few functions of the driver that are asked; names and numbers as in cuda.h.
using CuInit = int (*)(unsigned);
using CuDriverGetVersion = int (*)(int*);
using CuDeviceGetCount = int (*)(int*);
using CuDeviceGet = int (*)(int*, int);
using CuDeviceGetAttribute = int (*)(int*, int, int);
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(::dlsym(library, name));
  return *function != nullptr;
}

std::string AskDevices(void* library, std::vector<std::string>* capabilities) {
  CuInit init = nullptr;
  CuDeviceGetCount get_count = nullptr;
  CuDeviceGet get_device = nullptr;
  CuDeviceGetAttribute get_attribute = nullptr;
  if (!Find(library, "cuInit", &init) || !Find(library, "cuDeviceGetCount", &get_count) ||
      !Find(library, "cuDeviceGet", &get_device) ||
      !Find(library, "cuDeviceGetAttribute", &get_attribute)) {
    return "libcuda.so.1 lacks a function that every driver has";
  }
  if (const int error = init(0); error != 0) {
    return absl::StrCat("cuInit answers ", error,
                        error == 100 ? ", no GPU (does this unit see /dev/nvidia*?)" : "");
  }
  int count = 0;
  if (const int error = get_count(&count); error != 0) {
    return absl::StrCat("cuDeviceGetCount answers ", error);
  }
  if (count <= 0) return "the driver has no GPU";
  for (int i = 0; i < std::min(count, kMostGpus); ++i) {
    int device = 0;
    int major = 0;
    int minor = 0;
    int error = get_device(&device, i);
    if (error == 0) error = get_attribute(&major, kCapabilityMajor, device);
    if (error == 0) error = get_attribute(&minor, kCapabilityMinor, device);
    if (error != 0) return absl::StrCat("GPU ", i, ": the driver answers ", error);
    const std::string capability = absl::StrCat(major, ".", minor);
    if (std::find(capabilities->begin(), capabilities->end(), capability) == capabilities->end()) {
      capabilities->push_back(capability);
    }
  }
  return "";
}

std::array<std::pair<const char*, MachineFact MachineFacts::*>, 4> Names() {
  return {{{"platform", &MachineFacts::platform},
           {"tensorrt", &MachineFacts::tensorrt},
           {"compute_capability", &MachineFacts::compute_capability},
           {"cuda_driver", &MachineFacts::cuda_driver}}};
}

std::string OnOneLine(std::string text) {
  std::replace_if(
      text.begin(), text.end(),
      [](char c) { return absl::ascii_iscntrl(static_cast<unsigned char>(c)); }, ' ');
  return text;
}

}  // namespace

MachineFact ProbePlatform() {
  MachineFact fact;
  utsname name{};
  if (::uname(&name) != 0) {
    fact.unknown = "uname fails";
    return fact;
  }
  fact.values.push_back(absl::AsciiStrToLower(absl::StrCat(name.sysname, "-", name.machine)));
  fact.source = "uname";
  return fact;
}

MachineFact ProbeTensorRt(const std::vector<std::string>& folders) {
  MachineFact fact;
  std::set<std::string> seen;
  std::vector<std::string> paths;
  for (const std::string& folder : folders) {
    std::error_code error;
    fs::directory_iterator it(folder, error);
    size_t entries = 0;
    for (; !error && it != fs::directory_iterator() && entries < kMostFolderEntries;
         it.increment(error), ++entries) {
      if (!absl::StartsWith(it->path().filename().string(), kTensorRtPrefix)) continue;
      // libnvinfer.so.10 leads to libnvinfer.so.10.3.0; a link that leads nowhere has no library.
      std::error_code gone;
      const fs::path real = fs::canonical(it->path(), gone);
      if (gone) continue;
      const std::string version = VersionOfLibrary(real.filename().string());
      if (version.empty() || !seen.insert(version).second) continue;
      fact.values.push_back(version);
      paths.push_back(real.string());
    }
  }
  fact.source = absl::StrJoin(paths, ", ");
  if (!fact.known()) fact.unknown = "no libnvinfer.so.X.Y.Z where the dynamic linker looks";
  return fact;
}

std::vector<std::string> LinkerFolders(const std::string& ld_so_conf) {
  std::vector<std::string> folders;
  if (const char* path = std::getenv("LD_LIBRARY_PATH"); path != nullptr) {
    for (const absl::string_view folder : absl::StrSplit(path, absl::ByAnyChar(":;"))) {
      if (absl::StartsWith(folder, "/")) folders.emplace_back(folder);
    }
  }
  LinkerConf(folders).Read(ld_so_conf, 0);
  utsname name{};
  const std::string triplet =
      absl::StrCat(::uname(&name) == 0 ? name.machine : "x86_64", "-linux-gnu");
  for (const char* root : {"/lib/", "/usr/lib/"}) folders.push_back(absl::StrCat(root, triplet));
  for (const char* folder : {"/lib64", "/usr/lib64", "/lib", "/usr/lib"}) folders.push_back(folder);
  return folders;
}

void ProbeCuda(MachineFacts& facts) {
  facts.compute_capability.source = facts.cuda_driver.source = "libcuda.so.1";
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    facts.compute_capability.unknown = facts.cuda_driver.unknown =
        absl::StrCat("no CUDA driver: ", why == nullptr ? "libcuda.so.1 cannot be loaded" : why);
    return;
  }
  CuDriverGetVersion get_version = nullptr;
  int version = 0;
  if (Find(library, "cuDriverGetVersion", &get_version) && get_version(&version) == 0 &&
      version > 0) {
    facts.cuda_driver.values.push_back(absl::StrCat(version / 1000, ".", version % 1000 / 10));
  } else {
    facts.cuda_driver.unknown = "the driver does not say its version";
  }
  facts.compute_capability.unknown = AskDevices(library, &facts.compute_capability.values);
  if (!facts.compute_capability.unknown.empty()) facts.compute_capability.values.clear();
}

void ProbeMachine(bool with_driver, const std::function<void(const std::string& text)>& print) {
  MachineFacts facts;
  facts.platform = ProbePlatform();
  facts.tensorrt = ProbeTensorRt(LinkerFolders("/etc/ld.so.conf"));
  print(FormatFacts(facts));
  if (!with_driver) return;
  MachineFacts driver;
  ProbeCuda(driver);
  print(FormatFacts(driver));
}

std::string FormatFacts(const MachineFacts& facts) {
  std::string out;
  for (const auto& [name, member] : Names()) {
    const MachineFact& fact = facts.*member;
    for (const std::string& value : fact.values) {
      absl::StrAppend(&out, name, "=", OnOneLine(value), "\n");
    }
    if (fact.known() && !fact.source.empty()) {
      absl::StrAppend(&out, name, ".source=", OnOneLine(fact.source), "\n");
    }
    if (!fact.known() && !fact.unknown.empty()) {
      absl::StrAppend(&out, name, ".unknown=", OnOneLine(fact.unknown), "\n");
    }
  }
  return out;
}

MachineFacts ParseFacts(absl::string_view text, std::string* strange) {
  MachineFacts facts;
  strange->clear();
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(line, absl::MaxSplits('=', 1));
    absl::string_view name = parts.first;
    const bool source = absl::ConsumeSuffix(&name, ".source");
    const bool unknown = !source && absl::ConsumeSuffix(&name, ".unknown");
    bool taken = false;
    for (const auto& [known, member] : Names()) {
      if (name != known) continue;
      MachineFact& fact = facts.*member;
      taken = true;
      if (source) {
        fact.source = std::string(parts.second);
      } else if (unknown) {
        fact.unknown = std::string(parts.second);
      } else {
        fact.values.emplace_back(parts.second);
      }
    }
    if (!taken && strange->empty()) *strange = OnOneLine(std::string(line.substr(0, 80)));
  }
  return facts;
}

}  // namespace modelhost
