#include "daemon/registry/lifecycle_policy.h"

#include <gtest/gtest.h>

namespace modelhost {
namespace {

VersionFacts Ready() {
  VersionFacts facts;
  facts.phase = Phase::kReady;
  facts.resident = true;
  return facts;
}

TEST(LifecyclePolicy, LeasesAreGrantedInReadyAndBringBackWhatNobodyAskedToUnload) {
  VersionFacts facts = Ready();
  EXPECT_EQ(MayGrant(facts), Verdict::kYes);
  facts.phase = Phase::kDraining;
  EXPECT_EQ(MayGrant(facts), Verdict::kYes);
  facts.unload_asked = true;
  EXPECT_EQ(MayGrant(facts), Verdict::kNotReady);
  for (const Phase phase : Phases()) {
    facts = Ready();
    facts.phase = phase;
    EXPECT_EQ(MayGrant(facts) == Verdict::kYes, phase == Phase::kReady || phase == Phase::kDraining)
        << PhaseName(phase);
  }
}

TEST(LifecyclePolicy, WhatIsSuspectIsNeitherGrantedNorLabelled) {
  VersionFacts facts = Ready();
  facts.health = Health::kSuspect;
  EXPECT_EQ(MayGrant(facts), Verdict::kSuspect);
  EXPECT_EQ(MayLabel(facts), Verdict::kSuspect);
  EXPECT_TRUE(MayAnnounce(facts)) << "labels stay: what was mapped is still what clients have";
}

TEST(LifecyclePolicy, ALabelOrAHoldKeepsAVersionReady) {
  VersionFacts labelled = Ready();
  labelled.labels = 1;
  VersionFacts held = Ready();
  held.holds = 1;
  EXPECT_EQ(MayUnload(labelled), Verdict::kLabelled);
  EXPECT_EQ(MayUnload(held), Verdict::kHeld);
  for (const VersionFacts& facts : {labelled, held}) {
    EXPECT_FALSE(MayLapse(facts));
    EXPECT_FALSE(MayEvict(facts));
  }
  EXPECT_TRUE(MayLapse(Ready()));
  EXPECT_TRUE(MayEvict(Ready()));
}

TEST(LifecyclePolicy, EvictionSparesWhatIsLeasedOrLoadedAgain) {
  VersionFacts leased = Ready();
  leased.leases = 1;
  VersionFacts reloading = Ready();
  reloading.reloading = true;
  EXPECT_FALSE(MayEvict(leased));
  EXPECT_FALSE(MayEvict(reloading));
  EXPECT_TRUE(MayLapse(leased)) << "it drains until the lease ends";
}

TEST(LifecyclePolicy, BytesGoAfterTheLastLeaseOrADeadlineThatReleases) {
  VersionFacts facts = Ready();
  EXPECT_FALSE(MayFree(facts, true)) << "never without a drain";
  facts.phase = Phase::kDraining;
  EXPECT_TRUE(MayFree(facts, false));
  facts.leases = 1;
  EXPECT_FALSE(MayFree(facts, false));
  EXPECT_TRUE(MayFree(facts, true));
}

TEST(LifecyclePolicy, NothingIsDeletedThatSomebodyMayNeed) {
  const VersionFacts idle;
  EXPECT_EQ(MayDelete(idle), Verdict::kYes);
  VersionFacts facts = idle;
  facts.labels = 1;
  EXPECT_EQ(MayDelete(facts), Verdict::kLabelled);
  facts = idle;
  facts.maybe_labelled = true;
  EXPECT_EQ(MayDelete(facts), Verdict::kLabelled) << "the labels on disk may name it";
  facts = idle;
  facts.leases = 1;
  EXPECT_EQ(MayDelete(facts), Verdict::kLeased);
  facts = idle;
  facts.holds = 1;
  EXPECT_EQ(MayDelete(facts), Verdict::kHeld);
  facts = idle;
  facts.awaited = true;
  EXPECT_EQ(MayDelete(facts), Verdict::kBusy);
  for (const Phase phase : Phases()) {
    facts = idle;
    facts.phase = phase;
    EXPECT_EQ(MayDelete(facts) == Verdict::kYes, AtRest(phase)) << PhaseName(phase);
  }
}

TEST(LifecyclePolicy, OnlyWhatIsGoneFromTheDiskIsForgotten) {
  VersionFacts facts;
  EXPECT_FALSE(MayForget(facts));
  facts.on_disk = false;
  EXPECT_TRUE(MayForget(facts));
  facts.labels = 1;
  EXPECT_FALSE(MayForget(facts));
}

}  // namespace
}  // namespace modelhost
