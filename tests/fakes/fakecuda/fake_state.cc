#include "tests/fakes/fakecuda/fake_state.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace fakecuda {
namespace {

constexpr char kMagic[16] = "FAKECUDA-MEM-1";
constexpr uint32_t kRead = 1;
constexpr uint32_t kReadWrite = 3;

std::vector<std::string> Split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, by);) parts.push_back(part);
  return parts;
}

std::string MemoryName(int gpu) {
  const std::string machine = Text("FAKECUDA_MACHINE");
  return "fakecuda-gpu" + std::to_string(gpu) + (machine.empty() ? "" : "-" + machine);
}

std::string UuidText(int gpu) {
  const modelhost::cuda::Uuid uuid = UuidOf(gpu);
  std::string text = "GPU-";
  char two[3];
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    std::snprintf(two, sizeof two, "%02x", uuid.bytes[i]);
    text += two;
  }
  return text;
}

}  // namespace

std::string Text(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? "" : value;
}

int64_t Number(const std::string& name, int64_t otherwise) {
  const std::string text = Text(name);
  return text.empty() ? otherwise : std::strtoll(text.c_str(), nullptr, 10);
}

std::vector<int> VisibleGpus() {
  const int count = static_cast<int>(Number("FAKECUDA_DEVICES", 1));
  std::vector<int> gpus;
  if (std::getenv("CUDA_VISIBLE_DEVICES") == nullptr) {
    for (int gpu = 0; gpu < count; ++gpu) gpus.push_back(gpu);
    return gpus;
  }
  // As the real one: everything from the first wrong name on is invisible.
  for (const std::string& name : Split(Text("CUDA_VISIBLE_DEVICES"), ',')) {
    int found = -1;
    for (int gpu = 0; gpu < count; ++gpu) {
      if (name == std::to_string(gpu) ||
          (name.starts_with("GPU-") && UuidText(gpu).starts_with(name))) {
        found = gpu;
      }
    }
    if (found < 0 || std::ranges::find(gpus, found) != gpus.end()) break;
    gpus.push_back(found);
  }
  return gpus;
}

modelhost::cuda::Uuid UuidOf(int gpu) {
  modelhost::cuda::Uuid uuid{};
  std::memset(uuid.bytes, 0xfa, sizeof(uuid.bytes));
  uuid.bytes[0] = static_cast<uint8_t>(gpu);
  uuid.bytes[15] = static_cast<uint8_t>(gpu);
  return uuid;
}

uint64_t MemoryBytes() { return static_cast<uint64_t>(Number("FAKECUDA_MEM_MB", 1024)) << 20; }
uint64_t GranularityBytes() {
  return static_cast<uint64_t>(Number("FAKECUDA_GRANULARITY_KB", 2048)) << 10;
}

std::optional<int> AttributeOf(int gpu, Attribute attribute) {
  int otherwise = 0;
  switch (attribute) {
    case Attribute::kUnifiedAddressing:
    case Attribute::kHostRegister:
    case Attribute::kVirtualMemoryManagement:
    case Attribute::kPosixFdHandles:
      otherwise = 1;
      break;
    case Attribute::kCapabilityMajor:
      otherwise = 8;
      break;
    case Attribute::kIntegrated:
    case Attribute::kCapabilityMinor:
    case Attribute::kPageableMemoryAccess:
    case Attribute::kPageableUsesHostPageTables:
    case Attribute::kReadOnlyHostRegister:
      break;
    default:
      return std::nullopt;
  }
  const std::string number = std::to_string(static_cast<int>(attribute));
  const auto all = Number("FAKECUDA_ATTR_" + number, otherwise);
  return static_cast<int>(Number("FAKECUDA_GPU" + std::to_string(gpu) + "_ATTR_" + number, all));
}

bool OpaquePointers() { return Text("FAKECUDA_DEVPTR") == "opaque"; }

Memory::~Memory() {
  if (fd >= 0) ::close(fd);
}

void Memory::MarkFreed() const {
  const uint32_t freed = 1;
  (void)!::pwrite(fd, &freed, sizeof freed, static_cast<off_t>(bytes + offsetof(Trailer, freed)));
}

bool Memory::Freed() const {
  uint32_t freed = 0;
  return ::pread(fd, &freed, sizeof freed, static_cast<off_t>(bytes + offsetof(Trailer, freed))) !=
             sizeof freed ||
         freed != 0;
}

State& Driver() {
  // Never destroyed: threads of a program may outlive its main.
  static State* const state = new State;
  return *state;
}

Context*& Current() {
  thread_local Context* current = nullptr;
  return current;
}

