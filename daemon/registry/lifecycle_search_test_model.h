// A model of all that can happen to two models of three versions, small enough to explore whole:
// loads, leases, labels in memory, on disk and in the page, their transactions and swaps (also of
// both models at once, and with a gap), bookings, evictions, drains that release, bad bytes,
// deletion, and a crash at every point.
//
// What the daemon decides is decided here by the very same code: VersionTracks for every change of
// a track, lifecycle_policy.h for the rest. Around it, this says what may happen next; the steps
// are those of manager_*.cc, each as fine as a crash can tell apart.
//
// What makes the states few enough to look at all of them, and why that loses nothing that matters:
//
//   Bytes are counted in versions, all of one size. Who is evicted is any that may be, and who
//   waits for room has no place in a queue: that is more than the daemon would do, never less. A
//   version has one label and one lease at most, and there is one lease in all, one drain for want
//   of use, one load by hand beside those that labels and swaps need, and one of each kind of
//   trouble (kMost...): the rules look at one version and ask whether there is one, not how many.
//   One swap and one write of the labels are under way at a time. Writes wait for each other in the
//   daemon, too; swaps of other models do not, but meet only in the room that they want.
//   Models and versions have no names: states that differ in that alone are one.
//
// All at once would still be too much. So there are several searches, by SearchBounds, each of them
// complete, and what one leaves out another one has:
//
//   one trouble at a time, beside swaps, gaps and a lease, with room for one version more than the
//   labels need; grants, loads, unloads, deletions and damage begin only while no label moves, and
//   labels and swaps beside no unload (nor swaps beside loads), but all that had begun goes on;
//   the same with room for what the labels name and no more: nothing fits unless something goes;
//   all of that begins also while labels move and swaps wait, without damage or failures;
//   the same with them, one at a time, with room for what is labelled, without leases;
//   two troubles at a time, with that room, without swaps and leases.
//
// In none of them are a lease, a trouble and something that begins while labels move all together
// (what a lease keeps, it keeps whether labels move or not), or two troubles beside a swap:
// model_manager_random_test comes there, by chance.
//
// The packing and what must not be are in lifecycle_search_test_state.cc, the daemon's moves in
// lifecycle_search_test_daemon.h, what may happen next in lifecycle_search_test_steps.cc.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/functional/function_ref.h"
#include "daemon/registry/lifecycle_policy.h"
#include "daemon/registry/version_state.h"

