// The registry and the copies on GPUs: who is given them, what a lost GPU means, what stays booked.
#include <gmock/gmock.h>

#include "daemon/registry/model_manager_test_fixture.h"
#include "tests/fakes/fake_device.h"

namespace modelhost {
namespace {

using ::testing::HasSubstr;

constexpr char kGpu[] = "GPU-00000000-0000-0000-0000-000000000001";
constexpr char kOther[] = "GPU-00000000-0000-0000-0000-000000000002";
constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kCopy = 2 * kMiB;  // Of one small file: the granularity.

class DeviceManagerTest : public ManagerTest {
 protected:
  void SetUp() override {
    ManagerTest::SetUp();
    gpus_.Add(kGpu, "vmm_fd", uint64_t{64} * kMiB, kCopy);
  }
  void TearDown() override {
    Shutdown();
    devices_.reset();
    ManagerTest::TearDown();
  }

  // As Boot, with the GPUs of `gpus_` and a policy for planner.
  void BootWith(DevicePolicy policy, uint64_t budget_bytes = uint64_t{32} * kMiB) {
    DeviceTierOptions options;
    options.budget_bytes = budget_bytes;
    options.ring_bytes = kMiB;
    device_budget_ = options;
    ManagerOptions manager_options;
    manager_options.device_check_interval = absl::Milliseconds(20);
    manager_options.model_policies["planner"].device = policy;
    Boot(manager_options, host_budget_);
  }
  DeviceTier* MakeDevices() override {
    devices_ = std::make_unique<DeviceTier>(gpus_, clock_, *host_, device_budget_);
    devices_->Discover();
    return devices_.get();
  }

  static AcquireRef OnGpu(uint64_t version,
                          AcquireRef::Device device = AcquireRef::Device::kRequired,
                          const std::string& gpu = kGpu) {
    AcquireRef ref;
    ref.model = "planner";
    ref.version = version;
    ref.device = device;
    ref.gpu = gpu;
    return ref;
  }
  uint64_t Booked() { return devices_->Snapshot().gpus.front().reserved_bytes; }

  FakeGpus gpus_;
  uint64_t host_budget_ = uint64_t{1} << 30;
  DeviceTierOptions device_budget_;
  std::unique_ptr<DeviceTier> devices_;
};

DevicePolicy All() {
  DevicePolicy policy;
  policy.wanted = true;
  return policy;
}

TEST_F(DeviceManagerTest, ALoadedVersionIsOnTheGpuAndGrantedWithItsMemory) {
  BootWith(All());
  EXPECT_TRUE(Load(1).status.ok());
  EXPECT_EQ(Version(1).device_residency, DeviceResidency::kResident);
  EXPECT_EQ(Booked(), kCopy);
  const SessionId session = NewSession();
  const auto grants = Acquire(session, OnGpu(1));
  ASSERT_TRUE(grants.ok()) << grants.status();
  ASSERT_NE(grants->front().device, nullptr);
  EXPECT_EQ(grants->front().device->gpu, kGpu);
  EXPECT_EQ(grants->front().device->mode, abi::DeviceMode::kVmmFd);
  const auto leases = OnLoop([&] { return manager_->Leases(); });
  ASSERT_EQ(leases.size(), 1U);
  EXPECT_EQ(leases.front().gpu, kGpu);
  EXPECT_EQ(leases.front().transport, "device_vmm_fd");
  EXPECT_EQ(OnLoop([&] { return manager_->Status().importers.at(kGpu); }), 1U);
}

TEST_F(DeviceManagerTest, WhoAsksForNoDeviceIsGivenNone) {
  BootWith(All());
  EXPECT_TRUE(Load(1).status.ok());
  const auto grants = Acquire(NewSession(), OnGpu(1, AcquireRef::Device::kNone));
  ASSERT_TRUE(grants.ok());
  EXPECT_EQ(grants->front().device, nullptr);
  EXPECT_EQ(OnLoop([&] { return manager_->Leases().front().transport; }), "host_file");
}

TEST_F(DeviceManagerTest, AVersionThatIsNotOnTheAskersGpuIsRefusedAtOnceWithTheReason) {
  BootWith({});
  EXPECT_TRUE(Load(1).status.ok());
  EXPECT_EQ(Version(1).device_residency, DeviceResidency::kNone);
  const SessionId session = NewSession();
  const auto refused = Acquire(session, OnGpu(1));
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status()));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("keeps it on the host"));
  const auto content = Acquire(session, OnGpu(1, AcquireRef::Device::kIfAny));
  ASSERT_TRUE(content.ok());
  EXPECT_EQ(content->front().device, nullptr);
  // No waiting cures it: the answer comes before the time that the asker would wait.
  auto answer = std::make_shared<std::promise<absl::Status>>();
  OnLoop([&] {
    manager_->AcquireOrWait(session, {OnGpu(1)}, absl::Hours(1),
                            [answer](auto grants) { answer->set_value(grants.status()); });
  });
  auto future = answer->get_future();
  ASSERT_EQ(future.wait_for(kPatience), std::future_status::ready);
  EXPECT_TRUE(absl::IsFailedPrecondition(future.get()));
}