Call::Call(const char* symbol, Need need) : symbol_(symbol), lock_(Driver().mutex) {
  State& state = Driver();
  if (const Rc injected = Injected(); injected != Rc::kSuccess) {
    entry_ = No(injected, "as the environment asks");
    return;
  }
  if (need == Need::kNothing) return;
  if (!state.initialised) {
    entry_ = No(Rc::kNotInitialized, "cuInit was not called");
  } else if (state.process != ::getpid()) {
    entry_ = No(Rc::kNotInitialized, "used after fork()");
  } else if (state.sticky != Rc::kSuccess) {
    entry_ = No(state.sticky, "the context is dead: an earlier error sticks");
  } else if (need == Need::kContext && Current() == nullptr) {
    entry_ = No(Rc::kInvalidContext, "no context is current on this thread");
  } else if (need == Need::kContext && Current()->retained == 0) {
    entry_ = No(Rc::kInvalidContext, "the current context was released");
  }
}

// FAKECUDA_FAIL="SYMBOL|*:N:WHAT,...": the Nth call of SYMBOL in this process, or of any, fails
// with WHAT: a number, "hang", "kill", "slow", or "stick" (700, and from then on always). N may be
// "N+": every one from there on.
Rc Call::Injected() {
  State& state = Driver();
  const int64_t of_symbol = ++state.calls[symbol_];
  const int64_t of_all = ++state.calls["*"];
  for (const std::string& rule : Split(Text("FAKECUDA_FAIL"), ',')) {
    const std::vector<std::string> parts = Split(rule, ':');
    if (parts.size() != 3) std::abort();
    const int64_t now = parts[0] == "*" ? of_all : parts[0] == symbol_ ? of_symbol : 0;
    const int64_t wanted = std::strtoll(parts[1].c_str(), nullptr, 10);
    if (now != wanted && !(parts[1].ends_with('+') && now > wanted)) continue;
    if (const std::string mark = Text("FAKECUDA_FAIL_MARK"); !mark.empty()) {
      const int once = Text("FAKECUDA_FAIL_ONCE").empty() ? 0 : O_EXCL;
      const int fd = ::open(mark.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | once, 0600);
      if (fd < 0 && errno == EEXIST) continue;
      if (fd < 0 ||
          ::write(fd, (std::string(symbol_) + "\n").c_str(), std::strlen(symbol_) + 1) < 0) {
        std::abort();
      }
      ::close(fd);
    }
    if (parts[2] == "hang") {
      lock_.unlock();
      while (true) ::pause();
    }
    if (parts[2] == "slow") {  // One second, and then as ever.
      lock_.unlock();
      ::poll(nullptr, 0, 1000);
      lock_.lock();
      continue;
    }
    if (parts[2] == "kill") ::raise(SIGKILL);
    if (parts[2] == "stick") {
      state.sticky = Rc::kIllegalAddress;
      return Rc::kIllegalAddress;
    }
    return static_cast<Rc>(std::strtol(parts[2].c_str(), nullptr, 10));
  }
  return Rc::kSuccess;
}

Rc Call::No(Rc rc, const char* why) const {
  if (rc != Rc::kSuccess && !Text("FAKECUDA_LOG").empty()) {
    std::fprintf(stderr, "fakecuda[%d] %s -> %d: %s\n", ::getpid(), symbol_, static_cast<int>(rc),
                 why);
  }
  return rc;
}

int GpuOf(Device device) {
  const std::vector<int> gpus = VisibleGpus();
  if (device < 0 || device >= static_cast<Device>(gpus.size())) return -1;
  return gpus[static_cast<size_t>(device)];
}

Device DeviceOf(int gpu) {
  const std::vector<int> gpus = VisibleGpus();
  const auto found = std::ranges::find(gpus, gpu);
  return found == gpus.end() ? -1 : static_cast<Device>(found - gpus.begin());
}

std::shared_ptr<Memory> MakeMemory(int gpu, uint64_t bytes, uint32_t handle_types, bool legacy,
                                   Rc* rc) {
  *rc = Rc::kOutOfMemory;
  if (bytes > MemoryBytes() || UsedBytes(gpu) > MemoryBytes() - bytes) return nullptr;
  auto memory = std::make_shared<Memory>();
  memory->fd = ::memfd_create(MemoryName(gpu).c_str(), MFD_CLOEXEC);
  memory->bytes = bytes;
  memory->gpu = gpu;
  memory->handle_types = handle_types;
  memory->legacy = legacy;
  Trailer trailer{};
  std::memcpy(trailer.magic, kMagic, sizeof kMagic);
  trailer.bytes = bytes;
  trailer.gpu = gpu;
  trailer.handle_types = handle_types;
  trailer.legacy = legacy ? 1 : 0;
  if (memory->fd < 0 || ::ftruncate(memory->fd, static_cast<off_t>(bytes + kPage)) != 0 ||
      ::pwrite(memory->fd, &trailer, sizeof trailer, static_cast<off_t>(bytes)) !=
          static_cast<ssize_t>(sizeof trailer)) {
    return nullptr;
  }
  *rc = Rc::kSuccess;
  return memory;
}