namespace modelhost {

inline constexpr int kSearchModels = 2;
inline constexpr int kSearchVersions = 3;
inline constexpr int kMostLoads = 1;
inline constexpr int kMostFailed = 1;
inline constexpr int kMostCancelled = 1;
inline constexpr int kMostUnloads = 1;
inline constexpr int kMostDraining = 1;
inline constexpr int kMostFlawed = 1;

enum class SearchDir : uint8_t { kAbsent, kGood, kBad };

struct SearchVersion {
  VersionTracks tracks;
  SearchDir dir = SearchDir::kGood;
  bool known = true;  // In the daemon's books.
  bool lease = false;
  bool released = false;  // The lease is on bytes that a deadline let go.
  bool unload_asked = false;
  bool booked = false;
  bool waits = false;      // To be loaded as soon as it is freed, or there is room.
  bool cancelled = false;  // Its load; what that booked is given back when it comes to rest.
  // What names it.
  bool label = false;  // In memory.
  bool label_on_disk = false;
  bool label_in_page = false;
  bool maybe_labelled = false;
  bool swap_target = false;
  bool write_target = false;
};

enum class LabelWrite : uint8_t {
  kNone,
  kBegun,      // Checked and held; the rename has not happened.
  kRenamed,    // It has, and nobody was told yet.
  kRestoring,  // It failed: the old labels are written again.
};

enum class SearchSwap : uint8_t { kNone, kWaiting, kFlipping };

struct SearchState {
  struct Model {
    std::array<SearchVersion, kSearchVersions> versions;
    bool written = false;  // The write under way moves this model's label.
  };
  std::array<Model, kSearchModels> models;
  LabelWrite write = LabelWrite::kNone;
  SearchSwap swap = SearchSwap::kNone;
  bool gap = false;       // The swap lets the old versions leave first.
  bool in_doubt = false;  // A write failed, and what the disk has now is not known.
};

struct SearchKey {
  std::array<uint64_t, kSearchModels> words{};
  friend bool operator==(const SearchKey& a, const SearchKey& b) {  // Of arrays it is a memcmp.
    return a.words[0] == b.words[0] && a.words[1] == b.words[1];
  }
  template <typename H>
  friend H AbslHashValue(H h, const SearchKey& key) {
    return H::combine(std::move(h), key.words[0], key.words[1]);
  }
};
// The same for states that differ only in which model or version is which.
SearchKey EncodeSearchState(const SearchState& state);
SearchState DecodeSearchState(const SearchKey& key);

// What of everything is explored.
struct SearchBounds {
  int capacity = 3;  // Versions that fit.
  int leases = 1;    // In all.
  bool swaps = true;
  // How many at a time, whichever they are: bytes that are flawed, loads that FAILED or were
  // cancelled, unloads asked for and label writes that failed. What a failed write named, though,
  // may be deleted. 0: as 1, but of them only unloads and deletions.
  int troubles = 1;
  // Whatever may begin begins also while labels move, and labels and swaps beside whatever has.
  bool crowded = false;
};

// The rules, each replaceable by a broken one.
struct SearchRules {
  std::function<Verdict(const VersionFacts&)> may_grant = MayGrant;
  std::function<Verdict(const VersionFacts&)> may_label = MayLabel;
  std::function<Verdict(const VersionFacts&)> may_unload = MayUnload;
  std::function<bool(const VersionFacts&)> may_evict = MayEvict;
  std::function<bool(const VersionFacts&, bool)> may_free = MayFree;
  std::function<Verdict(const VersionFacts&)> may_delete = MayDelete;
  bool seen_before_durable = false;        // Labels move before they are on disk.
  bool announced_before_ready = false;     // The page shows what is still loading.
  bool not_held_while_written = false;     // Nothing keeps the targets of a write READY.
  bool failed_load_keeps_booking = false;  // The booking of a failed load is not given back.
  bool booking_ends_with_drain = false;    // It is given back before the bytes are.
  bool sets_flip_one_by_one = false;       // A set's labels are written one after the other.
  bool failed_write_is_forgotten = false;  // What a failed write named may be deleted.
  bool failed_write_is_not_undone =
      false;                              // The old labels are written again once, not until done.
  bool repair_stays_quarantined = false;  // Bytes that are good again are not believed.
  bool gap_keeps_page = false;            // The old version drains while the page shows it.
  bool freed_wakes_nobody = false;        // Who waits for room is not told of what was freed,
  bool ended_load_wakes_nobody = false;   // or of what a load gave back that did not end well.
  bool quarantine_tells_nobody = false;   // Who waits to load what is found to be bad waits on.

  SearchBounds bounds;
};

// Millions are made and few are read.
struct SearchStepName {
  const char* what = "";
  std::array<int, kSearchModels> versions = {-1, -1};  // One of each model, or -1.
  std::array<int, kSearchModels> evicts = {-1, -1};
  int model = -1;

  std::string Text() const;  // "load m0 v1"
};

struct SearchStep {
  SearchStepName name;
  // Whether it is the daemon's own, or what an operator would do to get his model back; progress is
  // by these alone.
  bool helps = false;
  SearchState next;
  std::string violation;  // The step itself broke something.
};
// Calls `take` with each step that can be made from `state`.
void ForEachSearchStep(const SearchState& state, const SearchRules& rules,
                       absl::FunctionRef<void(const SearchStep&)> take);

// What must not be, in words; empty when all is well.
std::string FindViolation(const SearchState& state, int capacity);
// Every model that has a label has a READY version under it.
bool EveryLabelServes(const SearchState& state);

std::string DescribeSearchState(const SearchState& state);

}  // namespace modelhost