TEST_F(DeviceManagerTest, AnotherGpuThanTheOneThatHasItIsNamed) {
  BootWith(All());
  EXPECT_TRUE(Load(1).status.ok());
  const auto refused = Acquire(NewSession(), OnGpu(1, AcquireRef::Device::kRequired, kOther));
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status()));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr(kGpu));
}

TEST_F(DeviceManagerTest, NoGpuIsNoErrorAndStaysOnTheHost) {
  gpus_.FailFrom("List", 1, absl::UnavailableError("libcuda.so.1: not found"));
  BootWith(All());
  EXPECT_TRUE(Load(1).status.ok());
  EXPECT_EQ(Version(1).device_residency, DeviceResidency::kNone);
  const auto status = OnLoop([&] { return manager_->Status(); });
  EXPECT_THAT(status.devices.reason, HasSubstr("libcuda"));
  EXPECT_FALSE(Version(1).resident->report.warnings.empty());
}

TEST_F(DeviceManagerTest, AnUploadThatFailsFailsOneLoadAndTheNextOneSucceeds) {
  BootWith(All());
  for (const char* call : {"Create", "Upload"}) {
    gpus_.FailCall(call, 1, absl::UnavailableError("the agent died"));
    const OperationSnapshot load = Load(1);  // Tried again, as for any reason that may pass.
    EXPECT_TRUE(load.status.ok()) << call << ": " << load.status;
    EXPECT_EQ(Version(1).device_residency, DeviceResidency::kResident);
    EXPECT_TRUE(Await(OnLoop([&] {
                  return manager_->Unload({"planner", 1}, {}, false, 0);
                })).status.ok());
    EXPECT_EQ(Booked(), 0U) << call;
    EXPECT_EQ(gpus_.used(kGpu), 0U) << call;
  }
}

// The device's bytes are not the version's: what it garbles quarantines nothing.
TEST_F(DeviceManagerTest, ADeviceThatHoldsOtherBytesDoesNotQuarantineTheVersion) {
  BootWith(All());
  gpus_.FailCall("Upload", 1, absl::DataLossError("read back other bytes"));
  EXPECT_TRUE(Load(1).status.ok());
  EXPECT_EQ(PhaseOf(1), Phase::kReady);
}

TEST_F(DeviceManagerTest, ASwapThatFitsOnlyWithoutTheOldOneTakesResource) {
  BootWith(All(), kCopy);
  EXPECT_TRUE(Swap(1).status.ok());
  EXPECT_EQ(Booked(), kCopy);
  const OperationSnapshot refused = Swap(2);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status)) << refused.status;
  EXPECT_THAT(std::string(refused.status.message()), HasSubstr(kGpu));
  EXPECT_EQ(PhaseOf(1), Phase::kReady);
  SwapRequest request;
  request.targets = {{"planner", 2}};
  request.strategy = "resource";
  request.allow_downtime = true;
  const OperationSnapshot swap = Await(OnLoop([&] { return manager_->Swap(request, 0); }));
  EXPECT_TRUE(swap.status.ok()) << swap.status;
  EXPECT_EQ(Version(2).device_residency, DeviceResidency::kResident);
  EXPECT_EQ(Booked(), kCopy);
}

TEST_F(DeviceManagerTest, ALostGpuIsToldReloadedAndGetsAnotherGeneration) {
  BootWith(All());
  EXPECT_TRUE(Swap(1).status.ok());
  const SessionId session = NewSession();
  AcquireRef ref = OnGpu(0);
  ref.label = "stable";
  const auto before = Acquire(session, ref);
  ASSERT_TRUE(before.ok()) << before.status();
  gpus_.Reset(kGpu);
  Eventually([&] {
    const auto version = manager_->Version({"planner", 1});
    return version->device_residency == DeviceResidency::kResident &&
           !version->resident->devices.front().lost() &&
           version->resident != before->front().resident;
  });
  EXPECT_EQ(PhaseOf(1), Phase::kReady);
  Eventually([&] {
    return manager_->Model("planner")->labels.at("stable").generation > before->front().generation;
  });
  const auto after = Acquire(session, ref);
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_FALSE(after->front().device->lost());
  EXPECT_GT(after->front().generation, before->front().generation);
  EXPECT_EQ(devices_->Snapshot().gpus.front().lost, 1U);
}

