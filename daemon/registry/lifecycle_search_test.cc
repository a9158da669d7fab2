// Every state that the tables and the rules can reach is looked at, breadth first, so that what is
// found is found on a shortest way. And the search itself is tested: with a rule broken it must
// find what that breaks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
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
  size_t steps_deep = 0;  // Every state that is nearer was looked at; 0: all there are.
  std::string violation;  // With the way to it; empty when there is none.
};

class Search {
 public:
  explicit Search(SearchRules rules, size_t most = kMostStates)
      : rules_(std::move(rules)), most_(most) {}

  Found Run(bool progress) {
    Found found;
    (void)Add(EncodeSearchState(SearchState{}), 0);
    size_t next_look = 1000;
    for (uint32_t at = 0; at < keys_.size() && found.violation.empty(); ++at) {
      if (keys_.size() > most_) {
        found.steps_deep = DepthOf(at);
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
      ForEachSearchStep(state, rules_, [&](const SearchStep& step) {
        if (!found.violation.empty()) return;
        ++found.steps;
        const auto [next, added] = Add(EncodeSearchState(step.next), at);
        std::string wrong = step.violation;
        if (wrong.empty() && added) wrong = FindViolation(step.next);
        if (!wrong.empty()) {
          found.violation = absl::StrCat(wrong, "\n", Way(at), step.name.Text(), "\n",
                                         DescribeSearchState(step.next));
          return;
        }
        if (progress && step.helps && next != at) ways_.push_back(next);
      });
    }
    found.states = keys_.size();
    if (found.violation.empty() && progress) found.violation = FindStuck();
    return found;
  }

 private:
  // Its number, and whether it is a new one.
  std::pair<uint32_t, bool> Add(const SearchKey& key, uint32_t parent) {
    if (keys_.size() * 4 >= slots_.size() * 3) GrowSlots();
    const uint64_t hash = absl::HashOf(key);
    size_t slot = hash & (slots_.size() - 1);
    for (; slots_[slot] != 0; slot = (slot + 1) & (slots_.size() - 1)) {
      if ((slots_[slot] ^ TagOf(hash)) >> kIdBits != 0) continue;
      const uint32_t id = (slots_[slot] & kIdMask) - 1;
      if (keys_[id] == key) return {id, false};
    }
    keys_.push_back(key);
    parents_.push_back(parent);
    slots_[slot] = TagOf(hash) | static_cast<uint32_t>(keys_.size());
    return {static_cast<uint32_t>(keys_.size() - 1), true};
  }

  static uint32_t TagOf(uint64_t hash) {
    return static_cast<uint32_t>(hash >> 32) & ~kIdMask;
  }

  void GrowSlots() {
    slots_.assign(std::max<size_t>(1024, slots_.size() * 2), 0);
    for (size_t id = 0; id < keys_.size(); ++id) {
      const uint64_t hash = absl::HashOf(keys_[id]);
      size_t slot = hash & (slots_.size() - 1);
      while (slots_[slot] != 0) slot = (slot + 1) & (slots_.size() - 1);
      slots_[slot] = TagOf(hash) | static_cast<uint32_t>(id + 1);
    }
  }

  size_t DepthOf(uint32_t at) const {
    size_t depth = 0;
    for (; at != 0; at = parents_[at]) ++depth;
    return depth;
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
  const size_t most_;
  // By hash, with what follows in the next ones: 1 + the number of a key, and some of its hash; 0:
  // free.
  std::vector<uint32_t> slots_;
  std::vector<SearchKey> keys_;
  std::vector<uint32_t> parents_;
  std::vector<bool> serves_;
  std::vector<uint32_t> ways_;   // Steps that help, one state's after the other's.
  std::vector<uint32_t> first_;  // Where in ways_ a state's begin.
};

void Tell(const Found& found, absl::Time began) {
  std::printf("%zu states, %zu steps, %.1f s", found.states, found.steps,
              absl::ToDoubleSeconds(absl::Now() - began));
  if (found.steps_deep > 0) std::printf("; all states within %zu steps", found.steps_deep - 1);
  std::printf("\n");
}

TEST(LifecycleSearch, NoReachableStateBreaksAnInvariantAndEveryLabelCanServeAgain) {
  const absl::Time began = absl::Now();
  const Found found = Search(SearchRules{}).Run(/*progress=*/true);
  EXPECT_EQ(found.violation, "");
  EXPECT_EQ(found.steps_deep, 0U) << "there are more states than " << kMostStates;
  EXPECT_GT(found.states, 1'000'000U);
  Tell(found, began);
}

// Too many to look at all of them: those that lie nearest to the start.
TEST(LifecycleSearch, NorDoesAStateNearTheStartWithSeveralTroublesAtOnce) {
  const absl::Time began = absl::Now();
  SearchRules rules;
  rules.one_trouble_at_a_time = false;
  const Found found = Search(rules, 1'500'000).Run(/*progress=*/true);
  EXPECT_EQ(found.violation, "");
  EXPECT_GT(found.steps_deep, 10U);
  Tell(found, began);
}

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
  rules.swaps = !stuck;
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
        Broken{"WakesNobody", [](SearchRules& rules) { rules.lost_wake_up = true; }, kStuck},
        Broken{"LetsWaitForWhatIsBad",
               [](SearchRules& rules) { rules.quarantine_tells_nobody = true; }, kStuck}),
    [](const auto& broken) { return std::string(broken.param.name); });

}  // namespace
}  // namespace modelhost
