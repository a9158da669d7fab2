// Frames on handles.sock (SOCK_SEQPACKET: one send is one frame).
//
// Every frame is a FrameHeader and one fixed struct, some followed by an array of fixed structs;
// the length is exact. Numbers are in host byte order: both ends are on one machine. Names are
// NUL-padded.
//
//   client                                    daemon
//   Hello                                ->
//                                        <-   HelloReply  +fd catalogue page
//   Acquire (1..kMaxSet references)      ->
//                                        <-   Granted     +fd index, +fds of regions     } per
//                                        <-   RegionFds   +fds, until Granted.regions    }
//                                        reference
//                                             have come
//                                        <-   DeviceFds +fds, when a device was asked for
//   Fetch (one region of a lease)        ->
//                                        <-   RegionFds   +1 fd
//   Release                              ->   (no reply)
//   Subscribe                            ->
//                                        <-   Ack, and from then on Event frames, at any time
//   Upload (ticket from Control.Publish) ->   +fds of source files
//                                        <-   Ack
//                                        <-   Error instead of any reply
//
// A reply carries the request_id of its request; an Event has request_id 0. Requests may be sent
// without waiting for earlier replies; replies to one request are not interleaved with those to
// another. At most kMaxFdsPerFrame descriptors come with a frame; receivers ask for CLOEXEC and
// treat MSG_CTRUNC as an error. Descriptors with a frame that may carry none are closed and the
// connection is ended. All leases of a connection end with it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/abi/shared_layout.h"

