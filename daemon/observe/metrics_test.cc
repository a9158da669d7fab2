#include "daemon/observe/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/observe/metrics_test_exposition.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

const VersionKey kPlanner{"planner", 8};

class MetricsTest : public ::testing::Test {
 protected:
  void Know(const std::string& model) {
    VersionSnapshot version;
    version.key = {model, 1};
    metrics_.OnVersion(version);
  }
  Exposition Scrape() const { return Exposition(metrics_.registry()->Collect()); }

  Metrics metrics_{BuildInfo{"1.2.3", "abc", "none"}};
};

LoadReport ColdLoad() {
  LoadReport report;
  report.source = "cold";
  report.duration = absl::Milliseconds(1500);
  report.phases = {{"verify", absl::Milliseconds(1200), 100}, {"pin", absl::Milliseconds(50), 100}};
  report.disk_bytes = 4096;
  return report;
}

TEST_F(MetricsTest, SaysWhatItWasBuiltFrom) {
  const Exposition scrape = Scrape();
  const auto series = scrape.SeriesOf("modelhost_build_info{");
  ASSERT_THAT(series, SizeIs(1));
  for (const char* label :
       {"version=\"1.2.3\"", "revision=\"abc\"", "cuda=\"none\"", "grpc=\"1."}) {
    EXPECT_THAT(series[0], ::testing::HasSubstr(label));
  }
  EXPECT_EQ(scrape.Value(series[0]), 1);
}

TEST_F(MetricsTest, InvalidTransitionsAreThereFromTheStart) {
  EXPECT_EQ(Scrape().Value("modelhost_invalid_transitions_total"), 0);
  metrics_.OnInvalidTransition(kPlanner, "phase", "READY", "LOADING");
  EXPECT_EQ(Scrape().Value("modelhost_invalid_transitions_total"), 1);
}

TEST_F(MetricsTest, ALoadIsAHistogramByModelSourceAndOutcome) {
  metrics_.OnLoadFinished(kPlanner, ColdLoad(), absl::OkStatus(), "");
  const Exposition scrape = Scrape();
  const std::string name = "modelhost_model_load_duration_seconds";
  EXPECT_EQ(scrape.Type(name), "histogram");
  EXPECT_EQ(scrape.Value(name + "_count{model=\"planner\",outcome=\"success\",source=\"cold\"}"),
            1);
  EXPECT_EQ(scrape.Value(name + "_sum{model=\"planner\",outcome=\"success\",source=\"cold\"}"),
            1.5);
  EXPECT_THAT(scrape.Bounds(name),
              ElementsAre("0.001", "0.005", "0.01", "0.025", "0.05", "0.1", "0.25", "0.5", "1",
                          "2.5", "5", "10", "30", "60", "120", "300", "600", "+Inf"));
  const std::string phase = "modelhost_model_load_phase_duration_seconds";
  EXPECT_EQ(scrape.Value(phase + "_sum{model=\"planner\",phase=\"verify\"}"), 1.2);
  EXPECT_THAT(scrape.Bounds(phase), ElementsAre("0.001", "0.01", "0.05", "0.1", "0.5", "1", "5",
                                                "10", "30", "60", "300", "+Inf"));
  EXPECT_EQ(scrape.Value("modelhost_model_load_bytes_total{model=\"planner\",tier=\"disk\"}"),
            4096);
}

TEST_F(MetricsTest, AFailedLoadCountsItsPhaseAndReason) {
  metrics_.OnLoadFinished(kPlanner, ColdLoad(), absl::DataLossError("x"), "verify");
  EXPECT_EQ(Scrape().Value("modelhost_model_load_failures_total{model=\"planner\","
                           "phase=\"verify\",reason=\"data_loss\"}"),
            1);
}

TEST_F(MetricsTest, ACancelledLoadIsNoFailure) {
  metrics_.OnLoadFinished(kPlanner, ColdLoad(), absl::CancelledError("x"), "verify");
  const Exposition scrape = Scrape();
  EXPECT_THAT(scrape.SeriesOf("modelhost_model_load_failures_total{"), IsEmpty());
  EXPECT_EQ(scrape.Value("modelhost_model_load_duration_seconds_count{model=\"planner\","
                         "outcome=\"cancelled\",source=\"cold\"}"),
            1);
}

