#include "daemon/region/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "daemon/platform/errno_status.h"
#include "daemon/platform/sigbus_guard.h"
#include "daemon/region/loader_test_fixture.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kWeights = uint64_t{1} << 20;  // 17 chunks with the header.

std::string Text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string Message(const absl::Status& status) { return std::string(status.message()); }

bool HasPhase(const LoadReport& report, const std::string& name) {
  return std::any_of(report.phases.begin(), report.phases.end(),
                     [&](const LoadPhase& phase) { return phase.name == name; });
}

TEST_F(LoaderTest, PinnedVersionIsResidentVerifiedLockedAndIndexed) {
  const std::string weights = Weights(kWeights, 1);
  MakeVersion(1, {{"a.safetensors", weights}, {"config.json", "{}"}, {"empty.txt", ""}});
  const auto version = Load(1, Residency::kPinned);
  ASSERT_TRUE(version.ok()) << version.status();
  const ResidentVersion& v = **version;
  EXPECT_EQ(v.format, "safetensors");
  EXPECT_EQ(v.tensor_count, 1U);
  EXPECT_EQ(v.tensor_bytes, kWeights);
  ASSERT_EQ(v.regions.size(), 3U);
  ASSERT_EQ(v.eager.size(), 1U);
  EXPECT_EQ(Text(v.regions[v.eager[0]]->data()), weights);
  EXPECT_EQ(Text(v.regions[v.file_regions[1]]->data()), "{}");
  EXPECT_EQ(v.regions[v.file_regions[2]]->bytes(), 0U);
  EXPECT_EQ(v.tier, HostTier::kPinned);
  EXPECT_EQ(v.locked_bytes(), weights.size() + 2);
  EXPECT_EQ(v.host_bytes(), weights.size() + 2);
  EXPECT_EQ(host_->reserved(), weights.size() + 2);
  EXPECT_EQ(memlock_->reserved(), weights.size() + 2);
  EXPECT_EQ(v.regions[v.eager[0]]->ResidentBytes(), weights.size());
  EXPECT_TRUE(v.report.warnings.empty());
  EXPECT_EQ(v.report.disk_bytes, weights.size() + 2);
  for (const char* phase : {"open", "map", "prewarm", "verify", "pin", "index"}) {
    EXPECT_TRUE(HasPhase(v.report, phase)) << phase;
  }
  EXPECT_EQ(builder_.builds, 1);
}

TEST_F(LoaderTest, ASharedShardIsReadOnceAndSharedByBothVersions) {
  const std::string base = Weights(kWeights, 1);
  MakeVersion(1, {{"base.safetensors", base}, {"head.safetensors", Weights(1000, 2)}});
  const std::string head = Weights(2000, 3);
  MakeVersion(2, {{"base.safetensors", base}, {"head.safetensors", head}});
  const auto first = Load(1, Residency::kPinned);
  ASSERT_TRUE(first.ok()) << first.status();
  const uint64_t booked = host_->reserved();
  const auto second = Load(2, Residency::kPinned);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ((*second)->report.disk_bytes, head.size());
  EXPECT_EQ((*second)->report.shared_bytes, base.size());
  EXPECT_EQ(host_->reserved(), booked + head.size());
  EXPECT_EQ((*first)->regions[0], (*second)->regions[0]);
  EXPECT_NE((*first)->regions[1], (*second)->regions[1]);
}

TEST_F(LoaderTest, AnotherResidencyIsAnotherRegion) {
  MakeVersion(1, {{"a.safetensors", Weights(1000, 1)}});
  const auto pinned = Load(1, Residency::kPinned);
  const auto sealed = Load(1, Residency::kSealed);
  ASSERT_TRUE(pinned.ok() && sealed.ok());
  EXPECT_NE((*pinned)->regions[0], (*sealed)->regions[0]);
  EXPECT_EQ((*sealed)->regions[0]->kind(), abi::RegionKind::kSealed);
}

