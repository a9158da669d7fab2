#include "daemon/registry/lifecycle_search_test_model.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

// --- Packing

// Every combination of tracks that the tables can reach, under its phase and whether it is suspect.
const VersionTracks& Prototype(Phase phase, bool suspect) {
  static const auto prototypes = [] {
    std::array<std::array<VersionTracks, 2>, 8> made{};
    const auto keep = [&](const VersionTracks& tracks) {
      made[static_cast<size_t>(Phase{tracks.phase})][tracks.health == Health::kSuspect] = tracks;
    };
    const HealthState bad{Health::kSuspect, HealthReason::kSourceChanged};
    VersionTracks tracks;
    keep(tracks);
    VersionTracks quarantined = tracks;
    (void)quarantined.MoveTo(Phase::kQuarantined);
    keep(quarantined);
    for (const Phase next :
         {Phase::kReserved, Phase::kLoading, Phase::kReady, Phase::kDraining, Phase::kUnloading}) {
      if (next == Phase::kReady) {
        VersionTracks failed = tracks;
        (void)failed.MoveTo(Phase::kFailed);
        keep(failed);
        (void)tracks.SetHostTier(HostTier::kPinned);
      }
      (void)tracks.MoveTo(next);
      keep(tracks);
      VersionTracks doubtful = tracks;
      if (doubtful.SetHealth(bad, HealthCause::kHealthCheck).ok()) keep(doubtful);
    }
    return made;
  }();
  return prototypes[static_cast<size_t>(phase)][suspect];
}

class Packer {
 public:
  void Put(uint64_t value, int bits) {
    word_ |= value << at_;
    at_ += bits;
  }
  uint64_t word() const { return word_; }

 private:
  uint64_t word_ = 0;
  int at_ = 0;
};

class Unpacker {
 public:
  explicit Unpacker(uint64_t word) : word_(word) {}
  uint64_t Take(int bits) {
    const uint64_t value = word_ & ((uint64_t{1} << bits) - 1);
    word_ >>= bits;
    return value;
  }

 private:
  uint64_t word_;
};

constexpr int kVersionBits = 18;
constexpr int kModelBits = kVersionBits * kSearchVersions + 1;

uint64_t PackVersion(const SearchVersion& v) {
  Packer packer;
  packer.Put(static_cast<uint64_t>(Phase{v.tracks.phase}), 3);
  packer.Put(v.tracks.health == Health::kSuspect, 1);
  packer.Put(static_cast<uint64_t>(v.dir), 2);
  for (const bool bit :
       {v.known, v.lease, v.released, v.unload_asked, v.booked, v.waits, v.label, v.label_on_disk,
        v.label_in_page, v.maybe_labelled, v.swap_target, v.write_target}) {
    packer.Put(bit, 1);
  }
  return packer.word();
}

SearchVersion UnpackVersion(uint64_t word) {
  Unpacker unpacker(word);
  SearchVersion v;
  const Phase phase = static_cast<Phase>(unpacker.Take(3));
  v.tracks = Prototype(phase, unpacker.Take(1) != 0);
  v.dir = static_cast<SearchDir>(unpacker.Take(2));
  for (bool* bit :
       {&v.known, &v.lease, &v.released, &v.unload_asked, &v.booked, &v.waits, &v.label,
        &v.label_on_disk, &v.label_in_page, &v.maybe_labelled, &v.swap_target, &v.write_target}) {
    *bit = unpacker.Take(1) != 0;
  }
  return v;
}

// --- What the daemon does

bool InMemory(const SearchVersion& v) {
  return v.tracks.phase == Phase::kReady || v.tracks.phase == Phase::kDraining;
}