std::shared_ptr<Memory> OpenMemory(int fd) {
  struct stat info {};
  Trailer trailer{};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) ||
      info.st_size <= static_cast<off_t>(kPage) ||
      ::pread(fd, &trailer, sizeof trailer, info.st_size - static_cast<off_t>(kPage)) !=
          static_cast<ssize_t>(sizeof trailer) ||
      std::memcmp(trailer.magic, kMagic, sizeof kMagic) != 0 ||
      trailer.bytes != static_cast<uint64_t>(info.st_size) - kPage) {
    return nullptr;
  }
  auto memory = std::make_shared<Memory>();
  memory->fd = ::fcntl(fd, F_DUPFD_CLOEXEC, 3);
  memory->bytes = trailer.bytes;
  memory->gpu = trailer.gpu;
  memory->handle_types = trailer.handle_types;
  memory->legacy = trailer.legacy != 0;
  memory->imported = true;
  return memory->fd < 0 ? nullptr : memory;
}

uint64_t UsedBytes(int gpu) {
  const std::string wanted = "/memfd:" + MemoryName(gpu) + " (deleted)";
  std::map<ino_t, uint64_t> seen;
  DIR* const processes = ::opendir("/proc");
  if (processes == nullptr) std::abort();
  while (const dirent* process = ::readdir(processes)) {
    if (process->d_name[0] < '0' || process->d_name[0] > '9') continue;
    const std::string folder = "/proc/" + std::string(process->d_name) + "/fd/";
    DIR* const files = ::opendir(folder.c_str());
    if (files == nullptr) continue;  // Gone, or somebody else's.
    while (const dirent* file = ::readdir(files)) {
      const std::string path = folder + file->d_name;
      char link[256];
      const ssize_t bytes = ::readlink(path.c_str(), link, sizeof link);
      struct stat info {};
      if (bytes <= 0 || wanted != std::string(link, static_cast<size_t>(bytes)) ||
          ::stat(path.c_str(), &info) != 0) {
        continue;
      }
      seen[info.st_ino] = static_cast<uint64_t>(info.st_size) - kPage;
    }
    ::closedir(files);
  }
  ::closedir(processes);
  uint64_t used = 0;
  for (const auto& [inode, bytes] : seen) used += bytes;
  return used;
}

Mapped* FindMapping(DevicePtr at, DevicePtr* base) {
  auto& mappings = Driver().mappings;
  auto found = mappings.upper_bound(at);
  if (found == mappings.begin()) return nullptr;
  --found;
  if (at - found->first >= found->second.bytes) return nullptr;
  *base = found->first;
  return &found->second;
}

bool IsPinned(const void* host, uint64_t bytes) {
  const auto& ranges = Driver().host;
  const auto at = reinterpret_cast<uintptr_t>(host);
  auto found = ranges.upper_bound(at);
  if (found == ranges.begin()) return false;
  --found;
  return at - found->first <= found->second.bytes &&
         bytes <= found->second.bytes - (at - found->first);
}

namespace {

template <typename Move>
Rc Pieces(int gpu, DevicePtr at, uint64_t bytes, uint32_t right, Move move) {
  for (uint64_t done = 0; done < bytes;) {
    DevicePtr base = 0;
    Mapped* const mapped = FindMapping(at + done, &base);
    if (mapped == nullptr) return Rc::kInvalidValue;
    const auto access = mapped->access.find(gpu);
    if (access == mapped->access.end() || (access->second & right) != right ||
        mapped->memory->Freed()) {
      return Rc::kIllegalAddress;
    }
    const uint64_t offset = at + done - base;
    const uint64_t piece = std::min(bytes - done, mapped->bytes - offset);
    if (!move(mapped->memory->fd, offset, done, piece)) return Rc::kUnknown;
    done += piece;
  }
  return Rc::kSuccess;
}

}  // namespace