TEST_F(MetricsTest, AFlipIsObservedInItsFineBuckets) {
  const LabelChange change{"planner", "stable", 7, 8, 12};
  metrics_.OnLabelsMoved({&change, 1}, absl::Nanoseconds(4100));
  const Exposition scrape = Scrape();
  const std::string name = "modelhost_swap_flip_duration_seconds";
  EXPECT_EQ(scrape.Value(name + "_bucket{le=\"1e-06\"}"), 0);
  EXPECT_EQ(scrape.Value(name + "_bucket{le=\"5e-06\"}"), 1);
  EXPECT_THAT(scrape.Bounds(name), SizeIs(11));
}

TEST_F(MetricsTest, LabelsThatDidNotMoveAreNoFlip) {
  const LabelChange same{"planner", "stable", 8, 8, 12};
  metrics_.OnLabelsMoved({&same, 1}, absl::Nanoseconds(4100));
  EXPECT_EQ(Scrape().Value("modelhost_swap_flip_duration_seconds_count"), 0);
}

TEST_F(MetricsTest, SwapsAndRollbacksEndWithAnOutcome) {
  Know("planner");
  OperationSnapshot operation;
  operation.kind = OperationKind::kSwap;
  operation.model = "planner";
  operation.started = absl::FromUnixSeconds(100);
  operation.finished = absl::FromUnixSeconds(102);
  operation.state = OperationState::kRunning;
  metrics_.OnOperation(operation);
  operation.state = OperationState::kSucceeded;
  metrics_.OnOperation(operation);
  operation.state = OperationState::kFailed;
  operation.status = absl::DataLossError("x");
  metrics_.OnOperation(operation);
  operation.kind = OperationKind::kRollback;
  operation.state = OperationState::kSucceeded;
  metrics_.OnOperation(operation);

  const Exposition scrape = Scrape();
  const auto swaps = [&](const char* outcome) {
    return scrape.Value(absl::StrCat("modelhost_swaps_total{model=\"planner\",outcome=\"", outcome,
                                     "\",trigger=\"api\"}"));
  };
  EXPECT_EQ(swaps("success"), 1);
  EXPECT_EQ(swaps("failed"), 1);
  EXPECT_EQ(swaps("rolled_back"), 1);
  EXPECT_EQ(
      scrape.Value("modelhost_swap_duration_seconds_sum{model=\"planner\",outcome=\"success\"}"),
      2);
  EXPECT_EQ(scrape.Value("modelhost_rollbacks_total{model=\"planner\",trigger=\"api\"}"), 1);
}

TEST_F(MetricsTest, AClientCannotMakeSeriesWithNamesOfItsChoice) {
  Know("planner");
  for (int i = 0; i < 100; ++i) {
    metrics_.OnAttach(absl::StrCat("no-such-", i), "native", absl::Microseconds(20),
                      absl::NotFoundError("x"));
  }
  metrics_.OnAttach("planner", "native", absl::Microseconds(20), absl::OkStatus());
  const Exposition scrape = Scrape();
  const std::string name = "modelhost_attach_duration_seconds_count";
  EXPECT_THAT(scrape.SeriesOf(name), SizeIs(2));
  EXPECT_EQ(scrape.Value(name + "{model=\"other\",outcome=\"error\",transport=\"native\"}"), 100);
  EXPECT_EQ(scrape.Value(name + "{model=\"planner\",outcome=\"success\",transport=\"native\"}"), 1);
  EXPECT_THAT(scrape.Bounds("modelhost_attach_duration_seconds"),
              ElementsAre("0.0001", "0.00025", "0.0005", "0.001", "0.0025", "0.005", "0.01", "0.05",
                          "0.1", "0.5", "1", "5", "+Inf"));
}

