// Trees that somebody else made, through the real program: none of their links puts the disk in
// reach, none of their files makes it wait, and what a version requires is not lost with its copy.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "client/modelctl/flow_test_process.h"
#include "tests/fakes/temp_folder.h"

namespace modelhost::modelctl::testing {
namespace {

namespace fs = std::filesystem;

class HostileSourceTest : public ::testing::Test {
 protected:
  HostileSourceTest() { Put("secret/model.safetensors", Model()); }

  // The smallest file that a reader accepts: one F32 tensor of one element.
  static std::string Model() {
    const std::string header = R"({"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})";
    std::string out(8, '\0');
    out[0] = static_cast<char>(header.size());
    return out + header + std::string("\0\0\x80\x3f", 4);
  }
  // A TensorRT plan is what modelctl takes for one by its name, with bytes of no other format.
  static std::string Plan() { return "ftrt" + std::string(4096, '\x7b'); }

  std::string Path(const std::string& name) const { return root_ / name; }
  void Put(const std::string& name, const std::string& bytes) const {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::binary) << bytes;
  }
  void Link(const std::string& target, const std::string& name) const {
    fs::create_directories((root_ / name).parent_path());
    fs::create_symlink(target, root_ / name);
  }
  Ended Run(const std::vector<std::string>& arguments) const {
    std::vector<std::string> command = {"timeout", "5", MODELCTL_BINARY};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return Process(command, {{"HOME", root_.string()}}).Wait();
  }
  Ended DryRun(const std::string& name, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"--runtime-dir", Path("none"), "publish",
                                          Path(name),      "--model",    "m",
                                          "--version",     "1",          "--dry-run"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return Run(arguments);
  }
  // By all three commands that take a folder.
  void ExpectRefused(const std::string& name) const {
    const std::string out = Path("out.safetensors");
    for (const Ended& ended :
         {Run({"inspect", Path(name)}), DryRun(name), Run({"import", Path(name), "--out", out})}) {
      EXPECT_EQ(ended.code, 6) << name << ended.out << ended.err;
      EXPECT_NE(ended.err.find("link"), std::string::npos) << ended.err;
    }
    EXPECT_FALSE(fs::exists(out));
  }

  const modelhost::testing::TempFolder folder_;
  const fs::path& root_ = folder_.path();
};

TEST_F(HostileSourceTest, BlobsThatAreALinkPutNothingInReach) {
  Link("/", "models--x/blobs");
  Link(Path("secret/model.safetensors"), "models--x/snapshots/0f1e/model.safetensors");
  Put("models--x/refs/main", "0f1e");
  ExpectRefused("models--x/snapshots/0f1e");
  EXPECT_NE(Run({"inspect", Path("models--x")}).code, 0);
  EXPECT_NE(DryRun("models--x").code, 0);
}

TEST_F(HostileSourceTest, ASnapshotThatIsALinkIsNotEntered) {
  Put("models--x/blobs/1", "x");
  Link(Path("secret"), "models--x/snapshots/0f1e");
  Put("models--x/refs/main", "0f1e");
  ExpectRefused("models--x/snapshots/0f1e");
  EXPECT_EQ(Run({"inspect", Path("models--x")}).code, 6);
  EXPECT_EQ(DryRun("models--x").code, 6);
  EXPECT_EQ(Run({"import", Path("models--x"), "--out", Path("out.safetensors")}).code, 6);
}

TEST_F(HostileSourceTest, FifosInPlaceOfSmallFilesBlockNothing) {
  Put("models--x/blobs/1", Model());
  Link("../../blobs/1", "models--x/snapshots/0f1e/model.safetensors");
  fs::create_directories(root_ / "models--x/refs");
  ASSERT_EQ(::mkfifo(Path("models--x/refs/main").c_str(), 0600), 0);
  EXPECT_EQ(Run({"inspect", Path("models--x"), "-o", "name"}).out, "w\n");
  EXPECT_EQ(DryRun("models--x").code, 0);
  EXPECT_EQ(Run({"import", Path("models--x"), "--out", Path("out.safetensors")}).code, 0);

  Put("v/model.safetensors", Model());
  ASSERT_EQ(::mkfifo(Path("v/manifest.json").c_str(), 0600), 0);
  const Ended ended = DryRun("v");
  EXPECT_EQ(ended.code, 6);
  EXPECT_NE(ended.err.find("manifest.json: a FIFO"), std::string::npos) << ended.err;
}

TEST_F(HostileSourceTest, ACopyOfAVersionStaysBoundToItsMachine) {
  Put("v/planner.engine", Plan());
  Put("v/manifest.json",
      R"({"schema": 1, "model": "m", "version": 1, "requires": {"tensorrt": "10.3.0"}, )"
      R"("digest": "ab", "files": []})");
  Ended ended = DryRun("v", {"-o", "json"});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_NE(ended.out.find(R"("tensorrt": "10.3.0")"), std::string::npos) << ended.out;
  EXPECT_EQ(ended.err.find("nothing says for which"), std::string::npos) << ended.err;
  ended = DryRun("v", {"--require", "tensorrt=8.6.1"});
  EXPECT_EQ(ended.code, 4) << ended.err;
  EXPECT_NE(ended.err.find("is '8.6.1' in --require and '10.3.0' in manifest.json"),
            std::string::npos)
      << ended.err;
  EXPECT_EQ(DryRun("v", {"--require", "tensorrt=10.3.0"}).code, 0);
}

}  // namespace
}  // namespace modelhost::modelctl::testing
