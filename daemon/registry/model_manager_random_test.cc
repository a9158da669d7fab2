// The real manager under random operations, failing system calls and crashes, one task at a time:
// what runs next on the loop, on the pools, or not at all any more, is drawn. After each step what
// the manager shows, what is on disk and what was booked must fit together. The seed is printed;
// MODELHOST_SEED repeats a run.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/platform/linux_os.h"
#include "daemon/registry/model_manager.h"
#include "proto/abi/catalogue_page.h"
#include "tests/fakes/fault_os.h"
#include "tests/fakes/fixed_machine.h"
#include "tests/fakes/manual_loop.h"
#include "tests/fakes/model_files.h"
#include "tests/fakes/small_index.h"

namespace modelhost {
namespace {

constexpr int kSteps = 6000;
constexpr uint64_t kLastVersion = 3;
std::vector<std::string> ModelNames() { return {"planner", "detector"}; }

// What clients would see.
class ShownPage : public LabelPublisher {
 public:
  void Publish(std::span<const LabelChange> changes) override {
    for (const LabelChange& change : changes) shown[{change.model, change.label}] = change.to;
  }
  uint32_t SlotOf(const std::string&, const std::string&) override { return abi::kNoSlot; }
  std::map<std::pair<std::string, std::string>, uint64_t> shown;
};

class Witness : public Observer {
 public:
  void OnInvalidTransition(const VersionKey& key, absl::string_view track, absl::string_view from,
                           absl::string_view to) override {
    forbidden = absl::StrCat(key.ToString(), " ", track, " ", from, " -> ", to);
  }
  void OnDrained(const VersionKey& key, absl::Duration, bool deadline) override {
    if (deadline) released.insert(key);
  }
  std::string forbidden;
  std::set<VersionKey> released;  // Some of whose leases are on bytes that a deadline let go.
};

// One daemon's life: all that a crash takes with it.
struct Life {
  explicit Life(Os& os_in, ManualClock& clock_in, const std::filesystem::path& base)
      : loop(clock_in) {
    store = *Store::Open(os_in, base / "store", base / "state", ::geteuid());
    state_dir = *os_in.OpenDir(base / "state");
    LabelFile labels = *LoadLabels(os_in, state_dir);
    labels.epoch += 1;
    EXPECT_TRUE(SaveLabels(os_in, state_dir, labels).ok());
    verified = VerifiedFiles::Load(os_in, state_dir);
    publisher = std::make_unique<Publisher>(*store, verified.get());
    EXPECT_TRUE(publisher->SweepIncoming().ok());
    LoaderOptions loader_options;
    loader_options.memlock = MemlockPolicy::kOff;
    loader = std::make_unique<Loader>(os_in, clock_in, *store, *verified, chunks, regions, host,
                                      memlock, indexer, index, machine, loader_options);
    std::vector<std::string> unknown;
    access = AccessPolicy::Make({}, {}, ::geteuid(), &unknown);
    ManagerOptions options;
    options.memlock = MemlockPolicy::kOff;
    options.own_uid = ::geteuid();
    for (const std::string& model : ModelNames()) {
      options.model_policies[model].keep_previous = absl::Seconds(30);
    }
    manager = std::make_unique<ModelManager>(
        ModelManager::Deps{os_in, clock_in, loop, pool, short_work, *store, *publisher, *loader,
                           *verified, host, memlock, page, state_dir, *access, machine},
        options, labels);
    manager->AddObserver(&witness);
    manager->Start();
  }

  // In this order nothing outlives what it refers to: tasks first, with all they hold.
  ~Life() {
    pool.reset_tasks();
    short_work.reset_tasks();
  }

  // Tasks that never ran are destroyed with what they hold, as a crash forgets them.
  class Forgetful : public Executor {
   public:
    void Post(Task task) override { tasks_.push_back(std::move(task)); }
    bool RunOne() {
      if (tasks_.empty()) return false;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      std::move(task)();
      return true;
    }
    void reset_tasks() { tasks_.clear(); }

   private:
    std::deque<Task> tasks_;
  };

  BudgetPool host{"host", 900};  // Bytes: three versions.
  BudgetPool memlock{"memlock", UINT64_MAX};
  std::unique_ptr<Store> store;
  UniqueFd state_dir;
  std::unique_ptr<VerifiedFiles> verified;
  std::unique_ptr<Publisher> publisher;
  RegionCache regions;
  InProcessIndexer indexer;
  SmallIndex index;
  FixedMachine machine;
  InlineExecutor chunks;
  std::unique_ptr<Loader> loader;
  std::optional<AccessPolicy> access;
  ShownPage page;
  Witness witness;
  ManualLoop loop;
  Forgetful pool;
  Forgetful short_work;
  std::unique_ptr<ModelManager> manager;
};

class RandomLife : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "random_life_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    base_ = pattern;
    std::filesystem::create_directories(base_ / "state");
    float value = 0;
    for (const std::string& model : ModelNames()) {
      for (uint64_t version = 1; version <= kLastVersion; ++version) {
        value += 1;
        WriteVersion(
            base_ / "store", model, version,
            {{"model.safetensors", SafetensorsBytes({{"w", std::vector<float>(48, value)}})}});
      }
    }
    const char* given = std::getenv("MODELHOST_SEED");
    seed_ = given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    random_.seed(seed_);
    std::printf("MODELHOST_SEED=%llu\n", static_cast<unsigned long long>(seed_));
  }