class Daemon {
 public:
  Daemon(SearchState& state, const SearchRules& rules) : s_(state), rules_(rules) {}

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
    if (v.tracks.phase == Phase::kFailed) Move(v, Phase::kStaged);
    if (v.tracks.phase != Phase::kStaged) return;
    v.waits = false;
    Move(v, Phase::kReserved);
    if (rules_.announced_before_ready && v.label) Announce(v);
  }

  // The load's job comes to its booking.
  void Admit(SearchVersion& v, SearchVersion* victim) {
    if (Booked() < kCapacity) {
      v.booked = true;
      return Move(v, Phase::kLoading);
    }
    bool room_comes = false;
    ForEach([&](SearchVersion& other) { room_comes |= other.tracks.phase == Phase::kUnloading; });
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
    if (rules_.lost_wake_up) return;
    ForEach([&](SearchVersion& other) {
      if (other.waits && other.tracks.phase == Phase::kStaged) Load(other);
    });
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

// --- What can happen

std::array<int, kSearchModels> OneVersion(int m, int n) {
  std::array<int, kSearchModels> versions = {-1, -1};
  versions[m] = n;
  return versions;
}

class Steps {
 public:
  Steps(const SearchState& state, const SearchRules& rules,
        absl::FunctionRef<void(const SearchStep&)> take)
      : state_(state), rules_(rules), take_(take), copy_(state), looking_(copy_, rules) {}

  void All() {
    for (const SearchState::Model& model : state_.models) {
      for (const SearchVersion& v : model.versions) {
        const Phase phase = v.tracks.phase;
        leases_ += v.lease;
        flawed_ += Flawed(v);
        loading_ += v.waits || phase == Phase::kReserved || phase == Phase::kLoading;
        failed_ += phase == Phase::kFailed;
        draining_ += phase == Phase::kDraining;
        unloads_ += v.unload_asked;
      }
    }
    quiet_ = state_.write == LabelWrite::kNone && state_.swap == SearchSwap::kNone;
    for (int m = 0; m < kSearchModels; ++m) {
      for (int n = 0; n < kSearchVersions; ++n) OfVersion(m, n);
    }
    OfLabels();
    OfSwaps();
    Crash();
  }

 private:
  static bool Flawed(const SearchVersion& v) { return v.dir != SearchDir::kGood || !v.known; }

  using Do = absl::FunctionRef<void(SearchState&, Daemon&, SearchVersion&)>;
  using Name = SearchStepName;

  void Step(const Name& name, bool helps, absl::FunctionRef<void(SearchState&, Daemon&)> act) {
    SearchStep step{.name = name, .helps = helps, .next = state_, .violation = {}};
    Daemon daemon(step.next, rules_);
    act(step.next, daemon);
    step.violation = daemon.violation();
    take_(step);
  }

  void OfVersion(int m, int n) {
    const SearchVersion& v = state_.models[m].versions[n];
    const auto step = [&](const char* what, bool helps, Do act) {
      Step(Name{.what = what, .versions = OneVersion(m, n)}, helps,
           [&](SearchState& next, Daemon& daemon) {
             act(next, daemon, next.models[m].versions[n]);
           });
    };
    const VersionFacts facts = looking_.FactsOf(v);
    const Phase phase = v.tracks.phase;

    // The disk and the clients.
    if (v.dir == SearchDir::kAbsent) {
      step("publish", false, [](auto&, auto&, SearchVersion& x) { x.dir = SearchDir::kGood; });
    } else if (!v.known) {
      step("scan", true, [](auto&, auto&, SearchVersion& x) { x.known = true; });
    }
    if (v.dir == SearchDir::kGood && flawed_ < kMostFlawed && quiet_) {
      step("bytes go bad", false, [](auto&, auto&, SearchVersion& x) { x.dir = SearchDir::kBad; });
    }
    if (v.lease) {
      step("lease ends", true, [](auto&, Daemon& daemon, SearchVersion& x) {
        x.lease = x.released = false;
        daemon.MaybeFree(x, false);
      });
    }
    if (!v.known) return;
    if (!v.lease && leases_ < kMostLeases && quiet_ && rules_.may_grant(facts) == Verdict::kYes) {
      step("grant", false, [](auto&, Daemon& daemon, SearchVersion& x) {
        if (x.tracks.phase == Phase::kDraining) daemon.StopDrain(x);
        x.lease = true;
      });
    }

    // Bad bytes.
    if (v.dir == SearchDir::kBad) {
      step("repair", true, [this](auto&, Daemon& daemon, SearchVersion& x) {
        x.dir = SearchDir::kGood;
        if (x.tracks.phase == Phase::kQuarantined && !rules_.repair_stays_quarantined) {
          daemon.Move(x, Phase::kStaged);
        }
        // Loaded again beside what is there, and put in its place.
        if (InMemory(x)) (void)x.tracks.SetHealth({}, HealthCause::kLoad);
      });
      if (InMemory(v) && v.tracks.health != Health::kSuspect) {
        step("health check", false, [](auto&, auto&, SearchVersion& x) {
          (void)x.tracks.SetHealth({Health::kSuspect, HealthReason::kSourceChanged},
                                   HealthCause::kHealthCheck);
        });
      }
      if (phase == Phase::kStaged || phase == Phase::kFailed) {
        step("verify", false,
             [](auto&, Daemon& daemon, SearchVersion& x) { daemon.Move(x, Phase::kQuarantined); });
      }
    }

    // A load.
    if ((AtRest(phase) && phase != Phase::kQuarantined) || phase == Phase::kDraining) {
      const bool more = loading_ < kMostLoads && quiet_;
      if (!v.waits && (v.label || more)) {
        step("load", v.label, [](auto&, Daemon& daemon, SearchVersion& x) { daemon.Load(x); });
      }
    }
    if (phase == Phase::kReserved) {
      Admissions(m, n);
      step("cancel", false,
           [](auto&, Daemon& daemon, SearchVersion& x) { daemon.LoadFailed(x, Phase::kStaged); });
    }
    if (phase == Phase::kLoading) {
      if (v.dir == SearchDir::kGood) {
        step("loaded", true, [](auto&, Daemon& daemon, SearchVersion& x) { daemon.LoadDone(x); });
      }
      if (failed_ < kMostFailed) {
        step("load fails", true,
             [](auto&, Daemon& daemon, SearchVersion& x) { daemon.LoadFailed(x, Phase::kFailed); });
      }
      if (v.dir == SearchDir::kBad) {
        step("bad bytes", true, [](auto&, Daemon& daemon, SearchVersion& x) {
          daemon.LoadFailed(x, Phase::kQuarantined);
        });
      }
    }

    // Its end.
    if (phase == Phase::kReady && rules_.may_unload(facts) == Verdict::kYes) {
      if (unloads_ == 0 && quiet_) {
        step("unload", false,
             [](auto&, Daemon& daemon, SearchVersion& x) { daemon.BeginDrain(x, true); });
      }
      if (draining_ < kMostDraining) {
        step("keep_previous over", true,
             [](auto&, Daemon& daemon, SearchVersion& x) { daemon.BeginDrain(x, false); });
      }
    }
    if (phase == Phase::kDraining) {
      step("deadline releases", true,
           [](auto&, Daemon& daemon, SearchVersion& x) { daemon.MaybeFree(x, true); });
    }
    if (phase == Phase::kUnloading) {
      step("freed", true, [](auto&, Daemon& daemon, SearchVersion& x) { daemon.Freed(x); });
    }
    if (v.dir != SearchDir::kAbsent && flawed_ - Flawed(v) < kMostFlawed && quiet_ &&
        rules_.may_delete(facts) == Verdict::kYes) {
      step("delete", false, [](auto&, auto&, SearchVersion& x) {
        x.dir = SearchDir::kAbsent;
        x.known = false;
        x.tracks = VersionTracks();  // Out of the books.
      });
    }
  }

  // With room; or without, making it by each version that may go for it.
  void Admissions(int m, int n) {
    const auto admit = [&](int from, int victim) {
      Step(Name{.what = "admission",
                .versions = OneVersion(m, n),
                .evicts = OneVersion(from, victim)},
           true, [&](SearchState& next, Daemon& daemon) {
             daemon.Admit(next.models[m].versions[n],
                          victim < 0 ? nullptr : &next.models[from].versions[victim]);
           });
    };
    bool evicts = false;
    for (int from = 0; from < kSearchModels; ++from) {
      for (int victim = 0; victim < kSearchVersions; ++victim) {
        const SearchVersion& other = state_.models[from].versions[victim];
        if (!other.known || !rules_.may_evict(looking_.FactsOf(other))) continue;
        evicts = true;
        admit(from, victim);
      }
    }
    if (!evicts) admit(0, -1);
  }

  void OfLabels() {
    switch (state_.write) {
      case LabelWrite::kBegun:
        Step(Name{"rename"}, true, [](SearchState&, Daemon& daemon) { daemon.Rename(); });
        Step(Name{"write fails"}, false,
             [](SearchState&, Daemon& daemon) { daemon.WriteFailed(false); });
        return;
      case LabelWrite::kRenamed:
        Step(Name{"durable"}, true, [](SearchState&, Daemon& daemon) { daemon.WriteDone(); });
        Step(Name{"fsync fails, put back"}, false,
             [](SearchState&, Daemon& daemon) { daemon.WriteFailed(false); });
        Step(Name{"fsync fails, not put back"}, false,
             [](SearchState&, Daemon& daemon) { daemon.WriteFailed(true); });
        return;
      case LabelWrite::kRestoring:
        Step(Name{"restored"}, true, [](SearchState&, Daemon& daemon) { daemon.RestoreDone(); });
        Step(Name{"restoring fails"}, false, [this](SearchState& next, Daemon&) {
          next.write = LabelWrite::kNone;
          next.in_doubt = !rules_.failed_write_is_not_undone;
        });
        return;
      case LabelWrite::kNone:
        break;
    }
    if (state_.in_doubt) {
      Step(Name{"restore again"}, true,
           [](SearchState& next, Daemon&) { next.write = LabelWrite::kRestoring; });
    }
    if (unloads_ > 0) return;
    // By hand: one label is set, or removed.
    for (int m = 0; m < kSearchModels && state_.swap == SearchSwap::kNone; ++m) {
      for (int n = 0; n <= kSearchVersions; ++n) {
        const auto& versions = state_.models[m].versions;
        const bool removal = n == kSearchVersions;
        if (removal ? std::ranges::none_of(versions, &SearchVersion::label)
                    : !versions[n].known || versions[n].label || versions[n].swap_target) {
          continue;
        }
        if (!removal && rules_.may_label(looking_.FactsOf(versions[n])) != Verdict::kYes) continue;
        Step(removal ? Name{.what = "remove label", .model = m}
                     : Name{.what = "label", .versions = OneVersion(m, n)},
             false, [&](SearchState& next, Daemon& daemon) {
               std::array<SearchVersion*, kSearchModels> to{};
               std::array<bool, kSearchModels> moved{};
               moved[m] = true;
               if (!removal) to[m] = &next.models[m].versions[n];
               daemon.BeginWrite(to, moved);
             });
      }
    }
  }

  void OfSwaps() {
    if (state_.swap == SearchSwap::kWaiting) {
      Step(Name{"cancel swap"}, true, [](SearchState&, Daemon& daemon) { daemon.FailSwap(); });
      FlipSwap();
      return;
    }
    if (!quiet_ || unloads_ > 0 || loading_ > 0 || state_.in_doubt) return;
    const auto usable = [&](int m, int n) {
      const SearchVersion& v = state_.models[m].versions[n];
      return v.known && !v.label && v.tracks.health != Health::kSuspect &&
             v.tracks.phase != Phase::kQuarantined;
    };
    for (const bool gap : {false, true}) {
      for (int a = -1; a < kSearchVersions; ++a) {
        for (int b = -1; b < kSearchVersions; ++b) {
          if ((a < 0 && b < 0) || (a >= 0 && !usable(0, a)) || (b >= 0 && !usable(1, b))) continue;
          Step(Name{.what = gap ? "swap with a gap" : "swap", .versions = {a, b}}, false,
               [&](SearchState& next, Daemon& daemon) {
                 daemon.StartSwap({a < 0 ? nullptr : &next.models[0].versions[a],
                                   b < 0 ? nullptr : &next.models[1].versions[b]},
                                  gap);
               });
        }
      }
    }
  }

  void FlipSwap() {
    if (state_.write != LabelWrite::kNone) return;
    for (const SearchState::Model& model : state_.models) {
      for (const SearchVersion& v : model.versions) {
        if (v.swap_target && v.tracks.phase != Phase::kReady) return;
      }
    }
    Step(Name{"flip"}, true, [](SearchState& next, Daemon& daemon) {
      std::array<SearchVersion*, kSearchModels> to{};
      std::array<bool, kSearchModels> moved{};
      for (int m = 0; m < kSearchModels; ++m) {
        for (SearchVersion& v : next.models[m].versions) {
          if (v.swap_target) to[m] = &v;
        }
        moved[m] = to[m] != nullptr && !to[m]->label;
      }
      if (!moved[0] && !moved[1]) return daemon.EndSwap();
      next.swap = SearchSwap::kFlipping;
      daemon.BeginWrite(to, moved);
    });
  }

  // And the next start: what was in memory is lost, what the disk says holds.
  void Crash() {
    Step(Name{"crash"}, false, [](SearchState& next, Daemon& daemon) {
      next.write = LabelWrite::kNone;
      next.swap = SearchSwap::kNone;
      next.gap = false;
      next.in_doubt = false;
      for (SearchState::Model& model : next.models) {
        model.written = false;
        for (SearchVersion& v : model.versions) {
          SearchVersion fresh;
          fresh.dir = v.dir;
          fresh.known = v.dir != SearchDir::kAbsent;
          fresh.label = fresh.label_on_disk = v.label_on_disk;
          v = fresh;
        }
      }
      daemon.ForEach([&](SearchVersion& v) {
        if (v.label && v.known) daemon.Load(v);
      });
    });
  }

  const SearchState& state_;
  const SearchRules& rules_;
  const absl::FunctionRef<void(const SearchStep&)> take_;
  SearchState copy_;  // For the facts only.
  const Daemon looking_;
  // What the bounds count.
  int leases_ = 0;
  int flawed_ = 0;
  int loading_ = 0;
  int failed_ = 0;
  int draining_ = 0;
  int unloads_ = 0;
  bool quiet_ = true;  // No label moves, and no swap is under way.
};

}  // namespace

