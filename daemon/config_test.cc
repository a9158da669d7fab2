#include "daemon/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string ErrorOf(const std::string& text) {
  const absl::Status status = ParseConfig(text, "modelhostd.toml").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  return std::string(status.message());
}

TEST(ConfigTest, ReadsEveryKey) {
  auto config = ParseConfig(R"(
[memory]
host_budget = "12GiB"
memlock = "required"
[load]
threads = 3
retries = 7
verify = "manifest"
io_priority = "idle"
pace = "200MiB/s"
admission_timeout = "5s"
[device]
enabled = false
pinned_ring = "64MiB"
threads = 2
stall_timeout = "5s"
budget = "3GiB"
segment_size = "1GiB"
check_interval = "500ms"
allow_registered = true
[metrics]
listen = "[::1]:9000"
[access]
read_groups = ["robots"]
admin_groups = []
max_leases_per_uid = 7
max_connections_per_uid = 5
[machine]
platform = "linux-aarch64"
tensorrt = "10.3.0"
compute_capability = ["8.7", "8.9"]
cuda_driver = "12.4"
[[models]]
name = "planner"
residency = "sealed"
required = true
[[models]]
name = "detector"
keep_previous = "90s"
)",
                            "modelhostd.toml");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->memory.host_budget_bytes, uint64_t{12} << 30);
  EXPECT_EQ(config->memory.memlock, MemlockPolicy::kRequired);
  EXPECT_EQ(config->load.threads, 3);
  EXPECT_EQ(config->load.retries, 7);
  EXPECT_EQ(config->load.verify, VerifyPolicy::kManifest);
  EXPECT_EQ(config->load.io_priority, "idle");
  EXPECT_TRUE(config->load.pace.kind == LoadPace::Kind::kRate);
  EXPECT_EQ(config->load.pace.bytes_per_second, uint64_t{200} << 20);
  EXPECT_EQ(config->load.admission_timeout, absl::Seconds(5));
  EXPECT_EQ(config->access.max_leases_per_uid, 7u);
  EXPECT_EQ(config->access.max_connections_per_uid, 5u);
  EXPECT_FALSE(config->device.enabled);
  EXPECT_EQ(config->device.pinned_ring_bytes, uint64_t{64} << 20);
  EXPECT_EQ(config->device.threads, 2);
  EXPECT_EQ(config->device.stall_timeout, absl::Seconds(5));
  EXPECT_EQ(config->device.budget_bytes, uint64_t{3} << 30);
  EXPECT_EQ(config->device.segment_bytes, uint64_t{1} << 30);
  EXPECT_EQ(config->device.check_interval, absl::Milliseconds(500));
  EXPECT_TRUE(config->device.allow_registered);
  EXPECT_EQ(config->metrics.listen, "[::1]:9000");
  EXPECT_THAT(config->access.read_groups, ElementsAre("robots"));
  EXPECT_TRUE(config->access.admin_groups.empty());
  EXPECT_THAT(config->machine.platform.values, ElementsAre("linux-aarch64"));
  EXPECT_THAT(config->machine.tensorrt.values, ElementsAre("10.3.0"));
  EXPECT_THAT(config->machine.compute_capability.values, ElementsAre("8.7", "8.9"));
  EXPECT_THAT(config->machine.cuda_driver.values, ElementsAre("12.4"));
  ASSERT_EQ(config->models.size(), 2u);
  EXPECT_EQ(config->models.at("planner").residency, Residency::kSealed);
  EXPECT_EQ(config->models.at("planner").required, true);
  EXPECT_EQ(config->models.at("detector").keep_previous, absl::Seconds(90));
}

TEST(ConfigTest, AnEmptyFileIsTheDefault) {
  auto config = ParseConfig("", "f");
  ASSERT_TRUE(config.ok());
  EXPECT_FALSE(config->memory.host_budget_bytes.has_value());
  EXPECT_FALSE(config->machine.platform.known() || config->machine.tensorrt.known() ||
               config->machine.compute_capability.known() || config->machine.cuda_driver.known());
  EXPECT_EQ(config->memory.memlock, MemlockPolicy::kBestEffort);
  EXPECT_EQ(config->load.io_priority, DefaultConfig().load.io_priority);
  EXPECT_EQ(config->metrics.listen, "127.0.0.1:9464");
  EXPECT_FALSE(config->metrics.given);
  EXPECT_TRUE(ParseConfig("[metrics]\nlisten = \"127.0.0.1:9464\"\n", "f")->metrics.given);
  EXPECT_THAT(config->access.admin_groups, ElementsAre("modelhost-admin"));
}

TEST(ConfigTest, UnknownKeysNameFileLineAndKey) {
  EXPECT_THAT(ErrorOf("[memory]\nhost_budget = \"1GiB\"\nmemlok = \"off\"\n"),
              HasSubstr("modelhostd.toml:3: key 'memory.memlok': unknown (known here are "
                        "host_budget, memlock)"));
  EXPECT_THAT(ErrorOf("\n\n[memroy]\n"), HasSubstr("modelhostd.toml:3: key 'memroy': unknown"));
  EXPECT_THAT(ErrorOf("[[models]]\nname = \"a\"\nresidence = \"warm\"\n"),
              HasSubstr("modelhostd.toml:3: key 'models.residence': unknown"));
  EXPECT_THAT(ErrorOf("[[models]]\nname = \"a\"\ndevice = { tensors = [\"[\"] }\n"),
              HasSubstr("modelhostd.toml:3: key 'models.device.tensors': '[': not a regular"));
}