TEST_F(DeviceManagerTest, ALostCopyThatCannotBeMadeAgainIsNotHandedOutAndTriedAgain) {
  BootWith(All());
  EXPECT_TRUE(Load(1).status.ok());
  gpus_.FailFrom("Create", 1, absl::UnavailableError("no GPU"));
  gpus_.Reset(kGpu);
  Eventually([&] { return manager_->Version({"planner", 1})->resident->devices.front().lost(); });
  const SessionId session = NewSession();
  EXPECT_TRUE(absl::IsFailedPrecondition(Acquire(session, OnGpu(1)).status()));
  EXPECT_TRUE(Acquire(session, OnGpu(1, AcquireRef::Device::kNone)).ok()) << "the host is good";
  gpus_.Heal();
  Eventually([&] {
    const auto version = manager_->Version({"planner", 1});
    return !version->resident->devices.front().lost();
  });
  EXPECT_TRUE(Acquire(session, OnGpu(1)).ok());
}

TEST_F(DeviceManagerTest, WhatAReleasedLeaseHasMappedStaysBookedUntilItEnds) {
  BootWith(All());
  EXPECT_TRUE(Load(1).status.ok());
  const SessionId session = NewSession();
  auto grants = Acquire(session, OnGpu(1));
  ASSERT_TRUE(grants.ok());
  const LeaseId lease = grants->front().lease;
  grants = absl::CancelledError("");  // As the broker does, once it is sent.
  EXPECT_TRUE(Await(OnLoop([&] {
                return manager_->Unload({"planner", 1}, absl::ZeroDuration(), true, 0);
              })).status.ok());
  EXPECT_EQ(PhaseOf(1), Phase::kStaged);
  EXPECT_EQ(Booked(), kCopy);
  EXPECT_EQ(gpus_.used(kGpu), kCopy);
  EXPECT_TRUE(OnLoop([&] { return manager_->Release(session, lease); }).ok());
  Eventually([&] { return Booked() == 0; });
  EXPECT_EQ(gpus_.used(kGpu), 0U);
}

// Room for one: the new copy takes the place of the lost one, whose booking is given back.
TEST_F(DeviceManagerTest, ALostCopyIsMadeAgainWhereTwoDoNotFit) {
  BootWith(All(), kCopy);
  EXPECT_TRUE(Load(1).status.ok());
  gpus_.Reset(kGpu);
  Eventually([&] {
    return !manager_->Version({"planner", 1})->resident->devices.front().lost() &&
           gpus_.calls("Create") == 2;
  });
  EXPECT_EQ(Booked(), kCopy);
}

TEST_F(DeviceManagerTest, AGpuThatGoesAndComesBackHasItsCopiesAgain) {
  BootWith(All());
  EXPECT_TRUE(Swap(1).status.ok());
  const auto generation =
      OnLoop([&] { return manager_->Model("planner")->labels.at("stable").generation; });
  gpus_.FailFrom("Check", 1, absl::UnavailableError("fell off the bus"));
  gpus_.FailFrom("Report", 1, absl::UnavailableError("fell off the bus"));
  Eventually([&] {
    const auto version = manager_->Version({"planner", 1});
    return version->device_residency == DeviceResidency::kLost;
  });
  Eventually([&] { return !devices_->Snapshot().gpus.front().usable; });
  EXPECT_EQ(PhaseOf(1), Phase::kReady);
  EXPECT_EQ(gpus_.calls("Create"), 1) << "nothing is made on a GPU that is not there";
  gpus_.Heal();
  Eventually([&] {
    const auto version = manager_->Version({"planner", 1});
    return version->device_residency == DeviceResidency::kResident &&
           !version->resident->devices.front().lost() &&
           manager_->Model("planner")->labels.at("stable").generation > generation;
  });
}

