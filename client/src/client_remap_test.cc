// Live models on a GPU: followed to new addresses, or kept at the same ones.
#include <thread>

#include "client/src/testing/device_fixture.h"

namespace modelhost::testing {
namespace {

using ::testing::HasSubstr;

constexpr auto kPatience = std::chrono::seconds(20);

class RemapTest : public DeviceTest {
 protected:
  // Runs `body` in a client process. It says what it waits for with Ask, one letter at a time, and
  // `answer` does it here, where the server is.
  void WithClient(const std::function<void()>& body, const std::function<void(char)>& answer,
                  const Environment& environment = {}) {
    Child child(
        [&](int socket) {
          socket_ = socket;
          LoadFakeDriver();
          if (!HasFatalFailure()) body();
        },
        DeviceEnvironment(environment), server_->Still());
    while (const char what = Hear(child.socket())) {
      answer(what);
      Say(child.socket(), what);
    }
    child.ExpectGood();
  }
  // In the client.
  void Ask(char what) const {
    Say(socket_, what);
    ASSERT_EQ(Hear(socket_), what);
  }
  LivePtr Follow(const ClientPtr& client, uint32_t device_flags, mh_status expected = MH_OK) {
    mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
    options.want = MH_WANT_DEVICE;
    options.device_flags = device_flags;
    mh_live* live = nullptr;
    EXPECT_EQ(mh_follow(client.get(), "planner", &options, &live, &error_), expected)
        << error_.message;
    return LivePtr(live);
  }
  // Until `met`, which may adopt.
  static bool Until(const std::function<bool()>& met) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (!met()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }
  ::testing::AssertionResult RemapsTo(const LivePtr& live, uint64_t version) {
    if (Until([&] {
          const mh_handle* handle = nullptr;
          return mh_live_remap(live.get(), &handle, &error_) == MH_OK &&
                 mh_handle_version(handle) == version;
        })) {
      return ::testing::AssertionSuccess();
    }
    mh_error status{};
    mh_live_status(live.get(), &status);
    return ::testing::AssertionFailure()
           << "remap: " << error_.message << "; status: " << status.message;
  }
  bool RemapFailsWith(const LivePtr& live, mh_status status) {
    return Until([&] { return mh_live_remap(live.get(), nullptr, &error_) == status; });
  }
  static std::vector<const void*> Pointers(const mh_handle* handle) {
    std::vector<const void*> pointers;
    for (size_t i = 0; i < mh_tensor_count(handle); ++i) {
      pointers.push_back(TensorOf(handle, i).device_data);
    }
    return pointers;
  }

