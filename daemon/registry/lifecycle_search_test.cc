// Every state that the tables and the rules can reach is looked at, breadth first, so that what is
// found is found on a shortest way; in several searches (lifecycle_search_test_model.h says why),
// and each ends because there is nothing left. And the search itself is tested: with a rule broken
// it must find what that breaks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "daemon/registry/lifecycle_search_test_model.h"

namespace modelhost {
namespace {

// What a test may take of memory, 70 bytes each.
constexpr int kIdBits = 24;
constexpr uint32_t kIdMask = (uint32_t{1} << kIdBits) - 1;
constexpr size_t kMostStates = 12'000'000;
static_assert(kMostStates < kIdMask);

struct Found {
  size_t states = 0;
  size_t steps = 0;
  bool all = true;        // There are no others.
  std::string violation;  // With the way to it; empty when there is none.
};

class Search {
 public:
  explicit Search(SearchRules rules) : rules_(std::move(rules)) {}

  Found Run(bool progress) {
    Found found;
    const SearchKey start = EncodeSearchState(SearchState{});
    (void)Add(start, absl::HashOf(start), 0);
    std::vector<Reached> reached;
    size_t next_look = 1000;
    for (uint32_t at = 0; at < keys_.size() && found.violation.empty(); ++at) {
      if (keys_.size() > kMostStates) {
        found.all = false;
        break;
      }
      // What is stuck in what is known so far is stuck. A broken rule is found early so.
      if (progress && at >= next_look) {
        next_look *= 4;
        found.violation = FindStuck();
        if (!found.violation.empty()) break;
      }
      const SearchState state = DecodeSearchState(keys_[at]);
      serves_.push_back(EveryLabelServes(state));
      first_.push_back(static_cast<uint32_t>(ways_.size()));
      // All of a state's steps are made before the first is looked for: memory is slow, and can be
      // asked for many things at once.
      reached.clear();
      ForEachSearchStep(state, rules_, [&](const SearchStep& step) {
        if (!step.violation.empty() && found.violation.empty()) {
          found.violation = Told(step.violation, at, step.name, step.next);
        }
        const SearchKey key = EncodeSearchState(step.next);
        reached.push_back({key, absl::HashOf(key), step.name, step.helps});
        __builtin_prefetch(&slots_[reached.back().hash & (slots_.size() - 1)]);
      });
      for (const Reached& one : reached) {
        const uint32_t slot = slots_[one.hash & (slots_.size() - 1)];
        if (slot != 0 && HasTag(slot, one.hash)) __builtin_prefetch(&keys_[(slot & kIdMask) - 1]);
      }
      for (const Reached& one : reached) {
        if (!found.violation.empty()) break;
        ++found.steps;
        const auto [next, added] = Add(one.key, one.hash, at);
        if (added) {
          const SearchState there = DecodeSearchState(one.key);
          const std::string wrong = FindViolation(there, rules_.bounds.capacity);
          if (!wrong.empty()) found.violation = Told(wrong, at, one.name, there);
        }
        if (progress && one.helps && next != at) ways_.push_back(next);
      }
    }
    found.states = keys_.size();
    if (found.violation.empty() && progress) found.violation = FindStuck();
    return found;
  }

 private:
  struct Reached {
    SearchKey key;
    uint64_t hash = 0;
    SearchStepName name;
    bool helps = false;
  };

  std::string Told(const std::string& wrong, uint32_t at, const SearchStepName& last,
                   const SearchState& there) {
    return absl::StrCat(wrong, "\n", Way(at), last.Text(), "\n", DescribeSearchState(there));
  }

  // Its number, and whether it is a new one.
  std::pair<uint32_t, bool> Add(const SearchKey& key, uint64_t hash, uint32_t parent) {
    if (keys_.size() * 4 >= slots_.size() * 3) GrowSlots();
    size_t slot = hash & (slots_.size() - 1);
    for (; slots_[slot] != 0; slot = (slot + 1) & (slots_.size() - 1)) {
      if (!HasTag(slots_[slot], hash)) continue;
      const uint32_t id = (slots_[slot] & kIdMask) - 1;
      if (keys_[id] == key) return {id, false};
    }
    keys_.push_back(key);
    parents_.push_back(parent);
    slots_[slot] = TagOf(hash) | static_cast<uint32_t>(keys_.size());
    return {static_cast<uint32_t>(keys_.size() - 1), true};
  }