  void TearDown() override {
    life_.reset();
    ASSERT_TRUE(
        LinuxOs().RemoveTreeAt(*LinuxOs().OpenDir(base_.parent_path()), base_.filename()).ok());
  }

  uint64_t Draw(uint64_t below) {
    return std::uniform_int_distribution<uint64_t>(0, below - 1)(random_);
  }
  VersionKey DrawKey() { return {ModelNames()[Draw(2)], 1 + Draw(kLastVersion)}; }

  void Boot() {
    os_.Heal();
    life_ = std::make_unique<Life>(os_, clock_, base_);
    sessions_.clear();
    leases_.clear();
  }

  // Everything that is under way comes to its end.
  void Settle() {
    bool more = true;
    while (more) {
      more = life_->loop.RunOne();
      more = life_->pool.RunOne() || more;
      more = life_->short_work.RunOne() || more;
    }
  }

  void DoOne() {
    ModelManager& manager = *life_->manager;
    switch (Draw(24)) {
      case 0:
      case 1:
        (void)manager.Load(DrawKey(), 0);
        break;
      case 2:
        (void)manager.Unload(DrawKey(),
                             Draw(2) == 0 ? absl::InfiniteDuration() : absl::Seconds(Draw(5)),
                             Draw(2) == 0, 0);
        break;
      case 3:
      case 4: {
        SwapRequest request;
        request.targets = {{ModelNames()[0], 1 + Draw(kLastVersion)}};
        if (Draw(2) == 0) request.targets[0].model = ModelNames()[1];
        if (request.targets[0].model == ModelNames()[0] && Draw(2) == 0) {
          request.targets.push_back({ModelNames()[1], 1 + Draw(kLastVersion)});
        }
        (void)manager.Swap(request, 0);
        break;
      }
      case 5:
        (void)manager.Rollback(ModelNames()[Draw(2)], "", 0, 0);
        break;
      case 6: {
        const VersionKey key = DrawKey();
        manager.SetLabel(key.model, Draw(2) == 0 ? "canary" : "stable", key.version, std::nullopt,
                         [](const absl::StatusOr<LabelChange>&) {});
        break;
      }
      case 7:
        manager.RemoveLabel(ModelNames()[Draw(2)], Draw(3) == 0 ? "stable" : "canary", std::nullopt,
                            [](const absl::StatusOr<LabelChange>&) {});
        break;
      case 8:
      case 9: {
        if (sessions_.size() < 3) {
          Peer peer;
          peer.uid = ::geteuid();
          sessions_.push_back(manager.BeginSession(peer, "native"));
        }
        const SessionId session = sessions_[Draw(sessions_.size())];
        AcquireRef ref;
        ref.model = ModelNames()[Draw(2)];
        if (Draw(2) == 0) {
          ref.label = "stable";
        } else {
          ref.version = 1 + Draw(kLastVersion);
        }
        if (auto grants = manager.Acquire(session, std::span(&ref, 1)); grants.ok()) {
          EXPECT_NE(grants->front().resident, nullptr);
          leases_.emplace_back(session, grants->front().lease);
        }
        break;
      }
      case 10:
        if (!leases_.empty()) {
          const size_t which = Draw(leases_.size());
          (void)manager.Release(leases_[which].first, leases_[which].second);
          leases_.erase(leases_.begin() + static_cast<int64_t>(which));
        }
        break;
      case 11:
        if (!sessions_.empty()) {
          const size_t which = Draw(sessions_.size());
          manager.EndSession(sessions_[which], "gone");
          std::erase_if(leases_,
                        [&](const auto& lease) { return lease.first == sessions_[which]; });
          sessions_.erase(sessions_.begin() + static_cast<int64_t>(which));
        }
        break;
      case 12: {
        const auto running = manager.ListOperations();
        if (!running.empty()) (void)manager.CancelOperation(running[Draw(running.size())].id);
        break;
      }
      case 13:
        manager.Rescan([](const auto&) {});
        break;
      case 14:
        (void)manager.Verify(DrawKey(), 0);
        break;
      case 15:
        life_->loop.AdvanceTime(absl::Seconds(1 + Draw(40)));
        break;
      case 16: {
        static constexpr std::array kCalls = {"Sync",   "Rename",       "WriteAt",
                                              "ReadAt", "CreateFileAt", "Link"};
        os_.FailCall(kCalls[Draw(kCalls.size())], 1 + static_cast<int>(Draw(4)), EIO);
        break;
      }
      case 17:
        os_.Heal();
        break;
      case 18:
        if (Draw(4) == 0) {
          ++crashes_;
          life_.reset();
          Boot();
        }
        break;
      default:
        for (uint64_t more = 1 + Draw(6); more > 0; --more) {
          if (Draw(2) == 0) {
            (void)life_->loop.RunOne();
          } else if (Draw(2) == 0) {
            (void)life_->pool.RunOne();
          } else {
            (void)life_->short_work.RunOne();
          }
        }
        break;
    }
  }

