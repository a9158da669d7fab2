// What goes wrong under an import: a source that is cut while it is read, and a target without
// room.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "client/modelctl/import.h"
#include "daemon/format/model_builders.h"
#include "daemon/format/torch_builder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fakes/temp_folder.h"

namespace modelhost::modelctl {
namespace {

using modelhost::testing::Safetensors;
using modelhost::testing::TensorJson;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

class ImportFaultsTest : public ::testing::Test {
 protected:
  ImportFaultsTest() {
    options_.source = (root_ / "in.safetensors").string();
    options_.out = (root_ / "out.safetensors").string();
    watch_.note = [](const std::string&) {};
  }

  // 12 MiB each: several pieces.
  void PutTwo() const {
    const uint64_t bytes = 12 << 20;
    const std::string head =
        Safetensors("{" + TensorJson("a", "F32", "[3145728]", 0, bytes) + "," +
                        TensorJson("b", "F32", "[3145728]", bytes, 2 * bytes) + "}",
                    0);
    std::ofstream(options_.source, std::ios::binary) << head;
    fs::resize_file(options_.source, head.size() + 2 * bytes);
  }

  const modelhost::testing::TempFolder folder_;
  const fs::path& root_ = folder_.path();
  ImportOptions options_;
  ImportWatch watch_;
};

TEST_F(ImportFaultsTest, ASourceThatIsCutMeanwhileIsAnErrorAndNoSignal) {
  for (const std::string phase : {"write", "verify"}) {
    for (const bool convert : {false, true}) {
      PutTwo();
      options_.choices.dtype.reset();
      if (convert) options_.choices.dtype = abi::DType::kBF16;
      watch_.progress = [&](const char* now, uint64_t, uint64_t) {
        if (now == phase) fs::resize_file(options_.source, 5 << 20);
        return true;
      };
      const ImportEnd end = RunImport(options_, watch_);
      EXPECT_EQ(end.code, ExitCode::kConflict) << end.error;
      EXPECT_THAT(end.error, HasSubstr("changed while it was imported, and nothing was written"));
      EXPECT_FALSE(fs::exists(options_.out));
    }
  }
}

TEST_F(ImportFaultsTest, WithoutRoomNotOneByteIsWritten) {
  // A broadcast of one number, which on paper is 40 TB.
  namespace pickled = modelhost::testing::pickled;
  const std::string view =
      pickled::View(pickled::Storage("FloatStorage", "0", 1), 0, {10'000'000, 1'000'000}, {0, 0});
  const auto model = modelhost::testing::Checkpoint(
      pickled::Whole(pickled::Dict({{pickled::Text("w"), view}})), {{"0", std::string(4, '\0')}});
  options_.source = (root_ / "in.pt").string();
  std::ofstream(options_.source, std::ios::binary) << model.Build();
  int calls = 0;
  watch_.progress = [&](const char*, uint64_t, uint64_t) { return ++calls > 0; };
  const ImportEnd end = RunImport(options_, watch_);
  EXPECT_EQ(end.code, ExitCode::kResources) << end.error;
  EXPECT_THAT(end.error, HasSubstr("out.safetensors: needs 400000000"));
  EXPECT_THAT(end.error, HasSubstr("bytes, and its file system has "));
  EXPECT_EQ(calls, 0);
  EXPECT_FALSE(fs::exists(options_.out));
}

}  // namespace
}  // namespace modelhost::modelctl
