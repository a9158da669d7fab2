#include "client/modelctl/exec_plan.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "proto/handle/unique_fd.h"

namespace modelhost::modelctl {
namespace {

namespace fs = std::filesystem;

std::vector<LeasedFile> Files() { return {{"model.gguf", 7, {}}, {"sub/tokenizer.json", 9, {}}}; }

TEST(SubstituteTest, BracesBecomeTheFolderAndFilesInIt) {
  const auto out = Substitute({"prog", "--dir={}", "-m", "{model.gguf}", "{sub/tokenizer.json}:{}"},
                              Files(), "/run/x", false);
  ASSERT_TRUE(out.ok()) << out.exit().error;
  EXPECT_EQ(*out, (std::vector<std::string>{"prog", "--dir=/run/x", "-m", "/run/x/model.gguf",
                                            "/run/x/sub/tokenizer.json:/run/x"}));
}

TEST(SubstituteTest, FdPathsAreBare) {
  const auto out = Substitute({"{model.gguf}"}, Files(), "", true);
  ASSERT_TRUE(out.ok());
  EXPECT_EQ((*out)[0], "/proc/self/fd/7");
}

TEST(SubstituteTest, OtherBracesAreLeftAlone) {
  const std::vector<std::string> arguments = {
      R"({"a": {"b": 1}})", "{", "}", "{x", "${HOME}", "}{"};
  const auto out = Substitute(arguments, Files(), "/run/x", false);
  ASSERT_TRUE(out.ok()) << out.exit().error;
  EXPECT_EQ(*out, arguments);
}

TEST(SubstituteTest, DoubledBracesAreTheProgramsOwn) {
  const auto out = Substitute({R"({"options": {{}}, "at": "{model.gguf}"})", "f'{{a.shape}}'",
                               "{{x}}", "{{}", "{}}", "{{model.gguf}}{}", "{{ name }}"},
                              Files(), "/d", false);
  ASSERT_TRUE(out.ok()) << out.exit().error;
  EXPECT_EQ(*out,
            (std::vector<std::string>{R"({"options": {}, "at": "/d/model.gguf"})", "f'{a.shape}'",
                                      "{{x}}", "{/d", "/d}", "{model.gguf}/d", "{{ name }}"}));
  EXPECT_FALSE(NeedsFolder({"{{}}", "{{model.gguf}}"}, Files(), false));
}

TEST(SubstituteTest, AFileInsideOtherBracesIsReplaced) {
  const auto out = Substitute({R"({"path": "{model.gguf}"})"}, Files(), "/d", false);
  ASSERT_TRUE(out.ok());
  EXPECT_EQ((*out)[0], R"({"path": "/d/model.gguf"})");
}

TEST(SubstituteTest, ANameThatTheVersionDoesNotHaveIsSaid) {
  const auto out = Substitute({"{modle.gguf}"}, Files(), "/d", false);
  ASSERT_FALSE(out.ok());
  EXPECT_EQ(out.exit().code, ExitCode::kNotFound);
  EXPECT_NE(out.exit().error.find("model.gguf, sub/tokenizer.json"), std::string::npos);
}

TEST(NeedsFolderTest, OnlyWhenSomethingStandsInIt) {
  EXPECT_FALSE(NeedsFolder({"prog", "x"}, Files(), false));
  EXPECT_TRUE(NeedsFolder({"{}"}, Files(), true));
  EXPECT_TRUE(NeedsFolder({"{model.gguf}"}, Files(), false));
  EXPECT_FALSE(NeedsFolder({"{model.gguf}"}, Files(), true));
}

TEST(LinkFolderTest, IsPrivateHasEveryFileAndGoesAway) {
  std::string source = fs::temp_directory_path() / "modelctl-exec-source-XXXXXX";
  const UniqueFd fd(::mkostemp(source.data(), O_CLOEXEC));
  ASSERT_TRUE(fd.valid());
  ASSERT_EQ(::write(fd.get(), "bytes", 5), 5);
  std::string path;
  {
    const auto folder = LinkFolder::Make({{"a.gguf", fd.get(), {}}, {"sub/b.json", fd.get(), {}}});
    ASSERT_TRUE(folder.ok()) << folder.exit().error;
    path = folder->path();
    struct stat info;
    ASSERT_EQ(::stat(path.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0700u);
    std::string text;
    std::ifstream(path + "/sub/b.json") >> text;
    EXPECT_EQ(text, "bytes");
    EXPECT_EQ(fs::read_symlink(path + "/a.gguf"), FdPath(fd.get()));
  }
  EXPECT_FALSE(fs::exists(path));
  EXPECT_TRUE(fs::exists(source));  // Links are removed, never what they lead to.
  fs::remove(source);
}

}  // namespace
}  // namespace modelhost::modelctl
