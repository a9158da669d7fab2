// A daemon goes and another comes: what the fd store kept is resident again without a read, and
// whatever is not as it was is loaded from disk.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>

#include "daemon/region/loader_test_fixture.h"
#include "daemon/region/parking.h"
#include "daemon/region/restored_memory.h"
#include "daemon/store/atomic_file.h"
#include "tests/fakes/memory_fd_store.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kBytes = uint64_t{1} << 20;

class RestoreTest : public LoaderTest {
 protected:
  void SetUp() override {
    LoaderTest::SetUp();
    MakeVersion(1, {{"a.safetensors", Weights(kBytes, 1)}, {"config.json", "{}"}});
    Boot(std::vector<NamedFd>());
  }
  void TearDown() override {
    resident_.clear();
    if (parking_ != nullptr) parking_->Leave();
    loader_.reset();
    parking_.reset();
    LoaderTest::TearDown();
  }

  void Boot(std::vector<NamedFd> stored, Parking::Options options = Parking::Options()) {
    options.epoch = ++epoch_;
    if (options.builder.empty()) options.builder = "1.0 abc";
    if (options.most == 0) options.most = 100;
    restored_ = std::make_unique<RestoredMemory>();
    parking_ = std::make_unique<Parking>(os_, fd_store_, state_dir_, options);
    cache_ = std::make_unique<RegionCache>();
    loader_ = std::make_unique<Loader>(os_, clock_, *store_, *verified_, *pool_, *cache_, *host_,
                                       *memlock_, indexer_, builder_, machine_, loader_options_);
    loader_->UseFdStore(*parking_, *restored_);
    restored_->Take(os_, fd_store_, state_dir_, std::move(stored));
  }
  // The daemon ends, in order (SIGTERM) or by SIGKILL: to the store it is all the same.
  std::vector<NamedFd> End() {
    parking_->Leave();
    resident_.clear();
    loader_.reset();
    parking_.reset();
    restored_.reset();
    EXPECT_EQ(host_->reserved(), 0U);
    return fd_store_.GiveAll();
  }
  void Restart(Parking::Options options = Parking::Options()) { Boot(End(), options); }

  const ResidentVersion& Resident(uint64_t number = 1, Residency residency = Residency::kSealed) {
    auto loaded = Load(number, residency);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    if (!loaded.ok()) std::abort();
    resident_.push_back(*std::move(loaded));
    return *resident_.back();
  }
  uint64_t InodeOf(const UniqueFd& fd) { return os_.Stat(fd)->inode; }
  UniqueFd Sealed(const std::string& text) {
    auto memory = WritableRegion::Create("other", text.size(), HugePages::kOff);
    std::ranges::copy(std::as_bytes(std::span(text)), memory->bytes().begin());
    return std::move((*std::move(*memory).Seal()).fd);
  }
  NamedFd& Of(std::vector<NamedFd>& fds, const std::string& name) {
    return *std::ranges::find(fds, name, &NamedFd::name);
  }
  // The record says that the first region is `fd`, and that is what comes back.
  void Forge(std::vector<NamedFd>& stored, UniqueFd fd) {
    const FileInfo info = *os_.Stat(fd);
    Of(stored, "mh-1-1").fd = std::move(fd);
    ParkedRecord record =
        *ParseParkedRecord(*ReadSmallFileAt(os_, state_dir_, kParkedName, 1 << 20));
    const auto region = std::ranges::find(
        record.regions, "mh-1-1", [](const ParkedRegion& each) { return each.memory.name; });
    region->memory = {"mh-1-1", info.device, info.inode, info.bytes};
    ASSERT_TRUE(
        ReplaceFileAt(os_, state_dir_, kParkedName, 0600, SerializeParkedRecord(record)).ok());
  }
  // A restart with something wrong: all is loaded from disk, and `why` is told.
  void ExpectAllFromDisk(std::vector<NamedFd> stored, const std::string& why) {
    Boot(std::move(stored));
    EXPECT_THAT(restored_->report().problem, HasSubstr(why));
    EXPECT_EQ(restored_->report().taken, 0U);
    EXPECT_THAT(restored_->versions(), IsEmpty());
    const ResidentVersion& version = Resident();
    EXPECT_EQ(version.report.restored_bytes, 0U);
    EXPECT_FALSE(version.report.restored_index);
    EXPECT_EQ(version.report.disk_bytes, version.host_bytes());
    // And the store has it again, whole.
    EXPECT_EQ(fd_store_.size(), 3U);
  }

