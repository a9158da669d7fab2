#include "daemon/registry/desired_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Target = DesiredFacts::Target;
using State = DesiredLabelState;

constexpr absl::Duration kNow = absl::Seconds(1000);

DesiredFacts Fact(uint64_t want, uint64_t have, Target target) {
  DesiredFacts fact;
  fact.model = "planner";
  fact.label = "stable";
  fact.want = want;
  fact.have = have;
  fact.target = target;
  return fact;
}

DesiredPlan PlanOne(const DesiredFacts& fact, absl::Duration now = kNow, size_t running = 0) {
  return PlanDesired({&fact, 1}, running, now);
}

// Every case of one label: what is known, what is said, whether a swap starts.
TEST(DesiredPlanTest, EveryCaseOfOneLabel) {
  struct Case {
    const char* what;
    Target target;
    bool named;   // The label names the wish.
    int running;  // 0: none, 1: ours to the wish, 2: ours to another, 3: a stranger's to the wish,
                  // 4: a stranger's to another.
    State state;
    bool starts;
    const char* reason;
  };
  const Case cases[] = {
      {"as wanted", Target::kReady, true, 0, State::kInSync, false, ""},
      {"as wanted, and being moved away", Target::kReady, true, 4, State::kInSync, false, ""},
      {"ready, not named", Target::kReady, false, 0, State::kPending, true, "starts now"},
      {"on disk", Target::kAtRest, false, 0, State::kPending, true, "starts now"},
      {"loading for somebody", Target::kComing, false, 0, State::kPending, true, "starts now"},
      {"not there", Target::kAbsent, false, 0, State::kPending, false, "not in the store yet"},
      {"named, and gone", Target::kAbsent, true, 0, State::kPending, false, "not in the store yet"},
      {"bad bytes", Target::kRefused, false, 0, State::kFailed, false, "bad"},
      {"named, and bad", Target::kRefused, true, 0, State::kFailed, false, "bad"},
      {"named, at rest", Target::kAtRest, true, 0, State::kPending, true, "loaded again"},
      {"named, loading", Target::kComing, true, 0, State::kPending, false, "being loaded"},
      {"our swap runs", Target::kComing, false, 1, State::kPending, false, "op-7 is under way"},
      {"our old swap runs", Target::kAtRest, false, 2, State::kPending, true, "starts now"},
      {"a stranger's swap there", Target::kComing, false, 3, State::kPending, false,
       "op-7 is under way"},
      {"a stranger's swap away", Target::kReady, false, 4, State::kPending, false,
       "op-7 moves it to 9; brought back"},
  };
  for (const Case& one : cases) {
    DesiredFacts fact = Fact(8, one.named ? 8 : 7, one.target);
    fact.why = "bad";
    if (one.running > 0) {
      fact.running = 7;
      fact.running_to = one.running % 2 == 1 ? 8 : 9;
      fact.running_is_ours = one.running <= 2;
    }
    const DesiredPlan plan = PlanOne(fact);
    ASSERT_EQ(plan.rows.size(), 1u);
    EXPECT_EQ(plan.rows[0].state, one.state) << one.what;
    EXPECT_EQ(plan.start.size(), one.starts ? 1u : 0u) << one.what;
    EXPECT_THAT(plan.rows[0].reason, HasSubstr(one.reason)) << one.what;
    EXPECT_EQ(plan.next_look, absl::InfiniteDuration()) << one.what;
  }
}

TEST(DesiredPlanTest, AFailureHoldsOffTheNextAttemptAndIsSaid) {
  DesiredFacts fact = Fact(8, 7, Target::kAtRest);
  fact.attempt = {3, kNow, "no room"};
  const DesiredPlan plan = PlanOne(fact, kNow + absl::Milliseconds(500));
  EXPECT_THAT(plan.start, IsEmpty());
  EXPECT_EQ(plan.rows[0].state, State::kFailed);
  EXPECT_EQ(plan.rows[0].reason, "no room; failed 3 times, tried again in 4s");
  EXPECT_EQ(plan.next_look, absl::Milliseconds(3500));

  const DesiredPlan due = PlanOne(fact, kNow + absl::Seconds(4));
  EXPECT_THAT(due.start, ElementsAre(0));
  EXPECT_EQ(due.rows[0].state, State::kFailed);  // Until it has succeeded.
}

TEST(DesiredPlanTest, TheWaitGrowsFromASecondToAMinute) {
  EXPECT_EQ(DesiredBackoff(1), absl::Seconds(1));
  EXPECT_EQ(DesiredBackoff(2), absl::Seconds(2));
  EXPECT_EQ(DesiredBackoff(6), absl::Seconds(32));
  EXPECT_EQ(DesiredBackoff(7), absl::Minutes(1));
  EXPECT_EQ(DesiredBackoff(4'000'000'000u), absl::Minutes(1));
}

TEST(DesiredPlanTest, AClockThatJumpsHoldsNothingOffForLong) {
  DesiredFacts fact = Fact(8, 7, Target::kAtRest);
  fact.attempt = {1, kNow, "no room"};
  EXPECT_THAT(PlanOne(fact, kNow - absl::Hours(5)).start, ElementsAre(0));
  EXPECT_THAT(PlanOne(fact, kNow + absl::Hours(5)).start, ElementsAre(0));
  fact.attempt.failures = 1000;
  EXPECT_LE(PlanOne(fact, kNow).next_look, absl::Minutes(1));
}

TEST(DesiredPlanTest, DriftIsAMoveAwayFromWhatWasInSync) {
  DesiredFacts fact = Fact(8, 7, Target::kReady);
  EXPECT_FALSE(PlanOne(fact).rows[0].drifting);
  fact.was_in_sync = true;
  EXPECT_TRUE(PlanOne(fact).rows[0].drifting);
  fact.have = 8;
  EXPECT_FALSE(PlanOne(fact).rows[0].drifting);
}

TEST(DesiredPlanTest, AFewAtATimeAndTheOthersWaitForTheirTurn) {
  std::vector<DesiredFacts> facts;
  for (uint64_t i = 0; i < 500; ++i) {
    facts.push_back(Fact(2, 1, Target::kAtRest));
    facts.back().model = absl::StrCat("m", i);
  }
  const DesiredPlan plan = PlanDesired(facts, 1, kNow);
  EXPECT_EQ(plan.start.size(), kMostDesiredSwaps - 1);
  EXPECT_EQ(plan.rows.back().state, State::kPending);
  EXPECT_EQ(plan.rows.back().reason, "waits for its turn");
  EXPECT_THAT(PlanDesired(facts, kMostDesiredSwaps, kNow).start, IsEmpty());

  // A swap of the file's own that is out of date is replaced, whoever waits.
  facts[400].running = 7;
  facts[400].running_to = 3;
  facts[400].running_is_ours = true;
  EXPECT_THAT(PlanDesired(facts, kMostDesiredSwaps, kNow).start, ElementsAre(400));
}

TEST(DesiredPlanTest, OneLabelThatCannotBeHadHoldsUpNoOther) {
  std::vector<DesiredFacts> facts = {Fact(8, 7, Target::kRefused), Fact(9, 0, Target::kAbsent),
                                     Fact(3, 2, Target::kAtRest), Fact(4, 3, Target::kReady)};
  facts[2].attempt = {9, kNow, "no room"};
  const DesiredPlan plan = PlanDesired(facts, 0, kNow);
  EXPECT_THAT(plan.start, ElementsAre(3));
  EXPECT_EQ(plan.next_look, absl::Minutes(1));
}

}  // namespace
}  // namespace modelhost