  int socket_ = -1;
};

TEST_F(RemapTest, AFollowedModelMovesToNewAddressesWhenItIsAdopted) {
  StartPlanner();
  WithClient(
      [&] {
        const ClientPtr client = Connect();
        const LivePtr live = Follow(client, 0);
        ASSERT_NE(live, nullptr);
        const OwnCuda own;
        HandlePtr old(mh_retain(mh_live_current(live.get())));
        ExpectSameBytes(own, old.get());
        Ask('8');
        EXPECT_TRUE(Until([&] { return mh_handle_version(mh_live_adopt(live.get())) == 8; }));
        ExpectSameBytes(own, mh_live_current(live.get()));
        ExpectSameBytes(own, old.get());
        EXPECT_EQ(mh_live_remap(live.get(), nullptr, &error_), MH_FAILED_PRECONDITION);
        EXPECT_THAT(error_.message, HasSubstr("MH_DEVICE_SAME_ADDRESSES"));
      },
      [&](char) { server_->SetLabel("planner", "stable", 8); });
}

TEST_F(RemapTest, ADriverThatFailsInTheBackgroundIsToldOfAndTriedAgain) {
  StartPlanner();
  WithClient(
      [&] {
        const ClientPtr client = Connect();
        const LivePtr live = Follow(client, 0);
        ASSERT_NE(live, nullptr);
        ::setenv("FAKECUDA_FAIL", "cuMemMap:1+:2", 1);
        Ask('8');
        EXPECT_TRUE(
            Until([&] { return mh_live_status(live.get(), &error_) == MH_RESOURCE_EXHAUSTED; }));
        EXPECT_EQ(mh_handle_version(mh_live_adopt(live.get())), 7U);
        Ask('l');
        ::setenv("FAKECUDA_FAIL", "", 1);
        EXPECT_TRUE(Until([&] { return mh_handle_version(mh_live_adopt(live.get())) == 8; }));
        EXPECT_EQ(mh_live_status(live.get(), &error_), MH_OK);
        ExpectSameBytes(OwnCuda(), mh_live_current(live.get()));
      },
      [&](char what) {
        if (what == '8') server_->SetLabel("planner", "stable", 8);
        // What could not be used was given back.
        if (what == 'l') {
          EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
        }
      });
}

TEST_F(RemapTest, TheNewVersionTakesTheAddressesOfTheOldOne) {
  StartPlanner();
  WithClient(
      [&] {
        const ClientPtr client = Connect();
        const LivePtr live = Follow(client, MH_DEVICE_SAME_ADDRESSES);
        ASSERT_NE(live, nullptr);
        const OwnCuda own;
        const HandlePtr old(mh_retain(mh_live_current(live.get())));
        const auto before = Pointers(old.get());
        ExpectSameBytes(own, old.get());
        Ask('8');
        for (int i = 0; i < 100; ++i) {
          EXPECT_EQ(mh_handle_version(mh_live_adopt(live.get())), 7U);
        }
        EXPECT_TRUE(RemapsTo(live, 8));
        const mh_handle* now = mh_live_current(live.get());
        EXPECT_EQ(Pointers(now), before);
        EXPECT_EQ(ValueOf(now), 8);
        ExpectSameBytes(own, now);
        // What is left of the old one is on the host.
        EXPECT_EQ(TensorOf(old.get(), 0).device_data, nullptr);
        EXPECT_EQ(ValueOf(old.get()), 7);
        // Nothing newer: nothing happens.
        const mh_handle* same = nullptr;
        EXPECT_EQ(mh_live_remap(live.get(), &same, &error_), MH_OK);
        EXPECT_EQ(same, now);
        // And back.
        Ask('7');
        EXPECT_TRUE(RemapsTo(live, 7));
        EXPECT_EQ(Pointers(mh_live_current(live.get())), before);
        ExpectSameBytes(own, mh_live_current(live.get()));
      },
      [&](char what) {
        server_->SetLabel("planner", "stable", static_cast<uint64_t>(what - '0'));
      });
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 0; }));
}

TEST_F(RemapTest, AnotherLayoutIsRefusedByItsFirstDifferenceAndTheOldVersionStays) {
  StartPlanner();
  FakeVersion renamed = OnDevice("planner", 1, 1);
  renamed.tensors[5].name = "tensor.5x";
  FakeVersion larger = OnDevice("planner", 2, 2, 6, 2, 32);
  FakeVersion moved = OnDevice("planner", 3, 3);
  moved.tensors[4].device_offset += 512;
  FakeVersion segments = OnDevice("planner", 4, 4, 6, 1);
  FakeVersion sizes = OnDevice("planner", 5, 5);
  sizes.device_segments[1].bytes = 2 * kSegmentBytes;
  FakeVersion typed = OnDevice("planner", 6, 6);
  typed.tensors[0].dtype = abi::DType::kI32;
  for (const FakeVersion* version : {&renamed, &larger, &moved, &segments, &sizes, &typed}) {
    AddOnDevice(*version);
  }
  WithClient(
      [&] {
        const ClientPtr client = Connect();
        const LivePtr live = Follow(client, MH_DEVICE_SAME_ADDRESSES);
        ASSERT_NE(live, nullptr);
        const OwnCuda own;
        const auto before = Pointers(mh_live_current(live.get()));
        const std::pair<char, const char*> cases[] = {
            {'1', "tensor main/tensor.5 is main/tensor.5x now"},
            {'2', "tensor main/tensor.0 has 128 bytes, not 64"},
            {'3', "tensor main/tensor.4 lies at another place"},
            {'4', "1 device segments, not 2"},
            {'5', "device segment 1 has 131072 bytes, not 65536"},
            {'6', "tensor main/tensor.0 has another type"}};
        for (const auto& [version, why] : cases) {
          Ask(version);
          EXPECT_TRUE(Until([&] {
            return mh_live_remap(live.get(), nullptr, &error_) == MH_FAILED_PRECONDITION &&
                   std::string(error_.message).find(why) != std::string::npos;
          })) << error_.message;
          // At later calls too.
          EXPECT_EQ(mh_live_remap(live.get(), nullptr, &error_), MH_FAILED_PRECONDITION);
          EXPECT_EQ(mh_handle_version(mh_live_current(live.get())), 7U);
          EXPECT_EQ(Pointers(mh_live_current(live.get())), before);
          ExpectSameBytes(own, mh_live_current(live.get()));
        }
        Ask('8');
        EXPECT_TRUE(RemapsTo(live, 8));
        EXPECT_EQ(Pointers(mh_live_current(live.get())), before);
      },
      [&](char what) {
        server_->SetLabel("planner", "stable", static_cast<uint64_t>(what - '0'));
      });
}

