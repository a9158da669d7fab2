// What may be done with a version, as pure functions of what is known about it. The manager decides
// nothing of this kind by itself, and lifecycle_search_test.cc explores all that these rules
// allow. No state, no I/O; any thread.
//
// The invariants that they keep:
//   a label on disk always names a version whose directory is there and that was READY when set
//   the page shows no version on which leases cannot be granted
//   no lease is on freed bytes, but for those that a deadline released
//   nothing is deleted that a label, a lease, or work under way needs
#pragma once

#include <cstdint>

#include "daemon/registry/version_state.h"

namespace modelhost {

struct VersionFacts {
  Phase phase = Phase::kStaged;
  Health health = Health::kOk;
  bool resident = false;        // Its bytes can be handed out.
  bool on_disk = true;          // As the last scan saw it.
  uint64_t labels = 0;          // That name it, in memory.
  bool maybe_labelled = false;  // A write of the labels failed that named it: the disk may, too.
  uint64_t leases = 0;
  uint32_t holds = 0;      // Swaps and label moves under way that count on it being READY.
  bool awaited = false;    // Somebody waits for it to become READY.
  bool reloading = false;  // Its files are read once more, beside what is resident.
  // Resident since before a restart of the daemon, a moment ago: leases may still be declared
  // again.
  bool awaits_clients = false;
  bool unload_asked = false;  // In DRAINING: by an operation, not because nobody needed it.
};

// kYes, or what speaks against it.
enum class Verdict : uint8_t {
  kYes,
  kSuspect,
  kLabelled,
  kLeased,
  kHeld,
  kBusy,      // Work on it is under way.
  kNotReady,  // Not in a phase for it.
};

bool AtRest(Phase phase);  // STAGED, FAILED, QUARANTINED: nothing in memory, nothing under way.

// A new lease. A version that drains because nobody needed it comes back for one.
Verdict MayGrant(const VersionFacts& version);
// A label is moved to it.
Verdict MayLabel(const VersionFacts& version);
// The page shows that a label names it.
bool MayAnnounce(const VersionFacts& version);
// It leaves READY because somebody asked.
Verdict MayUnload(const VersionFacts& version);
// It leaves READY because nobody has needed it for keep_previous.
bool MayLapse(const VersionFacts& version);
// It leaves READY for another one's room.
bool MayEvict(const VersionFacts& version);
// Its bytes go. `released`: by a deadline, from under leases whose holders keep what they have
// mapped.
bool MayFree(const VersionFacts& version, bool released);
// Its directory goes.
Verdict MayDelete(const VersionFacts& version);
// It leaves the books, its directory being gone.
bool MayForget(const VersionFacts& version);

}  // namespace modelhost