  uint64_t epoch_ = 0;
  MemoryFdStore fd_store_;
  std::unique_ptr<RestoredMemory> restored_;
  std::unique_ptr<Parking> parking_;
  std::unique_ptr<RegionCache> cache_;
  LoaderOptions loader_options_;
  std::vector<std::shared_ptr<const ResidentVersion>> resident_;
};

TEST_F(RestoreTest, ASealedVersionComesBackWithoutAReadOrAParse) {
  const ResidentVersion& before = Resident();
  EXPECT_EQ(before.report.disk_bytes, before.host_bytes());
  const uint64_t weights = InodeOf(before.regions[0]->fd());
  const uint64_t index = InodeOf(before.index.fd);
  EXPECT_EQ(fd_store_.size(), 3U);  // Two files and the index.
  EXPECT_EQ(parking_->parked(), 3U);
  const int builds = builder_.builds;
  Restart();
  EXPECT_EQ(restored_->report().taken, 3U);
  EXPECT_THAT(restored_->versions(), ElementsAre(std::pair<std::string, uint64_t>("m", 1)));
  const ResidentVersion& after = Resident();
  EXPECT_EQ(after.report.source, "restore");
  EXPECT_EQ(after.report.disk_bytes, 0U);
  EXPECT_EQ(after.report.restored_bytes, after.host_bytes());
  EXPECT_TRUE(after.report.restored_index);
  EXPECT_EQ(builder_.builds, builds);
  EXPECT_EQ(InodeOf(after.regions[0]->fd()), weights);
  EXPECT_EQ(InodeOf(after.index.fd), index);
  EXPECT_EQ(after.tensor_count, 1U);
  EXPECT_EQ(after.tensor_bytes, kBytes);
  EXPECT_EQ(after.format, "safetensors");
  EXPECT_THAT(after.eager, ElementsAre(0));
  // Booked and locked as if it had been loaded.
  EXPECT_EQ(after.tier, HostTier::kPinned);
  EXPECT_EQ(host_->reserved(), after.host_bytes());
  EXPECT_EQ(memlock_->reserved(), after.host_bytes());
}

TEST_F(RestoreTest, ItComesBackAgainAndAgain) {
  const uint64_t weights = InodeOf(Resident().regions[0]->fd());
  for (int i = 0; i < 5; ++i) {
    Restart();
    const ResidentVersion& version = Resident();
    EXPECT_EQ(version.report.source, "restore");
    EXPECT_EQ(InodeOf(version.regions[0]->fd()), weights);
    EXPECT_EQ(fd_store_.size(), 3U);
  }
}

TEST_F(RestoreTest, EverythingLeavesTheStoreBeforeAnythingIsLookedAt) {
  Resident();
  std::vector<NamedFd> stored = End();
  stored.push_back({"junk", Sealed("x")});
  fd_store_.log.clear();
  // Dies as soon as it has taken them: nothing is left for a second death.
  Boot(std::move(stored));
  EXPECT_THAT(fd_store_.log, ElementsAre("-mh-1-1", "-mh-1-2", "-mh-1-3", "-junk"));
  EXPECT_EQ(fd_store_.size(), 0U);
  Restart();
  EXPECT_EQ(restored_->report().received, 0U);
  EXPECT_EQ(Resident().report.restored_bytes, 0U);
}

