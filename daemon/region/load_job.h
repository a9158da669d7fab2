// One call of Loader::Load, phase by phase. Lives on the stack of the thread that loads; what it
// made so far goes with it when it fails.
//
//   Open -> Plan -> { Claim -> Book -> Map -> ChunkPass -> Pin -> Finish | wait for others }* ->
//   ChooseDevices -> Index -> MakeDevices -> Park
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/region/chunk_pass.h"
#include "daemon/region/loader.h"
#include "daemon/region/requires_check.h"
#include "proto/handle/region.h"

namespace modelhost {

class LoadJob {
 public:
  LoadJob(Loader& loader, const LoadRequest& request);
  ~LoadJob();
  LoadJob(const LoadJob&) = delete;

  absl::StatusOr<std::shared_ptr<const ResidentVersion>> Run();

 private:
  // One distinct content of the version.
  struct Slot {
    RegionKey key;
    uint32_t file = 0;  // In the manifest; the first with this content.
    bool mine = false;  // Claimed, to be made here.
    bool verify = false;
    bool want_lock = false;
    bool restored = false;  // Its memory came back from the fd store, and stands for the file.
    HostTier tier = HostTier::kNone;
    Reservation host;
    Reservation memlock;
    ReadOnlyMapping mapping;  // Of the file; after Pin of the sealed copy, if there is one.
    std::optional<WritableRegion> copy;  // Sealed only.
    std::shared_ptr<const HostRegion> region;
  };

  // Adds the time since construction to a phase of the report.
  class PhaseTimer {
   public:
    PhaseTimer(LoadJob& job, std::string name) : job_(job), name_(std::move(name)) {
      started_ = job.loader_.clock_.Monotonic();
    }
    ~PhaseTimer() { job_.AddPhase(name_, job_.loader_.clock_.Monotonic() - started_, bytes); }
    uint64_t bytes = 0;

   private:
    LoadJob& job_;
    const std::string name_;
    absl::Duration started_;
  };

  absl::Status Open();
  absl::Status Plan();
  // Before a byte is loaded, handed out or booked: is the version for this machine? (Its manifest
  // is known by then; for files placed by hand Open has made one, and read them for it.)
  absl::Status CheckMachine();
  void WarnOfRequirements(const std::vector<ComponentIndex>& components);
  absl::Status MakeRegions();
  // True when something was claimed.
  bool Claim();
  absl::Status WaitForOthers();
  absl::Status Book();
  absl::Status BookMemlock();
  absl::Status Map();
  absl::Status MapFile(Slot& slot);
  // True when the fd store had the memory of a sealed slot.
  absl::StatusOr<bool> MapRestored(Slot& slot);
  absl::Status CheckRestored(const Slot& slot, std::span<const std::byte> bytes) const;
  absl::Status RunPass();
  absl::Status Pin();
  absl::Status LockSlot(Slot& slot, std::span<const std::byte> bytes, uint64_t done_before);
  void Finish();
  // Which GPUs are meant; waits until it is known which there are.
  absl::Status ChooseDevices();
  absl::Status Index(ResidentVersion& version);
  absl::Status MakeDevices(ResidentVersion& version);
  void Park(ResidentVersion& version);
  absl::StatusOr<std::shared_ptr<const ResidentVersion>> Complete();
  // The index and what goes with it: from the fd store, or else parsed and laid out.
  bool AdoptIndex(ResidentVersion& version);
  // What an index depends on besides the files; empty when it names no device.
  std::string GpuLayout() const;
  absl::Status MakeIndex(ResidentVersion& version);

  const ManifestFile& FileOf(const Slot& slot) const;
  const UniqueFd& FdOf(const Slot& slot) const { return opened_.files[slot.file]; }
  std::string PathOf(const Slot& slot) const;
  bool InPageCache(std::span<const std::byte> bytes);
  absl::Status MemlockRefused(const absl::Status& why) const;
  absl::Status Cancelled() const;
  void AddPhase(const std::string& name, absl::Duration duration, uint64_t bytes);

  Loader& loader_;
  Os& os_;
  const LoadRequest& request_;
  const std::shared_ptr<CancelToken> cancel_;
  const std::string name_;  // "planner@8"
  const absl::Duration started_;
  ProgressMeter progress_;
  LoadReport report_;
  bool all_in_page_cache_ = true;
  uint64_t host_booked_bytes_ = 0;  // Of the regions that this load made.
  uint64_t unlocked_bytes_ = 0;     // Wanted to be locked, and are not.
  std::string unlocked_why_;
  std::string distrusted_;  // Why memory of the fd store was not taken.
  std::string dir_;         // Of the version, for people.
  VersionFiles opened_;
  std::vector<RequiresSource> requirements_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> file_slots_;  // Slot of manifest->files[i].
  DeviceTier::Targets targets_;
  std::vector<std::string> contents_warnings_;  // That an index brings along.
  DevicePlan plan_;
};

}  // namespace modelhost
