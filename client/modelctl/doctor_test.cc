#include "client/modelctl/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "client/modelctl/doctor_advice.h"

namespace modelhost::modelctl {
namespace {

TEST(DoctorTest, ReadsKernelReleases) {
  EXPECT_EQ(ParseKernelRelease("6.1.0-18-amd64"), (std::pair<int, int>{6, 1}));
  EXPECT_EQ(ParseKernelRelease("5.10.120-tegra"), (std::pair<int, int>{5, 10}));
  EXPECT_EQ(ParseKernelRelease("6.18"), (std::pair<int, int>{6, 18}));
  EXPECT_EQ(ParseKernelRelease("6.18+"), (std::pair<int, int>{6, 18}));
  EXPECT_EQ(ParseKernelRelease("linux"), (std::pair<int, int>{0, 0}));
  EXPECT_EQ(ParseKernelRelease(""), (std::pair<int, int>{0, 0}));
}

TEST(DoctorTest, ReadsTheChosenWord) {
  EXPECT_EQ(ChosenWord("always within_size advise [never] deny force\n"), "never");
  EXPECT_EQ(ChosenWord("nothing chosen"), "");
  EXPECT_EQ(ChosenWord("]["), "");
}

TEST(DoctorTest, SealingIsReallyTried) {
  const Check check = CheckSealing();
  EXPECT_EQ(check.verdict, Verdict::kOk) << check.finding;
}

TEST(DoctorTest, WhatIsNotWellComesWithAdvice) {
  for (const Check& check :
       {CheckKernel(), CheckPopulate(), CheckSealing(), CheckMemlock(std::nullopt),
        CheckFileLimit(), CheckShmemHugePages(), CheckFolios("/"), CheckFolios("/nowhere"),
        CheckGpus(std::nullopt).front()}) {
    EXPECT_FALSE(check.finding.empty()) << check.name;
    EXPECT_EQ(check.verdict == Verdict::kOk, check.advice.empty()) << check.name;
  }
}

TEST(DoctorTest, TheDisksSpeedIsMeasuredWithoutAStore) {
  const Check check = CheckDisk("");
  // A rate of a file of its own; where the folder cannot be read past the page cache, why.
  const bool measured = check.finding.find("/s (") != std::string::npos;
  if (measured) {
    EXPECT_NE(check.finding.find("a temporary file in "), std::string::npos) << check.finding;
  } else {
    EXPECT_EQ(check.verdict, Verdict::kWarn);
    EXPECT_NE(check.advice.find("fio"), std::string::npos) << check.advice;
  }
}

TEST(DoctorTest, EveryTroubleHasAnEntryInTroubleshootingInTheSameWords) {
  std::ifstream in(MODELHOST_SOURCE_DIR "/docs/troubleshooting.md");
  std::ostringstream page;
  page << in.rdbuf();
  for (size_t i = 0; i < static_cast<size_t>(Trouble::kCount); ++i) {
    const TroubleText& text = TextOf(static_cast<Trouble>(i));
    EXPECT_NE(text.verdict, Verdict::kOk) << text.check;
    // A row of the page's table; what is open in the text goes on with the daemon's words.
    const std::string row = absl::StrCat("\n| `", text.check, "` | ", text.advice);
    EXPECT_THAT(page.str(), testing::HasSubstr(row));
  }
}

TEST(DoctorTest, TheDevicesModeIsTheDaemonsWord) {
  v1::GetStatusResponse status;
  status.set_device_mode("host_only");
  status.set_device_reason("this build has no device tier");
  EXPECT_NE(CheckGpus(status).front().finding.find("mode host_only: this build has no device tier"),
            std::string::npos);
}

TEST(DoctorTest, EachGpuHasAVerdictOfItsOwn) {
  v1::GetStatusResponse status;
  const auto add = [&](const char* uuid, const char* mode, bool usable, const char* limits) {
    v1::DeviceStatus* gpu = status.add_devices();
    gpu->set_uuid(uuid);
    gpu->set_name("Orin");
    gpu->set_driver("12.4");
    gpu->set_mode(mode);
    gpu->set_reason("so it is");
    gpu->set_usable(usable);
    gpu->set_problem(usable ? "" : "fell off the bus");
    gpu->set_limits(limits);
  };
  add("GPU-1", "vmm_fd", true, "");
  add("GPU-2", "cuda_ipc", true, "unprotected");
  add("GPU-3", "host_only", true, "");
  add("GPU-4", "vmm_fd", false, "");
  const std::vector<Check> checks = CheckGpus(status);
  ASSERT_EQ(checks.size(), 4U);
  EXPECT_EQ(checks[0].verdict, Verdict::kOk);
  EXPECT_EQ(checks[0].finding, "GPU-1, Orin, driver 12.4: vmm_fd: so it is");
  EXPECT_EQ(checks[1].verdict, Verdict::kWarn);
  EXPECT_EQ(checks[1].advice, "unprotected");
  EXPECT_EQ(checks[2].verdict, Verdict::kWarn);
  EXPECT_EQ(checks[3].verdict, Verdict::kFail);
  EXPECT_NE(checks[3].finding.find("fell off the bus"), std::string::npos);
}

}  // namespace
}  // namespace modelhost::modelctl