Rc Store(int gpu, DevicePtr to, const void* host, uint64_t bytes) {
  return Pieces(gpu, to, bytes, kReadWrite, [&](int fd, uint64_t at, uint64_t done, uint64_t n) {
    return ::pwrite(fd, static_cast<const char*>(host) + done, n, static_cast<off_t>(at)) ==
           static_cast<ssize_t>(n);
  });
}

Rc Fetch(int gpu, void* host, DevicePtr from, uint64_t bytes) {
  return Pieces(gpu, from, bytes, kRead, [&](int fd, uint64_t at, uint64_t done, uint64_t n) {
    return ::pread(fd, static_cast<char*>(host) + done, n, static_cast<off_t>(at)) ==
           static_cast<ssize_t>(n);
  });
}

namespace {

// A kernel's load. A GPU with the host's page tables (attributes 88 and 100) reaches what this
// process may read.
Rc LoadWord(int gpu, DevicePtr from, uint64_t* word) {
  DevicePtr base = 0;
  if (FindMapping(from, &base) != nullptr ||
      AttributeOf(gpu, Attribute::kPageableMemoryAccess) != 1 ||
      AttributeOf(gpu, Attribute::kPageableUsesHostPageTables) != 1) {
    return Fetch(gpu, word, from, sizeof *word);
  }
  const iovec here{word, sizeof *word};
  const iovec there{reinterpret_cast<void*>(from), sizeof *word};
  return ::process_vm_readv(::getpid(), &here, 1, &there, 1, 0) == sizeof *word
             ? Rc::kSuccess
             : Rc::kIllegalAddress;
}

}  // namespace

void Run(FakeStream& stream, uint64_t upto) {
  while (stream.done < upto && !stream.queue.empty()) {
    const Operation operation = stream.queue.front();
    stream.queue.pop_front();
    ++stream.done;
    const int gpu = stream.context->gpu;
    Rc rc = Rc::kSuccess;
    if (operation.kind == Operation::Kind::kFromHost) {
      rc = Store(gpu, operation.to, operation.host, operation.bytes);
    } else if (operation.kind == Operation::Kind::kStore32) {
      rc = Store(gpu, operation.to, &operation.value, sizeof operation.value);
    } else {
      uint64_t word = 0;
      rc = LoadWord(gpu, operation.from, &word);
      if (rc == Rc::kSuccess) rc = Store(gpu, operation.to, &word, sizeof word);
    }
    // An address that the device may not reach ends its context.
    if (rc != Rc::kSuccess) Driver().sticky = Rc::kIllegalAddress;
  }
}

bool CopiesInFlight(DevicePtr at, uint64_t bytes) {
  for (const FakeStream* stream : Driver().streams) {
    for (const Operation& operation : stream->queue) {
      if (operation.to < at + bytes && at < operation.to + operation.bytes) return true;
    }
  }
  return false;
}

bool CopiesFromHost(const void* host, uint64_t bytes) {
  const auto* first = static_cast<const char*>(host);
  for (const FakeStream* stream : Driver().streams) {
    for (const Operation& operation : stream->queue) {
      const auto* from = static_cast<const char*>(operation.host);
      if (from != nullptr && from < first + bytes && first < from + operation.bytes) return true;
    }
  }
  return false;
}

uintptr_t TakeAddresses(uint64_t bytes, uint64_t alignment) {
  void* const got = ::mmap(nullptr, bytes + alignment, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (got == MAP_FAILED) return 0;
  const auto start = reinterpret_cast<uintptr_t>(got);
  const uintptr_t at = (start + alignment - 1) & ~(alignment - 1);
  if (at > start) ::munmap(got, at - start);
  const uintptr_t end = start + bytes + alignment;
  if (end > at + bytes) ::munmap(reinterpret_cast<void*>(at + bytes), end - at - bytes);
  return at;
}

void FreeAddresses(uintptr_t at, uint64_t bytes) {
  if (::munmap(reinterpret_cast<void*>(at), bytes) != 0) std::abort();
}

bool MapAt(uintptr_t at, uint64_t bytes, int fd) {
  return ::mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, fd, 0) !=
         MAP_FAILED;
}

void UnmapAt(uintptr_t at, uint64_t bytes) {
  if (::mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
    std::abort();
  }
}

// So that a program that reads or writes through a device pointer on the CPU meets the same rights.
void ProtectAt(uintptr_t at, uint64_t bytes, uint32_t access) {
  int rights = PROT_NONE;
  if (!OpaquePointers() && access == kReadWrite) rights = PROT_READ | PROT_WRITE;
  if (!OpaquePointers() && access == kRead) rights = PROT_READ;
  if (::mprotect(reinterpret_cast<void*>(at), bytes, rights) != 0) std::abort();
}

}  // namespace fakecuda