TEST_F(LoaderTest, FilesOfOneContentShareARegion) {
  const std::string weights = Weights(1000, 1);
  MakeVersion(1, {{"a.safetensors", weights}, {"b.safetensors", weights}});
  const auto version = Load(1, Residency::kWarm);
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ((*version)->regions.size(), 1U);
  EXPECT_EQ((*version)->tensor_count, 2U);
  EXPECT_EQ(host_->reserved(), weights.size());
}

TEST_F(LoaderTest, BadBytesAreDataLossWithFileChunkAndBothDigests) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  Overwrite(PathOf(1, "a.safetensors"), 5 * kChunk + 7, "XXXX");
  Overwrite(PathOf(1, "a.safetensors"), 9 * kChunk, "YYYY");
  for (const Residency residency :
       {Residency::kMapped, Residency::kWarm, Residency::kPinned, Residency::kSealed}) {
    const absl::Status status = Load(1, residency).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(Message(status), HasSubstr(PathOf(1, "a.safetensors") + ": chunk 5:"));
    EXPECT_THAT(Message(status), HasSubstr("SHA-256"));
    EXPECT_EQ(host_->reserved(), 0U);
  }
  EXPECT_EQ(builder_.builds, 0);
}

TEST_F(LoaderTest, WithoutFullVerificationDigestsAreNotLookedAt) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  Overwrite(PathOf(1, "a.safetensors"), 5 * kChunk, "XXXX");
  loader_ = MakeLoader({.verify = VerifyPolicy::kManifest});
  const auto version = Load(1, Residency::kPinned);
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_FALSE(HasPhase((*version)->report, "verify"));
}

TEST_F(LoaderTest, WhatWasVerifiedIsNotHashedAgainUntilItChanges) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  ASSERT_TRUE(Load(1, Residency::kPinned).ok());
  const auto again = Load(1, Residency::kPinned);
  ASSERT_TRUE(again.ok());
  EXPECT_FALSE(HasPhase((*again)->report, "verify"));
  EXPECT_EQ((*again)->report.source, "warm");
  Overwrite(PathOf(1, "a.safetensors"), 100, "XXXX");
  EXPECT_EQ(Load(1, Residency::kPinned).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(LoaderTest, WhatWasHashedForItsManifestIsNotHashedAgain) {
  MakeVersion(1, {{"a.safetensors", Weights(3 * kChunk, 1)}});
  const std::string dir = root_ + "/store/models/m/versions/1";
  ASSERT_EQ(::chmod(dir.c_str(), 0755), 0);
  ASSERT_EQ(::unlink((dir + "/manifest.json").c_str()), 0);
  const auto first = Load(1, Residency::kWarm);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_FALSE(HasPhase((*first)->report, "verify"));
}

TEST_F(LoaderTest, MappedAndVerifiedBeforeReadsNothing) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  ASSERT_TRUE(Load(1, Residency::kMapped).ok());
  const int populated = os_.calls("Populate");
  const auto version = Load(1, Residency::kMapped);
  ASSERT_TRUE(version.ok());
  EXPECT_EQ(os_.calls("Populate"), populated);
  EXPECT_EQ((*version)->report.disk_bytes, 0U);
  EXPECT_EQ((*version)->tier, HostTier::kMapped);
}

TEST_F(LoaderTest, WhatDoesNotFitTheBudgetIsRefusedBeforeAnyRead) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  host_ = std::make_unique<BudgetPool>("host", kWeights / 2);
  loader_ = MakeLoader();
  const int reads = os_.calls("ReadAt");
  absl::StatusOr<VersionFiles> opened = store_->OpenVersion("m", 1, [](uint64_t) { return true; });
  const int reads_of_open = os_.calls("ReadAt") - reads;
  ASSERT_TRUE(opened.ok());
  const absl::Status status = Load(1, Residency::kPinned).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(status), HasSubstr("needs 1.0 MiB"));
  EXPECT_THAT(Message(status), HasSubstr("512.0 KiB of 512.0 KiB"));
  EXPECT_EQ(os_.calls("Populate"), 0);
  EXPECT_EQ(os_.calls("ReadAt") - reads, 2 * reads_of_open);  // The manifest's alone.
}

