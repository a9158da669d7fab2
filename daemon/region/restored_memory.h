// What the fd store gave back at this start: checked once, then offered to the loads, each thing
// once, until DropRest.
//
// Take removes every name from the store before it looks at anything: a start that dies over what
// came back finds nothing there the next time, and loads from disk. What is taken up must be the
// very memory that the record (parked_record.h) speaks of: name, device and inode, exact size, all
// seals, for an index also SHA-256 of its bytes. A region's bytes were verified when it was made,
// and the seals, which can never be taken off, keep them as they were; the load that takes it
// compares one chunk with the manifest all the same (LoadJob::MapRestored).
//
// Copies on GPUs are offered to the device tier, which asks the device for their checksums before a
// load takes one: their descriptors say nothing of what they are. A copy that lacks a descriptor is
// dropped alone, and made again from the host's bytes.
//
//   one thing that is not as recorded   somebody else was at work: all of it is dropped
//   a descriptor that is missing        its version is dropped (a crash, or the store was full)
//   descriptors that nobody recorded    dropped; no reason to distrust the others
//
// Whatever is dropped is loaded from disk as ever. The memory that is still offered is not booked:
// the load that takes it does that. Thread-safe.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "daemon/platform/fd_store.h"
#include "daemon/platform/os.h"
#include "daemon/region/device_region.h"
#include "daemon/region/parked_record.h"
#include "proto/handle/region.h"

namespace modelhost {

class DeviceTier;

// What a version must be for an index to be its own.
struct IndexIdentity {
  std::string model;
  uint64_t version = 0;
  Digest digest;
  Residency residency = Residency::kPinned;
  std::vector<Digest> contents;  // Of its regions, in their order.
  std::string builder;
  std::string gpu_layout;  // How it lays tensors out on GPUs; empty: it does not.
};

struct RestoredIndex {
  SealedRegion memory;
  ParkedIndex facts;
};

struct RestoreReport {
  uint64_t received = 0;    // Descriptors that came back.
  uint64_t foreign = 0;     // Of these, that no record speaks of.
  uint64_t taken = 0;       // Of these, offered to loads.
  uint64_t bytes = 0;       // Of the regions offered.
  uint64_t copies = 0;      // On GPUs, of those offered.
  uint64_t incomplete = 0;  // Versions with a descriptor missing.
  uint64_t refused = 0;     // Versions dropped because something was not as recorded.
  std::string problem;      // What was not; empty when all was.
};

class RestoredMemory {
 public:
  RestoredMemory() = default;
  RestoredMemory(const RestoredMemory&) = delete;

  // At the start, once, before any load. Blocking.
  void Take(Os& os, FdStore& store, const UniqueFd& state_dir, std::vector<NamedFd> stored);

  RestoreReport report() const;
  // The versions of which something is offered: they were resident when the last daemon ended.
  const std::vector<std::pair<std::string, uint64_t>>& versions() const { return versions_; }

  std::optional<SealedRegion> TakeRegion(const Digest& content, uint64_t bytes);
  // By a load that failed: the next one may have it.
  void GiveBack(const Digest& content, SealedRegion region);
  std::optional<RestoredIndex> TakeIndex(const IndexIdentity& wanted);
  // A load found something that is not as recorded: nothing more is offered. May free gigabytes.
  void Distrust(const std::string& problem);

  // Copies on GPUs go there, now and later; what is dropped here is dropped there. It outlives this
  // object's use.
  void UseDevices(DeviceTier& devices);

  // Lets go of what nobody took. May free gigabytes. Returns the bytes of the regions dropped.
  uint64_t DropRest();

 private:
  void Sort(Os& os, const ParkedRecord& record, std::vector<NamedFd> stored)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SortDevices(const ParkedRecord& record, std::map<std::string, std::vector<UniqueFd>>& fds)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void OfferCopies() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::vector<std::pair<std::string, uint64_t>> versions_;  // Written by Take.
  mutable absl::Mutex mutex_;
  RestoreReport report_ ABSL_GUARDED_BY(mutex_);
  bool dropped_ ABSL_GUARDED_BY(mutex_) = false;
  DeviceTier* devices_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::vector<DeviceRegion::Parts> copies_ ABSL_GUARDED_BY(mutex_);  // Until there is a tier.
  std::map<Digest, SealedRegion> regions_ ABSL_GUARDED_BY(mutex_);
  struct OfVersion {
    ParkedVersion version;  // Its index is there.
    SealedRegion memory;
  };
  std::vector<OfVersion> indexes_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace modelhost