  static uint32_t TagOf(uint64_t hash) { return static_cast<uint32_t>(hash >> 32) & ~kIdMask; }
  static bool HasTag(uint32_t slot, uint64_t hash) { return (slot ^ TagOf(hash)) >> kIdBits == 0; }

  void GrowSlots() {
    slots_.assign(std::max<size_t>(1024, slots_.size() * 2), 0);
    for (size_t id = 0; id < keys_.size(); ++id) {
      const uint64_t hash = absl::HashOf(keys_[id]);
      size_t slot = hash & (slots_.size() - 1);
      while (slots_[slot] != 0) slot = (slot + 1) & (slots_.size() - 1);
      slots_[slot] = TagOf(hash) | static_cast<uint32_t>(id + 1);
    }
  }

  // From which state can no label be served again? From those not looked at yet, perhaps.
  std::string FindStuck() {
    const size_t looked_at = first_.size();
    std::vector<bool> serves = serves_;
    serves.resize(keys_.size(), true);
    // The steps that help backwards: from where each state is reached.
    std::vector<uint32_t> begin(keys_.size() + 1, 0);
    for (const uint32_t to : ways_) ++begin[to];
    uint32_t sum = 0;
    for (uint32_t& count : begin) count = sum += count;
    std::vector<uint32_t> from(ways_.size());
    for (size_t at = looked_at; at-- > 0;) {
      const size_t end = at + 1 < looked_at ? first_[at + 1] : ways_.size();
      for (size_t way = first_[at]; way < end; ++way) {
        from[--begin[ways_[way]]] = static_cast<uint32_t>(at);
      }
    }
    std::vector<uint32_t> open;
    for (uint32_t at = 0; at < keys_.size(); ++at) {
      if (serves[at]) open.push_back(at);
    }
    while (!open.empty()) {
      const uint32_t at = open.back();
      open.pop_back();
      for (uint32_t way = begin[at]; way < begin[at + 1]; ++way) {
        if (serves[from[way]]) continue;
        serves[from[way]] = true;
        open.push_back(from[way]);
      }
    }
    for (uint32_t at = 0; at < looked_at; ++at) {
      if (!serves[at]) {
        return absl::StrCat("what the labels name can never be READY again\n", Way(at),
                            DescribeSearchState(DecodeSearchState(keys_[at])));
      }
    }
    return "";
  }

  // The names of the steps that lead there. Versions change places on the way: what is alike is one
  // state.
  std::string Way(uint32_t at) {
    std::vector<uint32_t> way;
    for (; at != 0; at = parents_[at]) way.push_back(at);
    std::string names;
    uint32_t from = 0;
    for (size_t i = way.size(); i-- > 0; from = way[i]) {
      bool named = false;
      ForEachSearchStep(DecodeSearchState(keys_[from]), rules_, [&](const SearchStep& step) {
        if (named || EncodeSearchState(step.next) != keys_[way[i]]) return;
        named = true;
        absl::StrAppend(&names, step.name.Text(), "\n");
      });
    }
    return names;
  }

