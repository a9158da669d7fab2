// For the tests of publishing: a store, and ways to look behind its back.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "daemon/store/store_test_fixture.h"

namespace modelhost {

class PublishTest : public ::testing::Test {
 protected:
  std::string Incoming() const { return store_.root() + "/incoming"; }
  bool Exists(uint64_t version) const {
    return std::filesystem::exists(store_.version_path("planner", version));
  }
  // Flips the first byte in place, behind the store's back.
  void Rot(const std::string& path) {
    ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
    std::fstream(path, std::ios::in | std::ios::out | std::ios::binary) << '#';
    ASSERT_EQ(::chmod(path.c_str(), 0444), 0);
  }

  ScratchDir scratch_;
  TestStore store_{scratch_.path()};
  const TestStore::Files files_ = {{"model.gguf", "weights"}, {"sub/dir/tokenizer.json", "{}"}};
};

}  // namespace modelhost
