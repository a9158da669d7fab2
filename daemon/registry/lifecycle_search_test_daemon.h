// What the daemon does in the model of lifecycle_search_test_model.h, step by step: the moves are
// those of manager_*.cc, decided by the same rules.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/registry/lifecycle_search_test_model.h"

namespace modelhost {

inline bool InMemory(const SearchVersion& v) {
  return v.tracks.phase == Phase::kReady || v.tracks.phase == Phase::kDraining;
}

// Makes its moves in `state`.
class SearchDaemon {
 public:
  SearchDaemon(SearchState& state, const SearchRules& rules) : s_(state), rules_(rules) {}

  const std::string& violation() const { return violation_; }

  VersionFacts FactsOf(const SearchVersion& v) const {
    VersionFacts facts;
    facts.phase = v.tracks.phase;
    facts.health = v.tracks.health;
    facts.resident = InMemory(v);
    facts.on_disk = v.known;
    facts.labels = v.label;
    facts.maybe_labelled = v.maybe_labelled;
    facts.leases = v.lease;
    facts.holds = Held(v);
    facts.awaited = v.waits || v.tracks.phase == Phase::kReserved ||
                    v.tracks.phase == Phase::kLoading ||
                    (v.swap_target && v.tracks.phase != Phase::kReady);
    facts.unload_asked = v.unload_asked;
    return facts;
  }

  void Load(SearchVersion& v) {
    if (v.tracks.phase == Phase::kDraining) return StopDrain(v);
    if (v.tracks.phase == Phase::kUnloading) {
      v.waits = true;
      return;
    }
    if (v.tracks.phase == Phase::kLoading && v.cancelled) {
      v.waits = true;  // For a load of its own, not somebody else's cancelled one.
      return;
    }
    if (v.tracks.phase == Phase::kFailed) Move(v, Phase::kStaged);
    if (v.tracks.phase != Phase::kStaged) return;
    v.waits = false;
    Move(v, Phase::kReserved);
    if (rules_.announced_before_ready && v.label) Announce(v);
  }

  // The load's job comes to its booking.
  void Admit(SearchVersion& v, SearchVersion* victim) {
    if (Booked() < rules_.bounds.capacity) {
      v.booked = true;
      return Move(v, Phase::kLoading);
    }
    bool room_comes = false;
    ForEach([&](SearchVersion& other) {
      room_comes |= other.tracks.phase == Phase::kUnloading || other.cancelled;
    });
    if (!room_comes && victim != nullptr) {
      BeginDrain(*victim, false);
      room_comes = true;
    }
    Move(v, Phase::kStaged);
    if (room_comes) {
      v.waits = true;
    } else {
      LoadEnded(v, false);
    }
  }

  void LoadDone(SearchVersion& v) {
    if (!v.tracks.SetHostTier(HostTier::kPinned).ok()) Forbid("bytes outside of LOADING");
    Move(v, Phase::kReady);
    if (v.label && !Withdrawn(v) && MayAnnounce(FactsOf(v))) Announce(v);
    LoadEnded(v, true);
  }

  void LoadFailed(SearchVersion& v, Phase to) {
    v.booked = rules_.failed_load_keeps_booking && v.booked;
    Move(v, to);
    LoadEnded(v, false);
    // What it had booked is free again.
    if (!rules_.ended_load_wakes_nobody) WakeWaiting();
  }

  // Who waits for it is told now; it comes to rest later.
  void Cancel(SearchVersion& v) {
    v.cancelled = true;
    LoadEnded(v, false);
  }

  void CancelledLoadEnds(SearchVersion& v) {
    v.cancelled = false;
    v.booked = rules_.failed_load_keeps_booking && v.booked;
    Move(v, Phase::kFailed);
    Move(v, Phase::kStaged);
    if (v.waits) Load(v);
    if (!rules_.ended_load_wakes_nobody) WakeWaiting();
  }

