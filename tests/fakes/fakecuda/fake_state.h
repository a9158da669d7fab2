// The inside of the fake libcuda.so.1: what its calls share. See README.md for what it promises.
//
// One lock over everything: a driver's own concurrency is not what is modelled. Device addresses
// are real addresses of this process, reserved PROT_NONE; an allocation is a memfd, so that the
// kernel counts who holds it across processes, as the kernel module of a real driver does.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "proto/cuda/cuda_abi.h"

#define FAKE_CUDA_API extern "C" __attribute__((visibility("default"))) modelhost::cuda::Rc

namespace fakecuda {

using modelhost::cuda::Access;
using modelhost::cuda::Attribute;
using modelhost::cuda::Device;
using modelhost::cuda::DevicePtr;
using modelhost::cuda::Rc;

inline constexpr uint64_t kPage = 4096;

// The environment, asked anew each time: a test may set it between two calls.
std::string Text(const std::string& name);
int64_t Number(const std::string& name, int64_t otherwise);
// Physical numbers of the GPUs that this process sees, in its order (CUDA_VISIBLE_DEVICES).
std::vector<int> VisibleGpus();
modelhost::cuda::Uuid UuidOf(int gpu);
uint64_t MemoryBytes();
uint64_t GranularityBytes();
// nullopt: an attribute that the fake does not know.
std::optional<int> AttributeOf(int gpu, Attribute attribute);
bool OpaquePointers();

// Device memory: a memfd of `bytes` and one page that says what it is.
struct Trailer {
  char magic[16];
  uint64_t bytes;
  int32_t gpu;
  uint32_t handle_types;
  uint32_t legacy;
  uint32_t freed;  // cuMemFree by the exporter of a legacy allocation.
};

struct Memory {
  int fd = -1;
  uint64_t bytes = 0;
  int gpu = 0;
  uint32_t handle_types = 0;
  bool legacy = false;
  bool imported = false;

  Memory() = default;
  Memory(const Memory&) = delete;
  ~Memory();
  void MarkFreed() const;
  bool Freed() const;
};

// What one memory operation of the device does when its turn comes.
struct Operation {
  enum class Kind { kFromHost, kStore32, kLoad64 } kind = Kind::kFromHost;
  DevicePtr to = 0;
  const void* host = nullptr;
  uint64_t bytes = 0;
  DevicePtr from = 0;
  uint32_t value = 0;
};

struct Context {
  int gpu = 0;
  int retained = 0;
};
struct FakeStream {
  Context* context = nullptr;
  std::deque<Operation> queue;
  uint64_t done = 0;
  uint64_t queued = 0;
};
struct FakeEvent {
  Context* context = nullptr;
  FakeStream* stream = nullptr;
  uint64_t after = 0;
};
struct Mapped {
  uint64_t bytes = 0;
  std::shared_ptr<Memory> memory;
  std::map<int, uint32_t> access;  // By GPU.
  int opened = 0;                  // cuIpcOpenMemHandle, times.
};
struct HostRange {
  uint64_t bytes = 0;
  bool registered = false;  // Else from cuMemHostAlloc.
  bool device_mapped = false;
};
struct FakeModule {
  std::string image;
};
struct FakeFunction {
  std::string name;
};

struct State {
  std::recursive_mutex mutex;
  bool initialised = false;
  pid_t process = 0;
  Rc sticky = Rc::kSuccess;
  std::map<int, std::unique_ptr<Context>> contexts;  // By GPU.
  std::map<uint64_t, std::shared_ptr<Memory>> allocations;
  uint64_t next_allocation = 0x1000;
  std::map<DevicePtr, uint64_t> reservations;
  std::map<DevicePtr, Mapped> mappings;
  std::map<uintptr_t, HostRange> host;
  std::set<FakeStream*> streams;
  std::set<FakeEvent*> events;
  std::set<FakeModule*> modules;
  std::set<FakeFunction*> functions;
  std::map<std::string, int64_t> calls;
};
State& Driver();

enum class Need { kNothing, kInit, kContext };

// One call of an entry point: takes the lock, counts, injects what the environment asks for, and
// checks what every call needs.
class Call {
 public:
  Call(const char* symbol, Need need);
  // Not kSuccess: return it at once.
  Rc entry() const { return entry_; }
  // `rc`, with its reason on stderr where FAKECUDA_LOG is set.
  Rc No(Rc rc, const char* why) const;

 private:
  Rc Injected();

  const char* const symbol_;
  std::unique_lock<std::recursive_mutex> lock_;
  Rc entry_ = Rc::kSuccess;
};

// The current context of this thread.
Context*& Current();
// The physical GPU behind a device of this process; -1 for a wrong one.
int GpuOf(Device device);
Device DeviceOf(int gpu);

std::shared_ptr<Memory> MakeMemory(int gpu, uint64_t bytes, uint32_t handle_types, bool legacy,
                                   Rc* rc);
// Of an exported descriptor, which stays the caller's. Null: not one of ours.
std::shared_ptr<Memory> OpenMemory(int fd);
// Of all processes that this one may look at.
uint64_t UsedBytes(int gpu);

// The mapping that holds `at`, or nullptr.
Mapped* FindMapping(DevicePtr at, DevicePtr* base);
bool IsPinned(const void* host, uint64_t bytes);
// Copies between host memory and device addresses with the rights of the current GPU.
Rc Store(int gpu, DevicePtr to, const void* host, uint64_t bytes);
Rc Fetch(int gpu, void* host, DevicePtr from, uint64_t bytes);
// Runs what a stream has queued, up to its `upto`-th operation.
void Run(FakeStream& stream, uint64_t upto);
bool CopiesInFlight(DevicePtr at, uint64_t bytes);
bool CopiesFromHost(const void* host, uint64_t bytes);

// PROT_NONE addresses of `bytes`, aligned; 0 when there are none.
uintptr_t TakeAddresses(uint64_t bytes, uint64_t alignment);
void FreeAddresses(uintptr_t at, uint64_t bytes);
bool MapAt(uintptr_t at, uint64_t bytes, int fd);
void UnmapAt(uintptr_t at, uint64_t bytes);
void ProtectAt(uintptr_t at, uint64_t bytes, uint32_t access);

}  // namespace fakecuda

#define FAKE_CUDA_CALL(symbol, need)       \
  const fakecuda::Call call(symbol, need); \
  if (call.entry() != Rc::kSuccess) return call.entry()
#define FAKE_CUDA_NEED(condition, rc, why) \
  if (!(condition)) return call.No(rc, why)
