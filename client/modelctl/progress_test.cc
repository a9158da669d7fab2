#include "client/modelctl/progress.h"

#include <gtest/gtest.h>

#include <sstream>

namespace modelhost::modelctl {
namespace {

v1::Operation Step(const std::string& phase, uint64_t done, uint64_t total) {
  v1::Operation operation;
  operation.set_id("op-12");
  operation.set_kind(v1::SWAP);
  operation.set_state(v1::RUNNING);
  operation.set_model("planner");
  operation.set_version(8);
  operation.set_phase(phase);
  operation.set_bytes_done(done);
  operation.set_bytes_total(total);
  return operation;
}

const absl::Time kStart = absl::FromUnixSeconds(1000);

TEST(ProgressTest, PlainHasALineForEachPhaseAndOneEveryFiveSeconds) {
  std::ostringstream out;
  Progress progress(ProgressMode::kPlain, out, 80, "swap planner@8");
  progress.Update(Step("load", 0, 4096), kStart);
  progress.Update(Step("load", 1024, 4096), kStart + absl::Seconds(1));
  progress.Update(Step("load", 2048, 4096), kStart + absl::Seconds(5));
  progress.Tick(kStart + absl::Seconds(6));
  progress.Tick(kStart + absl::Seconds(11));
  progress.Update(Step("flip", 0, 0), kStart + absl::Seconds(12));
  progress.Finish(kStart + absl::Seconds(60));
  EXPECT_EQ(out.str(),
            "op-12  swap planner@8  load  0 B of 4.0 KiB (0 %)\n"
            "op-12  swap planner@8  load  2.0 KiB of 4.0 KiB (50 %)  409 B/s  eta 5.00 s\n"
            "op-12  swap planner@8  load  2.0 KiB of 4.0 KiB (50 %)  186 B/s  eta 11.0 s\n"
            "op-12  swap planner@8  flip\n");
}

TEST(ProgressTest, PlainSaysNothingAboutTheEnd) {
  std::ostringstream out;
  Progress progress(ProgressMode::kPlain, out, 80, "x");
  v1::Operation end = Step("", 0, 0);
  end.set_state(v1::SUCCEEDED);
  progress.Update(end, kStart);
  progress.Tick(kStart + absl::Seconds(60));
  EXPECT_EQ(out.str(), "");
}

TEST(ProgressTest, BarRedrawsOneLineAndLeavesAPhaseBehind) {
  std::ostringstream out;
  Progress progress(ProgressMode::kBar, out, 200, "load planner@8");
  progress.Update(Step("read", 50, 100), kStart);
  progress.Update(Step("verify", 0, 100), kStart + absl::Seconds(1));
  progress.Finish(kStart + absl::Seconds(2));
  EXPECT_EQ(out.str(),
            "op-12  load planner@8\n"
            "\r\x1b[K  read  [############............]  50 B of 100 B (50 %)"
            "\r\x1b[K  read  [############............]  50 B of 100 B (50 %)\n"
            "\r\x1b[K  verify  [........................]  0 B of 100 B (0 %)"
            "\r\x1b[K  verify  [........................]  0 B of 100 B (0 %)\n");
}

TEST(ProgressTest, BarForgetsAPhaseThatNobodyCouldRead) {
  std::ostringstream out;
  Progress progress(ProgressMode::kBar, out, 200, "load planner@8");
  progress.Update(Step("open", 0, 0), kStart);
  progress.Update(Step("map", 0, 0), kStart + absl::Milliseconds(2));
  progress.Finish(kStart + absl::Milliseconds(3));
  EXPECT_EQ(out.str(), "op-12  load planner@8\n\r\x1b[K  open  0 ns\r\x1b[K  map  0 ns\r\x1b[K");
}

TEST(ProgressTest, BarNeverWraps) {
  std::ostringstream out;
  Progress progress(ProgressMode::kBar, out, 20, "load");
  progress.Update(Step("read", 50, 100), kStart);
  EXPECT_EQ(out.str(), "op-12  load\n\r\x1b[K  read  [##########");
}

TEST(ProgressTest, JsonIsOneObjectForEachEventTheLastOneToo) {
  std::ostringstream out;
  Progress progress(ProgressMode::kJson, out, 80, "x");
  progress.Update(Step("load", 1, 2), kStart);
  v1::Operation end = Step("load", 2, 2);
  end.set_state(v1::OPERATION_FAILED);
  end.mutable_failure()->set_code(15);
  end.mutable_failure()->set_message("bad bytes");
  progress.Update(end, kStart);
  progress.Tick(kStart + absl::Seconds(60));
  const std::string text = out.str();
  ASSERT_EQ(std::count(text.begin(), text.end(), '\n'), 2);
  EXPECT_EQ(
      text.find("{\"apiVersion\":\"modelhost/v1\",\"kind\":\"OperationEvent\",\"id\":\"op-12\","
                "\"operationKind\":\"swap\",\"state\":\"running\""),
      0u);
  EXPECT_NE(text.find("\"bytesDone\":1,\"bytesTotal\":2"), std::string::npos);
  EXPECT_NE(text.find("\"state\":\"failed\""), std::string::npos);
  EXPECT_NE(text.find("\"failure\":{\"code\":15,\"message\":\"bad bytes\""), std::string::npos);
}

TEST(ProgressTest, NoneIsSilent) {
  std::ostringstream out;
  Progress progress(ProgressMode::kNone, out, 80, "x");
  progress.Update(Step("load", 1, 2), kStart);
  progress.Tick(kStart + absl::Seconds(60));
  progress.Finish(kStart + absl::Seconds(60));
  EXPECT_EQ(out.str(), "");
}

TEST(ProgressTest, APhasesNameCannotDriveTheTerminal) {
  std::ostringstream out;
  Progress progress(ProgressMode::kPlain, out, 80, "x");
  progress.Update(Step("load\x1b[2J", 0, 0), kStart);
  EXPECT_EQ(out.str(), "op-12  x  load?[2J\n");
}

}  // namespace
}  // namespace modelhost::modelctl
