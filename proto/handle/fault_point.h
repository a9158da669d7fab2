// Places at which a test ends the process, as `kill -9` or a power failure would.
//
//   FaultPoint("publish.after_rename");
//
// In the programs that ship this calls an empty function (fault_point_none.cc). The test programs
// modelhostd-faulty and modelctl-faulty and the library libmodelhost-faulty.so are linked with
// tests/faults/fault_point_armed.cc instead, which reads MODELHOST_FAULT_POINT and
// MODELHOST_FAULT_LIST. A name that is not in the list below does not compile;
// tests/integration/test_crash.py sees to it that each is reached. Any thread.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace modelhost {

inline constexpr auto kFaultPoints = std::to_array<std::string_view>({
    // The daemon. Its start:
    "start.epoch_saved",
    "start.swept",
    "start.scanned",
    "start.serving",
    // A small file of the state directory or the store is replaced:
    "file.written",
    "file.kept",
    "file.renamed",
    "file.synced",
    // Publish and repair:
    "publish.staged",
    "publish.file",
    "publish.manifest",
    "publish.before_rename",
    "publish.renamed",
    "publish.synced",
    "publish.done",
    "repair.moved_aside",
    "repair.published",
    // Load:
    "load.opened",
    "load.booked",
    "load.mapped",
    "load.read",
    "load.pinned",
    "load.device_booked",
    "load.device_created",
    "load.device_uploaded",
    "load.indexed",
    "load.ready",
    // Labels:
    "flip.held",
    "flip.saved",
    "flip.remembered",
    "flip.half_written",
    "flip.seen",
    // A lease:
    "grant.noted",
    // Drain and free:
    "drain.begun",
    "drain.freeing",
    "drain.freed",
    // A version leaves the store:
    "delete.renamed",
    "delete.synced",
    "delete.removing",
    "delete.removed",
    // Garbage is collected; each version leaves as above:
    "gc.planned",
    "gc.removed",
    "gc.swept",
    "gc.orphans",
    "gc.done",
    // The fd store of the service manager, and the record of what is in it:
    "park.gone",
    "park.stored",
    "park.written",
    "park.recorded",
    "park.left",
    // What it gave back at the start is taken up:
    "restore.emptied",
    "restore.checked",
    "restore.taken",
    // The journal of operations:
    "journal.written",
    "journal.fresh",
    "journal.renamed",
    // modelctl's publish by descriptors:
    "ctl.ticket",
    "ctl.connected",
    "ctl.some_sent",
    "ctl.all_sent",
    // The client library:
    "client.hello_sent",
    "client.connected",
    "client.acquire_sent",
    "client.granted",
    "client.mapped",
    "client.released",
});

// A name of the list.
class FaultName {
 public:
  consteval FaultName(const char* name) : name_(name) {  // NOLINT(google-explicit-constructor)
    if (std::find(kFaultPoints.begin(), kFaultPoints.end(), name) == kFaultPoints.end()) {
      IsNotInTheList();  // Stops the compiler: no constant calls it.
    }
  }
  const char* c_str() const { return name_; }

 private:
  static void IsNotInTheList();  // Nowhere.

  const char* name_;
};

void FaultPoint(FaultName name);

}  // namespace modelhost