  // Bytes were found to be bad at rest.
  void Quarantine(SearchVersion& v) {
    Move(v, Phase::kQuarantined);
    if (!rules_.quarantine_tells_nobody) LoadEnded(v, false);
  }

  void BeginDrain(SearchVersion& v, bool asked) {
    Move(v, Phase::kDraining);
    v.unload_asked = asked;
    if (rules_.booking_ends_with_drain) v.booked = false;
    MaybeFree(v, false);
  }

  void StopDrain(SearchVersion& v) {
    v.unload_asked = false;
    Move(v, Phase::kReady);
  }

  void MaybeFree(SearchVersion& v, bool released) {
    if (!rules_.may_free(FactsOf(v), released)) return;
    Move(v, Phase::kUnloading);
    v.released = v.lease && released;
    v.unload_asked = false;
  }

  void Freed(SearchVersion& v) {
    v.booked = false;
    if (!v.tracks.SetHealth({}, HealthCause::kFree).ok())
      Forbid("health after the end of the bytes");
    if (!v.tracks.SetHostTier(HostTier::kNone).ok()) Forbid("bytes freed outside of UNLOADING");
    Move(v, Phase::kStaged);
    if (!rules_.freed_wakes_nobody) WakeWaiting();
  }

  // A write of the labels of both models, or of one; `to` null: the label is removed.
  void BeginWrite(const std::array<SearchVersion*, kSearchModels>& to,
                  const std::array<bool, kSearchModels>& moved) {
    for (int m = 0; m < kSearchModels; ++m) {
      if (!moved[m] || to[m] == nullptr) continue;
      if (rules_.may_label(FactsOf(*to[m])) != Verdict::kYes) return FailSwap();
    }
    for (int m = 0; m < kSearchModels; ++m) {
      s_.models[m].written = moved[m];
      if (moved[m] && to[m] != nullptr) to[m]->write_target = true;
    }
    s_.write = LabelWrite::kBegun;
    if (rules_.seen_before_durable) Flip();
  }

  void Rename() {
    for (SearchState::Model& model : s_.models) {
      if (!model.written) {
        // All labels are in one file.
        for (SearchVersion& v : model.versions) v.label_on_disk = v.label;
        continue;
      }
      for (SearchVersion& v : model.versions) {
        v.label_on_disk = v.write_target;
        if (v.write_target && (v.dir == SearchDir::kAbsent || !InMemory(v))) {
          violation_ = "a label is made durable whose version is not READY";
        }
      }
      if (rules_.sets_flip_one_by_one) break;
    }
    s_.write = LabelWrite::kRenamed;
  }

  void WriteDone() {
    s_.in_doubt = false;
    ForEach([](SearchVersion& v) { v.maybe_labelled = false; });
    Flip();
    if (rules_.sets_flip_one_by_one && s_.models[0].written && s_.models[1].written) {
      EndWriteOf(s_.models[0]);
      s_.write = LabelWrite::kBegun;
      return;
    }
    EndWrite();
    s_.write = LabelWrite::kNone;
    if (s_.swap == SearchSwap::kFlipping) EndSwap();
  }

  void WriteFailed(bool disk_has_it) {
    ForEach([&](SearchVersion& v) {
      if (v.write_target) v.maybe_labelled = !rules_.failed_write_is_forgotten;
    });
    if (!disk_has_it) DiskAsMemory();
    EndWrite();
    s_.in_doubt = true;
    s_.write = LabelWrite::kRestoring;
    if (s_.swap == SearchSwap::kFlipping) FailSwap();
  }

  void RestoreDone() {
    s_.in_doubt = false;
    ForEach([](SearchVersion& v) { v.maybe_labelled = false; });
    DiskAsMemory();
    s_.write = LabelWrite::kNone;
  }

  void EndSwap() {
    s_.swap = SearchSwap::kNone;
    s_.gap = false;
    ForEach([](SearchVersion& v) { v.swap_target = false; });
  }

