// The small parts: references, where the socket may be, guarded copies, error texts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "client/src/api_support.h"
#include "client/src/guarded_copy.h"
#include "client/src/reference.h"
#include "client/src/socket_path.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;

TEST(Reference, ThreeFormsAreRead) {
  auto plain = ParseReference("planner");
  ASSERT_TRUE(plain.ok());
  EXPECT_EQ(NameIn(plain->model), "planner");
  EXPECT_EQ(NameIn(plain->label), "stable");
  auto label = ParseReference("planner:canary");
  ASSERT_TRUE(label.ok());
  EXPECT_EQ(NameIn(label->label), "canary");
  auto fixed = ParseReference("a.b_c-d@18446744073709551615");
  ASSERT_TRUE(fixed.ok());
  EXPECT_EQ(fixed->version, UINT64_MAX);
  EXPECT_EQ(NameIn(fixed->label), "");
  for (const char* text : {"planner", "planner:canary", "planner@7"}) {
    EXPECT_EQ(ReferenceName(*ParseReference(text)), text);
  }
}

TEST(Reference, EverythingElseIsRefused) {
  const std::string long_name(65, 'a');
  for (const std::string& text :
       {std::string(), std::string("A"), std::string("a b"), std::string("a@"), std::string("a@-1"),
        std::string("a@+1"), std::string("a@1 "), std::string("a@18446744073709551616"),
        std::string("a@00"), std::string(":x"), std::string("a:"), std::string("a:X"), long_name,
        "a:" + long_name, std::string("a\0b", 3)}) {
    const auto ref = ParseReference(text);
    ASSERT_FALSE(ref.ok()) << text;
    EXPECT_EQ(ref.error().code, Code::kInvalidArgument);
  }
}

class SocketPath : public ::testing::Test {
 protected:
  SocketPath() {
    ::unsetenv("MODELHOST_RUNTIME_DIR");
    ::unsetenv("XDG_RUNTIME_DIR");
  }
  ~SocketPath() override {
    ::unsetenv("MODELHOST_RUNTIME_DIR");
    ::unsetenv("XDG_RUNTIME_DIR");
  }
};

TEST_F(SocketPath, TheOptionWinsThenTheEnvironmentThenTheUsersThenTheSystems) {
  EXPECT_THAT(SocketCandidates(""), ElementsAre("/tmp/modelhost-" + std::to_string(::getuid()) +
                                                    "/modelhost/handles.sock",
                                                "/run/modelhost/handles.sock"));
  ::setenv("XDG_RUNTIME_DIR", "/run/user/5", 1);
  EXPECT_THAT(SocketCandidates(""),
              ElementsAre("/run/user/5/modelhost/handles.sock", "/run/modelhost/handles.sock"));
  ::setenv("MODELHOST_RUNTIME_DIR", "/elsewhere", 1);
  EXPECT_THAT(SocketCandidates(""), ElementsAre("/elsewhere/handles.sock"));
  EXPECT_THAT(SocketCandidates("/given"), ElementsAre("/given/handles.sock"));
}

TEST(GuardedCopy, BothWaysCopyAndReportAPageThatIsGone) {
  std::string name = "/tmp/modelhost-copy-XXXXXX";
  const int fd = ::mkstemp(name.data());
  ASSERT_GE(fd, 0);
  ::unlink(name.c_str());
  const size_t bytes = 300'000;
  std::vector<char> content(bytes);
  for (size_t i = 0; i < bytes; ++i) content[i] = static_cast<char>(i * 7);
  ASSERT_EQ(::write(fd, content.data(), bytes), static_cast<ssize_t>(bytes));
  const void* mapped = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  for (auto* copy : {&GuardedCopy, &GuardedCopyByPipe}) {
    std::vector<char> to(bytes);
    ASSERT_TRUE(copy(to.data(), mapped, bytes).ok());
    EXPECT_EQ(to, content);
  }
  ASSERT_EQ(::ftruncate(fd, 8192), 0);
  for (auto* copy : {&GuardedCopy, &GuardedCopyByPipe}) {
    std::vector<char> to(bytes);
    const auto copied = copy(to.data(), mapped, bytes);
    ASSERT_FALSE(copied.ok());
    EXPECT_EQ(copied.error().code, Code::kDataLoss);
    EXPECT_TRUE(copy(to.data(), mapped, 8192).ok());
  }
  ::munmap(const_cast<void*>(mapped), bytes);
  ::close(fd);
}

TEST(ApiSupport, ALongTextIsCutAtACharacter) {
  mh_error error{};
  std::string text(510, 'a');
  text += "\xc3\xa9\xc3\xa9";  // Two characters of two bytes; the first would be cut in two.
  EXPECT_EQ(Report(&error, MH_NOT_FOUND, text), MH_NOT_FOUND);
  EXPECT_EQ(std::string(error.message), std::string(510, 'a'));
  EXPECT_EQ(error.status, MH_NOT_FOUND);
  EXPECT_EQ(Report(nullptr, MH_NOT_FOUND, text), MH_NOT_FOUND);
}

TEST(ApiSupport, NoExceptionLeaves) {
  mh_error error{};
  EXPECT_EQ(Guarded(&error, []() -> mh_status { throw std::bad_alloc(); }), MH_RESOURCE_EXHAUSTED);
  EXPECT_STREQ(error.message, "out of memory");
  EXPECT_EQ(Guarded(&error, []() -> mh_status { throw 1; }), MH_INTERNAL);
}

}  // namespace
}  // namespace modelhost
