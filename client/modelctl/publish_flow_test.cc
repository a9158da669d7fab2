// publish over both ways, and the scripts that complete a line.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/modelctl/flow_test_base.h"

namespace modelhost::modelctl::testing {
namespace {

class PublishFlowTest : public FlowTest {
 protected:
  PublishFlowTest() {
    daemon_.publish_result.set_digest(std::string(64, 'a'));
    daemon_.publish_result.set_bytes(3972844749);
  }

  // The smallest file that a reader accepts: one F32 tensor of one element.
  static std::string Safetensors() {
    const std::string header = R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
    std::string out(8, '\0');
    out[0] = static_cast<char>(header.size());
    return absl::StrCat(out, header, std::string("\0\0\x80\x3f", 4));
  }

  std::string In() const { return (scratch_ / "in").string(); }
};

TEST_F(PublishFlowTest, HandsDescriptorsOverAndEndsWithThePromisedLine) {
  daemon_.StartHandles();
  WriteFile("in/model.safetensors", "weights");
  WriteFile("in/sub/tokenizer.json", "{}");
  const Ended ended = Run({"publish", In(), "--model", "planner", "--version", "8", "--residency",
                           "sealed", "--progress", "none"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(ended.out, "planner@8 published  3.7 GiB  sha256:aaaaaaaaaaaa..\n");
  EXPECT_TRUE(daemon_.publish_begin.descriptors_follow());
  EXPECT_EQ(daemon_.publish_begin.residency(), "sealed");
  ASSERT_EQ(daemon_.publish_begin.files_size(), 2);
  EXPECT_EQ(daemon_.publish_begin.files(1).path(), "sub/tokenizer.json");
  EXPECT_EQ(daemon_.uploaded[0], "weights");
  EXPECT_EQ(daemon_.uploaded[1], "{}");
}

TEST_F(PublishFlowTest, ThreeHundredFilesGoInFramesOfAtMost64) {
  daemon_.StartHandles();
  for (int i = 0; i < 300; ++i) {
    WriteFile(absl::StrFormat("in/model-%05d-of-00300.safetensors", i + 1),
              absl::StrCat("part", i));
  }
  const std::string line =
      absl::StrCat("ulimit -n 96; ", MODELCTL_BINARY, " --runtime-dir ",
                   daemon_.runtime_dir().string(), " publish ", In(), " --model m --version 1");
  Process shell({"bash", "-c", line}, {});
  const Ended ended = shell.Wait();
  EXPECT_EQ(ended.code, 0) << ended.err;
  ASSERT_EQ(daemon_.uploaded.size(), 300u);
  EXPECT_EQ(daemon_.uploaded[299], "part299");
  EXPECT_LE(daemon_.largest_frame, 64u);
}

TEST_F(PublishFlowTest, StreamsTheBytesWhereNoDescriptorsCanBePassed) {
  const std::string big(3 * (1 << 20) + 7, 'x');
  WriteFile("in/a.bin", big);
  WriteFile("in/empty.txt", "");
  WriteFile("in/z.bin", "tail");
  const Ended ended = Run({"publish", In(), "--model", "planner", "--version", "8"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_FALSE(daemon_.publish_begin.descriptors_follow());
  EXPECT_EQ(daemon_.uploaded[0], big);
  EXPECT_EQ(daemon_.uploaded[2], "tail");
  EXPECT_EQ(daemon_.uploaded.count(1), 0u);
}

TEST_F(PublishFlowTest, SaysWhatItLeavesOut) {
  daemon_.StartHandles();
  WriteFile("in/model.safetensors", "w");
  WriteFile("in/.gitattributes", "x");
  const Ended ended = Run({"publish", In(), "--model", "planner", "--version", "8", "-q"});
  EXPECT_EQ(ended.err.find("warning: not published: .gitattributes: hidden\n"), 0U) << ended.err;
  EXPECT_NE(ended.err.find("warning: model.safetensors: at byte 0"), std::string::npos)
      << ended.err;
  EXPECT_EQ(daemon_.publish_begin.files_size(), 1);
}

TEST_F(PublishFlowTest, ALabelIsSwappedAfterwards) {
  daemon_.StartHandles();
  AddPlanner();
  WriteFile("in/model.safetensors", "w");
  daemon_.swap = [](grpc::ServerContext&, const v1::SwapRequest& request, OperationWriter& writer) {
    v1::OperationEvent event;
    *event.mutable_operation() = MakeOperation("op-8", v1::SWAP, v1::SUCCEEDED);
    v1::LabelChange* change = event.mutable_operation()->mutable_result()->add_changes();
    change->set_model("planner");
    change->set_label(request.label());
    change->set_from(0);
    change->set_to(request.targets(0).version());
    change->set_generation(1);
    writer.Write(event);
    return grpc::Status::OK;
  };
  const Ended good =
      Run({"publish", In(), "--model", "planner", "--version", "8", "--label", "canary"});
  EXPECT_NE(good.out.find("planner:canary none -> 8  generation 1"), std::string::npos) << good.err;
  // One document, with the swap inside.
  const Ended json = Run({"publish", In(), "--model", "planner", "--version", "8", "--label",
                          "canary", "-o", "jsonl"});
  EXPECT_EQ(std::count(json.out.begin(), json.out.end(), '\n'), 1) << json.out;
  EXPECT_NE(json.out.find("\"kind\":\"Publish\""), std::string::npos) << json.out;
  EXPECT_NE(json.out.find("\"swap\":{\"operation\":\"op-8\",\"state\":\"succeeded\""),
            std::string::npos)
      << json.out;
  const Ended name = Run(
      {"publish", In(), "--model", "planner", "--version", "8", "--label", "canary", "-o", "name"});
  EXPECT_EQ(name.out, "planner@8\n");

  daemon_.swap = [](grpc::ServerContext&, const v1::SwapRequest&, OperationWriter&) {
    return grpc::Status(grpc::RESOURCE_EXHAUSTED, "planner@8: needs 4 GiB, 1 GiB free");
  };
  ExpectFailure(Run({"publish", In(), "--model", "planner", "--version", "8", "--label", "canary"}),
                5,
                "planner@8 is published; `modelctl swap planner --version 8 --label canary` tries");
}

TEST_F(PublishFlowTest, DryRunIndexesAndLooksForAConflictAndSendsNothing) {
  AddPlanner();
  WriteFile("in/model.safetensors", Safetensors());
  const Ended ended = Run({"publish", In(), "--model", "planner", "--version", "9", "--dry-run"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_NE(ended.out.find("planner@9 would be published  1 file"), std::string::npos) << ended.out;
  EXPECT_NE(ended.out.find("model safetensors 1 tensor; nothing was sent"), std::string::npos);
  EXPECT_EQ(daemon_.publish_begin.files_size(), 0);
  ExpectFailure(Run({"publish", In(), "--model", "planner", "--version", "8", "--dry-run"}), 4,
                "planner@8: exists already");
  WriteFile("in/model.safetensors", "garbage!");
  ExpectFailure(Run({"publish", In(), "--model", "planner", "--version", "9", "--dry-run"}), 6, "");
}

std::string PlanBytes() {
  std::string plan("ptrt\x61\0\0\0\xd5\0\0\0\x10\0\0\0\0\0\0\0\0\0\0\0", 24);
  return plan + std::string(16, '\x9c');
}

TEST_F(PublishFlowTest, WhatItRequiresIsAnnouncedBothWays) {
  WriteFile("in/m.engine", PlanBytes());
  const std::vector<std::string> line = {
      "publish", In(),        "--model",         "planner",   "--version",
      "8",       "--require", "tensorrt=10.3.0", "--require", "compute_capability=8.7, 8.9"};
  for (const bool descriptors : {false, true}) {
    if (descriptors) daemon_.StartHandles();
    daemon_.publish_begin.Clear();
    const Ended ended = Run(line);
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_EQ(ended.err.find("warning"), std::string::npos) << ended.err;
    EXPECT_EQ(daemon_.publish_begin.descriptors_follow(), descriptors);
    ASSERT_EQ(daemon_.publish_begin.requirements_size(), 2);
    EXPECT_EQ(daemon_.publish_begin.requirements().at("tensorrt"), "10.3.0");
    EXPECT_EQ(daemon_.publish_begin.requirements().at("compute_capability"), "8.7, 8.9");
  }
}

TEST_F(PublishFlowTest, WhatItRequiresIsCheckedBeforeAnythingIsSent) {
  WriteFile("in/m.engine", PlanBytes());
  const auto publish = [&](std::vector<std::string> more) {
    std::vector<std::string> line = {"publish", In(), "--model", "planner", "--version", "8"};
    line.insert(line.end(), more.begin(), more.end());
    return Run(line);
  };
  ExpectFailure(publish({"--require", "tensorrt"}), 2, "KEY=VALUE");
  ExpectFailure(publish({"--require", "tensorrt=10.3"}), 2, "10.3.0");
  ExpectFailure(publish({"--require", "platform=linux-x86_64", "--require", "platform=x-y"}), 2,
                "given twice");
  const Ended unbound = publish({"--require", "made_by=us"});
  EXPECT_EQ(unbound.code, 0);
  EXPECT_NE(unbound.err.find("warning: m.engine: nothing says"), std::string::npos) << unbound.err;
  EXPECT_NE(unbound.err.find("'made_by'"), std::string::npos) << unbound.err;
  WriteFile("in/m.engine.requires.json", "{\"tensorrt\":\"10.3.0\"}");
  EXPECT_EQ(publish({"--dry-run"}).err.find("nothing says"), std::string::npos);
  ExpectFailure(publish({"--require", "tensorrt=8.6.1"}), 4, "'10.3.0' in m.engine.requires.json");
  WriteFile("in/m.engine.requires.json", "{\"tensorrt\":10}");
  ExpectFailure(publish({}), 6, "m.engine.requires.json: at byte");
  WriteFile("in/m.engine.requires.json", "{}");
  WriteFile("in/n.engine.requires.json", "{}");
  ExpectFailure(publish({}), 4, "speaks of n.engine");
}

TEST_F(PublishFlowTest, FilesThatThePolicyAsksForAreMissedBeforehand) {
  AddPlanner();
  daemon_.models["planner"].add_requires_files("tokenizer.json");
  daemon_.models["planner"].add_requires_files("model.safetensors");
  WriteFile("in/model.safetensors", Safetensors());
  for (const char* flag : {"--dry-run", "-q"}) {
    const Ended ended = Run({"publish", In(), "--model", "planner", "--version", "9", flag});
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_NE(ended.err.find("warning: tokenizer.json is not there, and requires_files of planner"),
              std::string::npos)
        << ended.err;
  }
  WriteFile("in/tokenizer.json", "{}");
  const Ended whole = Run({"publish", In(), "--model", "planner", "--version", "9", "--dry-run"});
  EXPECT_EQ(whole.err.find("requires_files"), std::string::npos) << whole.err;
}

TEST_F(PublishFlowTest, OnePartOfAShardedModelIsRefused) {
  WriteFile("in/model-00001-of-00002.safetensors", "w");
  ExpectFailure(Run({"publish", In() + "/model-00001-of-00002.safetensors", "--model", "planner",
                     "--version", "9"}),
                2, "publish the folder");
  ExpectFailure(Run({"publish", In() + "/none", "--model", "planner", "--version", "9"}), 3,
                "none");
}

class CompletionTest : public FlowTest {
 protected:
  // What bash would offer for `line`, with the real program answering for the models.
  std::string Complete(const std::vector<std::string>& words) {
    const Ended script = Run({"completion", "bash"});
    WriteFile("completion.bash", script.out);
    std::string array;
    for (const std::string& word : words) absl::StrAppend(&array, " '", word, "'");
    const std::string text = absl::StrCat(
        "modelctl() { ", MODELCTL_BINARY, " --runtime-dir ", daemon_.runtime_dir().string(),
        " \"$@\"; }\n. ", (scratch_ / "completion.bash").string(), "\nCOMP_WORDS=(", array,
        ")\nCOMP_CWORD=", words.size() - 1, "\n_modelctl\necho \"${COMPREPLY[@]}\"\n");
    Process shell({"bash", "-c", text}, {});
    const Ended ended = shell.Wait();
    EXPECT_EQ(ended.err, "");
    return ended.out;
  }
};

TEST_F(CompletionTest, TheBashScriptIsGoodBash) {
  const Ended script = Run({"completion", "bash"});
  EXPECT_EQ(script.code, 0);
  WriteFile("completion.bash", script.out);
  Process shell({"bash", "-n", (scratch_ / "completion.bash").string()}, {});
  const Ended ended = shell.Wait();
  EXPECT_EQ(ended.code, 0);
  EXPECT_EQ(ended.err, "");
}

TEST_F(CompletionTest, OffersVerbsFlagsValuesAndModels) {
  AddPlanner();
  daemon_.models["detector"].set_name("detector");
  EXPECT_EQ(Complete({"modelctl", "sw"}), "swap\n");
  EXPECT_EQ(Complete({"modelctl", "label", "r"}), "rm\n");
  EXPECT_EQ(Complete({"modelctl", "swap", "pl"}), "planner\n");
  EXPECT_EQ(Complete({"modelctl", "-o", "json", "swap", ""}), "detector planner\n");
  EXPECT_EQ(Complete({"modelctl", "swap", "planner", "--if"}), "--if-current\n");
  EXPECT_EQ(Complete({"modelctl", "swap", "planner", "--runtime"}), "--runtime-dir\n");
  EXPECT_EQ(Complete({"modelctl", "ls", "-o", "js"}), "json jsonl\n");
  EXPECT_EQ(Complete({"modelctl", "publish", "--residency", "s"}), "sealed\n");
  EXPECT_EQ(Complete({"modelctl", "publish", "--require", "plat"}), "platform=\n");
  EXPECT_EQ(Complete({"modelctl", "completion", "z"}), "zsh\n");
}

TEST_F(CompletionTest, OtherShellsHaveEveryVerb) {
  for (const char* shell : {"zsh", "fish"}) {
    const Ended ended = Run({"completion", shell});
    EXPECT_EQ(ended.code, 0);
    for (const char* verb : {"swap", "rollback", "doctor", "--if-current"}) {
      const std::string word = verb[0] == '-' && std::string(shell) == "fish" ? "if-current" : verb;
      EXPECT_NE(ended.out.find(word), std::string::npos) << shell << " " << verb;
    }
    EXPECT_NE(ended.out.find("modelctl ls -o name"), std::string::npos);
  }
  ExpectFailure(Run({"completion", "tcsh"}), 2, "tcsh");
}

}  // namespace
}  // namespace modelhost::modelctl::testing