TEST_F(LoaderTest, MemlockRequiredRefusesWithNumbersAndTheFix) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  memlock_ = std::make_unique<BudgetPool>("memlock", 4096);
  os_.set_limits({.ram_bytes = 1 << 30, .cgroup_bytes = 1 << 30, .memlock_bytes = 4096});
  loader_ = MakeLoader({.memlock = MemlockPolicy::kRequired});
  const absl::Status status = Load(1, Residency::kPinned).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(status), HasSubstr("needs 1.0 MiB"));
  EXPECT_THAT(Message(status), HasSubstr("RLIMIT_MEMLOCK is 4.0 KiB"));
  EXPECT_THAT(Message(status), HasSubstr("LimitMEMLOCK="));
  EXPECT_EQ(os_.calls("Populate"), 0);
}

TEST_F(LoaderTest, MemlockBestEffortGoesOnWarmAndSaysSo) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}, {"c.json", "{}"}});
  memlock_ = std::make_unique<BudgetPool>("memlock", 4096);
  loader_ = MakeLoader();
  const auto version = Load(1, Residency::kPinned);
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ((*version)->tier, HostTier::kWarm);
  EXPECT_EQ((*version)->locked_bytes(), 2U);  // The sidecar fits.
  ASSERT_EQ((*version)->report.warnings.size(), 1U);
  EXPECT_THAT((*version)->report.warnings[0], HasSubstr("1.0 MiB of m@1 are not locked"));
}

TEST_F(LoaderTest, AKernelThatRefusesToLockIsPutUpWithOrNotByPolicy) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  os_.FailFrom("Lock", 1, ENOMEM);
  const auto version = Load(1, Residency::kPinned);
  ASSERT_TRUE(version.ok()) << version.status();
  EXPECT_EQ((*version)->tier, HostTier::kWarm);
  EXPECT_EQ(memlock_->reserved(), 0U);
  EXPECT_EQ((*version)->report.warnings.size(), 1U);
  MakeVersion(2, {{"a.safetensors", Weights(kWeights, 2)}});
  loader_ = MakeLoader({.memlock = MemlockPolicy::kRequired});
  const absl::Status status = Load(2, Residency::kPinned).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(status), HasSubstr("RLIMIT_MEMLOCK"));
}

TEST_F(LoaderTest, MemlockOffNeverLocks) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  loader_ = MakeLoader({.memlock = MemlockPolicy::kOff});
  const auto version = Load(1, Residency::kPinned);
  ASSERT_TRUE(version.ok());
  EXPECT_EQ((*version)->tier, HostTier::kWarm);
  EXPECT_EQ(os_.calls("Lock"), 0);
  EXPECT_TRUE((*version)->report.warnings.empty());
}

TEST_F(LoaderTest, AnUnreadableChunkIsDataLossAndUndoesEverything) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  os_.FailCall("Populate", 8, EIO);
  const absl::Status status = Load(1, Residency::kPinned).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(status), HasSubstr("a.safetensors: chunk "));
  EXPECT_EQ(host_->reserved(), 0U);
  EXPECT_EQ(memlock_->reserved(), 0U);
  os_.Heal();
  EXPECT_TRUE(Load(1, Residency::kPinned).ok());
}