TEST(ConfigTest, WrongTypesAndValuesSayWhatIsExpected) {
  EXPECT_THAT(ErrorOf("memory = 3"), HasSubstr("write [memory]"));
  EXPECT_THAT(ErrorOf("[memory]\nhost_budget = \"12GB\""), HasSubstr("KiB, MiB, GiB"));
  EXPECT_THAT(ErrorOf("[memory]\nhost_budget = -1"), HasSubstr("0 or more"));
  EXPECT_THAT(ErrorOf("[memory]\nmemlock = true"), HasSubstr("found a boolean"));
  EXPECT_THAT(ErrorOf("[memory]\nmemlock = \"yes\""), HasSubstr("\"best_effort\""));
  EXPECT_THAT(ErrorOf("[load]\nthreads = 1.5"), HasSubstr("expected an integer"));
  EXPECT_THAT(ErrorOf("[load]\nthreads = 100000"), HasSubstr("0 to 1024"));
  EXPECT_THAT(ErrorOf("[load]\nretries = 21"), HasSubstr("0 to 20"));
  EXPECT_THAT(ErrorOf("[load]\nio_priority = \"best-effort:8\""), HasSubstr("0 to 7"));
  for (const char* pace : {"fast", "", "200MiB", "0MiB/s", "-1/s", "/s", "auto/s"}) {
    EXPECT_THAT(ErrorOf(absl::StrCat("[load]\npace = \"", pace, "\"")), HasSubstr("200MiB/s"));
  }
  EXPECT_THAT(ErrorOf("[load]\nadmission_timeout = \"5\""), HasSubstr("expected a duration"));
  EXPECT_THAT(ErrorOf("[access]\nmax_leases_per_uid = 0"), HasSubstr("expected 1 to "));
  EXPECT_THAT(ErrorOf("[metrics]\nlisten = \"9464\""), HasSubstr("ADDR:PORT"));
}

TEST(ConfigTest, TheMachineIsSaidInFull) {
  EXPECT_THAT(ErrorOf("[machine]\ntensorrt = \"10.3\""), HasSubstr("10.3.0"));
  EXPECT_THAT(ErrorOf("[machine]\ntensorrt = \"10.3.0+\""), HasSubstr("not a range"));
  EXPECT_THAT(ErrorOf("[machine]\ncompute_capability = \"8.7, 8.9\""), HasSubstr("not a range"));
  EXPECT_THAT(ErrorOf("[machine]\ncompute_capability = []"), HasSubstr("expected a value"));
  EXPECT_THAT(ErrorOf("[machine]\nplatform = 3"), HasSubstr("'machine.platform'"));
  EXPECT_THAT(ErrorOf("[machine]\ngpu = \"8.7\""),
              HasSubstr("known here are platform, tensorrt, compute_capability, cuda_driver"));
}

TEST(ConfigTest, ModelsNeedANameAndOnlyOnce) {
  EXPECT_THAT(ErrorOf("[[models]]\nrequired = true\n"), HasSubstr("modelhostd.toml:1: "));
  EXPECT_THAT(ErrorOf("[[models]]\nrequired = true\n"), HasSubstr("'name' is missing"));
  EXPECT_THAT(ErrorOf("[[models]]\nname = \"a\"\n[[models]]\nname = \"a\"\n"),
              HasSubstr("'a' is given twice"));
  EXPECT_THAT(ErrorOf("[[models]]\nname = \"A\"\n"), HasSubstr("model name 'A'"));
  EXPECT_THAT(ErrorOf("[models]\nname = \"a\"\n"), HasSubstr("write [[models]]"));
}

TEST(ConfigTest, ListenAddresses) {
  for (const char* good : {"off", "127.0.0.1:9464", "0.0.0.0:0", "localhost:80", "[::1]:9464"}) {
    EXPECT_TRUE(CheckListenAddress(good).ok()) << good;
  }
  for (const char* bad :
       {"", "on", ":9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "::1:80", "[]:80",
        "a b:80", "h:-1", "example.org:80", "1.2.3:80", "[1.2.3.4]:80", "256.0.0.1:80"}) {
    EXPECT_FALSE(CheckListenAddress(bad).ok()) << bad;
  }
}

TEST(ConfigTest, LoadingNamesThePath) {
  const absl::Status missing = LoadConfig("/nonexistent/modelhostd.toml").status();
  EXPECT_TRUE(absl::IsNotFound(missing)) << missing;
  EXPECT_THAT(missing.message(), HasSubstr("/nonexistent/modelhostd.toml"));
  EXPECT_FALSE(LoadConfig("/").ok());

  const std::string path = absl::StrCat(::testing::TempDir(), "/config_test_", ::getpid(), ".toml");
  std::ofstream(path) << "[load]\nthreads = 2\n";
  auto config = LoadConfig(path);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->load.threads, 2);
  std::ofstream(path) << "[load]\nthread = 2\n";
  EXPECT_THAT(LoadConfig(path).status().message(), HasSubstr(path + ":2: key 'load.thread'"));
  std::ofstream(path) << std::string((size_t{4} << 20) + 1, '#');
  EXPECT_THAT(LoadConfig(path).status().message(), HasSubstr("longer than"));
  std::remove(path.c_str());
}

}  // namespace
}  // namespace modelhost