TEST_F(RestoreTest, AnUnloadedVersionLeavesTheStoreAndSharedBytesStay) {
  MakeVersion(2, {{"a.safetensors", Weights(kBytes, 1)}, {"b.json", "[1]"}});
  Resident(1);
  Resident(2);
  EXPECT_EQ(fd_store_.size(), 5U);  // Weights, two small files, two indexes.
  resident_.erase(resident_.begin());
  Restart();  // Joins what told the store.
  EXPECT_THAT(restored_->versions(), ElementsAre(std::pair<std::string, uint64_t>("m", 2)));
  EXPECT_EQ(restored_->report().taken, 3U);
  EXPECT_EQ(Resident(2).report.source, "restore");
  EXPECT_EQ(Resident(1).report.shared_bytes, Weights(kBytes, 1).size());
}

TEST_F(RestoreTest, OfAFileBackedVersionTheIndexComesBack) {
  Resident(1, Residency::kPinned);
  EXPECT_EQ(fd_store_.size(), 1U);
  const int builds = builder_.builds;
  Restart();
  const ResidentVersion& after = Resident(1, Residency::kPinned);
  EXPECT_EQ(builder_.builds, builds);
  EXPECT_TRUE(after.report.restored_index);
  EXPECT_EQ(after.report.source, "warm");
  EXPECT_EQ(after.tier, HostTier::kPinned);
}

TEST_F(RestoreTest, AnotherResidencyOrProgramParsesAgain) {
  Resident(1, Residency::kPinned);
  Restart();
  EXPECT_FALSE(Resident(1, Residency::kSealed).report.restored_index);
  Parking::Options upgraded;
  upgraded.builder = "1.1 def";
  Restart(upgraded);
  const ResidentVersion& after = Resident(1, Residency::kSealed);
  EXPECT_FALSE(after.report.restored_index);
  EXPECT_EQ(after.report.source, "restore");  // The weights are what they are.
}

TEST_F(RestoreTest, MemoryOfAnotherSizeIsRefused) {
  Resident();
  auto stored = End();
  Of(stored, "mh-1-1").fd = Sealed("short");
  ExpectAllFromDisk(std::move(stored), "mh-1-1: is inode");
}

TEST_F(RestoreTest, ARecordOfAnotherSizeIsRefused) {
  const std::string bytes = std::to_string(Resident().regions[0]->bytes());
  auto stored = End();
  std::string text = *ReadSmallFileAt(os_, state_dir_, kParkedName, 1 << 20);
  const size_t at = text.find("\"bytes\": " + bytes);
  ASSERT_NE(at, std::string::npos);
  text.replace(at, 9 + bytes.size(), "\"bytes\": 4096");
  ASSERT_TRUE(ReplaceFileAt(os_, state_dir_, kParkedName, 0600, text).ok());
  ExpectAllFromDisk(std::move(stored), "mh-1-1: ");
}

TEST_F(RestoreTest, SwappedNamesAreRefused) {
  Resident();
  auto stored = End();
  std::swap(Of(stored, "mh-1-1").fd, Of(stored, "mh-1-2").fd);
  ExpectAllFromDisk(std::move(stored), "the record says");
}

TEST_F(RestoreTest, AnIndexWithOtherBytesIsRefused) {
  Resident();
  auto stored = End();
  std::string text = *ReadSmallFileAt(os_, state_dir_, kParkedName, 1 << 20);
  const size_t at = text.find("\"sha256\": \"") + 11;
  text[at] = text[at] == 'a' ? 'b' : 'a';
  ASSERT_TRUE(ReplaceFileAt(os_, state_dir_, kParkedName, 0600, text).ok());
  ExpectAllFromDisk(std::move(stored), "its bytes have SHA-256");
}