TEST_F(LoaderTest, AnUnreadableChunkOfASealedCopyIsDataLoss) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  os_.Before("Populate", [this] { os_.FailFrom("ReadAt", 1, EIO); });
  EXPECT_EQ(Load(1, Residency::kSealed).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(LoaderTest, ASealedCopyThatCannotBeWrittenIsRefused) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  os_.FailCall("WriteAt", 3, ENOSPC);
  EXPECT_EQ(Load(1, Residency::kSealed).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(LoaderTest, AFileTruncatedDuringTheLoadIsDataLossAndNoSignal) {
  for (const Residency residency :
       {Residency::kMapped, Residency::kWarm, Residency::kPinned, Residency::kSealed}) {
    const auto number = static_cast<uint64_t>(residency) + 1;
    MakeVersion(number, {{"a.safetensors", Weights(kWeights, static_cast<int>(number))}});
    int calls = 0;
    std::mutex mutex;
    os_.Before("Populate", [&] {
      const std::lock_guard<std::mutex> lock(mutex);
      if (++calls == 4) Truncate(PathOf(number, "a.safetensors"), 2 * kChunk);
    });
    EXPECT_EQ(Load(number, residency).status().code(), absl::StatusCode::kDataLoss);
    os_.Heal();
  }
}

TEST_F(LoaderTest, AFileTruncatedBetweenReadAndHashIsDataLossAndNoSignal) {
  // Nothing but the guard stands between the hash and SIGBUS here: Populate has succeeded.
  class TruncatingClock final : public Clock {
   public:
    absl::Duration Monotonic() const override {
      if (then) then();
      return real.Monotonic();
    }
    absl::Time Wall() const override { return real.Wall(); }
    std::function<void()> then;
    SystemClock real;
  } clock;
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  Loader loader(os_, clock, *store_, *verified_, *pool_, regions_, *host_, *memlock_, indexer_,
                builder_, machine_, {.threads = 1});
  os_.Before("Populate", [&] {
    clock.then = [&] {
      Truncate(PathOf(1, "a.safetensors"), 100);
      clock.then = nullptr;
    };
  });
  EXPECT_EQ(loader.Load(Request(1, Residency::kWarm)).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(LoaderTest, AFileTruncatedBeforeItIsIndexedIsDataLossAndNoSignal) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  loader_ = MakeLoader({.verify = VerifyPolicy::kNone});
  const std::string path = PathOf(1, "a.safetensors");
  LoadRequest request = Request(1, Residency::kMapped);
  request.progress = [&](const LoadProgress& progress) {
    if (progress.phase == "index") Truncate(path, 0);
  };
  const absl::Status status = loader_->Load(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  // The errno tells it from bytes that are bad: it may be tried again.
  EXPECT_EQ(ErrnoOf(status), EIO);
}

TEST_F(LoaderTest, ASealedVersionOutlivesItsSource) {
  const std::string weights = Weights(kWeights, 1);
  MakeVersion(1, {{"a.safetensors", weights}});
  const auto version = Load(1, Residency::kSealed);
  ASSERT_TRUE(version.ok()) << version.status();
  Truncate(PathOf(1, "a.safetensors"), 0);
  EXPECT_EQ(Text((*version)->regions[0]->data()), weights);
  EXPECT_TRUE((*version)->regions[0]->SourceUnchanged());
  EXPECT_TRUE(ReadOnlyMapping::MapSealed((*version)->regions[0]->fd(), weights.size()).ok());
}

TEST_F(LoaderTest, ASourceChangedInPlaceIsSeenAndNeverSharedAgain) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  MakeVersion(2, {{"a.safetensors", Weights(kWeights, 1)}});
  const auto version = Load(1, Residency::kPinned);
  ASSERT_TRUE(version.ok());
  EXPECT_TRUE((*version)->regions[0]->SourceUnchanged());
  ASSERT_EQ(::link(PathOf(1, "a.safetensors").c_str(), (root_ + "/link").c_str()), 0);
  EXPECT_TRUE((*version)->regions[0]->SourceUnchanged());
  Overwrite(PathOf(1, "a.safetensors"), 100, "XXXX");
  EXPECT_FALSE((*version)->regions[0]->SourceUnchanged());
  const auto other = Load(2, Residency::kPinned);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_NE((*other)->regions[0], (*version)->regions[0]);
}

TEST_F(LoaderTest, CancellingEndsALoadInAnyPhase) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  for (const char* phase : {"open", "map", "prewarm", "pin", "index"}) {
    LoadRequest request = Request(1, Residency::kSealed);
    request.progress = [&](const LoadProgress& progress) {
      if (progress.phase == phase) request.cancel->Cancel();
    };
    EXPECT_EQ(loader_->Load(request).status().code(), absl::StatusCode::kCancelled) << phase;
    EXPECT_EQ(host_->reserved(), 0U);
  }
}

TEST_F(LoaderTest, ACancelledLoadReadsNoFurtherPiece) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  const LoadRequest request = Request(1, Residency::kWarm);
  os_.Before("Populate", [&] { request.cancel->Cancel(); });
  EXPECT_EQ(loader_->Load(request).status().code(), absl::StatusCode::kCancelled);
  EXPECT_LE(os_.calls("Populate"), 2);  // One for each worker.
}

TEST_F(LoaderTest, MissingSidecarsAreNamed) {
  MakeVersion(1, {{"a.safetensors", Weights(1000, 1)}});
  LoadRequest request = Request(1, Residency::kPinned);
  request.policy.requires_files = {"a.safetensors", "tokenizer.json"};
  const absl::Status status = loader_->Load(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Message(status), HasSubstr("tokenizer.json"));
}

TEST_F(LoaderTest, MalformedWeightsAreInvalidWithThePath) {
  MakeVersion(1, {{"a.safetensors", "\x08\0\0\0\0\0\0\0notjson!"}});
  const absl::Status status = Load(1, Residency::kPinned).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status), HasSubstr("versions/1"));
}

