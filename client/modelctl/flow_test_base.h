// A test of the real modelctl against a FakeDaemon.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "client/modelctl/flow_test_daemon.h"
#include "client/modelctl/flow_test_process.h"
#include "tests/fakes/temp_folder.h"

namespace modelhost::modelctl::testing {

class FlowTest : public ::testing::Test {
 protected:
  std::unique_ptr<Process> Start(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(),
                     {MODELCTL_BINARY, "--runtime-dir", daemon_.runtime_dir().string()});
    return std::make_unique<Process>(
        arguments, std::map<std::string, std::string>{{"HOME", scratch_.string()},
                                                      {"XDG_RUNTIME_DIR", scratch_.string()}});
  }
  Ended Run(std::vector<std::string> arguments) { return Start(std::move(arguments))->Wait(); }

  // planner: 7 READY and stable, 8 STAGED.
  void AddPlanner() {
    v1::Model& model = daemon_.models["planner"];
    model.set_name("planner");
    v1::Label* label = model.add_labels();
    label->set_model("planner");
    label->set_label("stable");
    label->set_version(7);
    label->set_generation(11);
    *model.add_versions() = MakeVersion("planner", 7, v1::READY);
    model.mutable_versions(0)->add_labels("stable");
    model.mutable_versions(0)->set_leases(3);
    *model.add_versions() = MakeVersion("planner", 8, v1::STAGED);
  }
  void WriteFile(const std::string& name, const std::string& text) {
    std::filesystem::create_directories((scratch_ / name).parent_path());
    std::ofstream(scratch_ / name, std::ios::binary) << text;
  }

  FakeDaemon daemon_;
  const modelhost::testing::TempFolder folder_;
  const std::filesystem::path& scratch_ = folder_.path();
};

// On failure stdout is empty and stderr ends with the one error line.
inline void ExpectFailure(const Ended& ended, int code, const std::string& part) {
  EXPECT_EQ(ended.code, code) << ended.err;
  EXPECT_EQ(ended.out, "");
  const size_t at = ended.err.find("error: ");
  ASSERT_NE(at, std::string::npos) << ended.err;
  EXPECT_EQ(ended.err.find('\n', at), ended.err.size() - 1) << ended.err;
  EXPECT_NE(ended.err.find(part, at), std::string::npos) << ended.err;
}

}  // namespace modelhost::modelctl::testing
