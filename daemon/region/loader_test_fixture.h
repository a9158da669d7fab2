// For tests of the loader: a real store in a temporary directory, versions written by hand, the
// real Os behind a FaultOs, and a small index builder.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/platform/clock.h"
#include "daemon/platform/linux_os.h"
#include "daemon/platform/thread_pool.h"
#include "daemon/region/loader.h"
#include "daemon/region/memory_budget.h"
#include "daemon/region/region_cache.h"
#include "daemon/store/store.h"
#include "daemon/store/verified.h"
#include "tests/fakes/fault_os.h"
#include "tests/fakes/fixed_machine.h"

namespace modelhost {

// Seals the tensors' names: enough to see that the loader hands everything on.
class NameIndexBuilder final : public IndexBuilder {
 public:
  absl::StatusOr<SealedRegion> Build(const ResidentVersion& version,
                                     const std::vector<ComponentIndex>& components,
                                     const DevicePlan& plan) override;
  std::atomic<int> builds = 0;  // Loads race for one.
};

class LoaderTest : public testing::Test {
 protected:
  static constexpr uint64_t kChunk = uint64_t{64} << 10;

  void SetUp() override;
  void TearDown() override;

  // A safetensors file with one U8 tensor "t" of `bytes` bytes made from `seed`.
  static std::string Weights(uint64_t bytes, int seed);
  // Writes the version with its manifest; the files' modes as publish leaves them.
  void MakeVersion(uint64_t number, const std::map<std::string, std::string>& files,
                   const std::map<std::string, std::string>& requirements = {});
  std::string PathOf(uint64_t number, const std::string& file) const;
  // Ways to spoil a published file.
  void Overwrite(const std::string& path, uint64_t offset, const std::string& with) const;
  void Truncate(const std::string& path, uint64_t bytes) const;

  std::unique_ptr<Loader> MakeLoader(LoaderOptions options = {});
  LoadRequest Request(uint64_t number, Residency residency) const;
  absl::StatusOr<std::shared_ptr<const ResidentVersion>> Load(uint64_t number, Residency residency);

  LinuxOs real_os_;
  FaultOs os_{real_os_};
  SystemClock clock_;
  std::string root_;
  UniqueFd state_dir_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<VerifiedFiles> verified_;
  std::unique_ptr<BudgetPool> host_;
  std::unique_ptr<BudgetPool> memlock_;
  RegionCache regions_;
  InProcessIndexer indexer_;
  NameIndexBuilder builder_;
  FixedMachine machine_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Loader> loader_;
};

}  // namespace modelhost
