#include "daemon/service/grpc_status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "daemon/platform/errno_status.h"
#include "modelhost/v1/error_info.pb.h"

namespace modelhost {
namespace {

using ::testing::EndsWith;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

v1::ErrorInfo InfoOf(const grpc::Status& status) {
  v1::RpcStatus details;
  EXPECT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), static_cast<int>(status.error_code()));
  EXPECT_EQ(details.details_size(), 1);
  EXPECT_EQ(details.details(0).type_url(), "type.googleapis.com/google.rpc.ErrorInfo");
  v1::ErrorInfo info;
  EXPECT_TRUE(info.ParseFromString(details.details(0).value()));
  return info;
}

TEST(GrpcStatusTest, OkIsOkAndHasNoDetails) {
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_EQ(ToGrpcStatus(absl::OkStatus(), {{"verb", "Swap"}}).error_details(), "");
}

TEST(GrpcStatusTest, EveryCodeKeepsItsMeaning) {
  EXPECT_EQ(ToGrpcStatus(absl::DataLossError("x")).error_code(), grpc::StatusCode::DATA_LOSS);
  EXPECT_EQ(ToGrpcStatus(absl::AbortedError("x")).error_code(), grpc::StatusCode::ABORTED);
  EXPECT_EQ(ToGrpcStatus(absl::UnauthenticatedError("x")).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
}

TEST(GrpcStatusTest, DetailsSayReasonDomainAndWhatItIsAbout) {
  const grpc::Status status = ToGrpcStatus(absl::NotFoundError("planner@9: no such version"),
                                           {{"verb", "Load"}, {"version", "9"}, {"label", ""}});
  EXPECT_EQ(status.error_message(), "planner@9: no such version");
  const v1::ErrorInfo info = InfoOf(status);
  EXPECT_EQ(info.reason(), "NOT_FOUND");
  EXPECT_EQ(info.domain(), "modelhost");
  EXPECT_THAT(info.metadata(), UnorderedElementsAre(Pair("verb", "Load"), Pair("version", "9")));
}

TEST(GrpcStatusTest, AReasonOfItsOwnAndTheErrnoComeAlong) {
  const v1::ErrorInfo info =
      InfoOf(ToGrpcStatus(WithReason(ErrnoStatus(ENOSPC, "a.gguf"), "STORE_FULL")));
  EXPECT_EQ(info.reason(), "STORE_FULL");
  EXPECT_EQ(info.metadata().at("errno"), std::to_string(ENOSPC));
}

TEST(GrpcStatusTest, ALongTextFitsTheTrailers) {
  // Percent-encoding makes three bytes of each of these.
  std::string text;
  for (int i = 0; i < 5000; ++i) text += "ü";
  const grpc::Status status = ToGrpcStatus(absl::InternalError(text), {{"model", text}});
  EXPECT_THAT(status.error_message(), EndsWith("ü..."));
  EXPECT_LT(3 * status.error_message().size() + 4 * status.error_details().size() / 3, 7000U);
}

TEST(SafeTextTest, ReplacesWhatIsNotUtf8) {
  EXPECT_EQ(SafeText("größe"), "größe");
  EXPECT_EQ(SafeText("a\xff z"), "a\xEF\xBF\xBD z");
  EXPECT_EQ(SafeText("\xc3"), "\xEF\xBF\xBD");
  EXPECT_EQ(SafeText("\xf0\x9f\x98\x80"), "\xf0\x9f\x98\x80");
  EXPECT_EQ(SafeText("\xed\xa0\x80"), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
}

TEST(SafeTextTest, ReplacesControlCharacters) {
  EXPECT_EQ(SafeText(absl::string_view("a\0b\n\x1b[2J\x7f", 9)),
            "a\xEF\xBF\xBD"
            "b\xEF\xBF\xBD\xEF\xBF\xBD[2J\xEF\xBF\xBD");
  EXPECT_EQ(SafeText("\xc2\x9b\xc2\xa0"), "\xEF\xBF\xBD\xc2\xa0");
}

TEST(SafeTextTest, CutsBetweenCharacters) { EXPECT_EQ(SafeText("aüü", 4), "aü..."); }

}  // namespace
}  // namespace modelhost