SearchKey EncodeSearchState(const SearchState& state) {
  SearchKey key;
  for (int m = 0; m < kSearchModels; ++m) {
    std::array<uint64_t, kSearchVersions> words{};
    for (int n = 0; n < kSearchVersions; ++n) words[n] = PackVersion(state.models[m].versions[n]);
    std::ranges::sort(words);
    Packer packer;
    for (const uint64_t word : words) packer.Put(word, kVersionBits);
    packer.Put(state.models[m].written, 1);
    key.words[m] = packer.word();
  }
  std::ranges::sort(key.words);
  key.words[0] |= static_cast<uint64_t>(state.write) << kModelBits;
  key.words[0] |= static_cast<uint64_t>(state.swap) << (kModelBits + 2);
  key.words[0] |= static_cast<uint64_t>(state.gap) << (kModelBits + 4);
  key.words[0] |= static_cast<uint64_t>(state.in_doubt) << (kModelBits + 5);
  return key;
}

SearchState DecodeSearchState(const SearchKey& key) {
  SearchState state;
  for (int m = 0; m < kSearchModels; ++m) {
    Unpacker unpacker(key.words[m]);
    for (SearchVersion& v : state.models[m].versions) {
      v = UnpackVersion(unpacker.Take(kVersionBits));
    }
    state.models[m].written = unpacker.Take(1) != 0;
    if (m != 0) continue;
    state.write = static_cast<LabelWrite>(unpacker.Take(2));
    state.swap = static_cast<SearchSwap>(unpacker.Take(2));
    state.gap = unpacker.Take(1) != 0;
    state.in_doubt = unpacker.Take(1) != 0;
  }
  return state;
}