TEST_F(LoaderTest, AMissingVersionIsNotFound) {
  MakeVersion(1, {{"a.safetensors", Weights(1000, 1)}});
  EXPECT_EQ(Load(9, Residency::kPinned).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(LoaderTest, LoadsThatRaceForASharedShardReadItOnce) {
  const std::string base = Weights(kWeights, 1);
  constexpr int kLoads = 4;
  for (int i = 1; i <= kLoads; ++i) {
    MakeVersion(static_cast<uint64_t>(i),
                {{"base.safetensors", base}, {"own.safetensors", Weights(1000, 10 + i)}});
  }
  std::vector<std::shared_ptr<const ResidentVersion>> versions(kLoads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kLoads; ++i) {
    threads.emplace_back([&, i] {
      auto version = Load(static_cast<uint64_t>(i) + 1, Residency::kPinned);
      ASSERT_TRUE(version.ok()) << version.status();
      versions[static_cast<size_t>(i)] = *std::move(version);
    });
  }
  for (std::thread& thread : threads) thread.join();
  uint64_t disk_bytes = 0;
  std::set<const HostRegion*> shared;
  for (const auto& version : versions) {
    ASSERT_NE(version, nullptr);
    disk_bytes += version->report.disk_bytes;
    shared.insert(version->regions[0].get());
  }
  EXPECT_EQ(shared.size(), 1U);
  EXPECT_EQ(disk_bytes, base.size() + kLoads * Weights(1000, 0).size());
}

TEST_F(LoaderTest, AWaitingLoadTakesOverWhenTheOtherFails) {
  const std::string base = Weights(kWeights, 1);
  MakeVersion(1, {{"base.safetensors", base}});
  MakeVersion(2, {{"base.safetensors", base}});
  const LoadRequest first = Request(1, Residency::kPinned);
  LoadRequest second = Request(2, Residency::kPinned);
  // The second cancels the first once it waits for it.
  second.progress = [&](const LoadProgress& progress) {
    if (progress.phase == "wait") first.cancel->Cancel();
  };
  absl::StatusOr<std::shared_ptr<const ResidentVersion>> result = nullptr;
  std::thread other;
  bool begun = false;
  std::mutex mutex;
  os_.Before("Populate", [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    if (begun) return;
    begun = true;
    other = std::thread([&] { result = loader_->Load(second); });
    while (!first.cancel->cancelled()) std::this_thread::yield();
  });
  EXPECT_EQ(loader_->Load(first).status().code(), absl::StatusCode::kCancelled);
  other.join();
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ((*result)->report.disk_bytes, base.size());
  EXPECT_TRUE(HasPhase((*result)->report, "wait"));
}

TEST_F(LoaderTest, ALoadOnTheOnlyPoolThreadNeedsNoOther) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  pool_ = std::make_unique<ThreadPool>("one", 1);
  loader_ = MakeLoader({.threads = 4});
  absl::Status status = absl::UnknownError("not run");
  pool_->Post([&] { status = Load(1, Residency::kPinned).status(); });
  pool_.reset();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(LoaderTest, ProgressTellsEveryPhaseInOrder) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  LoadRequest request = Request(1, Residency::kPinned);
  std::vector<std::string> phases;
  request.progress = [&](const LoadProgress& progress) {
    if (phases.empty() || phases.back() != progress.phase) phases.push_back(progress.phase);
    EXPECT_LE(progress.bytes_done, progress.bytes_total);
  };
  ASSERT_TRUE(loader_->Load(request).ok());
  EXPECT_THAT(phases, testing::ElementsAre("open", "map", "prewarm", "pin", "index"));
}

TEST_F(LoaderTest, VerifyFindsTheFirstBadChunk) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}, {"z.json", "{}"}});
  EXPECT_TRUE(loader_->Verify(Request(1, Residency::kPinned)).ok());
  Overwrite(PathOf(1, "a.safetensors"), 3 * kChunk, "XXXX");
  Overwrite(PathOf(1, "a.safetensors"), 4 * kChunk, "XXXX");
  const absl::Status status = loader_->Verify(Request(1, Residency::kPinned));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(status), HasSubstr(PathOf(1, "a.safetensors") + ": chunk 3"));
}

