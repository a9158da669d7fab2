#include "daemon/observe/state_metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/observe/metrics_test_exposition.h"
#include "daemon/observe/process_metrics.h"

namespace modelhost {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;

const absl::Time kNow = absl::FromUnixSeconds(1'000'000);

VersionSnapshot Version(uint64_t number, Phase phase, std::vector<std::string> labels = {}) {
  VersionSnapshot version;
  version.key = {"planner", number};
  version.phase = phase;
  version.labels = std::move(labels);
  if (phase == Phase::kReady || phase == Phase::kDraining) {
    auto resident = std::make_shared<ResidentVersion>();
    resident->format = "safetensors";
    version.resident = std::move(resident);
    version.digest = Digest{};
  }
  return version;
}

RegistryState TwoVersions() {
  RegistryState state;
  state.status.ready = true;
  state.status.clients = 3;
  state.status.pools = {{"host", 1000, 10}, {"memlock", UINT64_MAX, 5}};
  ModelSnapshot model;
  model.name = "planner";
  model.labels["stable"] = {.version = 8,
                            .digest = {},
                            .generation = 12,
                            .previous = 7,
                            .changed = absl::FromUnixSeconds(500)};
  model.versions = {Version(7, Phase::kDraining), Version(8, Phase::kReady, {"stable"}),
                    Version(9, Phase::kStaged)};
  state.models = {model};
  state.leases = {{1, 1, {"planner", 7}, "stable", "host_file", kNow - absl::Seconds(90)},
                  {2, 2, {"planner", 7}, "stable", "host_file", kNow - absl::Seconds(30)},
                  {3, 3, {"planner", 8}, "stable", "host_file", kNow}};
  state.leases[0].stale_for = absl::Seconds(90);
  state.leases[1].stale_for = absl::Seconds(30);
  return state;
}

Exposition Render(const RegistryState& state, const ResidentBytes& resident = {}) {
  return Exposition(RenderState(state, resident));
}

TEST(StateMetricsTest, ShowsReadinessClientsAndBudgets) {
  const Exposition scrape = Render(TwoVersions());
  EXPECT_EQ(scrape.Value("modelhost_ready"), 1);
  EXPECT_EQ(scrape.Value("modelhost_clients"), 3);
  EXPECT_EQ(scrape.Value("modelhost_memory_budget_bytes{pool=\"host\"}"), 1000);
  EXPECT_EQ(scrape.Value("modelhost_memory_reserved_bytes{pool=\"host\"}"), 10);
  EXPECT_TRUE(std::isinf(scrape.Value("modelhost_memory_budget_bytes{pool=\"memlock\"}")));
}

TEST(StateMetricsTest, ShowsWhatEachLabelNames) {
  const Exposition scrape = Render(TwoVersions());
  const std::string labels = "{model=\"planner\",label=\"stable\"}";
  EXPECT_EQ(scrape.Value("modelhost_label_version" + labels), 8);
  EXPECT_EQ(scrape.Value("modelhost_label_generation" + labels), 12);
  EXPECT_EQ(scrape.Value("modelhost_label_last_change_timestamp_seconds" + labels), 500);
}

TEST(StateMetricsTest, AVersionsStateIsOneOfASet) {
  const Exposition scrape = Render(TwoVersions());
  const auto series =
      scrape.SeriesOf("modelhost_model_version_state{model=\"planner\",version=\"8\"");
  EXPECT_THAT(series, SizeIs(8));
  double sum = 0;
  for (const std::string& one : series) sum += scrape.Value(one);
  EXPECT_EQ(sum, 1);
  EXPECT_EQ(scrape.Value("modelhost_model_version_state{model=\"planner\",version=\"8\","
                         "state=\"ready\"}"),
            1);
}

TEST(StateMetricsTest, SeriesOfAVersionGoWhenItIsUnloaded) {
  RegistryState state = TwoVersions();
  const ResidentBytes resident = {{{"planner", 7}, 70}, {{"planner", 8}, 80}};
  EXPECT_EQ(Render(state, resident)
                .Value("modelhost_host_resident_bytes{model=\"planner\",version=\"7\"}"),
            70);

  state.models[0].versions[0] = Version(7, Phase::kStaged);
  state.leases = {};
  const Exposition after = Render(state, resident);
  for (const std::string& family : after.families()) {
    for (const std::string& series : after.SeriesOf(family + "{")) {
      EXPECT_THAT(series, ::testing::Not(::testing::HasSubstr("version=\"7\""))) << series;
    }
  }
  EXPECT_TRUE(after.Has("modelhost_host_mapped_bytes{model=\"planner\",version=\"8\"}"));
}

TEST(StateMetricsTest, StaleLeasesAreCountedAndTheOldestShown) {
  const Exposition scrape = Render(TwoVersions());
  EXPECT_EQ(scrape.Value("modelhost_leases{model=\"planner\",version=\"7\","
                         "transport=\"host_file\"}"),
            2);
  EXPECT_EQ(scrape.Value("modelhost_stale_leases{model=\"planner\"}"), 2);
  EXPECT_EQ(scrape.Value("modelhost_oldest_stale_lease_age_seconds{model=\"planner\"}"), 90);
}

TEST(StateMetricsTest, NoLeaseIsZeroAndNotAbsent) {
  RegistryState state = TwoVersions();
  state.leases = {};
  const Exposition scrape = Render(state);
  EXPECT_EQ(scrape.Value("modelhost_leases{model=\"planner\",version=\"8\","
                         "transport=\"host_file\"}"),
            0);
  EXPECT_EQ(scrape.Value("modelhost_stale_leases{model=\"planner\"}"), 0);
  EXPECT_EQ(scrape.Value("modelhost_oldest_stale_lease_age_seconds{model=\"planner\"}"), 0);
}

TEST(StateMetricsTest, LoadsInProgressHaveARatio) {
  RegistryState state = TwoVersions();
  VersionSnapshot loading = Version(9, Phase::kLoading);
  loading.load_bytes_done = 25;
  loading.load_bytes_total = 100;
  state.models[0].versions[2] = loading;
  state.models[0].versions.push_back(Version(10, Phase::kQuarantined));
  const Exposition scrape = Render(state);
  EXPECT_EQ(scrape.Value("modelhost_model_loads_in_progress{model=\"planner\"}"), 1);
  EXPECT_EQ(scrape.Value("modelhost_model_load_progress_ratio{model=\"planner\",version=\"9\"}"),
            0.25);
  EXPECT_FALSE(scrape.Has("modelhost_model_load_progress_ratio{model=\"planner\",version=\"8\"}"));
  EXPECT_EQ(scrape.Value("modelhost_quarantined_versions{model=\"planner\"}"), 1);
}

TEST(StateMetricsTest, OperationsAreCountedByKindAndState) {
  RegistryState state = TwoVersions();
  OperationSnapshot operation;
  operation.kind = OperationKind::kLoad;
  operation.state = OperationState::kRunning;
  state.operations = {operation, operation};
  operation.state = OperationState::kSucceeded;
  state.operations.push_back(operation);
  const Exposition scrape = Render(state);
  EXPECT_EQ(scrape.Value("modelhost_operations{kind=\"load\",state=\"running\"}"), 2);
  EXPECT_EQ(scrape.Value("modelhost_operations{kind=\"swap\",state=\"queued\"}"), 0);
}

TEST(StateMetricsTest, AScraperHasNothingToComplainAbout) {
  RegistryState state = TwoVersions();
  state.models[0].versions[1].health = Health::kDegraded;
  const Exposition scrape = Render(state, {{{"planner", 8}, 80}});
  EXPECT_THAT(scrape.problems(), IsEmpty());
  EXPECT_EQ(scrape.Value("modelhost_model_health{model=\"planner\",version=\"8\","
                         "health=\"degraded\"}"),
            1);
  EXPECT_EQ(scrape.Value("modelhost_model_version_info{model=\"planner\",version=\"8\","
                         "digest=\"000000000000\",format=\"safetensors\"}"),
            1);
}

TEST(ProcessMetricsTest, ReadsFieldsBehindANameWithSpacesAndParentheses) {
  const auto stat = ParseProcessStat(
      "42 (a ) b) S 1 2 3 4 5 6 7 8 9 10 150 50 0 0 20 0 7 0 300 4096000 25 18446744073709551615\n",
      100, 4096);
  ASSERT_TRUE(stat.has_value());
  EXPECT_EQ(stat->cpu_seconds, 2);
  EXPECT_EQ(stat->threads, 7);
  EXPECT_EQ(stat->started_after_boot_seconds, 3);
  EXPECT_EQ(stat->virtual_bytes, 4096000);
  EXPECT_EQ(stat->resident_bytes, 25 * 4096);
}

TEST(ProcessMetricsTest, RefusesWhatIsNotAStatLine) {
  EXPECT_FALSE(ParseProcessStat("", 100, 4096).has_value());
  EXPECT_FALSE(ParseProcessStat("42 (a) S 1 2", 100, 4096).has_value());
}

TEST(ProcessMetricsTest, TellsOfThisProcess) {
  const Exposition scrape(ProcessCollector().Collect());
  EXPECT_THAT(scrape.problems(), IsEmpty());
  EXPECT_EQ(scrape.Type("process_cpu_seconds_total"), "counter");
  EXPECT_GT(scrape.Value("process_resident_memory_bytes"), 1e6);
  EXPECT_GE(scrape.Value("process_open_fds"), 3);
  EXPECT_GT(scrape.Value("process_max_fds"), scrape.Value("process_open_fds"));
  const double started = scrape.Value("process_start_time_seconds");
  EXPECT_NEAR(started, absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()), 3600);
}

}  // namespace
}  // namespace modelhost