TEST_F(MetricsTest, SessionsEndForOneOfAFewReasons) {
  metrics_.OnSession(Session{}, true, "");
  for (const char* why : {"closed", "violation", "stopping", "who knows", "slow"}) {
    metrics_.OnSession(Session{}, false, why);
  }
  const Exposition scrape = Scrape();
  for (const char* reason : {"clean", "protocol_error", "shutdown", "other", "timeout"}) {
    EXPECT_EQ(
        scrape.Value(absl::StrCat("modelhost_client_disconnects_total{reason=\"", reason, "\"}")),
        1);
  }
}

TEST_F(MetricsTest, RefusalsAreCountedByVerbOnly) {
  metrics_.OnRefused(Peer{}, "Swap");
  metrics_.OnRefused(Peer{}, "acquire planner@8");
  metrics_.OnRefused(Peer{}, "acquire other@9");
  const Exposition scrape = Scrape();
  EXPECT_EQ(scrape.Value("modelhost_refused_attempts_total{what=\"swap\"}"), 1);
  EXPECT_EQ(scrape.Value("modelhost_refused_attempts_total{what=\"acquire\"}"), 2);
}

TEST_F(MetricsTest, RpcsAreTimedByMethodAndCode) {
  metrics_.RpcStarted("modelhost.v1.Control/Swap");
  EXPECT_EQ(Scrape().Value("modelhost_rpc_in_flight{method=\"modelhost.v1.Control/Swap\"}"), 1);
  metrics_.RpcAnswered("modelhost.v1.Control/Swap", "NOT_FOUND", absl::Microseconds(200));
  metrics_.RpcEnded("modelhost.v1.Control/Swap");
  const Exposition scrape = Scrape();
  EXPECT_EQ(scrape.Value("modelhost_rpc_in_flight{method=\"modelhost.v1.Control/Swap\"}"), 0);
  EXPECT_EQ(scrape.Value("modelhost_rpc_duration_seconds_count{code=\"NOT_FOUND\","
                         "method=\"modelhost.v1.Control/Swap\"}"),
            1);
  EXPECT_THAT(scrape.Bounds("modelhost_rpc_duration_seconds"),
              ElementsAre("0.0001", "0.0005", "0.001", "0.005", "0.01", "0.05", "0.1", "0.5", "1",
                          "5", "+Inf"));
}

TEST_F(MetricsTest, TheNumberOfMethodsIsBounded) {
  for (int i = 0; i < 1000; ++i) metrics_.RpcStarted(absl::StrCat("made-up/", i));
  EXPECT_THAT(Scrape().SeriesOf("modelhost_rpc_in_flight{"), SizeIs(65));
}

TEST_F(MetricsTest, AScraperHasNothingToComplainAbout) {
  Know("planner");
  metrics_.OnLoadFinished(kPlanner, ColdLoad(), absl::OkStatus(), "");
  metrics_.OnLoadFinished(kPlanner, ColdLoad(), absl::InternalError("x"), "map");
  metrics_.OnUnloaded(kPlanner, absl::Milliseconds(3));
  metrics_.OnDrained(kPlanner, absl::Seconds(3), true);
  metrics_.OnIntegrityCheck("planner", "full", absl::OkStatus());
  metrics_.OnRefused(Peer{}, "Swap");
  metrics_.OnSession(Session{}, false, "closed");
  metrics_.RpcAnswered("a/b", "OK", absl::Milliseconds(1));
  const Exposition scrape = Scrape();
  EXPECT_THAT(scrape.problems(), IsEmpty());
  EXPECT_EQ(scrape.Value("modelhost_swap_drain_duration_seconds_count{model=\"planner\","
                         "outcome=\"deadline\"}"),
            1);
  EXPECT_EQ(scrape.Value("modelhost_integrity_checks_total{kind=\"full\",model=\"planner\","
                         "outcome=\"success\"}"),
            1);
  EXPECT_EQ(scrape.Value("modelhost_model_unload_duration_seconds_count{model=\"planner\","
                         "outcome=\"success\"}"),
            1);
}

}  // namespace
}  // namespace modelhost
