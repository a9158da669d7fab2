// For tests of the registry: the verbs on real parts, which are a store in a temporary directory,
// the loader, a control loop with its thread. What a test waits for is an event with a deadline,
// never a time.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "absl/synchronization/notification.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/linux_os.h"
#include "daemon/platform/thread_pool.h"
#include "daemon/registry/model_manager.h"
#include "proto/abi/catalogue_page.h"
#include "tests/fakes/fault_os.h"
#include "tests/fakes/fixed_machine.h"
#include "tests/fakes/model_files.h"
#include "tests/fakes/small_index.h"

namespace modelhost {

inline constexpr auto kPatience = std::chrono::seconds(20);

class RecordingPage : public LabelPublisher {
 public:
  void Publish(std::span<const LabelChange> changes) override {
    published.emplace_back(changes.begin(), changes.end());
  }
  uint32_t SlotOf(const std::string&, const std::string&) override { return 3; }
  std::vector<std::vector<LabelChange>> published;  // Control thread.
};

class RecordingObserver : public Observer {
 public:
  void OnVersion(const VersionSnapshot& version) override {
    phases[version.key].push_back(version.phase);
  }
  void OnInvalidTransition(const VersionKey& key, absl::string_view track, absl::string_view from,
                           absl::string_view to) override {
    ++invalid;
    ADD_FAILURE() << key.ToString() << ": forbidden " << track << " " << from << " -> " << to;
  }
  std::map<VersionKey, std::vector<Phase>> phases;  // Control thread.
  int invalid = 0;
};

class ManagerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "manager_XXXXXX";
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    base_ = pattern;
    std::filesystem::create_directories(base_ / "state");
    Put(1, {1, 2, 3});
    Put(2, {4, 5, 6});
  }

  void TearDown() override {
    Shutdown();
    ASSERT_TRUE(
        LinuxOs().RemoveTreeAt(*LinuxOs().OpenDir(base_.parent_path()), base_.filename()).ok());
  }

  void Put(uint64_t version, const std::vector<float>& values,
           const std::string& model = "planner") {
    WriteVersion(base_ / "store", model, version,
                 {{"model.safetensors", SafetensorsBytes({{"w", values}})}});
  }

  std::filesystem::path File(uint64_t version) const {
    return base_ / "store/models/planner/versions" / std::to_string(version) / "model.safetensors";
  }

  void Boot(ManagerOptions options = {}, uint64_t host_budget = uint64_t{1} << 30) {
    os_ = std::make_unique<FaultOs>(real_os_);
    loop_ = *EventLoop::Create(clock_);
    store_ = *Store::Open(*os_, base_ / "store", base_ / "state", ::geteuid());
    state_dir_ = *os_->OpenDir(base_ / "state");
    LabelFile labels = *LoadLabels(*os_, state_dir_);
    labels.epoch += 1;
    ASSERT_TRUE(SaveLabels(*os_, state_dir_, labels).ok());
    verified_ = VerifiedFiles::Load(*os_, state_dir_);
    publisher_ = std::make_unique<Publisher>(*store_, verified_.get());
    host_ = std::make_unique<BudgetPool>("host", host_budget);
    memlock_ = std::make_unique<BudgetPool>("memlock", UINT64_MAX);
    chunks_ = std::make_unique<ThreadPool>("chunks", 2);
    LoaderOptions loader_options;
    loader_options.memlock = MemlockPolicy::kOff;
    loader_ =
        std::make_unique<Loader>(*os_, clock_, *store_, *verified_, *chunks_, regions_, *host_,
                                 *memlock_, indexer_, index_, machine_, loader_options);
    UseFdStore(labels.epoch);
    DeviceTier* const devices = MakeDevices();
    if (devices != nullptr) loader_->UseDevices(*devices);
    pool_ = std::make_unique<ThreadPool>("load", load_threads_);
    short_work_ = std::make_unique<ThreadPool>("work", 2);
    std::vector<std::string> unknown;
    access_ = AccessPolicy::Make({}, {}, ::geteuid(), &unknown);
    page_ = std::make_unique<RecordingPage>();
    observer_ = std::make_unique<RecordingObserver>();
    options.memlock = MemlockPolicy::kOff;
    options.own_uid = ::geteuid();
    options.health_interval = absl::Milliseconds(50);
    manager_ = std::make_unique<ModelManager>(
        ModelManager::Deps{*os_, clock_, *loop_, *pool_, *short_work_, *store_, *publisher_,
                           *loader_, *verified_, *host_, *memlock_, *page_, state_dir_, *access_,
                           machine_, parking_.get(), restored_.get(), devices},
        options, labels);
    manager_->AddObserver(observer_.get());
    absl::Notification running;  // Until the loop runs, this thread counts as it.
    loop_->Post([&] { running.Notify(); });
    thread_ = std::thread([this] { loop_->Run(); });
    running.WaitForNotification();
    manager_->Start();
    Eventually([this] {
      return manager_->Status().not_ready !=
             std::vector<std::string>{"the store has not been read yet"};
    });
  }

  void Shutdown() {
    if (!thread_.joinable()) return;
    loop_->Post([this] { manager_->Stop([this] { loop_->Quit(); }); });
    thread_.join();
    EXPECT_EQ(observer_->invalid, 0);
    manager_.reset();
    pool_.reset();
    short_work_.reset();
    loader_.reset();
    parking_.reset();
    restored_.reset();
    chunks_.reset();
  }

  // With an fd store: makes parking_ and restored_, and gives them to the loader.
  virtual void UseFdStore(uint64_t /*epoch*/) {}
  // Null: there is no device tier. After host_; outlives the manager.
  virtual DeviceTier* MakeDevices() { return nullptr; }

  void Reboot() {
    Shutdown();
    Boot();
  }

  template <typename Function>
  auto OnLoop(Function function) {
    return RunAndWait(*loop_, std::move(function));
  }

  // Waits until `condition` holds on the control thread.
  void Eventually(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!OnLoop(condition)) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "it never came to be";
      std::this_thread::yield();
    }
  }

  OperationSnapshot Await(absl::StatusOr<OperationId> id) {
    EXPECT_TRUE(id.ok()) << id.status();
    if (!id.ok()) return {};
    auto done = std::make_shared<std::promise<OperationSnapshot>>();
    auto told = std::make_shared<bool>(false);
    auto future = done->get_future();
    OnLoop([&] {
      return manager_
          ->SubscribeOperation(*id,
                               [done, told](const OperationSnapshot& operation) {
                                 if (!operation.finished_state() || *told) return;
                                 *told = true;
                                 done->set_value(operation);
                               })
          .status();
    }).IgnoreError();
    const bool ended = future.wait_for(kPatience) == std::future_status::ready;
    EXPECT_TRUE(ended) << "the operation did not end";
    return ended ? future.get() : OperationSnapshot{};
  }

  OperationSnapshot Swap(uint64_t version, std::optional<uint64_t> if_current = std::nullopt) {
    SwapRequest request;
    request.targets = {{"planner", version}};
    request.if_current = if_current;
    return Await(OnLoop([&] { return manager_->Swap(request, 0); }));
  }

  Phase PhaseOf(uint64_t version) {
    return OnLoop([&] { return manager_->Version({"planner", version})->phase; });
  }

  SessionId NewSession(uint32_t uid = ::geteuid(), uint32_t gid = 0) {
    Peer peer;
    peer.uid = uid;
    peer.gid = gid;
    return OnLoop([&] { return manager_->BeginSession(peer, "native"); });
  }

  absl::StatusOr<ModelManager::RescanResult> Rescan() {
    auto done = std::make_shared<std::promise<absl::StatusOr<ModelManager::RescanResult>>>();
    OnLoop([&] { manager_->Rescan([done](const auto& result) { done->set_value(result); }); });
    auto future = done->get_future();
    const bool ended = future.wait_for(kPatience) == std::future_status::ready;
    EXPECT_TRUE(ended) << "the scan did not end";
    if (!ended) return absl::DeadlineExceededError("rescan");
    return future.get();
  }

  OperationSnapshot Load(uint64_t version, const std::string& model = "planner") {
    return Await(OnLoop([&] { return manager_->Load({model, version}, 0); }));
  }

  VersionSnapshot Version(uint64_t version, const std::string& model = "planner") {
    return OnLoop([&] { return *manager_->Version({model, version}); });
  }

  // Publishes one file, model.safetensors, by descriptor.
  OperationSnapshot PublishOne(uint64_t version, const std::string& bytes,
                               const std::map<std::string, std::string>& requirements = {}) {
    WriteFile(base_ / "source/model.safetensors", bytes);
    const PublishRequest request{
        "planner", version, {{"model.safetensors", bytes.size()}}, "", requirements};
    Peer owner;
    owner.uid = ::geteuid();
    const auto ticket = OnLoop([&] { return manager_->PublishFromDescriptors(request, owner); });
    EXPECT_TRUE(ticket.ok()) << ticket.status();
    if (!ticket.ok()) return {};
    std::vector<UniqueFd> fds;
    fds.push_back(*real_os_.OpenFileAt(*real_os_.OpenDir(base_ / "source"), "model.safetensors"));
    EXPECT_TRUE(OnLoop([&] {
                  return manager_->OfferUpload(owner, ticket->ticket, 0, std::move(fds), true);
                }).ok());
    return Await(ticket->operation);
  }

  // While no load runs.
  void SetPlatform(const std::string& platform) {
    OnLoop([&] { machine_.facts.platform = {{platform}, "uname", ""}; });
  }

  // Changes the last byte of a version's file where it is.
  void Flip(uint64_t version) {
    std::filesystem::permissions(File(version), std::filesystem::perms(0644));
    {
      std::fstream file(File(version), std::ios::in | std::ios::out | std::ios::binary);
      file.seekg(-1, std::ios::end);
      const char last = static_cast<char>(file.get());
      file.seekp(-1, std::ios::end);
      file.put(static_cast<char>(last ^ 1));
    }
    std::filesystem::permissions(File(version), std::filesystem::perms(0444));
  }

  absl::StatusOr<std::vector<Grant>> Acquire(SessionId session, AcquireRef ref) {
    return OnLoop([&] { return manager_->Acquire(session, std::span(&ref, 1)); });
  }

  std::filesystem::path base_;
  LinuxOs real_os_;
  SystemClock clock_;
  std::unique_ptr<FaultOs> os_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Store> store_;
  UniqueFd state_dir_;
  std::unique_ptr<VerifiedFiles> verified_;
  std::unique_ptr<Publisher> publisher_;
  std::unique_ptr<BudgetPool> host_;
  std::unique_ptr<BudgetPool> memlock_;
  RegionCache regions_;
  InProcessIndexer indexer_;
  SmallIndex index_;
  FixedMachine machine_;
  std::unique_ptr<ThreadPool> chunks_;
  std::unique_ptr<Parking> parking_;
  std::unique_ptr<RestoredMemory> restored_;
  std::unique_ptr<Loader> loader_;
  int load_threads_ = 3;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<ThreadPool> short_work_;
  std::optional<AccessPolicy> access_;
  std::unique_ptr<RecordingPage> page_;
  std::unique_ptr<RecordingObserver> observer_;
  std::unique_ptr<ModelManager> manager_;
  std::thread thread_;
};

// Some calls of the system hang for as long as a test likes, and at most until its end.
class HangingManagerTest : public ManagerTest {
 protected:
  void TearDown() override {
    Unblock();
    ManagerTest::TearDown();
  }
  // From now on calls of `call` hang, until Unblock.
  void Block(const std::string& call) {
    os_->Before(call, [this] {
      hanging_.store(true);
      release_.WaitForNotification();
    });
  }
  void AwaitHanging() {
    Eventually([this] { return hanging_.load(); });
  }
  void Unblock() {
    if (!release_.HasBeenNotified()) release_.Notify();
  }

  absl::Notification release_;
  std::atomic<bool> hanging_{false};
};

}  // namespace modelhost
