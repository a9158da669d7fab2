// swap and what may happen to it on the way.
#include <csignal>

#include "client/modelctl/flow_test_base.h"

namespace modelhost::modelctl::testing {
namespace {

class SwapFlowTest : public FlowTest {
 protected:
  SwapFlowTest() { AddPlanner(); }

  static v1::OperationEvent Event(v1::OperationState state, const std::string& phase,
                                  uint64_t done = 0, uint64_t total = 0) {
    v1::OperationEvent event;
    *event.mutable_operation() = MakeOperation("op-12", v1::SWAP, state);
    event.mutable_operation()->set_model("planner");
    event.mutable_operation()->set_version(8);
    event.mutable_operation()->set_label("stable");
    event.mutable_operation()->set_phase(phase);
    event.mutable_operation()->set_bytes_done(done);
    event.mutable_operation()->set_bytes_total(total);
    return event;
  }

  void SwapSucceeds() {
    daemon_.swap = [this](grpc::ServerContext&, const v1::SwapRequest& request,
                          OperationWriter& writer) {
      request_ = request;
      writer.Write(Event(v1::RUNNING, "load", 0, 4096));
      writer.Write(Event(v1::RUNNING, "flip"));
      v1::OperationEvent event = Event(v1::SUCCEEDED, "");
      v1::OperationResult& result = *event.mutable_operation()->mutable_result();
      for (const v1::SwapTarget& target : request.targets()) {
        v1::LabelChange* change = result.add_changes();
        change->set_model(target.model());
        change->set_label(request.label());
        change->set_from(target.version() - 1);
        change->set_to(target.version());
        change->set_generation(12);
      }
      result.mutable_load()->set_seconds(1);
      result.mutable_load()->set_nanos(840'000'000);
      result.mutable_flip()->set_nanos(4100);
      result.set_draining_leases(3);
      writer.Write(event);
      return grpc::Status::OK;
    };
  }
  void SwapFails(int code, const std::string& message,
                 v1::OperationState state = v1::OPERATION_FAILED) {
    daemon_.swap = [=](grpc::ServerContext&, const v1::SwapRequest&, OperationWriter& writer) {
      v1::OperationEvent event = Event(state, "verify");
      event.mutable_operation()->mutable_failure()->set_code(code);
      event.mutable_operation()->mutable_failure()->set_message(message);
      writer.Write(event);
      return grpc::Status::OK;
    };
  }
  // Runs until it is cancelled by CancelOperation.
  void SwapHangs() {
    daemon_.swap = [this](grpc::ServerContext& context, const v1::SwapRequest&,
                          OperationWriter& writer) {
      writer.Write(Event(v1::RUNNING, "load", 1024, 4096));
      if (daemon_.WaitForCancel(context)) writer.Write(Event(v1::CANCELLED, ""));
      return grpc::Status::OK;
    };
  }