void ForEachSearchStep(const SearchState& state, const SearchRules& rules,
                       absl::FunctionRef<void(const SearchStep&)> take) {
  Steps(state, rules, take).All();
}

std::string SearchStepName::Text() const {
  std::string text = what;
  const auto append = [&](const std::array<int, kSearchModels>& named) {
    for (int m = 0; m < kSearchModels; ++m) {
      if (named[m] >= 0) absl::StrAppend(&text, " m", m, " v", named[m]);
    }
  };
  append(versions);
  if (model >= 0) absl::StrAppend(&text, " m", model);
  if (evicts != std::array<int, kSearchModels>{-1, -1}) text += ", evicting";
  append(evicts);
  return text;
}

std::string FindViolation(const SearchState& state) {
  int booked = 0;
  bool set = true;
  std::array<bool, kSearchModels> moved{};
  std::array<bool, kSearchModels> moved_on_disk{};
  for (int m = 0; m < kSearchModels; ++m) {
    const SearchState::Model& model = state.models[m];
    // Both of its labels move: one that is there already when the other flips is no half.
    set = set && model.written;
    for (const SearchVersion& v : model.versions) {
      const bool bytes = v.tracks.host_tier != HostTier::kNone;
      booked += v.booked;
      moved[m] = moved[m] || (v.write_target && v.label);
      moved_on_disk[m] = moved_on_disk[m] || (v.write_target && v.label_on_disk);
      if (v.label_on_disk && v.dir == SearchDir::kAbsent) return "a label on disk names nothing";
      if (v.label && v.dir == SearchDir::kAbsent) return "a label in memory names nothing";
      if (v.label_in_page && !(v.tracks.phase == Phase::kReady && bytes)) {
        return "the page shows a version on which no lease can be granted";
      }
      if (v.label_in_page && !v.label) return "the page shows what is not the label";
      // Nobody was told yet of a rename; a disk that fails is written to until it does not.
      const bool disk_may_differ = state.write == LabelWrite::kRenamed || state.in_doubt;
      if (v.label_in_page && !v.label_on_disk && !disk_may_differ) {
        return "clients see a label that is not durable";
      }
      if (v.lease && !v.released && !InMemory(v)) return "a lease is on freed bytes";
      if (v.lease && v.dir == SearchDir::kAbsent) return "what is leased was deleted";
      if (v.booked != (bytes || v.tracks.phase == Phase::kLoading)) {
        return v.booked ? "a booking has no bytes" : "bytes are not booked";
      }
    }
  }
  if (booked > kCapacity) return "more is booked than there is";
  const bool half_on_disk = !state.in_doubt && moved_on_disk[0] != moved_on_disk[1];
  if (set && (moved[0] != moved[1] || half_on_disk)) {
    return "half of a set has moved";
  }
  return "";
}