TEST_F(LoaderTest, VerifyTellsOfBadBytesBeforeWhatMayPass) {
  MakeVersion(1, {{"a.safetensors", Weights(100, 1)}, {"b.safetensors", Weights(200, 2)}});
  loader_ = MakeLoader({.threads = 1});  // In the order of the files.
  const int before = os_.calls("ReadAt");
  ASSERT_TRUE(loader_->Verify(Request(1, Residency::kPinned)).ok());
  const int reads = os_.calls("ReadAt") - before;  // Of the manifest, then one of each file.
  Overwrite(PathOf(1, "b.safetensors"), 150, "x");
  os_.FailCall("ReadAt", reads - 1, EIO);
  const absl::Status bad = loader_->Verify(Request(1, Residency::kPinned));
  EXPECT_EQ(bad.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Message(bad), HasSubstr("b.safetensors: chunk 0"));
}

TEST_F(LoaderTest, VerifyChecksTheWholeFileTooAndCanBeCancelled) {
  MakeVersion(1, {{"a.safetensors", Weights(kWeights, 1)}});
  const std::string path = PathOf(1, "manifest.json");
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  auto manifest = ParseManifest(text.str());
  ASSERT_TRUE(manifest.ok());
  manifest->files[0].sha256 = Sha256({});
  manifest->digest = VersionDigest(manifest->files);
  Truncate(path, 0);
  Overwrite(path, 0, SerializeManifest(*manifest));
  const absl::Status status = loader_->Verify(Request(1, Residency::kPinned));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  const LoadRequest request = Request(1, Residency::kPinned);
  request.cancel->Cancel();
  EXPECT_EQ(loader_->Verify(request).code(), absl::StatusCode::kCancelled);
}

TEST_F(LoaderTest, AManifestThatLiesAboutADigestSpoilsNoOtherVersion) {
  // Version 2 claims the digest of version 1's file for other bytes, with chunks that fit those.
  const std::string good = Weights(kWeights, 1);
  MakeVersion(1, {{"a.safetensors", good}});
  MakeVersion(2, {{"a.safetensors", Weights(kWeights, 2)}});
  const std::string path = PathOf(2, "manifest.json");
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  auto manifest = ParseManifest(text.str());
  ASSERT_TRUE(manifest.ok());
  manifest->files[0].sha256 = Sha256(std::as_bytes(std::span(good)));
  manifest->digest = VersionDigest(manifest->files);
  Truncate(path, 0);
  Overwrite(path, 0, SerializeManifest(*manifest));
  const auto liar = Load(2, Residency::kPinned);
  const auto honest = Load(1, Residency::kPinned);
  ASSERT_TRUE(honest.ok()) << honest.status();
  EXPECT_EQ(Text((*honest)->regions[0]->data()), good);
}

class SigbusEnvironment final : public testing::Environment {
 public:
  void SetUp() override { InstallSigbusHandler(); }
};
[[maybe_unused]] const auto* const kEnvironment =
    testing::AddGlobalTestEnvironment(new SigbusEnvironment);

}  // namespace
}  // namespace modelhost