namespace modelhost::abi {

inline constexpr uint32_t kFrameAbiMin = 1;
inline constexpr uint32_t kFrameAbi = 3;
// From here on a reference that declares a lease again may name its label beside the version.
inline constexpr uint32_t kFrameAbiDeclaredLabel = 2;
// From here on a client may ask for device memory.
inline constexpr uint32_t kFrameAbiDevice = 3;
inline constexpr uint16_t kFrameMagic = 0x4d48;  // "HM"
inline constexpr uint32_t kMaxFdsPerFrame = 64;
inline constexpr uint32_t kMaxFrameBytes = 16384;
inline constexpr uint32_t kMaxSet = 32;
inline constexpr uint32_t kMaxErrorText = 1024;
inline constexpr uint32_t kTicketBytes = 16;

enum class FrameType : uint16_t {
  kHello = 1,
  kHelloReply = 2,
  kAcquire = 3,
  kGranted = 4,
  kRegionFds = 5,
  kFetch = 6,
  kRelease = 7,
  kSubscribe = 8,
  kAck = 9,
  kEvent = 10,
  kError = 11,
  kUpload = 12,
  kDeviceFds = 13,
};

struct FrameHeader {
  uint16_t magic;
  uint16_t type;        // FrameType
  uint32_t bytes;       // Of the whole frame, this header included.
  uint32_t request_id;  // Chosen by the client, not 0; 0 in events.
  uint32_t fd_count;    // Descriptors that come with this frame.
};

struct Hello {
  FrameHeader header;
  uint32_t abi_min;  // The oldest and the newest kFrameAbi that the client speaks.
  uint32_t abi_max;
  uint64_t reserved;
};

struct HelloReply {
  FrameHeader header;
  uint32_t abi;  // What this connection speaks.
  uint32_t reserved0;
  uint64_t epoch;
  uint64_t page_bytes;
  uint64_t reserved[2];
};

// What a client asks for: a label, or a fixed version when `version` is not 0.
struct Ref {
  char model[kNameBytes];
  char label[kNameBytes];        // Empty with a fixed version (see kFrameAbiDeclaredLabel).
  uint64_t version;              // 0: by label.
  uint8_t digest[kDigestBytes];  // All zero: any. Otherwise NOT_FOUND unless the version has it.
};

enum AcquireFlags : uint32_t {
  kAcquireWait = 1,  // Until READY or the deadline; else FAILED_PRECONDITION at once.
  kAcquireRedeclare =
      2,  // The client has the bytes mapped already (the daemon was restarted): send
          // Granted alone, without descriptors, as soon as the version is READY.
  // Also device memory, on the GPU of the DeviceWant that then follows the references. The one of
  // the two: FAILED_PRECONDITION where the version has no copy on that GPU. The other: then without
  // (a DeviceFds frame of mode kNone). Redeclared leases count as holders of it.
  kAcquireDevice = 4,
  kAcquireDeviceIfAny = 8,
};

inline constexpr uint32_t kGpuUuidBytes = 48;

// After the references of an Acquire with kAcquireDevice or kAcquireDeviceIfAny, never both.
struct DeviceWant {
  char gpu[kGpuUuidBytes];  // "GPU-...", as the driver says it, NUL-padded.
};

struct Acquire {
  FrameHeader header;
  uint32_t flags;
  uint32_t count;        // 1..kMaxSet; all are resolved from one snapshot, all or none.
  uint64_t deadline_ms;  // From receipt; only with kAcquireWait.
  // Ref refs[count]
};

struct RegionRef {
  uint32_t region;  // Number in the index.
  uint32_t kind;    // RegionKind
  uint64_t bytes;
};

struct Granted {
  FrameHeader header;
  uint32_t number;  // Of the reference in the Acquire, from 0.
  uint32_t count;
  uint64_t lease_id;
  uint64_t version;
  uint64_t generation;  // Of the label when resolved; 0 for a fixed version.
  uint32_t slot;        // In the catalogue page; kNoSlot for a fixed version.
  uint32_t regions;     // How many region descriptors come in all, in this and later frames.
  uint64_t index_bytes;
  uint8_t digest[kDigestBytes];
  char model[kNameBytes];
  char label[kNameBytes];
  uint32_t ref_count;  // Region descriptors in this frame: fds[1..].
  uint32_t device;     // 1: DeviceFds frames follow the regions' frames.
  // RegionRef refs[ref_count]
};

struct RegionFds {
  FrameHeader header;
  uint64_t lease_id;
  uint32_t count;
  uint32_t reserved;
  // RegionRef refs[count]
};

// How a client reaches device memory.
enum class DeviceMode : uint32_t {
  kNone = 0,            // There is none for this client.
  kVmmFd = 1,           // A descriptor of device memory for each segment; map it read-only.
  kHostDirect = 2,      // The GPU reads the host region itself: no segments.
  kHostRegistered = 3,  // A descriptor of host memory for each segment, to be registered.
  kCudaIpc = 4,         // A legacy handle for each segment, no descriptors.
};

constexpr const char* DeviceModeName(DeviceMode mode) {
  switch (mode) {
    case DeviceMode::kNone:
      return "host_only";
    case DeviceMode::kVmmFd:
      return "vmm_fd";
    case DeviceMode::kHostDirect:
      return "host_direct";
    case DeviceMode::kHostRegistered:
      return "host_registered";
    case DeviceMode::kCudaIpc:
      return "cuda_ipc";
  }
  return "unknown";
}

// Follows the last frame of regions of a Granted with device = 1; more of them until `total`
// segments have come. In the order of the segments' numbers.
struct DeviceFds {
  FrameHeader header;
  uint64_t lease_id;
  uint32_t mode;   // DeviceMode
  uint32_t total;  // Segments in all.
  uint32_t count;  // In this frame; 0 only when total is 0.
  uint32_t reserved;
  // DeviceRef refs[count]; kVmmFd and kHostRegistered: one descriptor each.
};

struct DeviceRef {
  uint32_t segment;  // Number in the index.
  uint32_t reserved;
  uint64_t bytes;
  uint8_t ipc[64];  // kCudaIpc
};

struct Fetch {
  FrameHeader header;
  uint64_t lease_id;
  uint32_t region;
  uint32_t reserved;
};

struct Release {
  FrameHeader header;
  uint64_t lease_id;
};

struct Subscribe {
  FrameHeader header;
};

struct Ack {
  FrameHeader header;
};

enum class EventKind : uint32_t {
  kLabelMoved = 1,  // slot, generation, version
  kDraining = 2,    // lease_id: the version is on its way out; move on when you can.
  kLookAtPage = 3,  // Events were dropped because the reader was slow: read the page.
  kClosing = 4,     // The daemon stops; mappings stay good.
  kEvicted = 5,     // lease_id: an operator ended the lease; its mappings stay good.
};

struct Event {
  FrameHeader header;
  uint32_t kind;
  uint32_t slot;
  uint64_t generation;
  uint64_t version;
  uint64_t lease_id;
};

struct Error {
  FrameHeader header;
  uint32_t code;    // Canonical code (google.rpc.Code), never 0.
  uint32_t length;  // Of the text, at most kMaxErrorText; it follows.
  // char text[length]
};

struct Upload {
  FrameHeader header;
  uint8_t ticket[kTicketBytes];
  uint32_t first;  // Number of the first descriptor's file in the Publish request.
  uint32_t last;   // 1: this frame completes the set.
};

static_assert(SharedLayout<FrameHeader> && sizeof(FrameHeader) == 16);
static_assert(sizeof(Hello) == 32 && sizeof(HelloReply) == 56);
static_assert(sizeof(Ref) == 184 && sizeof(Acquire) == 32);
static_assert(sizeof(Acquire) + kMaxSet * sizeof(Ref) <= kMaxFrameBytes);
static_assert(sizeof(Granted) == 248 && sizeof(RegionRef) == 16);
static_assert(sizeof(Granted) + kMaxFdsPerFrame * sizeof(RegionRef) <= kMaxFrameBytes);
static_assert(sizeof(RegionFds) == 32 && sizeof(Fetch) == 32 && sizeof(Release) == 24);
static_assert(sizeof(DeviceWant) == 48 && sizeof(DeviceFds) == 40 && sizeof(DeviceRef) == 80);
static_assert(sizeof(DeviceFds) + kMaxFdsPerFrame * sizeof(DeviceRef) <= kMaxFrameBytes);
static_assert(sizeof(Acquire) + kMaxSet * sizeof(Ref) + sizeof(DeviceWant) <= kMaxFrameBytes);
static_assert(sizeof(Event) == 48 && sizeof(Error) == 24 && sizeof(Upload) == 40);

}  // namespace modelhost::abi