TEST_F(RemapTest, WhatCannotBeMappedLeavesTheOldVersionInItsPlace) {
  StartPlanner();
  for (const char* failure : {"cuMemMap", "cuMemSetAccess"}) {
    server_->SetLabel("planner", "stable", 7);
    WithClient(
        [&] {
          const ClientPtr client = Connect();
          const LivePtr live = Follow(client, MH_DEVICE_SAME_ADDRESSES);
          ASSERT_NE(live, nullptr);
          const OwnCuda own;
          const auto before = Pointers(mh_live_current(live.get()));
          Ask('8');
          // Two were made at the start: the first or the second of the new version's fails.
          const std::string third = std::string(failure) + ":4:2";
          ::setenv("FAKECUDA_FAIL", third.c_str(), 1);
          EXPECT_TRUE(RemapFailsWith(live, MH_RESOURCE_EXHAUSTED)) << error_.message;
          EXPECT_EQ(mh_handle_version(mh_live_current(live.get())), 7U);
          EXPECT_EQ(Pointers(mh_live_current(live.get())), before);
          ExpectSameBytes(own, mh_live_current(live.get()));
          // Not even the old one.
          ::setenv("FAKECUDA_FAIL", (std::string(failure) + ":1+:2").c_str(), 1);
          EXPECT_TRUE(RemapFailsWith(live, MH_DATA_LOSS)) << error_.message;
          EXPECT_THAT(error_.message, HasSubstr("cannot be put back"));
          EXPECT_EQ(TensorOf(mh_live_current(live.get()), 0).device_data, nullptr);
          ::setenv("FAKECUDA_FAIL", "", 1);
          EXPECT_TRUE(RemapsTo(live, 8)) << error_.message;
          EXPECT_EQ(Pointers(mh_live_current(live.get())), before);
          ExpectSameBytes(own, mh_live_current(live.get()));
        },
        [&](char) { server_->SetLabel("planner", "stable", 8); });
  }
}

TEST_F(RemapTest, OnlyMemoryByDescriptorKeepsItsAddresses) {
  FakeVersion version = OnDevice("planner", 7, 7);
  version.device_segments.clear();
  for (FakeTensor& tensor : version.tensors) tensor.device_segment = abi::kNone;
  server_->Add(version);
  FakeDevice device;
  device.gpu = kGpu0;
  device.mode = abi::DeviceMode::kHostDirect;
  server_->SetDevice("planner", 7, std::move(device));
  server_->SetLabel("planner", "stable", 7);
  server_->Start();
  InClient(
      [&] {
        const ClientPtr client = Connect();
        EXPECT_EQ(Follow(client, MH_DEVICE_SAME_ADDRESSES, MH_UNIMPLEMENTED), nullptr);
        EXPECT_THAT(error_.message, HasSubstr("and this is host_direct"));
        mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
        options.want = MH_WANT_DEVICE;
        options.device_flags = MH_DEVICE_SAME_ADDRESSES;
        const char* refs[] = {"planner"};
        mh_live_set* set = nullptr;
        EXPECT_EQ(mh_follow_set(client.get(), refs, 1, &options, &set, &error_),
                  MH_INVALID_ARGUMENT);
      },
      {{"FAKECUDA_ATTR_88", "1"}, {"FAKECUDA_ATTR_100", "1"}});
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 0; }));
}

TEST_F(RemapTest, AForkedChildRemapsNothing) {
  StartPlanner();
  InClient([&] {
    const ClientPtr client = Connect();
    LivePtr live = Follow(client, MH_DEVICE_SAME_ADDRESSES);
    ASSERT_NE(live, nullptr);
    const OwnCuda own;
    InChild([&] {
      EXPECT_EQ(mh_live_remap(live.get(), nullptr, &error_), MH_FAILED_PRECONDITION);
      EXPECT_EQ(TensorOf(mh_live_current(live.get()), 0).device_data, nullptr);
      live.reset();
    });
    ExpectSameBytes(own, mh_live_current(live.get()));
  });
}

}  // namespace
}  // namespace modelhost::testing