TEST_F(RestoreTest, MemoryThatCanStillBeWrittenIsRefused) {
  Resident();
  auto stored = End();
  auto open_memory = WritableRegion::Create("open", kBytes, HugePages::kOff);
  Forge(stored, *open_memory->fd().Duplicate());
  ExpectAllFromDisk(std::move(stored), "mh-1-1: ");
}

TEST_F(RestoreTest, SealedMemoryWithOtherBytesIsFoundByItsDigest) {
  const uint64_t bytes = Resident().regions[0]->bytes();
  MakeVersion(2, {{"a.safetensors", Weights(kBytes, 2)}});
  Resident(2);
  auto stored = End();
  Forge(stored, Sealed(std::string(bytes, 'x')));
  Boot(std::move(stored));
  EXPECT_EQ(restored_->report().problem, "");  // Only its digest tells.
  const ResidentVersion& version = Resident();
  EXPECT_EQ(version.report.source, "warm");
  EXPECT_GE(version.report.disk_bytes, bytes);
  ASSERT_EQ(version.report.warnings.size(), 1U);
  EXPECT_THAT(version.report.warnings[0], HasSubstr("of the memory that the fd store kept"));
  const std::span<const std::byte> data = version.regions[0]->data();
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(data.data()), data.size()),
            Weights(kBytes, 1));
  // Who made one thing up may have made up more.
  EXPECT_EQ(Resident(2).report.restored_bytes, 0U);
  EXPECT_THAT(restored_->report().problem, HasSubstr("the manifest says"));
}

TEST_F(RestoreTest, TwoDescriptorsOfOneNameAreRefused) {
  Resident();
  auto stored = End();
  stored.push_back({"mh-1-1", Sealed("x")});
  ExpectAllFromDisk(std::move(stored), "mh-1-1: 2 descriptors came back under one name");
}

TEST_F(RestoreTest, WithoutARecordNothingIsTaken) {
  Resident();
  auto stored = End();
  ASSERT_TRUE(os_.RemoveFileAt(state_dir_, kParkedName).ok());
  ExpectAllFromDisk(std::move(stored), "parked.json");
}

TEST_F(RestoreTest, AFileInsteadOfMemoryIsRefused) {
  Resident();
  auto stored = End();
  Of(stored, "mh-1-1").fd = UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  ExpectAllFromDisk(std::move(stored), "mh-1-1: ");
}

TEST_F(RestoreTest, ForeignDescriptorsSpoilNothing) {
  Resident();
  auto stored = End();
  for (int i = 0; i < 300; ++i) stored.push_back({"stored", Sealed("junk")});
  Boot(std::move(stored));
  EXPECT_EQ(restored_->report().foreign, 300U);
  EXPECT_EQ(restored_->report().problem, "");
  EXPECT_EQ(Resident().report.source, "restore");
}

TEST_F(RestoreTest, AVersionWithADescriptorMissingIsLoadedWhole) {
  MakeVersion(2, {{"a.safetensors", Weights(kBytes, 2)}});
  Resident(1);
  Resident(2);
  auto stored = End();
  std::erase_if(stored, [](const NamedFd& each) { return each.name == "mh-1-1"; });
  Boot(std::move(stored));
  EXPECT_EQ(restored_->report().incomplete, 1U);
  EXPECT_EQ(restored_->report().problem, "");
  const ResidentVersion& first = Resident(1);
  EXPECT_EQ(first.report.restored_bytes, 0U);
  EXPECT_FALSE(first.report.restored_index);
  EXPECT_EQ(Resident(2).report.source, "restore");
}

TEST_F(RestoreTest, AnotherContentUnderTheSameNumberIsLoaded) {
  Resident();
  auto stored = End();
  ASSERT_TRUE(os_.RemoveTreeAt(*os_.OpenDir(root_ + "/store/models/m/versions"), "1").ok());
  MakeVersion(1, {{"a.safetensors", Weights(kBytes, 7)}, {"config.json", "{}"}});
  Boot(std::move(stored));
  const ResidentVersion& version = Resident();
  EXPECT_FALSE(version.report.restored_index);
  EXPECT_EQ(version.report.disk_bytes, Weights(kBytes, 7).size());
  const std::span<const std::byte> data = version.regions[0]->data();
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(data.data()), data.size()),
            Weights(kBytes, 7));
}