  const SearchRules rules_;
  // By hash, with what follows in the next ones: 1 + the number of a key, and some of its hash; 0:
  // free.
  std::vector<uint32_t> slots_;
  std::vector<SearchKey> keys_;
  std::vector<uint32_t> parents_;
  std::vector<bool> serves_;
  std::vector<uint32_t> ways_;   // Steps that help, one state's after the other's.
  std::vector<uint32_t> first_;  // Where in ways_ a state's begin.
};

struct Scope {
  const char* name;
  SearchBounds bounds;
};

class SearchScope : public ::testing::TestWithParam<Scope> {};

TEST_P(SearchScope, NoReachableStateBreaksAnInvariantAndEveryLabelCanServeAgain) {
  SearchRules rules;
  rules.bounds = GetParam().bounds;
  const std::clock_t began = std::clock();
  const Found found = Search(rules).Run(/*progress=*/true);
  std::printf("%zu states, %zu steps, %.1f s of CPU\n", found.states, found.steps,
              static_cast<double>(std::clock() - began) / CLOCKS_PER_SEC);
  EXPECT_EQ(found.violation, "");
  EXPECT_TRUE(found.all) << "there are more states than " << kMostStates;
  EXPECT_GT(found.states, 100'000U);
}

INSTANTIATE_TEST_SUITE_P(
    Each, SearchScope,
    ::testing::Values(Scope{"OneTroubleAtATime", {}},
                      Scope{"RoomForWhatIsLabelled", {.capacity = 2}},
                      Scope{"ManyAtOnceAndNoTrouble", {.troubles = 0, .crowded = true}},
                      Scope{"ManyAtOnceAndNoLease", {.capacity = 2, .leases = 0, .crowded = true}},
                      Scope{"TwoTroublesAndNoSwap",
                            {.capacity = 2, .leases = 0, .swaps = false, .troubles = 2}}),
    [](const auto& scope) { return std::string(scope.param.name); });

TEST(LifecycleSearch, AStateIsTheSameAfterPackingWhicheverVersionIsWhich) {
  SearchState state;
  state.models[0].versions[2].label = true;
  state.models[1].versions[1].dir = SearchDir::kBad;
  SearchState other;
  other.models[1].versions[0].label = true;
  other.models[0].versions[2].dir = SearchDir::kBad;
  EXPECT_EQ(EncodeSearchState(state), EncodeSearchState(other));
  EXPECT_EQ(EncodeSearchState(DecodeSearchState(EncodeSearchState(state))),
            EncodeSearchState(state));
  other.models[1].versions[0].dir = SearchDir::kBad;
  EXPECT_NE(EncodeSearchState(state), EncodeSearchState(other));
}

constexpr char kStuck[] = "can never be READY again";

struct Broken {
  const char* name;
  std::function<void(SearchRules&)> breaks;
  const char* says;
};

class BrokenRule : public ::testing::TestWithParam<Broken> {};

TEST_P(BrokenRule, IsFound) {
  SearchRules rules;
  GetParam().breaks(rules);
  // What nobody tells those who wait about is no wrong state, but one without a way out: found when
  // all was looked at that can come after it, which is less without swaps.
  const bool stuck = std::string(GetParam().says) == kStuck;
  if (stuck) rules.bounds.swaps = false;
  const Found found = Search(rules).Run(/*progress=*/stuck);
  EXPECT_NE(found.violation.find(GetParam().says), std::string::npos)
      << "found: " << found.violation;
  std::printf("%zu states until: %s\n", found.states,
              found.violation.substr(0, found.violation.find('\n')).c_str());
}

VersionFacts WithoutLeases(VersionFacts facts) {
  facts.leases = 0;
  return facts;
}
VersionFacts WithoutLabels(VersionFacts facts) {
  facts.labels = 0;
  facts.maybe_labelled = false;
  return facts;
}
VersionFacts WithoutAskers(VersionFacts facts) {
  facts.awaited = false;
  return facts;
}
VersionFacts WithoutHolds(VersionFacts facts) {
  facts.holds = 0;
  return facts;
}
VersionFacts InReady(VersionFacts facts) {
  if (facts.phase == Phase::kUnloading) facts.phase = Phase::kReady;
  facts.resident = true;
  return facts;
}

INSTANTIATE_TEST_SUITE_P(
    Each, BrokenRule,
    ::testing::Values(
        Broken{"FreesWithLeases",
               [](SearchRules& rules) {
                 rules.may_free = [](const VersionFacts& facts, bool released) {
                   return MayFree(WithoutLeases(facts), released);
                 };
               },
               "a lease is on freed bytes"},
        Broken{"LabelsBeforeDurable", [](SearchRules& rules) { rules.seen_before_durable = true; },
               "not durable"},
        Broken{"AnnouncesBeforeReady",
               [](SearchRules& rules) { rules.announced_before_ready = true; },
               "no lease can be granted"},
        Broken{"EvictsLabelled",
               [](SearchRules& rules) {
                 rules.may_evict = [](const VersionFacts& facts) {
                   return MayEvict(WithoutLabels(facts));
                 };
               },
               "no lease can be granted"},
        Broken{"UnloadsLabelled",
               [](SearchRules& rules) {
                 rules.may_unload = [](const VersionFacts& facts) {
                   return MayUnload(WithoutLabels(facts));
                 };
               },
               "no lease can be granted"},
        Broken{"EvictsLeased",
               [](SearchRules& rules) {
                 rules.may_evict = [](const VersionFacts& facts) {
                   return MayEvict(WithoutLeases(facts));
                 };
                 rules.may_free = [](const VersionFacts& facts, bool) {
                   return facts.phase == Phase::kDraining;
                 };
               },
               "a lease is on freed bytes"},
        Broken{"DeletesLabelled",
               [](SearchRules& rules) {
                 rules.may_delete = [](const VersionFacts& facts) {
                   return MayDelete(WithoutLabels(facts));
                 };
               },
               "names nothing"},
        Broken{"DeletesLeased",
               [](SearchRules& rules) {
                 rules.may_delete = [](const VersionFacts& facts) {
                   return MayDelete(WithoutLeases(facts));
                 };
               },
               "deleted"},
        Broken{"DeletesAwaited",
               [](SearchRules& rules) {
                 rules.may_delete = [](const VersionFacts& facts) {
                   return MayDelete(WithoutAskers(facts));
                 };
               },
               "what is awaited was deleted"},
        Broken{"UnloadsHeld",
               [](SearchRules& rules) {
                 rules.may_unload = [](const VersionFacts& facts) {
                   return MayUnload(WithoutHolds(facts));
                 };
                 rules.bounds = {.troubles = 0, .crowded = true};
               },
               "not READY"},
        Broken{"ForgetsWhatAFailedWriteNamed",
               [](SearchRules& rules) { rules.failed_write_is_forgotten = true; },
               "a label on disk names nothing"},
        Broken{"GivesUpOnAFailedWrite",
               [](SearchRules& rules) { rules.failed_write_is_not_undone = true; }, "not durable"},
        Broken{"GrantsWhileFreeing",
               [](SearchRules& rules) {
                 rules.may_grant = [](const VersionFacts& facts) {
                   return MayGrant(InReady(facts));
                 };
               },
               "a lease is on freed bytes"},
        Broken{"LabelsWhatIsNotReady",
               [](SearchRules& rules) {
                 rules.may_label = [](const VersionFacts&) { return Verdict::kYes; };
               },
               "not READY"},
        Broken{"DoesNotHoldTargets",
               [](SearchRules& rules) { rules.not_held_while_written = true; }, "READY"},
        Broken{"LosesABookingOnFailure",
               [](SearchRules& rules) { rules.failed_load_keeps_booking = true; },
               "a booking has no bytes"},
        Broken{"GivesBookingsBackTooEarly",
               [](SearchRules& rules) { rules.booking_ends_with_drain = true; },
               "bytes are not booked"},
        Broken{"FlipsSetsOneByOne", [](SearchRules& rules) { rules.sets_flip_one_by_one = true; },
               "half of a set"},
        Broken{"KeepsThePageInAGap", [](SearchRules& rules) { rules.gap_keeps_page = true; },
               "no lease can be granted"},
        Broken{"NeverBelievesARepair",
               [](SearchRules& rules) { rules.repair_stays_quarantined = true; }, kStuck},
        Broken{"FreedWakesNobody", [](SearchRules& rules) { rules.freed_wakes_nobody = true; },
               kStuck},
        Broken{"EndedLoadWakesNobody",
               [](SearchRules& rules) {
                 rules.ended_load_wakes_nobody = true;
                 rules.bounds.capacity = 2;  // What both labels name.
               },
               kStuck},
        Broken{"LetsWaitForWhatIsBad",
               [](SearchRules& rules) { rules.quarantine_tells_nobody = true; }, kStuck}),
    [](const auto& broken) { return std::string(broken.param.name); });

}  // namespace
}  // namespace modelhost
