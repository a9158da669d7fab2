// cuMemAlloc and the 64-byte handles of legacy CUDA IPC.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "tests/fakes/fakecuda/fake_state.h"

using namespace fakecuda;  // lint: allow(using-std) the whole file is that interface
using modelhost::cuda::IpcHandle;

namespace {

constexpr uint64_t kLegacyMagic = 0x31434950454b4146ULL;
constexpr uint64_t kLegacyAlignment = uint64_t{2} << 20;
constexpr uint32_t kReadWriteAccess = 3;

struct LegacyHandle {
  uint64_t magic;
  int32_t pid;
  int32_t fd;
  uint64_t inode;
};
static_assert(sizeof(LegacyHandle) <= sizeof(IpcHandle));

uint64_t InodeOf(int fd) {
  struct stat info {};
  return ::fstat(fd, &info) == 0 ? info.st_ino : 0;
}

// At addresses of its own, readable and writable: legacy memory knows no protection.
DevicePtr MapLegacy(std::shared_ptr<Memory> memory, int opened) {
  const uint64_t bytes = (memory->bytes + kPage - 1) & ~(kPage - 1);
  const uintptr_t at = TakeAddresses(bytes, kLegacyAlignment);
  if (at == 0 || !MapAt(at, memory->bytes, memory->fd)) return 0;
  ProtectAt(at, memory->bytes, kReadWriteAccess);
  const int gpu = memory->gpu;
  const uint64_t size = memory->bytes;
  Driver().mappings[at] = Mapped{size, std::move(memory), {{gpu, kReadWriteAccess}}, opened};
  return at;
}

Mapped* FindLegacy(DevicePtr at, bool imported) {
  const auto found = Driver().mappings.find(at);
  if (found == Driver().mappings.end() || !found->second.memory->legacy ||
      (found->second.opened > 0) != imported) {
    return nullptr;
  }
  return &found->second;
}

}  // namespace

FAKE_CUDA_API cuMemAlloc_v2(DevicePtr* at, size_t bytes) {
  FAKE_CUDA_CALL("cuMemAlloc", Need::kContext);
  FAKE_CUDA_NEED(at != nullptr && bytes != 0, Rc::kInvalidValue, "null");
  Rc rc = Rc::kSuccess;
  auto memory = MakeMemory(Current()->gpu, bytes, 0, /*legacy=*/true, &rc);
  FAKE_CUDA_NEED(memory != nullptr, rc, "the device is full");
  *at = MapLegacy(std::move(memory), 0);
  FAKE_CUDA_NEED(*at != 0, Rc::kOutOfMemory, "no addresses are left");
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemFree_v2(DevicePtr at) {
  FAKE_CUDA_CALL("cuMemFree", Need::kInit);
  Mapped* const mapped = FindLegacy(at, /*imported=*/false);
  FAKE_CUDA_NEED(mapped != nullptr, Rc::kInvalidValue, "not the start of a cuMemAlloc");
  FAKE_CUDA_NEED(!CopiesInFlight(at, mapped->bytes), Rc::kInvalidValue,
                 "copies to it are in flight");
  // Whoever opened it may touch it no more: undefined in the documentation, an error here.
  mapped->memory->MarkFreed();
  FreeAddresses(at, mapped->bytes);
  Driver().mappings.erase(at);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuIpcGetMemHandle(IpcHandle* handle, DevicePtr at) {
  FAKE_CUDA_CALL("cuIpcGetMemHandle", Need::kContext);
  FAKE_CUDA_NEED(Number("FAKECUDA_NO_IPC", 0) == 0, Rc::kNotSupported, "as the environment asks");
  Mapped* const mapped = FindLegacy(at, /*imported=*/false);
  FAKE_CUDA_NEED(handle != nullptr && mapped != nullptr, Rc::kInvalidValue,
                 "not the start of a cuMemAlloc");
  const LegacyHandle inside{kLegacyMagic, ::getpid(), mapped->memory->fd,
                            InodeOf(mapped->memory->fd)};
  *handle = {};
  std::memcpy(handle->bytes, &inside, sizeof inside);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuIpcOpenMemHandle_v2(DevicePtr* at, IpcHandle handle, uint32_t flags) {
  FAKE_CUDA_CALL("cuIpcOpenMemHandle", Need::kContext);
  FAKE_CUDA_NEED(Number("FAKECUDA_NO_IPC", 0) == 0, Rc::kNotSupported, "as the environment asks");
  FAKE_CUDA_NEED(at != nullptr && flags == modelhost::cuda::kIpcLazyPeerAccess, Rc::kInvalidValue,
                 "null, or flags");
  LegacyHandle inside{};
  std::memcpy(&inside, handle.bytes, sizeof inside);
  FAKE_CUDA_NEED(inside.magic == kLegacyMagic, Rc::kInvalidValue, "not a handle");
  FAKE_CUDA_NEED(inside.pid != ::getpid(), Rc::kInvalidContext,
                 "opened in the process that made it");
  for (auto& [base, mapped] : Driver().mappings) {
    if (mapped.opened > 0 && InodeOf(mapped.memory->fd) == inside.inode) {
      ++mapped.opened;
      *at = base;
      return Rc::kSuccess;
    }
  }
  const std::string path =
      "/proc/" + std::to_string(inside.pid) + "/fd/" + std::to_string(inside.fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  FAKE_CUDA_NEED(fd >= 0, Rc::kInvalidContext, "the exporter is gone");
  auto memory = InodeOf(fd) == inside.inode ? OpenMemory(fd) : nullptr;
  ::close(fd);
  FAKE_CUDA_NEED(memory != nullptr && memory->legacy && !memory->Freed(), Rc::kInvalidValue,
                 "the memory was freed");
  FAKE_CUDA_NEED(memory->gpu == Current()->gpu, Rc::kInvalidDevice, "memory of another GPU");
  *at = MapLegacy(std::move(memory), 1);
  FAKE_CUDA_NEED(*at != 0, Rc::kOutOfMemory, "no addresses are left");
  return Rc::kSuccess;
}

FAKE_CUDA_API cuIpcCloseMemHandle(DevicePtr at) {
  FAKE_CUDA_CALL("cuIpcCloseMemHandle", Need::kInit);
  Mapped* const mapped = FindLegacy(at, /*imported=*/true);
  FAKE_CUDA_NEED(mapped != nullptr, Rc::kInvalidValue, "not an opened handle");
  if (--mapped->opened > 0) return Rc::kSuccess;
  FreeAddresses(at, mapped->bytes);
  Driver().mappings.erase(at);
  return Rc::kSuccess;
}
