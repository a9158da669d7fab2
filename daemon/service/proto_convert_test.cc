#include "daemon/service/proto_convert.h"

#include <gtest/gtest.h>

namespace modelhost {
namespace {

TEST(ProtoConvertTest, OperationNamesGoBothWays) {
  EXPECT_EQ(OperationName(12), "op-12");
  EXPECT_EQ(*ParseOperationName("op-12"), 12U);
}

TEST(ProtoConvertTest, RefusesWhatIsNoOperationName) {
  for (const char* bad : {"", "12", "op-", "op-0", "op-012", "op--1", "op-1x", "op- 1", "OP-1",
                          "op-99999999999999999999999"}) {
    EXPECT_EQ(ParseOperationName(bad).status().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
}

TEST(ProtoConvertTest, DurationsGoBothWaysAndInfinityIsClamped) {
  google::protobuf::Duration out;
  ToProto(absl::Milliseconds(1500), &out);
  EXPECT_EQ(out.seconds(), 1);
  EXPECT_EQ(out.nanos(), 500'000'000);
  EXPECT_EQ(*FromProto(out), absl::Milliseconds(1500));
  ToProto(absl::InfiniteDuration(), &out);
  EXPECT_EQ(out.seconds(), 315'576'000'000);
}

TEST(ProtoConvertTest, RefusesDurationsThatAreNegativeOrNotCanonical) {
  google::protobuf::Duration bad;
  bad.set_seconds(-1);
  EXPECT_FALSE(FromProto(bad).ok());
  bad.set_seconds(1);
  bad.set_nanos(1'000'000'000);
  EXPECT_FALSE(FromProto(bad).ok());
  bad.set_seconds(INT64_MAX);
  bad.set_nanos(0);
  EXPECT_FALSE(FromProto(bad).ok());
}

TEST(ProtoConvertTest, TimesBeforeTheEpochHavePositiveNanos) {
  google::protobuf::Timestamp out;
  ToProto(absl::UnixEpoch() - absl::Milliseconds(250), &out);
  EXPECT_EQ(out.seconds(), -1);
  EXPECT_EQ(out.nanos(), 750'000'000);
}

TEST(ProtoConvertTest, AnInvalidEntryIsInvalidAndItsNameIsUtf8) {
  VersionSnapshot version;
  version.key = {"planner", 0};
  version.name = "08\xff";
  version.invalid = "not a canonical number";
  const v1::Version out = ToProto(version);
  EXPECT_EQ(out.phase(), v1::INVALID);
  EXPECT_EQ(out.reason(), "not a canonical number");
  EXPECT_EQ(out.name(), "08\xEF\xBF\xBD");
  v1::Version parsed;
  EXPECT_TRUE(parsed.ParseFromString(out.SerializeAsString()));
}

TEST(ProtoConvertTest, AFailedVersionSaysWhy) {
  VersionSnapshot version;
  version.key = {"planner", 8};
  version.phase = Phase::kQuarantined;
  version.error = absl::DataLossError("chunk 3 of a.gguf");
  version.load_bytes_total = 100;
  const v1::Version out = ToProto(version);
  EXPECT_EQ(out.phase(), v1::QUARANTINED);
  EXPECT_EQ(out.reason(), "chunk 3 of a.gguf");
  EXPECT_EQ(out.load_bytes_total(), 0U);  // Only while it loads.
  EXPECT_FALSE(out.has_created());
}

TEST(ProtoConvertTest, ARunningOperationHasNoResult) {
  OperationSnapshot operation;
  operation.id = 3;
  operation.kind = OperationKind::kSwap;
  operation.state = OperationState::kRunning;
  operation.started = absl::FromUnixSeconds(100);
  v1::Operation out = ToProto(operation);
  EXPECT_EQ(out.id(), "op-3");
  EXPECT_FALSE(out.has_result());
  EXPECT_FALSE(out.has_finished());
  EXPECT_FALSE(out.has_failure());

  operation.state = OperationState::kFailed;
  operation.status = absl::ResourceExhaustedError("need 3, have 2");
  operation.finished = absl::FromUnixSeconds(101);
  out = ToProto(operation);
  EXPECT_EQ(out.failure().code(), 8);
  EXPECT_EQ(out.failure().message(), "need 3, have 2");
  EXPECT_EQ(out.finished().seconds(), 101);
}

TEST(ProtoConvertTest, ASwapTakesItsDefaults) {
  v1::SwapRequest request;
  request.add_targets()->set_model("planner");
  SwapRequest out = FromProto(request);
  EXPECT_EQ(out.label, "stable");
  EXPECT_EQ(out.strategy, "availability");
  EXPECT_FALSE(out.if_current.has_value());
  request.set_if_current(0);  // "Must not be set" is not "do not care".
  EXPECT_EQ(FromProto(request).if_current, 0U);
}

TEST(ProtoConvertTest, AnUnlimitedPoolHasNoLimit) {
  StatusSnapshot status;
  status.pools = {{"host", 1000, 10}, {"memlock", UINT64_MAX, 5}};
  v1::GetStatusResponse out;
  ToProto(status, absl::Now(), &out);
  EXPECT_EQ(out.pools(0).limit_bytes(), 1000U);
  EXPECT_TRUE(out.pools(1).unlimited());
  EXPECT_EQ(out.pools(1).limit_bytes(), 0U);
  EXPECT_EQ(out.pools(1).reserved_bytes(), 5U);
}

}  // namespace
}  // namespace modelhost
