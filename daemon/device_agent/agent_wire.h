// Frames between the daemon and a device agent: one fixed request, one fixed reply, exact lengths.
//
// Over a SOCK_SEQPACKET pair (proto/handle/fd_channel.h), descriptors by SCM_RIGHTS. One request at
// a time; kUpload and kVerify answer with kProgress any number of times and then with kReply. The
// agent is the same program: there are no versions. Texts are NUL-terminated.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/handle/fd_channel.h"

namespace modelhost::agent {

enum class Frame : uint16_t {
  kList = 0x101,  // Device number `index`; `devices` says how many there are. No driver: 0 of them.
  kOpen,          // From now on the device `uuid`: its self-test, and the mode. What a process of
          // its own has tried before is said in the request. cuda_ipc that nobody has tried:
          // `segment`, `ipc` are for trying, then to be released.
  kCreate,       // A segment of `bytes`. vmm_fd: +1 descriptor; cuda_ipc: `segment`, `ipc`.
  kUpload,       // +segment (vmm_fd), +plan, +sources: fills the segment and reads it back.
  kVerify,       // +segment (vmm_fd): its checksum. `expected` must be it.
  kRelease,      // cuda_ipc: `segment` is no longer needed.
  kMemory,       // Free and total bytes of the device.
  kCancel,       // While an upload runs. It has no reply of its own.
  kCheck,        // +segment (vmm_fd): whether it can still be imported and read at its ends.
  kTryImport,    // In another process: `ipc` of device `uuid` can be opened and holds TryWord.
  kTryHostRead,  // In another process, that may lose its context: device `uuid` reads host pages.
  kReply = 0x181,
  kProgress,
};

inline constexpr size_t kUuidBytes = 48;
inline constexpr size_t kTextBytes = 768;
inline constexpr size_t kFailureBytes = 256;
inline constexpr uint32_t kMaxDevices = 256;
inline constexpr size_t kMaxSources = 60;
inline constexpr uint64_t kMaxItems = uint64_t{1} << 24;

struct Request {
  abi::FrameHeader header;
  uint32_t index;
  uint32_t allow_registered;
  uint64_t bytes;
  uint64_t segment;     // cuda_ipc only.
  uint64_t items;       // UploadItems in the plan.
  uint64_t ring_bytes;  // Pinned host memory, at most.
  uint32_t threads;
  uint32_t direct;  // Read the sources past the page cache.
  uint64_t expected;
  uint32_t direct_test;  // TestResult of kTryHostRead and kTryImport, for kOpen.
  uint32_t ipc_test;
  uint8_t ipc[64];
  char uuid[kUuidBytes];
  char direct_failure[kFailureBytes];
  char ipc_failure[kFailureBytes];
};

// What lies in the memory that kTryImport opens.
constexpr uint64_t TryWord(uint64_t index) { return 0x6d6f64656c686f73ULL * (index + 1); }
inline constexpr uint64_t kTryWords = 512;

// The plan is a sealed memfd of these, by device_offset; they do not overlap.
struct UploadItem {
  uint64_t device_offset;
  uint64_t bytes;  // Not 0.
  uint64_t source_offset;
  uint32_t source;
  uint32_t reserved;
};

struct DeviceRecord {
  char uuid[kUuidBytes];
  char name[96];
  char reason[kTextBytes];
  uint32_t mode;  // DeviceMode
  int32_t driver_version;
  uint64_t total_bytes;
  uint64_t granularity;  // 0 without memory by descriptor.
};

struct Reply {
  abi::FrameHeader header;
  uint32_t code;  // Code
  uint32_t dead;  // 1: the context is; this agent ends itself after it.
  uint32_t devices;
  uint32_t reserved;
  uint64_t segment;
  uint64_t bytes;  // Created, or done so far.
  uint64_t checksum;
  uint64_t free_bytes;
  uint64_t total_bytes;
  uint8_t ipc[64];
  char text[kTextBytes];
  DeviceRecord device;
};

static_assert(sizeof(UploadItem) == 32);
static_assert(sizeof(Request) <= abi::kMaxFrameBytes && sizeof(Reply) <= abi::kMaxFrameBytes);

}  // namespace modelhost::agent
