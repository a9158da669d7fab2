#include "daemon/platform/sigbus_guard.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "proto/handle/unique_fd.h"

namespace modelhost {
namespace {

constexpr size_t kPages = 8;

// A mapped file whose end can be cut off under the mapping.
class SigbusGuardTest : public testing::Test {
 protected:
  void SetUp() override {
    InstallSigbusHandler();
    page_ = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    fd_ = UniqueFd(::memfd_create("sigbus_test", MFD_CLOEXEC));
    const std::string text(kPages * page_, 'x');
    ASSERT_EQ(::write(fd_.get(), text.data(), text.size()), static_cast<ssize_t>(text.size()));
    void* at = ::mmap(nullptr, text.size(), PROT_READ, MAP_SHARED, fd_.get(), 0);
    ASSERT_NE(at, MAP_FAILED);
    bytes_ = {static_cast<const std::byte*>(at), text.size()};
  }
  void TearDown() override { ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size()); }
  void Truncate(size_t pages) {
    ASSERT_EQ(::ftruncate(fd_.get(), static_cast<off_t>(pages * page_)), 0);
  }
  int Sum(std::span<const std::byte> bytes) const {
    int sum = 0;
    for (size_t i = 0; i < bytes.size(); i += page_) {
      sum += static_cast<int>(*static_cast<const volatile std::byte*>(&bytes[i]));
    }
    return sum;
  }

  size_t page_ = 0;
  UniqueFd fd_;
  std::span<const std::byte> bytes_;
};

TEST_F(SigbusGuardTest, MissingPagesReadAsZerosAndAreNoticed) {
  Truncate(3);
  const SigbusGuard guard(bytes_);
  EXPECT_FALSE(guard.hit());
  EXPECT_EQ(Sum(bytes_), 3 * 'x');
  EXPECT_TRUE(guard.hit());
}

TEST_F(SigbusGuardTest, AWholeFileIsNoHit) {
  const SigbusGuard guard(bytes_);
  EXPECT_EQ(Sum(bytes_), static_cast<int>(kPages) * 'x');
  EXPECT_FALSE(guard.hit());
}

TEST_F(SigbusGuardTest, TheGuardWithTheAddressIsTheOneThatIsHit) {
  Truncate(6);
  const SigbusGuard outer(bytes_.subspan(7 * page_));
  {
    const SigbusGuard inner(bytes_.first(7 * page_));
    Sum(bytes_);
    EXPECT_TRUE(inner.hit());
  }
  EXPECT_TRUE(outer.hit());
}

using SigbusGuardDeathTest = SigbusGuardTest;

TEST_F(SigbusGuardDeathTest, OutsideItsRangesTheSignalStillKills) {
  Truncate(3);
  EXPECT_EXIT(
      {
        const SigbusGuard guard(bytes_.first(4 * page_));
        Sum(bytes_);
      },
      [](int status) { return status != 0; }, "");
}

TEST_F(SigbusGuardDeathTest, ASignalThatWasSentStillKills) {
  EXPECT_EXIT(
      {
        const SigbusGuard guard(bytes_);
        ::raise(SIGBUS);
      },
      [](int status) { return status != 0; }, "");
}

}  // namespace
}  // namespace modelhost