  void FailSwap() {
    const bool had_gap = s_.gap;
    EndSwap();
    if (!had_gap) return;
    // What left for the new ones' sake comes back.
    ForEach([&](SearchVersion& v) {
      if (!v.label) return;
      if (v.tracks.phase == Phase::kReady) return Announce(v);
      Load(v);
      if (v.tracks.phase == Phase::kReady) Announce(v);
    });
  }

  void StartSwap(const std::array<SearchVersion*, kSearchModels>& to, bool gap) {
    s_.swap = SearchSwap::kWaiting;
    s_.gap = gap;
    for (SearchVersion* target : to) {
      if (target != nullptr) target->swap_target = true;
    }
    for (int m = 0; gap && m < kSearchModels; ++m) {
      if (to[m] == nullptr) continue;
      for (SearchVersion& old : s_.models[m].versions) {
        if (!rules_.gap_keeps_page) old.label_in_page = false;
        if (old.label && old.tracks.phase == Phase::kReady) BeginDrain(old, true);
      }
    }
    for (SearchVersion* target : to) {
      if (target != nullptr) Load(*target);
    }
  }

  void Move(SearchVersion& v, Phase to) {
    const Phase from = v.tracks.phase;
    if (!v.tracks.MoveTo(to).ok()) {
      Forbid(absl::StrCat(PhaseName(from), " -> ", PhaseName(to)));
    }
  }

  void Announce(SearchVersion& v) {
    for (SearchState::Model& model : s_.models) {
      const bool here = &v >= model.versions.data() && &v < model.versions.data() + kSearchVersions;
      if (!here) continue;
      for (SearchVersion& other : model.versions) other.label_in_page = &other == &v;
    }
  }

  template <typename Function>
  void ForEach(Function function) {
    for (SearchState::Model& model : s_.models) {
      for (SearchVersion& v : model.versions) function(v);
    }
  }

 private:
  uint32_t Held(const SearchVersion& v) const {
    uint32_t holds = v.swap_target && v.tracks.phase == Phase::kReady ? 1 : 0;
    if (v.write_target) ++holds;
    return rules_.not_held_while_written && s_.write != LabelWrite::kNone ? 0 : holds;
  }

  bool Withdrawn(const SearchVersion& v) const {
    if (!s_.gap || rules_.gap_keeps_page) return false;
    for (const SearchState::Model& model : s_.models) {
      const bool here = &v >= model.versions.data() && &v < model.versions.data() + kSearchVersions;
      if (here) return std::ranges::any_of(model.versions, &SearchVersion::swap_target);
    }
    return false;
  }

  int Booked() {
    int booked = 0;
    ForEach([&](SearchVersion& v) { booked += v.booked; });
    return booked;
  }

  void WakeWaiting() {
    ForEach([&](SearchVersion& other) {
      if (other.waits && other.tracks.phase == Phase::kStaged) Load(other);
    });
  }

  void LoadEnded(SearchVersion& v, bool good) {
    v.waits = false;
    if (!good && v.swap_target && s_.swap == SearchSwap::kWaiting) FailSwap();
  }

  void Flip() {
    for (SearchState::Model& model : s_.models) {
      if (!model.written) continue;
      for (SearchVersion& v : model.versions) v.label = v.label_in_page = v.write_target;
      if (rules_.sets_flip_one_by_one) break;
    }
  }

  void DiskAsMemory() {
    ForEach([](SearchVersion& v) { v.label_on_disk = v.label; });
  }

  void EndWriteOf(SearchState::Model& model) {
    model.written = false;
    for (SearchVersion& v : model.versions) v.write_target = false;
  }

  void EndWrite() {
    for (SearchState::Model& model : s_.models) EndWriteOf(model);
  }

  void Forbid(const std::string& what) {
    if (violation_.empty()) violation_ = absl::StrCat("the tables forbid ", what);
  }

  SearchState& s_;
  const SearchRules& rules_;
  std::string violation_;
};

}  // namespace modelhost
