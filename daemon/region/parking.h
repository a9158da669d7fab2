// Leaves the memory of resident versions in the fd store, so that the next daemon finds it there
// (restored_memory.h), and keeps the record of it (parked_record.h).
//
// A version is in the store for as long as the token of Park lives; a region that several versions
// share is there once. Everything is told to the store and written down by one thread of this
// object, in order: a store that hangs costs one load `patience`, and the others nothing until it
// goes on. Names are never
// used twice, so a record can not be mistaken for another's.
//
// The store has room for `most` descriptors. When it is full, what comes is not parked: first come
// the regions that hold tensors, then the index, copies on GPUs, and the other files. Of copies
// only those are parked that a descriptor keeps (vmm_fd).
//
// Outlives every version that it parked. Thread-safe.
#pragma once

#include <compare>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "daemon/platform/fd_store.h"
#include "daemon/platform/os.h"
#include "daemon/platform/thread_pool.h"
#include "daemon/region/parked_record.h"
#include "daemon/region/resident_version.h"

namespace modelhost {

class Parking {
 public:
  struct Options {
    uint64_t epoch = 0;   // Of this daemon; part of the names.
    std::string builder;  // Of indexes: this program and its revision.
    size_t most = 0;      // 0: there is no store, and Park does nothing.
    absl::Duration patience = absl::Seconds(2);
  };

  // All three outlive it.
  Parking(Os& os, FdStore& store, const UniqueFd& state_dir, Options options);
  ~Parking();
  Parking(const Parking&) = delete;

  // `version` is complete but for its report; `warnings` came of the load that parsed its files,
  // `gpu_layout` is its IndexIdentity's.
  // When this returns the store has it and the record says so, or `warning` (left empty otherwise)
  // says what of it will have to be read again. Null when nothing of it was parked.
  std::shared_ptr<const void> Park(const ResidentVersion& version,
                                   const std::vector<std::string>& warnings,
                                   const std::string& gpu_layout, std::string& warning);

  // The copy is lost: it leaves the store, and its versions stay. Before the copy dies.
  void Forget(const DeviceRegion& copy);

  // Until everything so far was told to the store. False: it hangs, and so would the destructor.
  bool Settle(absl::Duration patience);

  // From now on everything stays in the store, whatever is freed: the daemon ends.
  void Leave();

  const std::string& builder() const { return options_.builder; }
  uint64_t parked() const;  // Descriptors in the store.

 private:
  struct InodeKey {
    uint64_t device = 0;
    uint64_t inode = 0;
    friend auto operator<=>(const InodeKey&, const InodeKey&) = default;
  };
  struct SharedRegion {
    ParkedRegion record;
    uint64_t users = 0;
  };
  struct SharedDevice {
    ParkedDevice record;
    uint64_t users = 0;
  };
  struct Entry {
    ParkedVersion record;
    std::vector<InodeKey> regions;
    std::vector<const DeviceRegion*> devices;
  };
  class Token;
  struct Batch;  // What the store is to be told.

  absl::Status AddRegion(const HostRegion& region, Entry& entry, Batch& batch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AddIndex(const ResidentVersion& version, ParkedIndex facts, Entry& entry,
                        Batch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status AddDevice(const DeviceRegion& copy, Entry& entry, Batch& batch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes a place in the store, and gives it a name. RESOURCE_EXHAUSTED.
  absl::Status Put(const UniqueFd& fd, std::string& name, Batch& batch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status StoreIsFull() const;
  void Unpark(uint64_t entry);
  // On the thread of this object.
  absl::Status Tell(const Batch& batch);
  absl::Status WriteRecord();

  Os& os_;
  FdStore& store_;
  const UniqueFd& state_dir_;
  const Options options_;
  mutable absl::Mutex mutex_;
  bool left_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t next_name_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t next_entry_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t parked_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;  // Batches that the store has not taken yet.
  bool hangs_ ABSL_GUARDED_BY(mutex_) = false;    // A load has waited in vain for one of them.
  std::map<InodeKey, SharedRegion> regions_ ABSL_GUARDED_BY(mutex_);
  // A copy lives longer than its place here: its version ends the token first.
  std::map<const DeviceRegion*, SharedDevice> devices_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  uint64_t changes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t written_changes_ = 0;  // Only the thread's.
  ThreadPool thread_;             // Last: its tasks use the others.
};

}  // namespace modelhost
