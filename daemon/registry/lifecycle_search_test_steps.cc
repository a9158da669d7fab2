// What can happen next in the model of lifecycle_search_test_model.h.
#include <algorithm>
#include <array>

#include "daemon/registry/lifecycle_search_test_daemon.h"

namespace modelhost {
namespace {

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
        loading_ +=
            v.waits || phase == Phase::kReserved || (phase == Phase::kLoading && !v.cancelled);
        cancelled_ += v.cancelled;
        failed_ += phase == Phase::kFailed;
        draining_ += phase == Phase::kDraining;
        unloads_ += v.unload_asked;
      }
    }
    doubts_ = state_.in_doubt || state_.write == LabelWrite::kRestoring;
    at_rest_ = state_.write == LabelWrite::kNone && state_.swap == SearchSwap::kNone;
    quiet_ = at_rest_ || bounds_.crowded;
    for (int m = 0; m < kSearchModels; ++m) {
      for (int n = 0; n < kSearchVersions; ++n) OfVersion(m, n);
    }
    OfLabels();
    OfSwaps();
    Crash();
  }

 private:
  // Whether one more trouble may begin of which there are `count`.
  bool MayBegin(int count, int most) const { return count < most && Troubles() < most_troubles_; }

  int Troubles() const { return flawed_ + failed_ + cancelled_ + unloads_ + doubts_; }

  bool MayFail(int count, int most) const { return bounds_.troubles > 0 && MayBegin(count, most); }

  static bool Flawed(const SearchVersion& v) { return v.dir != SearchDir::kGood || !v.known; }

  using Do = absl::FunctionRef<void(SearchState&, SearchDaemon&, SearchVersion&)>;
  using Name = SearchStepName;

  void Step(const Name& name, bool helps,
            absl::FunctionRef<void(SearchState&, SearchDaemon&)> act) {
    SearchStep step{.name = name, .helps = helps, .next = state_, .violation = {}};
    SearchDaemon daemon(step.next, rules_);
    act(step.next, daemon);
    step.violation = daemon.violation();
    take_(step);
  }

  void OfVersion(int m, int n) {
    const SearchVersion& v = state_.models[m].versions[n];
    const auto step = [&](const char* what, bool helps, Do act) {
      Step(Name{.what = what, .versions = OneVersion(m, n)}, helps,
           [&](SearchState& next, SearchDaemon& daemon) {
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
    if (v.dir == SearchDir::kGood && MayFail(flawed_, kMostFlawed) && quiet_) {
      step("bytes go bad", false, [](auto&, auto&, SearchVersion& x) { x.dir = SearchDir::kBad; });
    }
    if (v.lease) {
      step("lease ends", true, [](auto&, SearchDaemon& daemon, SearchVersion& x) {
        x.lease = x.released = false;
        daemon.MaybeFree(x, false);
      });
    }
    if (!v.known) return;
    if (!v.lease && leases_ < bounds_.leases && quiet_ &&
        rules_.may_grant(facts) == Verdict::kYes) {
      step("grant", false, [](auto&, SearchDaemon& daemon, SearchVersion& x) {
        if (x.tracks.phase == Phase::kDraining) daemon.StopDrain(x);
        x.lease = true;
      });
    }

    // Bad bytes.
    if (v.dir == SearchDir::kBad) {
      step("repair", true, [this](auto&, SearchDaemon& daemon, SearchVersion& x) {
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
             [](auto&, SearchDaemon& daemon, SearchVersion& x) { daemon.Quarantine(x); });
      }
    }

    // A load.
    if ((AtRest(phase) && phase != Phase::kQuarantined) || phase == Phase::kDraining ||
        v.cancelled) {
      const bool more = loading_ < kMostLoads && quiet_;
      if (!v.waits && (v.label || more)) {
        step("load", v.label,
             [](auto&, SearchDaemon& daemon, SearchVersion& x) { daemon.Load(x); });
      }
    }
    if (phase == Phase::kReserved) {
      Admissions(m, n);
      step("cancel", false, [](auto&, SearchDaemon& daemon, SearchVersion& x) {
        daemon.LoadFailed(x, Phase::kStaged);
      });
    }
    if (v.cancelled) {
      step("cancelled load ends", true,
           [](auto&, SearchDaemon& daemon, SearchVersion& x) { daemon.CancelledLoadEnds(x); });
    } else if (phase == Phase::kLoading) {
      if (v.dir == SearchDir::kGood) {
        step("loaded", true,
             [](auto&, SearchDaemon& daemon, SearchVersion& x) { daemon.LoadDone(x); });
      }
      if (MayFail(cancelled_, kMostCancelled)) {
        step("cancel", false,
             [](auto&, SearchDaemon& daemon, SearchVersion& x) { daemon.Cancel(x); });
      }
      if (MayFail(failed_, kMostFailed)) {
        step("load fails", true, [](auto&, SearchDaemon& daemon, SearchVersion& x) {
          daemon.LoadFailed(x, Phase::kFailed);
        });
      }
      if (v.dir == SearchDir::kBad) {
        step("bad bytes", true, [](auto&, SearchDaemon& daemon, SearchVersion& x) {
          daemon.LoadFailed(x, Phase::kQuarantined);
        });
      }
    }

    // Its end.
    if (phase == Phase::kReady && rules_.may_unload(facts) == Verdict::kYes) {
      if (MayBegin(unloads_, kMostUnloads) && quiet_) {
        step("unload", false,
             [](auto&, SearchDaemon& daemon, SearchVersion& x) { daemon.BeginDrain(x, true); });
      }
      if (draining_ < kMostDraining) {
        step("keep_previous over", true,
             [](auto&, SearchDaemon& daemon, SearchVersion& x) { daemon.BeginDrain(x, false); });
      }
    }
    if (phase == Phase::kDraining) {
      step("deadline releases", true,
           [](auto&, SearchDaemon& daemon, SearchVersion& x) { daemon.MaybeFree(x, true); });
    }
    if (phase == Phase::kUnloading) {
      step("freed", true, [](auto&, SearchDaemon& daemon, SearchVersion& x) { daemon.Freed(x); });
    }
    // It takes the place of what is wrong with it already.
    const int others = Troubles() - Flawed(v) - (phase == Phase::kFailed);
    const bool only_this =
        flawed_ - Flawed(v) < kMostFlawed &&
        (others < most_troubles_ || (v.label_on_disk && others - doubts_ < most_troubles_));
    if (v.dir != SearchDir::kAbsent && only_this && quiet_ &&
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
           true, [&](SearchState& next, SearchDaemon& daemon) {
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
        Step(Name{"rename"}, true, [](SearchState&, SearchDaemon& daemon) { daemon.Rename(); });
        if (!MayFail(0, 1)) return;
        Step(Name{"write fails"}, false,
             [](SearchState&, SearchDaemon& daemon) { daemon.WriteFailed(false); });
        return;
      case LabelWrite::kRenamed:
        Step(Name{"durable"}, true, [](SearchState&, SearchDaemon& daemon) { daemon.WriteDone(); });
        if (!MayFail(0, 1)) return;
        Step(Name{"fsync fails, put back"}, false,
             [](SearchState&, SearchDaemon& daemon) { daemon.WriteFailed(false); });
        Step(Name{"fsync fails, not put back"}, false,
             [](SearchState&, SearchDaemon& daemon) { daemon.WriteFailed(true); });
        return;
      case LabelWrite::kRestoring:
        Step(Name{"restored"}, true,
             [](SearchState&, SearchDaemon& daemon) { daemon.RestoreDone(); });
        Step(Name{"restoring fails"}, false, [this](SearchState& next, SearchDaemon&) {
          next.write = LabelWrite::kNone;
          next.in_doubt = !rules_.failed_write_is_not_undone;
        });
        return;
      case LabelWrite::kNone:
        break;
    }
    if (state_.in_doubt) {
      Step(Name{"restore again"}, true,
           [](SearchState& next, SearchDaemon&) { next.write = LabelWrite::kRestoring; });
    }
    if (unloads_ > 0 && !bounds_.crowded) return;
    // By hand: one label is set, or removed. None that a swap has withdrawn.
    const bool by_hand = state_.swap == SearchSwap::kNone ||
                         (bounds_.crowded && state_.swap == SearchSwap::kWaiting && !state_.gap);
    for (int m = 0; m < kSearchModels && by_hand; ++m) {
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
             false, [&](SearchState& next, SearchDaemon& daemon) {
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
      Step(Name{"cancel swap"}, true,
           [](SearchState&, SearchDaemon& daemon) { daemon.FailSwap(); });
      FlipSwap();
      return;
    }
    if (!bounds_.swaps || !at_rest_) return;
    if (!bounds_.crowded && (unloads_ > 0 || loading_ > 0 || state_.in_doubt)) return;
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
               [&](SearchState& next, SearchDaemon& daemon) {
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
    Step(Name{"flip"}, true, [](SearchState& next, SearchDaemon& daemon) {
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
    Step(Name{"crash"}, false, [](SearchState& next, SearchDaemon& daemon) {
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
  const SearchBounds& bounds_ = rules_.bounds;
  const int most_troubles_ = std::max(1, bounds_.troubles);
  const absl::FunctionRef<void(const SearchStep&)> take_;
  SearchState copy_;  // For the facts only.
  const SearchDaemon looking_;
  // What the bounds count.
  int leases_ = 0;
  int flawed_ = 0;
  int loading_ = 0;
  int failed_ = 0;
  int cancelled_ = 0;  // Loads that have not come to rest.
  int draining_ = 0;
  int unloads_ = 0;
  int doubts_ = 0;       // About what the disk has.
  bool at_rest_ = true;  // No label moves, and no swap is under way.
  bool quiet_ = true;    // Then things may begin.
};

}  // namespace

void ForEachSearchStep(const SearchState& state, const SearchRules& rules,
                       absl::FunctionRef<void(const SearchStep&)> take) {
  Steps(state, rules, take).All();
}

}  // namespace modelhost
