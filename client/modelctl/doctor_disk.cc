// How fast the store's disk gives bytes, read past the page cache so that nothing which serves
// loses its pages.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/modelctl/doctor_advice.h"
#include "client/modelctl/render.h"
#include "proto/handle/unique_fd.h"

namespace modelhost::modelctl {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMostBytes = 64 << 20;
constexpr uint64_t kOwnFileBytes = 32 << 20;
constexpr size_t kBlockBytes = 4 << 20;
constexpr size_t kAlignment = 4096;
constexpr absl::Duration kMostTime = absl::Seconds(2);
constexpr size_t kMostEntries = 10'000;
// Below it a model of some gigabytes takes the better part of a minute.
constexpr double kSlowBytesPerSecond = 150e6;

struct FreeAligned {
  void operator()(std::byte* block) const { std::free(block); }
};
using Block = std::unique_ptr<std::byte, FreeAligned>;

Block MakeBlock() {
  void* block = nullptr;
  if (::posix_memalign(&block, kAlignment, kBlockBytes) != 0) return nullptr;
  std::memset(block, 0x5a, kBlockBytes);
  return Block(static_cast<std::byte*>(block));
}

// The largest file below `store` that this user can open; empty when there is none.
std::string LargestFile(const std::string& store) {
  std::string best;
  uint64_t best_bytes = kBlockBytes;  // Smaller ones say nothing about speed.
  std::error_code error;
  fs::recursive_directory_iterator it(absl::StrCat(store, "/models"),
                                      fs::directory_options::skip_permission_denied, error);
  for (size_t seen = 0; !error && it != fs::recursive_directory_iterator() && seen < kMostEntries;
       it.increment(error), ++seen) {
    std::error_code ignored;
    if (!it->is_regular_file(ignored)) continue;
    const uint64_t bytes = it->file_size(ignored);
    if (ignored || bytes < best_bytes || ::access(it->path().c_str(), R_OK) != 0) continue;
    best = it->path().string();
    best_bytes = bytes;
  }
  return best;
}

struct Speed {
  uint64_t bytes = 0;
  absl::Duration took;
  int error = 0;
};

Speed Read(const UniqueFd& fd, std::byte* block) {
  Speed speed;
  const absl::Time began = absl::Now();
  while (speed.bytes < kMostBytes && absl::Now() - began < kMostTime) {
    const ssize_t got = ::pread(fd.get(), block, kBlockBytes, static_cast<off_t>(speed.bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) speed.error = errno;
    if (got <= 0) break;
    speed.bytes += static_cast<uint64_t>(got);
  }
  speed.took = absl::Now() - began;
  return speed;
}

Check Judge(const std::string& path, const Speed& speed) {
  if (speed.error != 0 || speed.bytes == 0) {
    return Found(Trouble::kDiskNotRead,
                 absl::StrCat(path, ": ", std::strerror(speed.error == 0 ? EIO : speed.error)));
  }
  const double rate = static_cast<double>(speed.bytes) / absl::ToDoubleSeconds(speed.took);
  const std::string finding = absl::StrCat(FormatRate(speed.bytes, speed.took), " (",
                                           FormatBytes(speed.bytes), " of ", path, ")");
  if (rate >= kSlowBytesPerSecond) return Fine("disk", finding);
  return Found(Trouble::kDiskSlow, finding);
}

// A file of our own, without a name by the time it is read.
UniqueFd MakeOwnFile(const std::string& folder, std::byte* block, int* error) {
  std::string path = absl::StrCat(folder, "/modelctl-doctor-XXXXXX");
  UniqueFd fd(::mkostemp(path.data(), O_CLOEXEC));
  *error = errno;
  if (!fd.valid()) return fd;
  UniqueFd direct(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
  *error = errno;
  ::unlink(path.c_str());
  if (!direct.valid()) return direct;
  for (uint64_t done = 0; done < kOwnFileBytes; done += kBlockBytes) {
    if (::write(fd.get(), block, kBlockBytes) != static_cast<ssize_t>(kBlockBytes)) {
      *error = errno;
      return UniqueFd();
    }
  }
  if (::fsync(fd.get()) != 0) {
    *error = errno;
    return UniqueFd();
  }
  return direct;
}

}  // namespace

Check CheckDisk(const std::string& store) {
  const Block block = MakeBlock();
  if (block == nullptr) return Found(Trouble::kNoBuffer, "no memory for a buffer");
  const std::string file = store.empty() ? "" : LargestFile(store);
  if (!file.empty()) {
    const UniqueFd fd(::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT));
    if (fd.valid()) return Judge(file, Read(fd, block.get()));
  }
  const char* temporary = std::getenv("TMPDIR");
  const std::string folder = !store.empty() && ::access(store.c_str(), W_OK) == 0 ? store
                             : temporary != nullptr && *temporary == '/' ? std::string(temporary)
                                                                         : "/var/tmp";
  int error = 0;
  const UniqueFd fd = MakeOwnFile(folder, block.get(), &error);
  if (!fd.valid()) {
    return Found(Trouble::kDiskNoOwnFile, absl::StrCat(folder, ": ", std::strerror(error)));
  }
  return Judge(absl::StrCat("a temporary file in ", folder), Read(fd, block.get()));
}

}  // namespace modelhost::modelctl
