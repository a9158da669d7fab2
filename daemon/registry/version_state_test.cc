#include "daemon/registry/version_state.h"

#include <gtest/gtest.h>

#include <array>
#include <set>

namespace modelhost {
namespace {

constexpr std::array kPhases = {Phase::kStaged, Phase::kReserved,   Phase::kLoading,
                                Phase::kReady,  Phase::kDraining,   Phase::kUnloading,
                                Phase::kFailed, Phase::kQuarantined};

TEST(VersionState, OnlyReadyComesFromLoadingOrFromADrainThatStopped) {
  for (const Phase from : kPhases) {
    EXPECT_EQ(IsAllowed(from, Phase::kReady), from == Phase::kLoading || from == Phase::kDraining)
        << PhaseName(from);
  }
}

TEST(VersionState, MemoryIsFreedOnlyAfterADrain) {
  for (const Phase from : kPhases) {
    EXPECT_EQ(IsAllowed(from, Phase::kUnloading), from == Phase::kDraining) << PhaseName(from);
  }
}

TEST(VersionState, NothingIsReadBeforeItsBytesAreBooked) {
  for (const Phase from : kPhases) {
    EXPECT_EQ(IsAllowed(from, Phase::kLoading), from == Phase::kReserved) << PhaseName(from);
  }
}

TEST(VersionState, BadBytesStayBadUntilTheyArePublishedAgain) {
  for (const Phase to : kPhases) {
    EXPECT_EQ(IsAllowed(Phase::kQuarantined, to), to == Phase::kStaged) << PhaseName(to);
  }
}

TEST(VersionState, NoPhaseIsADeadEndAndEachCanBeReached) {
  std::set<Phase> reached = {Phase::kStaged};
  for (size_t round = 0; round < kPhases.size(); ++round) {
    for (const Transition& transition : Transitions()) {
      if (reached.contains(transition.from)) reached.insert(transition.to);
    }
  }
  EXPECT_EQ(reached.size(), kPhases.size());
  for (const Phase phase : kPhases) {
    EXPECT_FALSE(IsAllowed(phase, phase));
    bool leaves = false;
    for (const Transition& transition : Transitions()) leaves |= transition.from == phase;
    EXPECT_TRUE(leaves) << PhaseName(phase);
  }
}

TEST(VersionState, ARefusalNamesBothPhases) {
  const absl::Status status = CheckTransition(Phase::kStaged, Phase::kReady);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(status.message().find("STAGED"), std::string::npos);
  EXPECT_NE(status.message().find("READY"), std::string::npos);
  EXPECT_TRUE(CheckTransition(Phase::kLoading, Phase::kReady).ok());
}

}  // namespace
}  // namespace modelhost
