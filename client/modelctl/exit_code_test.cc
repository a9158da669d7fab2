#include "client/modelctl/exit_code.h"

#include <gtest/gtest.h>

#include "modelhost/v1/error_info.pb.h"

namespace modelhost::modelctl {
namespace {

std::string Details(const std::string& reason, const std::string& key, const std::string& value) {
  v1::ErrorInfo info;
  info.set_reason(reason);
  info.set_domain("modelhost");
  (*info.mutable_metadata())[key] = value;
  v1::RpcStatus status;
  google::protobuf::Any* any = status.add_details();
  any->set_type_url("type.googleapis.com/google.rpc.ErrorInfo");
  any->set_value(info.SerializeAsString());
  return status.SerializeAsString();
}

TEST(ExitCodeTest, EveryCanonicalCodeHasItsPromisedExitCode) {
  const std::pair<grpc::StatusCode, int> kPromised[] = {
      {grpc::OK, 0},
      {grpc::CANCELLED, 11},
      {grpc::UNKNOWN, 1},
      {grpc::INVALID_ARGUMENT, 6},
      {grpc::DEADLINE_EXCEEDED, 7},
      {grpc::NOT_FOUND, 3},
      {grpc::ALREADY_EXISTS, 4},
      {grpc::PERMISSION_DENIED, 9},
      {grpc::RESOURCE_EXHAUSTED, 5},
      {grpc::FAILED_PRECONDITION, 4},
      {grpc::ABORTED, 11},
      {grpc::OUT_OF_RANGE, 6},
      {grpc::UNIMPLEMENTED, 1},
      {grpc::INTERNAL, 1},
      {grpc::UNAVAILABLE, 8},
      {grpc::DATA_LOSS, 6},
      {grpc::UNAUTHENTICATED, 9},
  };
  for (const auto& [code, exit] : kPromised) {
    EXPECT_EQ(static_cast<int>(ExitCodeOf(code)), exit) << code;
  }
}

TEST(ExitCodeTest, WhatIsPrintedIsOneLineOfCharacters) {
  EXPECT_EQ(Printable("a\nb\tc\r"), "a b c");
  EXPECT_EQ(Printable("\x1b[2Jx\x7f"), "?[2Jx?");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "2J"),
            "?2J");  // CSI as one C1 character.
  EXPECT_EQ(Printable("gr\xc3\xb6\xc3\x9f"
                      "e"),
            "gr\xc3\xb6\xc3\x9f"
            "e");
  EXPECT_EQ(Printable("\xff"
                      "a\xc3"),
            "?a?");                             // No UTF-8.
  EXPECT_EQ(Printable("\xed\xa0\x80"), "???");  // A surrogate.
}

TEST(ExitCodeTest, TheDaemonsSentenceIsKeptAndAShortOneGetsItsSubject) {
  EXPECT_EQ(FromRpc({grpc::NOT_FOUND, "planer: no such model (planner?)"}, "swap planer").error,
            "planer: no such model (planner?)");
  EXPECT_EQ(FromRpc({grpc::NOT_FOUND, "no such model"}, "swap planer").error,
            "swap planer: no such model");
  EXPECT_TRUE(FromRpc(grpc::Status::OK, "x").ok());
}

TEST(ExitCodeTest, AnErrorIsOneLineOfPrintableText) {
  EXPECT_EQ(Fail(ExitCode::kOther, "a\nb\r\n\tc\x1b[0m\n").error, "a b c?[0m");
}

TEST(ExitCodeTest, AServerSideTimeoutNamesTheOperationThatGoesOn) {
  const Exit exit = FromRpc(
      {grpc::DEADLINE_EXCEEDED, "swap: still loading", Details("TIMEOUT", "operation", "op-12")},
      "swap");
  EXPECT_EQ(exit.code, ExitCode::kTimeout);
  EXPECT_NE(exit.error.find("op-12 goes on"), std::string::npos) << exit.error;
}

TEST(ExitCodeTest, AnUnknownFormatIsMalformedInputButAnUnknownCallIsNot) {
  const int code = static_cast<int>(grpc::UNIMPLEMENTED);
  EXPECT_EQ(FromFailure(code, "x: a GGUF of version 1", "load").code, ExitCode::kIntegrity);
  EXPECT_EQ(FromRpc({grpc::UNIMPLEMENTED, ""}, "swap").code, ExitCode::kOther);
}

TEST(ExitCodeTest, AFailureWithoutACodeIsStillAFailure) {
  EXPECT_EQ(FromFailure(0, "", "load planner@8").code, ExitCode::kOther);
  EXPECT_EQ(FromFailure(0, "", "load planner@8").error, "load planner@8: failed without a reason");
}

TEST(ErrorInfoTest, IsReadFromTheTrailer) {
  const auto info = ParseErrorInfo(Details("BUDGET", "need", "5"));
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->reason(), "BUDGET");
  EXPECT_EQ(info->metadata().at("need"), "5");
}

TEST(ErrorInfoTest, GarbageAndOtherDetailsAreNoErrorInfo) {
  EXPECT_FALSE(ParseErrorInfo("").has_value());
  EXPECT_FALSE(ParseErrorInfo("\xff\xff\xff\xff").has_value());
  std::string cut = Details("BUDGET", "need", "5");
  cut.resize(cut.size() - 3);
  EXPECT_FALSE(ParseErrorInfo(cut).has_value());
  v1::RpcStatus status;
  status.add_details()->set_type_url("type.googleapis.com/google.rpc.RetryInfo");
  EXPECT_FALSE(ParseErrorInfo(status.SerializeAsString()).has_value());
}

}  // namespace
}  // namespace modelhost::modelctl