// It was lost by the driver's word, and the memory is there all the same: what the daemon has of it
// would keep the new copy out, in the version, in a lease, and in the session of an evicted one.
TEST_F(DeviceManagerTest, WhatIsLostIsLetGoOfBeforeItIsMadeAgain) {
  gpus_.Add(kOther, "vmm_fd", kCopy, kCopy);  // With room for one.
  DevicePolicy policy = All();
  policy.gpu = kOther;
  BootWith(policy, kCopy);
  EXPECT_TRUE(Swap(1).status.ok());
  const SessionId session = NewSession();
  const auto lease = [&] {
    auto grants = Acquire(session, OnGpu(1, AcquireRef::Device::kRequired, kOther));
    EXPECT_TRUE(grants.ok()) << grants.status();
    return grants.ok() ? grants->front().lease : 0;
  };
  const LeaseId evicted = lease();
  EXPECT_TRUE(OnLoop([&] { return manager_->Evict(evicted); }).ok());
  EXPECT_NE(lease(), 0U);
  gpus_.FailFrom("Check", 1, absl::UnavailableError("fell off the bus"));
  gpus_.FailFrom("Report", 1, absl::UnavailableError("fell off the bus"));
  Eventually([&] {
    return manager_->Version({"planner", 1})->device_residency == DeviceResidency::kLost;
  });
  gpus_.Heal();
  Eventually([&] {
    const auto version = manager_->Version({"planner", 1});
    return version->device_residency == DeviceResidency::kResident &&
           !version->resident->devices.front().lost();
  });
  EXPECT_EQ(gpus_.used(kOther), kCopy);
  EXPECT_NE(lease(), 0U);
}

TEST_F(DeviceManagerTest, AgentsThatDieInEveryCheckCostNoCopy) {
  BootWith(All(), kCopy);
  EXPECT_TRUE(Swap(1).status.ok());
  gpus_.FailFrom("Check", 1, absl::AbortedError("the agent has ended (signal 9)"));
  Eventually([&] { return !devices_->Snapshot().gpus.front().usable; });
  EXPECT_EQ(Version(1).device_residency, DeviceResidency::kResident);
  EXPECT_TRUE(Acquire(NewSession(), OnGpu(1)).ok());
  gpus_.Heal();
  Eventually([&] { return devices_->Snapshot().gpus.front().usable; });
  EXPECT_EQ(Booked(), kCopy);
  EXPECT_EQ(gpus_.calls("Create"), 1);
}

TEST_F(DeviceManagerTest, WhatALeaseHasMappedStaysWhenItsVersionIsLoadedAnew) {
  BootWith(All(), 2 * kCopy);
  EXPECT_TRUE(Load(1).status.ok());
  const SessionId session = NewSession();
  auto grants = Acquire(session, OnGpu(1));
  ASSERT_TRUE(grants.ok()) << grants.status();
  const LeaseId lease = grants->front().lease;
  const std::weak_ptr<const ResidentVersion> before = grants->front().resident;
  grants = absl::CancelledError("");  // As the broker does, once it is sent.
  Flip(1);
  Eventually([&] { return manager_->Version({"planner", 1})->health == Health::kSuspect; });
  EXPECT_TRUE(Load(1).status.ok());
  // Two: the one that new leases are given, and the one that is mapped.
  Eventually([&] { return before.expired(); });
  EXPECT_EQ(Booked(), 2 * kCopy);
  EXPECT_EQ(gpus_.used(kGpu), 2 * kCopy);
  const OperationSnapshot refused = Load(2);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status)) << refused.status;
  EXPECT_THAT(std::string(refused.status.message()), HasSubstr("an earlier copy, lease"));
  EXPECT_TRUE(OnLoop([&] { return manager_->Release(session, lease); }).ok());
  Eventually([&] { return Booked() == kCopy; });
  EXPECT_EQ(gpus_.used(kGpu), kCopy);
}

TEST_F(DeviceManagerTest, WhatAnEvictedClientHasMappedStaysBookedUntilItsConnectionEnds) {
  BootWith(All());
  EXPECT_TRUE(Load(1).status.ok());
  const SessionId session = NewSession();
  auto grants = Acquire(session, OnGpu(1));
  ASSERT_TRUE(grants.ok()) << grants.status();
  const LeaseId lease = grants->front().lease;
  grants = absl::CancelledError("");
  EXPECT_TRUE(OnLoop([&] { return manager_->Evict(lease); }).ok());
  EXPECT_TRUE(Await(OnLoop([&] {
                return manager_->Unload({"planner", 1}, {}, false, 0);
              })).status.ok());
  EXPECT_EQ(Booked(), kCopy);
  EXPECT_EQ(gpus_.used(kGpu), kCopy);
  OnLoop([&] { manager_->EndSession(session, "gone"); });
  Eventually([&] { return Booked() == 0; });
  EXPECT_EQ(gpus_.used(kGpu), 0U);
}