  v1::SwapRequest request_;
};

TEST_F(SwapFlowTest, EndsWithThePromisedLine) {
  SwapSucceeds();
  const Ended ended = Run({"swap", "planner", "--version", "8", "--if-current", "7"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(ended.out,
            "planner:stable 7 -> 8  generation 12  load 1.84 s  flip 4.1 us  draining 3 leases\n");
  EXPECT_EQ(ended.err,
            "op-12  swap planner:stable to 8  load  0 B of 4.0 KiB (0 %)\n"
            "op-12  swap planner:stable to 8  flip\n");
  EXPECT_EQ(request_.label(), "stable");
  EXPECT_EQ(request_.if_current(), 7u);
}

TEST_F(SwapFlowTest, ASetHasALineForEachModel) {
  SwapSucceeds();
  const Ended ended = Run({"swap", "planner:canary", "--version", "8", "--set", "detector=4",
                           "--set", "voice=2", "--progress", "none"});
  EXPECT_EQ(ended.err, "");
  EXPECT_EQ(ended.out,
            "planner:canary 7 -> 8  generation 12  load 1.84 s  flip 4.1 us  draining 3 leases\n"
            "detector:canary 3 -> 4  generation 12\n"
            "voice:canary 1 -> 2  generation 12\n");
  ExpectFailure(Run({"swap", "planner", "--version", "8", "--set", "planner=9"}), 2, "named twice");
}

TEST_F(SwapFlowTest, ProgressAsJsonIsOnStderrAndTheResultOnStdout) {
  SwapSucceeds();
  const Ended ended =
      Run({"swap", "planner", "--version", "8", "--progress", "json", "-o", "jsonl"});
  EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 3) << ended.err;
  EXPECT_NE(ended.err.find("\"kind\":\"OperationEvent\""), std::string::npos);
  EXPECT_NE(ended.out.find("\"kind\":\"Swap\",\"operation\":\"op-12\""), std::string::npos)
      << ended.out;
  EXPECT_NE(ended.out.find("\"loadSeconds\":1.84,\"flipSeconds\":4.1e-06,\"drainingLeases\":3"),
            std::string::npos);
}

TEST_F(SwapFlowTest, ToTheVersionThatIsThereIsUnchanged) {
  daemon_.swap = [](grpc::ServerContext&, const v1::SwapRequest&, OperationWriter& writer) {
    v1::OperationEvent event = Event(v1::SUCCEEDED, "");
    event.mutable_operation()->mutable_result()->set_unchanged(true);
    writer.Write(event);
    return grpc::Status::OK;
  };
  const Ended ended = Run({"swap", "planner", "--version", "7"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_EQ(ended.out, "planner:stable 7  unchanged\n");
}

TEST_F(SwapFlowTest, AFailureWhileTheOldVersionServesIsTen) {
  SwapFails(15, "model.safetensors: chunk 3 has other bytes than its manifest says");
  ExpectFailure(Run({"swap", "planner", "--version", "8"}), 10,
                "chunk 3 has other bytes than its manifest says; planner:stable stays at 7");
}

TEST_F(SwapFlowTest, AFailureWhereNothingServedHasItsOwnCode) {
  SwapFails(15, "model.safetensors: bad bytes");
  ExpectFailure(Run({"swap", "planner:canary", "--version", "8"}), 6, "bad bytes");
}

TEST_F(SwapFlowTest, WhatIsRefusedBeforeItStartsHasItsOwnCode) {
  daemon_.swap = [](grpc::ServerContext&, const v1::SwapRequest&, OperationWriter&) {
    return grpc::Status(grpc::NOT_FOUND, "planner@9: no such version");
  };
  ExpectFailure(Run({"swap", "planner", "--version", "9"}), 3, "planner@9: no such version");
  daemon_.swap = [](grpc::ServerContext&, const v1::SwapRequest&, OperationWriter&) {
    return grpc::Status(grpc::FAILED_PRECONDITION, "planner:stable: names 7, not 6");
  };
  ExpectFailure(Run({"swap", "planner", "--version", "8", "--if-current", "6"}), 4,
                "names 7, not 6");
}

TEST_F(SwapFlowTest, ALostComparisonIsAConflictAlsoWhenItIsLostLate) {
  SwapFails(9, "planner:stable: names 9, not 7");
  ExpectFailure(Run({"swap", "planner", "--version", "8", "--if-current", "6"}), 4,
                "names 9, not 7");
}

TEST_F(SwapFlowTest, AFailedLoadIsTenAlsoWithAComparisonThatHeld) {
  SwapFails(9, "planner@8: needs tokenizer.json");
  ExpectFailure(Run({"swap", "planner", "--version", "8", "--if-current", "7"}), 10,
                "needs tokenizer.json; planner:stable stays at 7");
}

TEST_F(SwapFlowTest, ASupersededOneIsEleven) {
  SwapFails(10, "swap planner: superseded by op-13");
  ExpectFailure(Run({"swap", "planner", "--version", "8"}), 11, "op-13");
  SwapFails(1, "by uid 0", v1::CANCELLED);
  ExpectFailure(Run({"swap", "planner", "--version", "8"}), 11, "cancelled: by uid 0 (op-12)");
}

TEST_F(SwapFlowTest, ATimeoutLeavesTheOperationRunningAndNamesIt) {
  SwapHangs();
  const Ended ended = Run({"swap", "planner", "--version", "8", "--timeout", "300ms"});
  ExpectFailure(ended, 7, "not finished within 300 ms (op-12 goes on");
  EXPECT_FALSE(daemon_.cancel_called());
}

TEST_F(SwapFlowTest, CtrlCDetaches) {
  SwapHangs();
  const auto process = Start({"swap", "planner", "--version", "8"});
  ASSERT_TRUE(process->WaitForErr("op-12"));
  process->Signal(SIGINT);
  const Ended ended = process->Wait();
  EXPECT_EQ(ended.code, 130);
  EXPECT_EQ(ended.out, "");
  EXPECT_NE(ended.err.find("detached: op-12 goes on"), std::string::npos) << ended.err;
  EXPECT_FALSE(daemon_.cancel_called());
}

TEST_F(SwapFlowTest, ASecondCtrlCCancels) {
  SwapHangs();
  const auto process = Start({"swap", "planner", "--version", "8", "-q", "--progress", "plain"});
  ASSERT_TRUE(process->WaitForErr("op-12"));
  process->Signal(SIGINT);
  ASSERT_TRUE(process->WaitForErr("detached"));
  process->Signal(SIGINT);
  const Ended ended = process->Wait();
  EXPECT_TRUE(daemon_.cancel_called());
  ExpectFailure(ended, 11, "cancelled");
}

TEST_F(SwapFlowTest, NoWaitPrintsTheOperation) {
  SwapHangs();
  EXPECT_EQ(Run({"swap", "planner", "--version", "8", "--no-wait", "-o", "name"}).out, "op-12\n");
  EXPECT_EQ(Run({"swap", "planner", "--version", "8", "--no-wait"}).out,
            "op-12 started: swap planner:stable to 8\n");
  EXPECT_FALSE(daemon_.cancel_called());
}

TEST_F(SwapFlowTest, ADaemonThatDiesIsUnreachableAndTheOperationIsNamed) {
  SwapHangs();
  const auto process = Start({"swap", "planner", "--version", "8"});
  ASSERT_TRUE(process->WaitForErr("op-12"));
  daemon_.StopControl();
  const Ended ended = process->Wait();
  ExpectFailure(ended, 8, "while op-12 ran");
}

TEST_F(SwapFlowTest, DryRunPrintsThePlanOrWhatIsMissing) {
  const Ended fits = Run({"swap", "planner", "--version", "8", "--dry-run"});
  EXPECT_EQ(fits.code, 0) << fits.err;
  EXPECT_EQ(fits.out,
            "MODEL    FROM  TO  STATE      NEED\n"
            "planner     7   8  STAGED  4.0 GiB\n"
            "needs 4.0 GiB of 8.0 GiB free; nothing was changed\n");
  ExpectFailure(Run({"swap", "planner", "--version", "3", "--dry-run"}), 5,
                "needs 4.0 GiB, and 3.0 GiB of the host budget are free");
}

TEST_F(SwapFlowTest, UnloadPassesItsDeadlineOn) {
  v1::UnloadRequest got;
  daemon_.unload = [&](grpc::ServerContext&, const v1::UnloadRequest& request,
                       OperationWriter& writer) {
    got = request;
    v1::OperationEvent event = Event(v1::SUCCEEDED, "");
    event.mutable_operation()->set_kind(v1::UNLOAD);
    event.mutable_operation()->set_version(7);
    writer.Write(event);
    return grpc::Status::OK;
  };
  const Ended ended =
      Run({"unload", "planner@7", "--drain-timeout", "1m30s", "--on-deadline", "release"});
  EXPECT_EQ(ended.out, "planner@7 unloaded\n") << ended.err;
  EXPECT_EQ(got.drain_timeout().seconds(), 90);
  EXPECT_TRUE(got.release_on_deadline());
  ExpectFailure(Run({"unload", "planner"}), 2, "names no version");
}

// A newer daemon ends an operation in a state that did not exist.
TEST_F(SwapFlowTest, AnEndInAnUnknownStateIsAFailureWithItsReason) {
  AddPlanner();
  daemon_.swap = [](grpc::ServerContext&, const v1::SwapRequest&, OperationWriter& writer) {
    v1::OperationEvent event;
    *event.mutable_operation() =
        MakeOperation("op-5", v1::SWAP, static_cast<v1::OperationState>(77));
    event.mutable_operation()->mutable_finished()->set_seconds(1);
    event.mutable_operation()->mutable_failure()->set_code(grpc::ABORTED);
    event.mutable_operation()->mutable_failure()->set_message("superseded by op-6");
    writer.Write(event);
    return grpc::Status::OK;
  };
  const Ended ended = Run({"swap", "planner", "--version", "8"});
  EXPECT_EQ(ended.code, 11) << ended.err;
  EXPECT_NE(ended.err.find("superseded by op-6"), std::string::npos) << ended.err;
}

TEST_F(SwapFlowTest, WhoMovesALabelThatAFileGovernsIsWarned) {
  AddPlanner();
  daemon_.status.mutable_desired()->set_file("/etc/models");
  daemon_.status.mutable_desired()->set_state("ok");
  v1::DesiredLabel* row = daemon_.status.mutable_desired()->add_labels();
  row->set_model("planner");
  row->set_label("stable");
  row->set_want(7);
  row->set_line(3);
  const Ended set = Run({"label", "set", "planner:stable", "8"});
  EXPECT_NE(set.err.find("warning: planner:stable is governed by /etc/models, which wants 7"),
            std::string::npos)
      << set.err;
  EXPECT_NE(set.err.find("change line 3"), std::string::npos);
  EXPECT_EQ(Run({"label", "set", "planner:stable", "7"}).err, "");
  EXPECT_EQ(Run({"label", "set", "planner:canary", "8"}).err, "");
}

TEST_F(SwapFlowTest, WithoutWaitingEveryTargetThatAFileGovernsIsWarnedOf) {
  AddPlanner();
  daemon_.status.mutable_desired()->set_file("/etc/models");
  daemon_.status.mutable_desired()->set_state("ok");
  for (const char* model : {"planner", "vision", "third"}) {
    v1::DesiredLabel* row = daemon_.status.mutable_desired()->add_labels();
    row->set_model(model);
    row->set_label("stable");
    row->set_want(7);
    row->set_line(3);
  }
  daemon_.swap = [](auto&, const v1::SwapRequest&, auto& writer) {
    v1::OperationEvent event;
    event.mutable_operation()->set_id("op-12");
    event.mutable_operation()->set_state(v1::RUNNING);
    writer.Write(event);
    return grpc::Status::OK;
  };
  const Ended ended = Run(
      {"swap", "planner", "--version", "8", "--set", "vision=9", "--set", "third=7", "--no-wait"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_NE(ended.err.find("planner:stable is governed by"), std::string::npos) << ended.err;
  EXPECT_NE(ended.err.find("vision:stable is governed by"), std::string::npos) << ended.err;
  EXPECT_EQ(ended.err.find("third:stable"), std::string::npos) << ended.err;
}

}  // namespace
}  // namespace modelhost::modelctl::testing
