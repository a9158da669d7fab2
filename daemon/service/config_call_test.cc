// GetConfig and ReloadConfig over a real socket; and the desired state file in GetStatus.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/service/control_server_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr uint32_t kReaderUid = 4242;
constexpr uint32_t kOperator = 4343;

class ConfigCallTest : public ControlServerTest {
 protected:
  static grpc::Status GetConfig(v1::Control::Stub& stub, v1::Config* config) {
    grpc::ClientContext context;
    Deadline(context);
    return stub.GetConfig(&context, {}, config);
  }
  static grpc::Status ReloadConfig(v1::Control::Stub& stub, v1::ReloadConfigResponse* report) {
    grpc::ClientContext context;
    Deadline(context);
    return stub.ReloadConfig(&context, {}, report);
  }
};

TEST_F(ConfigCallTest, TellsEveryValueAndWhereItComesFrom) {
  RunAndWait(*loop_, [&] {
    config_.view = {"/etc/c.toml",
                    {{"load.threads", "3", "/etc/c.toml:2", false},
                     {"models.planner.required", "true", "/etc/c.toml:5", true}}};
  });
  v1::Config config;
  const grpc::Status status = GetConfig(*stub_, &config);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(config.file(), "/etc/c.toml");
  ASSERT_THAT(config.entries(), SizeIs(2));
  EXPECT_EQ(config.entries(0).key(), "load.threads");
  EXPECT_EQ(config.entries(0).source(), "/etc/c.toml:2");
  EXPECT_FALSE(config.entries(0).reloadable());
  EXPECT_TRUE(config.entries(1).reloadable());
}

TEST_F(ConfigCallTest, ReadersMayLookAndOnlyOperatorsMayReload) {
  Pretend(1000, {kReaderUid});
  auto reader = Connect();
  v1::Config config;
  v1::ReloadConfigResponse report;
  EXPECT_TRUE(GetConfig(*reader, &config).ok());
  EXPECT_EQ(ReloadConfig(*reader, &report).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  Pretend(1001);
  auto stranger = Connect();
  EXPECT_EQ(GetConfig(*stranger, &config).error_code(), grpc::StatusCode::PERMISSION_DENIED);
  Pretend(1002, {kOperator});
  EXPECT_TRUE(ReloadConfig(*Connect(), &report).ok());
  RunAndWait(*loop_, [&] {
    EXPECT_THAT(refusals_.seen,
                ElementsAre("ReloadConfig by 1000", HasSubstr("GetConfig by 1001")));
  });
}

TEST_F(ConfigCallTest, WhatIsAboutAModelIsToldToItsReaders) {
  WriteVersion(base_ / "store", "secret", 1,
               {{"model.safetensors", SafetensorsBytes({{"w", std::vector<float>{1}}})}});
  WriteFile(base_ / "store/models/secret/model.toml", "read_groups = [\"7777\"]\n");
  std::filesystem::permissions(base_ / "store/models/secret/model.toml",
                               std::filesystem::perms(0600));
  grpc::ClientContext context;
  Deadline(context);
  v1::RescanResponse scanned;
  ASSERT_TRUE(stub_->Rescan(&context, {}, &scanned).ok());
  RunAndWait(*loop_, [&] {
    config_.view.entries = {{"models.secret.required", "true", "c:1", true},
                            {"models.planner.required", "true", "c:2", true}};
  });
  Pretend(1000, {kReaderUid});
  v1::Config config;
  ASSERT_TRUE(GetConfig(*Connect(), &config).ok());
  ASSERT_THAT(config.entries(), SizeIs(1));
  EXPECT_EQ(config.entries(0).key(), "models.planner.required");

  // The same in the rows of the desired state file; the counts are of all.
  WriteFile(base_ / "desired", "secret.stable = 5\nplanner.stable = 5\n");
  RunAndWait(*loop_, [&] { manager_->FollowDesired(base_ / "desired"); });
  v1::GetStatusResponse status;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  auto reader = Connect();
  do {
    ASSERT_TRUE(GetStatus(*reader, &status).ok());
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
  } while (status.desired().state() != "ok");
  EXPECT_EQ(status.desired().wanted(), 2u);
  EXPECT_EQ(status.desired().pending(), 2u);
  ASSERT_THAT(status.desired().labels(), SizeIs(1));
  EXPECT_EQ(status.desired().labels(0).model(), "planner");
  EXPECT_EQ(status.desired().labels(0).state(), "pending");
}

TEST_F(ConfigCallTest, AReloadSaysWhatChangedAndWhatIsWrong) {
  RunAndWait(*loop_, [&] {
    config_.report =
        ReloadReport{"/etc/c.toml",
                     {{"desired.file", "\"\"", "\"/m\"", false}, {"load.threads", "0", "4", true}},
                     "it is not mounted"};
  });
  v1::ReloadConfigResponse report;
  ASSERT_TRUE(ReloadConfig(*stub_, &report).ok());
  ASSERT_THAT(report.changes(), SizeIs(2));
  EXPECT_EQ(report.changes(0).to(), "\"/m\"");
  EXPECT_TRUE(report.changes(1).needs_restart());
  EXPECT_EQ(report.store_error(), "it is not mounted");

  RunAndWait(*loop_, [&] {
    config_.report = absl::InvalidArgumentError("/etc/c.toml:3: key 'x': unknown");
  });
  const grpc::Status bad = ReloadConfig(*stub_, &report);
  EXPECT_EQ(bad.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(bad.error_message(), "/etc/c.toml:3: key 'x': unknown");
}

}  // namespace
}  // namespace modelhost