TEST_F(DeviceManagerTest, ATicketBringsNoCopyThatWasLostSinceTheGrant) {
  BootWith(All());
  EXPECT_TRUE(Load(1).status.ok());
  const SessionId stream = NewSession();
  const SessionId socket = NewSession();
  std::vector<LeaseTicket> tickets;
  for (const auto device : {AcquireRef::Device::kRequired, AcquireRef::Device::kIfAny}) {
    const auto grants = Acquire(stream, OnGpu(1, device));
    ASSERT_TRUE(grants.ok()) << grants.status();
    const auto ticket =
        OnLoop([&] { return manager_->IssueTicket(stream, grants->front(), /*device=*/true); });
    ASSERT_TRUE(ticket.ok()) << ticket.status();
    tickets.push_back(*ticket);
  }
  gpus_.FailFrom("Create", 1, absl::UnavailableError("no GPU"));
  gpus_.Reset(kGpu);
  Eventually([&] { return manager_->Version({"planner", 1})->resident->devices.front().lost(); });
  const auto required = OnLoop([&] { return manager_->Redeem(socket, tickets[0]); });
  EXPECT_TRUE(absl::IsFailedPrecondition(required.status())) << required.status();
  EXPECT_THAT(std::string(required.status().message()), HasSubstr(kGpu));
  const auto if_any = OnLoop([&] { return manager_->Redeem(socket, tickets[1]); });
  ASSERT_TRUE(if_any.ok()) << if_any.status();
  EXPECT_EQ(if_any->grant.device, nullptr);
}

TEST_F(DeviceManagerTest, AGpuThatComesLateGetsTheCopyThen) {
  gpus_.FailFrom("Report", 1, absl::UnavailableError("no answer"));
  BootWith(All());
  EXPECT_TRUE(Swap(1).status.ok());
  EXPECT_EQ(Version(1).device_residency, DeviceResidency::kNone);
  gpus_.Heal();
  Eventually([&] {
    return manager_->Version({"planner", 1})->device_residency == DeviceResidency::kResident &&
           manager_->Model("planner")->labels.at("stable").generation == 2;
  });
  EXPECT_TRUE(Acquire(NewSession(), OnGpu(1)).ok());
}

// What a client of a released lease has mapped does not come back by waiting: who can be evicted
// is.
TEST_F(DeviceManagerTest, RoomIsMadeBesideWhatAReleasedLeaseHolds) {
  Put(3, {7, 8, 9});
  BootWith(All(), 2 * kCopy);
  EXPECT_TRUE(Load(1).status.ok());
  const SessionId session = NewSession();
  ASSERT_TRUE(Acquire(session, OnGpu(1)).ok());
  EXPECT_TRUE(Await(OnLoop([&] {
                return manager_->Unload({"planner", 1}, absl::ZeroDuration(), true, 0);
              })).status.ok());
  EXPECT_TRUE(Load(2).status.ok());  // Idle, the rest of the budget.
  const OperationSnapshot load = Load(3);
  EXPECT_TRUE(load.status.ok()) << load.status;
  EXPECT_EQ(PhaseOf(2), Phase::kStaged);
  EXPECT_EQ(Booked(), 2 * kCopy);
}

TEST_F(DeviceManagerTest, ACopyInHostMemoryThatDoesNotFitIsRefusedAndNotTriedForEver) {
  gpus_.Add(kOther, "host_registered", uint64_t{64} * kMiB, kCopy);
  DevicePolicy policy = All();
  policy.gpu = kOther;
  host_budget_ = kCopy;  // The copy alone, and not the version beside it.
  BootWith(policy);
  const OperationSnapshot load = Load(1);
  EXPECT_TRUE(absl::IsResourceExhausted(load.status)) << load.status;
  EXPECT_EQ(PhaseOf(1), Phase::kStaged);
}

TEST_F(DeviceManagerTest, AnAgentThatHungIsAskedAgain) {
  BootWith(All());
  gpus_.FailCall("Upload", 1, absl::DeadlineExceededError("no sign of progress"));
  EXPECT_TRUE(Load(1).status.ok());
}

TEST_F(DeviceManagerTest, VersionsThatShareAFileShareItsCopy) {
  Put(3, {1, 2, 3});  // As version 1.
  BootWith(All());
  EXPECT_TRUE(Load(1).status.ok());
  EXPECT_TRUE(Load(3).status.ok());
  EXPECT_EQ(Booked(), kCopy);
  EXPECT_EQ(gpus_.calls("Create"), 1);
}

}  // namespace
}  // namespace modelhost