  std::filesystem::path Dir(const std::string& model, uint64_t version) const {
    return base_ / "store/models" / model / "versions" / std::to_string(version);
  }

  void Check() {
    const ModelManager& manager = *life_->manager;
    ASSERT_EQ(life_->witness.forbidden, "");
    const auto on_disk = LoadLabels(real_os_, life_->state_dir);
    ASSERT_TRUE(on_disk.ok()) << on_disk.status();
    for (const auto& [name, label] : on_disk->labels) {
      if (label.version == 0) continue;
      ASSERT_TRUE(std::filesystem::exists(Dir(name.first, label.version)))
          << "a label on disk names nothing: " << name.first << "@" << label.version;
    }
    for (const auto& [name, version] : life_->page.shown) {
      if (version == 0) continue;
      const auto shown = manager.Version({name.first, version});
      ASSERT_TRUE(shown.ok()) << shown.status();
      ASSERT_EQ(PhaseName(shown->phase), "READY")
          << name.first << "@" << version << " is in the page";
      ASSERT_NE(shown->resident, nullptr);
    }
    std::set<const HostRegion*> regions;
    uint64_t booked = 0;
    for (const ModelSnapshot& model : manager.Models()) {
      for (const VersionSnapshot& version : model.versions) {
        if (version.resident == nullptr) continue;
        for (const auto& region : version.resident->regions) {
          if (regions.insert(region.get()).second) booked += region->booked_bytes();
        }
      }
    }
    booked_by_resident_ = booked;
    ASSERT_GE(life_->host.reserved(), booked) << "bytes are resident that are not booked";
    ASSERT_LE(life_->host.reserved(), life_->host.limit());
    for (const Lease& lease : manager.Leases()) {
      if (life_->witness.released.contains(lease.key)) continue;
      const auto leased = manager.Version(lease.key);
      ASSERT_TRUE(leased.ok()) << leased.status();
      ASSERT_NE(leased->resident, nullptr) << lease.key.ToString() << ": a lease is on freed bytes";
    }
  }

  // With nothing under way and nothing failing, bookings are exact and every label serves.
  void CheckAtRest() {
    os_.Heal();
    Settle();
    Check();
    if (HasFatalFailure()) return;
    EXPECT_EQ(life_->host.reserved(), booked_by_resident_) << "a booking was lost";
    // What serves nobody gives way, and what was named but failed is asked for again.
    for (const SessionId session : sessions_) life_->manager->EndSession(session, "gone");
    sessions_.clear();
    leases_.clear();
    Settle();
    // More than fits may be named: two labels a model, two models. Those of one label do.
    for (const std::string& model : ModelNames()) {
      life_->manager->RemoveLabel(model, "canary", std::nullopt, [](const auto&) {});
    }
    Settle();
    for (const std::string& model : ModelNames()) {
      const auto named = life_->manager->Resolve(model, "stable");
      if (!named.ok()) continue;
      (void)life_->manager->Load(*named, 0);
      Settle();
      const auto version = life_->manager->Version(*named);
      ASSERT_TRUE(version.ok());
      EXPECT_EQ(PhaseName(version->phase), "READY")
          << named->ToString() << " can not serve: " << version->error;
    }
    Check();
  }

  std::filesystem::path base_;
  LinuxOs real_os_;
  FaultOs os_{real_os_};
  ManualClock clock_;
  std::unique_ptr<Life> life_;
  uint64_t seed_ = 0;
  std::mt19937_64 random_;
  std::vector<SessionId> sessions_;
  std::vector<std::pair<SessionId, LeaseId>> leases_;
  uint64_t booked_by_resident_ = 0;
  int crashes_ = 0;
};

TEST_F(RandomLife, KeepsItsPromisesAfterEveryStep) {
  Boot();
  Settle();
  for (int step = 0; step < kSteps && !HasFailure(); ++step) {
    SCOPED_TRACE(absl::StrCat("step ", step, " with MODELHOST_SEED=", seed_));
    DoOne();
    Check();
    if (step % 100 == 99 && !HasFailure()) CheckAtRest();
  }
  std::printf("%d steps, %d crashes, epoch %llu\n", kSteps, crashes_,
              static_cast<unsigned long long>(life_->manager->Status().epoch));
}

}  // namespace
}  // namespace modelhost