bool EveryLabelServes(const SearchState& state) {
  for (const SearchState::Model& model : state.models) {
    for (const SearchVersion& v : model.versions) {
      if (v.label && !(v.tracks.phase == Phase::kReady && v.tracks.health != Health::kSuspect &&
                       v.label_in_page)) {
        return false;
      }
    }
  }
  return true;
}

std::string DescribeSearchState(const SearchState& state) {
  std::string out;
  for (int m = 0; m < kSearchModels; ++m) {
    for (const SearchVersion& v : state.models[m].versions) {
      absl::StrAppend(&out, "  m", m, " ", PhaseName(v.tracks.phase),
                      v.tracks.health == Health::kSuspect ? " suspect" : "",
                      v.dir == SearchDir::kAbsent ? " absent"
                      : v.dir == SearchDir::kBad  ? " bad"
                                                  : "",
                      v.known ? "" : " unknown", v.lease ? " leased" : "",
                      v.released ? " released" : "", v.unload_asked ? " asked" : "",
                      v.booked ? " booked" : "", v.waits ? " waits" : "");
      absl::StrAppend(&out, v.label ? " label" : "", v.label_on_disk ? " label-on-disk" : "",
                      v.label_in_page ? " label-in-page" : "", v.maybe_labelled ? " maybe" : "",
                      v.swap_target ? " swap-target" : "", v.write_target ? " write-target" : "",
                      "\n");
    }
  }
  absl::StrAppend(&out, "  write ", static_cast<int>(state.write), " swap ",
                  static_cast<int>(state.swap), state.gap ? " with a gap" : "",
                  state.in_doubt ? " in doubt" : "", "\n");
  return out;
}

}  // namespace modelhost
