#include "daemon/registry/version_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <set>

namespace modelhost {
namespace {

TEST(VersionState, OnlyReadyComesFromLoadingOrFromADrainThatStopped) {
  for (const Phase from : Phases()) {
    EXPECT_EQ(IsAllowed(from, Phase::kReady), from == Phase::kLoading || from == Phase::kDraining)
        << PhaseName(from);
  }
}

TEST(VersionState, MemoryIsFreedOnlyAfterADrain) {
  for (const Phase from : Phases()) {
    EXPECT_EQ(IsAllowed(from, Phase::kUnloading), from == Phase::kDraining) << PhaseName(from);
  }
}

TEST(VersionState, NothingIsReadBeforeItsBytesAreBooked) {
  for (const Phase from : Phases()) {
    EXPECT_EQ(IsAllowed(from, Phase::kLoading), from == Phase::kReserved) << PhaseName(from);
  }
}

TEST(VersionState, BadBytesStayBadUntilTheyArePublishedAgain) {
  for (const Phase to : Phases()) {
    EXPECT_EQ(IsAllowed(Phase::kQuarantined, to), to == Phase::kStaged) << PhaseName(to);
  }
}

TEST(VersionState, NoPhaseIsADeadEndAndEachCanBeReached) {
  std::set<Phase> reached = {Phase::kStaged};
  for (size_t round = 0; round < Phases().size(); ++round) {
    for (const Transition& transition : Transitions()) {
      if (reached.contains(transition.from)) reached.insert(transition.to);
    }
  }
  EXPECT_EQ(reached.size(), Phases().size());
  for (const Phase phase : Phases()) {
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

constexpr HealthState kGood{};
constexpr HealthState kSuspectNow{Health::kSuspect, HealthReason::kSourceChanged};
constexpr HealthState kGone{Health::kDegraded, HealthReason::kSourceGone};

// On the shortest way through the tables.
VersionTracks In(Phase phase) {
  VersionTracks tracks;
  const auto go = [&](std::initializer_list<Phase> way) {
    for (const Phase next : way) {
      if (next == Phase::kReady) {
        EXPECT_TRUE(tracks.SetHostTier(HostTier::kPinned).ok());
      }
      EXPECT_TRUE(tracks.MoveTo(next).ok()) << PhaseName(next);
    }
  };
  using enum Phase;
  switch (phase) {
    case kStaged:
      break;
    case kReserved:
      go({kReserved});
      break;
    case kLoading:
      go({kReserved, kLoading});
      break;
    case kReady:
      go({kReserved, kLoading, kReady});
      break;
    case kDraining:
      go({kReserved, kLoading, kReady, kDraining});
      break;
    case kUnloading:
      go({kReserved, kLoading, kReady, kDraining, kUnloading});
      break;
    case kFailed:
      go({kReserved, kLoading, kFailed});
      break;
    case kQuarantined:
      go({kQuarantined});
      break;
  }
  return tracks;
}

TEST(VersionTracks, BytesComeInLoadingAndGoInUnloading) {
  for (const Phase phase : Phases()) {
    VersionTracks tracks = In(phase);
    const bool had = tracks.host_tier != HostTier::kNone;
    EXPECT_EQ(had,
              phase == Phase::kReady || phase == Phase::kDraining || phase == Phase::kUnloading)
        << PhaseName(phase);
    if (had) {
      EXPECT_EQ(tracks.SetHostTier(HostTier::kNone).ok(), phase == Phase::kUnloading)
          << PhaseName(phase);
    } else {
      EXPECT_EQ(tracks.SetHostTier(HostTier::kWarm).ok(), phase == Phase::kLoading)
          << PhaseName(phase);
    }
  }
}

TEST(VersionTracks, WithoutBytesNothingBecomesReadyAndWithThemNothingIsStaged) {
  VersionTracks tracks = In(Phase::kLoading);
  EXPECT_FALSE(tracks.MoveTo(Phase::kReady).ok());
  EXPECT_EQ(tracks.phase, Phase::kLoading) << "a refusal changes nothing";
  ASSERT_TRUE(tracks.SetHostTier(HostTier::kMapped).ok());
  EXPECT_FALSE(tracks.MoveTo(Phase::kFailed).ok());
  EXPECT_TRUE(tracks.MoveTo(Phase::kReady).ok());
  VersionTracks unloading = In(Phase::kUnloading);
  EXPECT_FALSE(unloading.MoveTo(Phase::kStaged).ok());
  ASSERT_TRUE(unloading.SetHostTier(HostTier::kNone).ok());
  EXPECT_TRUE(unloading.MoveTo(Phase::kStaged).ok());
}

TEST(VersionTracks, OnlyResidentBytesAreSuspect) {
  for (const Phase phase : Phases()) {
    VersionTracks tracks = In(phase);
    EXPECT_EQ(tracks.SetHealth(kSuspectNow, HealthCause::kHealthCheck).ok(),
              tracks.host_tier != HostTier::kNone)
        << PhaseName(phase);
  }
}

TEST(VersionTracks, SuspicionIsLiftedByALoadOrTheEndOfTheBytesAlone) {
  using enum HealthCause;
  for (const HealthCause cause : {kLoad, kHealthCheck, kVerify, kScan, kFree}) {
    VersionTracks tracks = In(Phase::kReady);
    ASSERT_TRUE(tracks.SetHealth(kSuspectNow, kHealthCheck).ok());
    EXPECT_EQ(tracks.SetHealth(kGood, cause).ok(), cause == kLoad || cause == kFree)
        << HealthCauseName(cause);
    EXPECT_FALSE(tracks.SetHealth(kGone, kScan).ok() && cause != kLoad && cause != kFree);
  }
}

TEST(VersionTracks, AHealthThatIsNotInTheClosedSetIsRefused) {
  VersionTracks tracks = In(Phase::kReady);
  using enum HealthCause;
  for (const HealthCause cause : {kLoad, kHealthCheck, kVerify, kScan, kFree}) {
    EXPECT_FALSE(tracks.SetHealth({Health::kSuspect, HealthReason::kPinPartial}, cause).ok());
    EXPECT_FALSE(tracks.SetHealth({Health::kDegraded, HealthReason::kNone}, cause).ok());
  }
  EXPECT_EQ(tracks.health_state(), kGood);
}

TEST(VersionTracks, ADeviceCopyLivesWithTheHostsBytes) {
  VersionTracks staged = In(Phase::kStaged);
  EXPECT_FALSE(staged.SetDeviceResidency(DeviceResidency::kCopying).ok());
  VersionTracks tracks = In(Phase::kReady);
  EXPECT_FALSE(tracks.SetDeviceResidency(DeviceResidency::kLost).ok()) << "there was none";
  EXPECT_FALSE(tracks.SetDeviceResidency(DeviceResidency::kResident).ok()) << "nobody copied";
  EXPECT_TRUE(tracks.SetDeviceResidency(DeviceResidency::kCopying).ok());
  EXPECT_TRUE(tracks.SetDeviceResidency(DeviceResidency::kResident).ok());
  EXPECT_TRUE(tracks.SetDeviceResidency(DeviceResidency::kLost).ok());
  EXPECT_FALSE(tracks.SetDeviceResidency(DeviceResidency::kResident).ok()) << "nobody copied";
  // Made again, in vain: it is as lost as before.
  EXPECT_TRUE(tracks.SetDeviceResidency(DeviceResidency::kCopying).ok());
  EXPECT_TRUE(tracks.SetDeviceResidency(DeviceResidency::kLost).ok());
  ASSERT_TRUE(tracks.MoveTo(Phase::kDraining).ok());
  ASSERT_TRUE(tracks.MoveTo(Phase::kUnloading).ok());
  ASSERT_TRUE(tracks.SetHostTier(HostTier::kNone).ok());
  EXPECT_FALSE(tracks.MoveTo(Phase::kStaged).ok()) << "the device still has it";
  ASSERT_TRUE(tracks.SetDeviceResidency(DeviceResidency::kNone).ok());
  EXPECT_TRUE(tracks.MoveTo(Phase::kStaged).ok());
}

TEST(VersionState, EveryPhaseAndEveryHealthIsExplained) {
  for (const Phase phase : Phases()) {
    EXPECT_EQ(std::ranges::count(PhaseRules(), phase, &PhaseRule::phase), 1) << PhaseName(phase);
  }
  for (const HealthTransition& row : HealthTransitions()) {
    for (const HealthState& state : {row.from, row.to}) {
      EXPECT_EQ(std::ranges::count(HealthRules(), state, &HealthRule::state), 1)
          << HealthStateName(state);
    }
    EXPECT_NE(row.from, row.to);
  }
}

}  // namespace
}  // namespace modelhost
