// A device agent's parent in this process, on the fake driver or another library. For tests.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/device_agent/device_agent.h"
#include "gmock/gmock.h"

namespace modelhost {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr char kGpu[] = "GPU-00fafafa-fafa-fafa-fafa-fafafafafa00";
inline bool GoOn(uint64_t) { return true; }

class DeviceAgentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    program_ = UniqueFd(::open(AGENT_TEST_CHILD, O_RDONLY | O_CLOEXEC));
    ASSERT_TRUE(program_.valid());
    // Other tests run beside this one.
    Set("FAKECUDA_MACHINE", std::to_string(::getpid()));
  }
  void TearDown() override {
    for (const std::string& name : set_) ::unsetenv(name.c_str());
  }
  void Set(const std::string& name, const std::string& value) {
    ::setenv(name.c_str(), value.c_str(), 1);
    set_.push_back(name);
  }
  DeviceAgentOptions Options(const char* library = FAKECUDA_PATH) {
    DeviceAgentOptions options;
    options.arguments = {library, "10000"};
    options.ring_bytes = 4 * kMiB;
    options.threads = 2;
    return options;
  }
  std::unique_ptr<DeviceAgent> Agent(DeviceAgentOptions options) {
    return std::make_unique<DeviceAgent>(program_, clock_, kGpu, std::move(options));
  }
  // A file of `bytes` pseudo-random bytes.
  UniqueFd Source(uint64_t bytes) {
    UniqueFd fd(::open(::testing::TempDir().c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    std::vector<uint64_t> words(bytes / 8 + 1);
    uint64_t word = 7;
    for (uint64_t& one : words) one = word = word * 6364136223846793005ULL + 1442695040888963407ULL;
    EXPECT_EQ(::pwrite(fd.get(), words.data(), bytes, 0), static_cast<ssize_t>(bytes));
    return fd;
  }
  static std::vector<DeviceCopy> Pieces() {
    // Odd offsets, gaps, one that spans chunks of the ring, one that is tiny.
    return {{0, 3 * kMiB + 5, 13, 0}, {4 * kMiB, 7, 3, 0}, {5 * kMiB + 512, 2 * kMiB, kMiB + 1, 0}};
  }
  // The first load of a model.
  absl::Status Load(DeviceAgent& agent, bool direct, uint64_t source_bytes = 4 * kMiB) {
    const UniqueFd source = Source(source_bytes);
    const auto segment = agent.Create(8 * kMiB, GoOn);
    if (!segment.ok()) return segment.status();
    const auto sum = agent.Upload(*segment, Pieces(), {&source}, direct, GoOn);
    if (!sum.ok()) return sum.status();
    if (const absl::Status good = agent.Verify(*segment, *sum, GoOn); !good.ok()) return good;
    return agent.Release(*segment);
  }

  SystemClock clock_;
  UniqueFd program_;
  std::vector<std::string> set_;
};

}  // namespace modelhost
