// The real modelhost-indexer on good and bad files, and programs that go wrong in its place.
#include "daemon/region/contents_indexer.h"

#include <fcntl.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "daemon/format/model_builders.h"
#include "daemon/platform/errno_status.h"
#include "daemon/platform/linux_os.h"
#include "daemon/platform/sigbus_guard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/handle/mapping.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

// A file of a version: written, open and mapped.
class TestFile {
 public:
  TestFile(std::string name, const std::string& bytes) : name_(std::move(name)) {
    std::string path = ::testing::TempDir() + "/indexer_XXXXXX";
    const UniqueFd made(::mkstemp(path.data()));
    EXPECT_EQ(::write(made.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    fd_ = UniqueFd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    ::unlink(path.c_str());
    auto mapping = ReadOnlyMapping::MapFile(fd_, bytes.size());
    EXPECT_TRUE(mapping.ok());
    mapping_ = *std::move(mapping);
  }
  ContentsIndexer::File file() const { return {name_, &fd_, mapping_.bytes()}; }
  void Truncate() { EXPECT_EQ(::ftruncate(fd_.get(), 0), 0); }

 private:
  std::string name_;
  UniqueFd fd_;
  ReadOnlyMapping mapping_;
};

std::string GoodModel() {
  return testing::Safetensors("{" + testing::TensorJson("w", "F32", "[2]", 0, 8) + "}", 8);
}

class ContentsIndexerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { InstallSigbusHandler(); }

  std::unique_ptr<ContentsIndexer> Make(const char* program, absl::Duration most) {
    UniqueFd fd(::open(program, O_RDONLY | O_CLOEXEC));
    EXPECT_TRUE(fd.valid()) << program;
    return std::make_unique<ProcessIndexer>(std::move(fd), os_, clock_,
                                            ProcessIndexer::Options{.most = most});
  }
  std::unique_ptr<ContentsIndexer> Real() { return Make(MODELHOST_INDEXER, absl::Seconds(60)); }
  // What comes of a program that goes wrong in the way of this name.
  absl::Status Wrong(const std::string& how, absl::Duration most = absl::Seconds(60)) {
    TestFile file(how, "x");
    if (how == "bus") file.Truncate();
    return Make(MODELHOST_WRONG_INDEXER, most)->Index({file.file()}, cancel_).status();
  }

  LinuxOs os_;
  SystemClock clock_;
  CancelToken cancel_;
};

TEST_F(ContentsIndexerTest, BothFindTheSame) {
  const TestFile model("sub/model.safetensors", GoodModel());
  const TestFile sidecar("tokenizer.json", "{}");
  InProcessIndexer here;
  for (ContentsIndexer* indexer :
       {static_cast<ContentsIndexer*>(Real().release()), static_cast<ContentsIndexer*>(&here)}) {
    const auto found = indexer->Index({model.file(), sidecar.file()}, cancel_);
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_EQ(found->size(), 1U);
    EXPECT_EQ((*found)[0].name, "model");
    ASSERT_EQ((*found)[0].index.size(), 1U);
    EXPECT_EQ((*found)[0].index.at(0).name, "w");
    EXPECT_EQ((*found)[0].index.at(0).nbytes, 8U);
    if (indexer != &here) delete indexer;
  }
}

TEST_F(ContentsIndexerTest, ARefusalSaysTheSameFromThere) {
  const TestFile model("m.gguf", "GGUF");
  InProcessIndexer here;
  const auto refused = Real()->Index({model.file()}, cancel_).status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
  EXPECT_EQ(refused, here.Index({model.file()}, cancel_).status());
}

TEST_F(ContentsIndexerTest, ManyFilesGoAlong) {
  std::vector<std::unique_ptr<TestFile>> kept;
  std::vector<ContentsIndexer::File> files;
  for (int i = 0; i < 300; ++i) {
    kept.push_back(
        std::make_unique<TestFile>("part" + std::to_string(i) + ".safetensors", GoodModel()));
    files.push_back(kept.back()->file());
  }
  const auto found = Real()->Index(files, cancel_);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->size(), 300U);
}

TEST_F(ContentsIndexerTest, ACrashRefusesTheFilesAndNothingElse) {
  for (const char* how : {"crash", "forbidden"}) {
    const absl::Status status = Wrong(how);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("ended by signal"));
  }
}

TEST_F(ContentsIndexerTest, WhatComesFromOutsideIsNotHeldAgainstTheFiles) {
  EXPECT_TRUE(absl::IsResourceExhausted(Wrong("killed")));
  EXPECT_TRUE(absl::IsUnavailable(Wrong("told to end")));
}

TEST_F(ContentsIndexerTest, TheRealProgramIsConfined) {
  const auto confined = [&](const char* program) {
    UniqueFd fd(::open(program, O_RDONLY | O_CLOEXEC));
    return ProcessIndexer(std::move(fd), os_, clock_, {}).CheckConfined();
  };
  const absl::Status real = confined(MODELHOST_INDEXER);
#ifdef MODELHOST_SANITIZED
  EXPECT_TRUE(absl::IsUnimplemented(real)) << real;
#else
  EXPECT_TRUE(real.ok()) << real;
#endif
  EXPECT_TRUE(absl::IsFailedPrecondition(confined("/bin/true")));
}

TEST_F(ContentsIndexerTest, ATruncatedFileIsTheDisksFault) {
  EXPECT_EQ(ErrnoOf(Wrong("bus")), EIO);
  TestFile model("m.safetensors", GoodModel());
  model.Truncate();
  const absl::Status real = Real()->Index({model.file()}, cancel_).status();
  EXPECT_FALSE(real.ok());
  EXPECT_FALSE(absl::IsInvalidArgument(real)) << real;
}

TEST_F(ContentsIndexerTest, NoAnswerOrNonsenseIsAnError) {
  EXPECT_THAT(std::string(Wrong("status").message()), HasSubstr("ended with status 7"));
  for (const char* how : {"garbage", "silence"}) {
    const absl::Status status = Wrong(how);
    EXPECT_TRUE(absl::IsInternal(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("the indexer's answer"));
  }
}

TEST_F(ContentsIndexerTest, OneThatHangsIsEndedAndSoIsOneThatNobodyWants) {
  EXPECT_TRUE(absl::IsDeadlineExceeded(Wrong("hang", absl::Milliseconds(100))));
  cancel_.Cancel();
  EXPECT_TRUE(absl::IsCancelled(Wrong("hang")));
}

}  // namespace
}  // namespace modelhost
