// Verbs that look, through the real program and a real socket.
#include <csignal>

#include "absl/strings/str_cat.h"
#include "client/modelctl/flow_test_base.h"

namespace modelhost::modelctl::testing {
namespace {

using ReadFlowTest = FlowTest;

TEST_F(ReadFlowTest, LsPrintsTheTable) {
  AddPlanner();
  const Ended ended = Run({"ls"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(ended.out,
            "MODEL    LABELS    VERSIONS READY     HOST  DEVICE  LEASES  HEALTH\n"
            "planner  stable=7  7               4.0 GiB       -       3  OK\n");
  EXPECT_EQ(ended.err, "");
}

TEST_F(ReadFlowTest, LsAsNamesAndAsJsonLines) {
  AddPlanner();
  EXPECT_EQ(Run({"ls", "-o", "name"}).out, "planner\n");
  const Ended lines = Run({"-o", "jsonl", "ls"});
  EXPECT_EQ(
      lines.out.find("{\"apiVersion\":\"modelhost/v1\",\"kind\":\"Model\",\"name\":\"planner\""),
      0u);
  EXPECT_NE(lines.out.find("\"hostBytes\":4294967296"), std::string::npos);
  const Ended json = Run({"ls", "-o", "json"});
  EXPECT_EQ(json.out.find("{\n  \"apiVersion\": \"modelhost/v1\",\n  \"kind\": \"ModelList\""), 0u);
}

TEST_F(ReadFlowTest, AnEmptyStoreIsAHintAndNoFailure) {
  const Ended ended = Run({"ls"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_NE(ended.err.find("modelctl publish"), std::string::npos);
  EXPECT_EQ(Run({"ls", "-q"}).err, "");
}

TEST_F(ReadFlowTest, StatusSaysWhatTheDaemonIs) {
  const Ended ended = Run({"status"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_NE(ended.out.find("epoch"), std::string::npos);
  EXPECT_NE(ended.out.find("2 h 2 min"), std::string::npos);
  EXPECT_NE(ended.out.find("host_only: this build has no device tier"), std::string::npos);
  EXPECT_NE(Run({"status", "-o", "jsonl"}).out.find("\"epoch\":12"), std::string::npos);
}

// --- A daemon of another version

TEST_F(ReadFlowTest, ACallThatTheDaemonDoesNotKnowNamesBothVersions) {
  daemon_.status.set_version("0.0.9");
  const Ended ended = Run({"verify", "planner@7"});
  EXPECT_EQ(ended.code, 1);
  EXPECT_EQ(ended.out, "");
  EXPECT_NE(
      ended.err.find("modelhostd 0.0.9 does not know this call; modelctl is " MODELHOST_VERSION
                     " (update modelhostd"),
      std::string::npos)
      << ended.err;
}

TEST_F(ReadFlowTest, StatesOfANewerDaemonAreShownByTheirNumber) {
  AddPlanner();
  v1::Version* odd = daemon_.models["planner"].add_versions();
  *odd = MakeVersion("planner", 9, static_cast<v1::VersionPhase>(77));
  odd->set_health(static_cast<v1::Health>(66));
  const Ended versions = Run({"versions", "planner"});
  EXPECT_EQ(versions.code, 0) << versions.err;
  EXPECT_NE(versions.out.find("UNKNOWN_77"), std::string::npos) << versions.out;
  EXPECT_NE(versions.out.find("UNKNOWN_66"), std::string::npos) << versions.out;
  const Ended json = Run({"versions", "planner", "-o", "json"});
  EXPECT_NE(json.out.find("\"state\": \"UNKNOWN_77\""), std::string::npos) << json.out;
}

TEST_F(ReadFlowTest, ADaemonWithoutADesiredStateFileOrOfNoSuchVersionSaysNothingOfIt) {
  EXPECT_EQ(Run({"status"}).out.find("desired"), std::string::npos);
}

TEST_F(ReadFlowTest, StatusTellsOfTheDesiredStateFile) {
  v1::DesiredStatus* desired = daemon_.status.mutable_desired();
  desired->set_file("/etc/models");
  desired->set_state("ok");
  desired->set_wanted(13);
  desired->set_in_sync(1);
  desired->set_pending(12);
  for (int i = 0; i < 13; ++i) {
    v1::DesiredLabel* row = desired->add_labels();
    row->set_model(absl::StrCat("m", i));
    row->set_label("stable");
    row->set_want(8);
    row->set_state(i == 0 ? "in_sync" : "pending");
    if (i > 0) row->set_reason("not in the store yet");
  }
  const std::string out = Run({"status"}).out;
  EXPECT_NE(out.find("/etc/models: ok, 1 of 13 labels in sync, 12 pending"), std::string::npos);
  EXPECT_NE(out.find("desired m10:stable"), std::string::npos) << out;
  EXPECT_NE(out.find("wants 8, has none, pending: not in the store yet"), std::string::npos);
  EXPECT_EQ(out.find("desired m11:stable"), std::string::npos) << out;
  EXPECT_NE(out.find("and 2 more (-o wide shows them)"), std::string::npos) << out;
  EXPECT_NE(Run({"status", "-o", "wide"}).out.find("desired m12:stable"), std::string::npos);
  desired->set_state("broken");
  desired->set_error("/etc/models:3: bad");
  EXPECT_NE(Run({"status"}).out.find("broken: /etc/models:3: bad; nothing is started"),
            std::string::npos);
}

TEST_F(ReadFlowTest, VersionsShowTheReasonOfABadOneAndOldStagedOnesOnRequest) {
  AddPlanner();
  v1::Model& model = daemon_.models["planner"];
  for (uint64_t version = 20; version < 40; ++version) {
    *model.add_versions() = MakeVersion("planner", version, v1::STAGED);
  }
  v1::Version* bad = model.add_versions();
  *bad = MakeVersion("planner", 0, v1::INVALID);
  bad->set_name("08");
  bad->set_reason("not a canonical number");
  const Ended some = Run({"versions", "planner"});
  EXPECT_NE(some.out.find("not a canonical number"), std::string::npos);
  EXPECT_EQ(some.out.find("\n     20 "), std::string::npos);
  EXPECT_NE(some.err.find("11 older versions"), std::string::npos) << some.err;
  const Ended all = Run({"versions", "planner", "--all"});
  EXPECT_NE(all.out.find("\n     20 "), std::string::npos) << all.out;
}

TEST_F(ReadFlowTest, DescribeShowsWhereTheLoadsTimeWent) {
  AddPlanner();
  v1::LoadReport* load = daemon_.models["planner"].mutable_versions(0)->mutable_last_load();
  load->set_source("cold");
  load->mutable_duration()->set_seconds(2);
  load->set_disk_bytes(uint64_t{4} << 30);
  v1::LoadPhase* phase = load->add_phases();
  phase->set_name("read");
  phase->mutable_duration()->set_seconds(1);
  phase->set_bytes(uint64_t{4} << 30);
  const Ended ended = Run({"describe", "planner"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_NE(ended.out.find("last load: cold, 2.00 s, 4.0 GiB from disk at 2.0 GiB/s"),
            std::string::npos)
      << ended.out;
  EXPECT_NE(ended.out.find("read   1.00 s  ###############...............  4.0 GiB  4.0 GiB/s"),
            std::string::npos)
      << ended.out;
  ExpectFailure(Run({"describe", "planner:canary"}), 3, "no such version");
}

TEST_F(ReadFlowTest, AnUnknownModelIsNotFound) {
  ExpectFailure(Run({"versions", "planer"}), 3, "planer: no such model");
}

TEST_F(ReadFlowTest, HealthIsAnExitCode) {
  AddPlanner();
  EXPECT_EQ(Run({"health"}).code, 0);
  EXPECT_EQ(Run({"health", "planner"}).out, "ok\n");
  v1::Version* version = daemon_.models["planner"].mutable_versions(0);
  version->set_health(v1::SUSPECT);
  version->set_health_reason("source changed");
  Ended ended = Run({"health", "planner"});
  EXPECT_EQ(ended.code, 12);
  EXPECT_EQ(ended.out, "degraded: planner SUSPECT: planner@7 source changed\n");
  EXPECT_EQ(Run({"health"}).code, 12);
  version->set_phase(v1::LOADING);
  ExpectFailure(Run({"health", "planner"}), 1, "not ready: stable names 7, which is LOADING");
  EXPECT_EQ(Run({"health"}).code, 0);  // Loading is no illness of the daemon.
  daemon_.status.set_ready(false);
  daemon_.status.add_not_ready("planner is loading");
  ExpectFailure(Run({"health"}), 1, "planner is loading");
  ExpectFailure(Run({"health", "nobody"}), 3, "nobody");
  ended = Run({"health", "-q"});
  EXPECT_EQ(ended.code, 1);
  EXPECT_EQ(ended.out + ended.err, "");
}

TEST_F(ReadFlowTest, AnUnreachableDaemonIsNamedAtOnce) {
  const std::string socket = (daemon_.runtime_dir() / "control.sock").string();
  daemon_.StopControl();
  std::filesystem::remove(socket);
  const auto began = std::chrono::steady_clock::now();
  ExpectFailure(Run({"status"}), 8, socket);
  // A socket that a killed daemon left behind: the file is there, nobody listens.
  { const std::ofstream stale(socket); }
  ExpectFailure(Run({"status"}), 8, "nobody listens");
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
}

TEST_F(ReadFlowTest, WatchPrintsThePresentAndGoesOn) {
  AddPlanner();
  const auto process = Start({"ls", "--watch", "-o", "name"});
  EXPECT_TRUE(process->WaitForOut("planner\n"));
  process->Signal(SIGINT);
  EXPECT_EQ(process->Wait().code, 130);
  EXPECT_EQ(Run({"ls", "--watch", "--timeout", "200ms"}).code, 0);
}

TEST_F(ReadFlowTest, AReaderThatLeavesIsNoFailure) {
  AddPlanner();
  const std::string line =
      absl::StrCat(MODELCTL_BINARY, " --runtime-dir ", daemon_.runtime_dir().string(),
                   " ls -o json | true; echo ${PIPESTATUS[0]}");
  Process shell({"bash", "-c", line}, {});
  EXPECT_EQ(shell.Wait().out, "0\n");
}

TEST_F(ReadFlowTest, UsageErrorsAreOneLineAndExitTwo) {
  ExpectFailure(Run({}), 2, "no verb given");
  ExpectFailure(Run({"fly"}), 2, "fly");
  ExpectFailure(Run({"ls", "--output", "xml"}), 2, "xml");
  ExpectFailure(Run({"versions"}), 2, "MODEL");
  ExpectFailure(Run({"versions", "Planner"}), 2, "'Planner': not a model name");
  ExpectFailure(Run({"ls", "--timeout", "soon"}), 2, "soon");
  ExpectFailure(Run({"exec", "planner"}), 2, "no command given");
  ExpectFailure(Run({"label"}), 2, "modelctl label --help");
  ExpectFailure(Run({"swap", "planner", "2"}), 2,
                "not expected: 2; a version goes after --version");
  ExpectFailure(Run({"--target", "robot:9465", "status"}), 2, "robot:9465");
}

TEST_F(ReadFlowTest, EveryVerbHasHelp) {
  const Ended top = Run({"--help"});
  EXPECT_EQ(top.code, 0);
  for (const char* verb :
       {"status",  "ls",     "versions", "describe", "inspect", "publish", "verify",
        "load",    "unload", "swap",     "rollback", "label",   "clients", "leases",
        "evict",   "ops",    "rescan",   "exec",     "health",  "doctor",  "completion",
        "version", "top",    "gc",       "delete",   "events",  "config",  "import"}) {
    EXPECT_NE(top.out.find(verb), std::string::npos) << verb;
    const Ended ended = Run({verb, "--help"});
    EXPECT_EQ(ended.code, 0) << verb;
    EXPECT_NE(ended.out.find(verb), std::string::npos) << verb;
    EXPECT_EQ(ended.err, "") << verb;
  }
  EXPECT_EQ(Run({"--version"}).out, "modelctl " MODELHOST_VERSION "\n");
  // Not the program's version with an exit status of 0, which a script takes for done.
  ExpectFailure(Run({"rollback", "planner", "--version", "1"}), 2, "--version");
}

TEST_F(ReadFlowTest, EvictNeedsAYes) {
  ExpectFailure(Run({"evict", "5"}), 2, "--yes");
  EXPECT_EQ(daemon_.evicted.lease(), 0u);
  const Ended ended = Run({"evict", "5", "--yes"});
  EXPECT_EQ(ended.out, "lease 5 of planner@7 evicted  pid 42 node\n");
  EXPECT_EQ(daemon_.evicted.lease(), 5u);
}

TEST_F(ReadFlowTest, LabelSetHasThreeSpellings) {
  for (const std::vector<std::string>& words : {std::vector<std::string>{"planner:canary", "8"},
                                                {"planner", "canary", "8"},
                                                {"planner@8", "canary"}}) {
    std::vector<std::string> line = {"label", "set", "--if-current", "7"};
    line.insert(line.end(), words.begin(), words.end());
    const Ended ended = Run(line);
    EXPECT_EQ(ended.out, "planner:canary 7 -> 8  generation 3\n") << ended.err;
    EXPECT_EQ(daemon_.set_label.version(), 8u);
    EXPECT_EQ(daemon_.set_label.if_current(), 7u);
  }
  ExpectFailure(Run({"label", "set", "planner", "8"}), 2, "expects MODEL:LABEL N");
}

TEST_F(ReadFlowTest, DoctorPrintsItsRowsWhateverTheVerdict) {
  daemon_.StartHandles();
  const Ended ended = Run({"doctor"});
  EXPECT_TRUE(ended.code == 0 || ended.code == 12 || ended.code == 1) << ended.code;
  for (const char* row : {"kernel", "sealing", "memlock", "control.sock", "handles.sock", "disk"}) {
    EXPECT_NE(ended.out.find(row), std::string::npos) << row;
  }
  EXPECT_NE(ended.out.find("modelhostd 0.1.0, epoch 12"), std::string::npos);
  daemon_.StopControl();
  const Ended without = Run({"doctor", "-o", "json"});
  EXPECT_NE(without.out.find("\"kind\": \"Doctor\""), std::string::npos);
  EXPECT_NE(without.code, 0);
}

}  // namespace
}  // namespace modelhost::modelctl::testing
