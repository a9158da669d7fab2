// What a version requires is part of what is published: in the manifest, and never another one
// under the same number.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "daemon/store/publish.h"
#include "daemon/store/publish_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class PublishRequiresTest : public PublishTest {
 protected:
  absl::StatusOr<PublishResult> Publish(uint64_t version, const Requirements& requirements,
                                        bool replace_bad = false) {
    return store_.Publish("planner", version, {{"m.engine", "plan"}}, replace_bad, requirements);
  }
};

TEST_F(PublishRequiresTest, TheyAreInTheManifest) {
  const Requirements wanted = {{"tensorrt", "10.3.0"}, {"made_by", "us"}};
  ASSERT_TRUE(Publish(1, wanted).ok());
  auto opened = store_.store().OpenVersion("planner", 1, nullptr);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->manifest->requires_map, wanted);
}

TEST_F(PublishRequiresTest, TheSameAgainIsAlreadyThere) {
  ASSERT_TRUE(Publish(1, {{"tensorrt", "10.3.0"}}).ok());
  auto again = Publish(1, {{"tensorrt", "10.3.0"}});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->already_there);
}

TEST_F(PublishRequiresTest, OthersUnderTheSameNumberAreRefusedShowingBoth) {
  ASSERT_TRUE(Publish(1, {{"tensorrt", "10.3.0"}}).ok());
  const absl::Status other = Publish(1, {{"tensorrt", "8.6.1"}}).status();
  EXPECT_TRUE(absl::IsAlreadyExists(other)) << other;
  EXPECT_THAT(std::string(other.message()),
              AllOf(HasSubstr("requires tensorrt=10.3.0"), HasSubstr("require tensorrt=8.6.1")));
  EXPECT_TRUE(absl::IsAlreadyExists(Publish(1, {}).status()));
  // Not even to repair it.
  EXPECT_TRUE(absl::IsAlreadyExists(Publish(1, {}, /*replace_bad=*/true).status()));
  EXPECT_TRUE(Publish(1, {{"tensorrt", "10.3.0"}}, true).ok());
  ASSERT_TRUE(Publish(2, {}).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(Publish(2, {{"tensorrt", "8.6.1"}}).status()));
}

TEST_F(PublishRequiresTest, WhatCannotBeComparedIsRefusedBeforeAnythingIsWritten) {
  for (const Requirements& bad : {Requirements{{"tensorrt", "ten"}}, Requirements{{"A b", "c"}},
                                  Requirements{{"note", "two\nlines"}}}) {
    const absl::Status status = Publish(1, bad).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("planner@1: requires: "));
  }
  EXPECT_EQ(store_.os().calls("CreateFileAt"), 0);
}

}  // namespace
}  // namespace modelhost