// The copy was verified when it was made, and is what the manifest says.
TEST_F(RestoreTest, AFileThatWentBadMeanwhileIsNotMissed) {
  Resident();
  auto stored = End();
  Overwrite(PathOf(1, "a.safetensors"), 4096, "XXXX");
  Boot(std::move(stored));
  EXPECT_EQ(Resident().report.source, "restore");
}

TEST_F(RestoreTest, AFullStoreTakesWeightsFirstAndTheRestIsReadAgain) {
  Parking::Options options;
  options.most = 2;
  Restart(options);
  const ResidentVersion& before = Resident();
  ASSERT_EQ(before.report.warnings.size(), 1U);
  EXPECT_THAT(before.report.warnings[0], HasSubstr("room for 2 descriptors"));
  EXPECT_EQ(fd_store_.size(), 2U);
  Restart(options);
  const ResidentVersion& after = Resident();
  EXPECT_EQ(after.report.restored_bytes, Weights(kBytes, 1).size());
  EXPECT_TRUE(after.report.restored_index);
  EXPECT_EQ(after.report.disk_bytes, 2U);  // config.json
}

// systemd drops in silence what it has no room for.
TEST_F(RestoreTest, WhatTheStoreDroppedIsLoaded) {
  fd_store_.room = 1;
  EXPECT_THAT(Resident().report.warnings, IsEmpty());
  Restart();
  EXPECT_EQ(restored_->report().incomplete, 1U);
  EXPECT_EQ(Resident().report.restored_bytes, 0U);
}

TEST_F(RestoreTest, AStoreThatHangsCostsALoadItsPatienceOnly) {
  absl::Notification go_on;
  fd_store_.hang = &go_on;
  Parking::Options options;
  options.patience = absl::Milliseconds(10);
  Restart(options);
  const ResidentVersion& version = Resident();
  ASSERT_EQ(version.report.warnings.size(), 1U);
  EXPECT_THAT(version.report.warnings[0], HasSubstr("took no descriptors"));
  EXPECT_FALSE(parking_->Settle(absl::Milliseconds(10)));
  go_on.Notify();
  EXPECT_TRUE(parking_->Settle(absl::Seconds(20)));
  Restart();
  EXPECT_EQ(Resident().report.source, "restore");
}

TEST_F(RestoreTest, AFailedLoadGivesBackWhatItTook) {
  Resident();
  loader_options_.memlock = MemlockPolicy::kRequired;
  Restart();
  os_.FailCall("Lock", 1, ENOMEM);
  EXPECT_FALSE(Load(1, Residency::kSealed).ok());
  EXPECT_EQ(host_->reserved(), 0U);
  const ResidentVersion& version = Resident();
  EXPECT_EQ(version.report.restored_bytes, version.host_bytes());
}

TEST_F(RestoreTest, WhatNobodyTakesIsLetGo) {
  Resident();
  Restart();
  EXPECT_EQ(restored_->DropRest(), Weights(kBytes, 1).size() + 2);
  EXPECT_EQ(Resident().report.restored_bytes, 0U);
}

TEST_F(RestoreTest, WithoutAStoreNothingIsWritten) {
  End();
  MemoryFdStore none;
  const Parking::Options off;
  Parking parking(os_, none, state_dir_, off);
  Boot(std::vector<NamedFd>());
  std::string warning;
  EXPECT_EQ(parking.Park(Resident(), {}, "", warning), nullptr);
  EXPECT_EQ(warning, "");
  EXPECT_TRUE(none.log.empty());
}

}  // namespace
}  // namespace modelhost
