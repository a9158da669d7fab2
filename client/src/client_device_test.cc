// Device memory through the C API, against a fake daemon and the fake driver.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <thread>

#include "client/src/testing/device_fixture.h"

namespace modelhost::testing {
namespace {

using ::testing::HasSubstr;

TEST_F(DeviceTest, TensorsAreThereForTheGpuToRead) {
  StartPlanner();
  InClient([&] {
    const ClientPtr client = Connect();
    const HandlePtr handle = AcquiredOn(client, "planner");
    ASSERT_NE(handle, nullptr);
    EXPECT_STREQ(mh_handle_gpu(handle.get()), kGpu0);
    EXPECT_STREQ(mh_handle_device_mode(handle.get()), "vmm_fd");
    EXPECT_STREQ(mh_handle_device_reason(handle.get()), "");
    EXPECT_EQ(ValueOf(handle.get()), 7);
    ExpectSameBytes(OwnCuda(), handle.get());
  });
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 0; }));
}

TEST_F(DeviceTest, AcquiringLeavesTheCallersContextsAlone) {
  StartPlanner();
  InClient([&] {
    const ClientPtr client = Connect();
    const auto load = cuda::Driver::Load(FAKECUDA_PATH);
    ASSERT_NE(load.driver, nullptr);
    cuda::ContextHandle current = nullptr;
    {
      const HandlePtr handle = AcquiredOn(client, "planner");
      EXPECT_EQ(load.driver->call().cuCtxGetCurrent(&current), cuda::Rc::kSuccess);
      EXPECT_EQ(current, nullptr);
    }
    const OwnCuda own(0);
    cuda::ContextHandle mine = nullptr;
    EXPECT_EQ(load.driver->call().cuCtxGetCurrent(&mine), cuda::Rc::kSuccess);
    HandlePtr handle = AcquiredOn(client, "planner");
    handle.reset();
    EXPECT_EQ(load.driver->call().cuCtxGetCurrent(&current), cuda::Rc::kSuccess);
    EXPECT_EQ(current, mine);
    EXPECT_NE(mine, nullptr);
  });
}

TEST_F(DeviceTest, WhoDoesNotAskLoadsNoDriver) {
  StartPlanner();
  InClient(
      [&] {
        const ClientPtr client = Connect();
        const HandlePtr handle = Acquired(client, "planner");
        EXPECT_EQ(TensorOf(handle.get(), 0).device_data, nullptr);
        EXPECT_STREQ(mh_handle_gpu(handle.get()), "");
        EXPECT_STREQ(mh_handle_device_mode(handle.get()), "none");
        EXPECT_STREQ(mh_handle_device_reason(handle.get()), "it was not asked for");
      },
      {{"FAKECUDA_FAIL", "*:1+:kill"}});
}

TEST_F(DeviceTest, AStoreThroughADevicePointerFaults) {
  StartPlanner();
  Child child(
      [&](int) {
        LoadFakeDriver();
        const ClientPtr client = Connect();
        const HandlePtr handle = AcquiredOn(client, "planner");
        const mh_tensor_view view = TensorOf(handle.get(), 0);
        ASSERT_NE(view.device_data, nullptr);
        EXPECT_EQ(*static_cast<const float*>(view.device_data), 7);
        ::signal(SIGSEGV, SIG_DFL);  // A sanitizer has its own end for it.
        *static_cast<volatile float*>(const_cast<void*>(view.device_data)) = 1;
      },
      DeviceEnvironment({{"FAKECUDA_DENY_IMPORT_RW", "1"}}), server_->Still());
  const int status = child.Wait();
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) << status;
}

TEST_F(DeviceTest, AGpuIsKnownByItsUuidWhateverItsNumberHere) {
  StartPlanner();
  InClient(
      [&] {
        const ClientPtr client = Connect();
        HandlePtr handle;
        // The first one here is the other GPU.
        EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE, &handle), MH_FAILED_PRECONDITION);
        EXPECT_THAT(error_.message, HasSubstr(kGpu1));
        EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE_IF_ANY, &handle), MH_OK);
        EXPECT_STREQ(mh_handle_device_mode(handle.get()), "none");
        EXPECT_THAT(mh_handle_device_reason(handle.get()),
                    HasSubstr("has no copy of it on GPU-01"));
        handle = AcquiredOn(client, "planner", kGpu0);
        ASSERT_NE(handle, nullptr);
        EXPECT_STREQ(mh_handle_gpu(handle.get()), kGpu0);
        ExpectSameBytes(OwnCuda(1), handle.get());
      },
      {{"CUDA_VISIBLE_DEVICES", "1,0"}});
  InClient(
      [&] {
        const ClientPtr client = Connect();
        HandlePtr handle;
        EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE, &handle, kGpu0),
                  MH_FAILED_PRECONDITION);
        EXPECT_THAT(error_.message, HasSubstr("does not see that GPU"));
      },
      {{"CUDA_VISIBLE_DEVICES", "1"}});
}

TEST_F(DeviceTest, WithoutANameItIsTheGpuOfTheCurrentContext) {
  AddOnDevice(OnDevice("planner", 7, 7), 1);
  server_->SetLabel("planner", "stable", 7);
  server_->Start();
  InClient([&] {
    const ClientPtr client = Connect();
    HandlePtr handle;
    EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE, &handle), MH_FAILED_PRECONDITION);
    const OwnCuda own(1);
    handle = AcquiredOn(client, "planner");
    ASSERT_NE(handle, nullptr);
    EXPECT_STREQ(mh_handle_gpu(handle.get()), kGpu1);
    ExpectSameBytes(own, handle.get());
  });
}

TEST_F(DeviceTest, WithoutAUsableDriverTheHostIsServedAndTheReasonSaid) {
  StartPlanner();
  const auto expect = [&](const char* why) {
    const ClientPtr client = Connect();
    HandlePtr handle;
    EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE, &handle), MH_FAILED_PRECONDITION);
    EXPECT_THAT(error_.message, HasSubstr(why));
    EXPECT_EQ(handle, nullptr);
    EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE_IF_ANY, &handle), MH_OK);
    EXPECT_THAT(mh_handle_device_reason(handle.get()), HasSubstr(why));
    EXPECT_STREQ(mh_handle_device_mode(handle.get()), "none");
    EXPECT_EQ(TensorOf(handle.get(), 0).device_data, nullptr);
    EXPECT_EQ(ValueOf(handle.get()), 7);
  };
  InClient([&] { expect("CUDA_ERROR_STUB_LIBRARY (34)"); }, {{"FAKECUDA_INIT", "34"}});
  InClient([&] { expect("no GPU is visible"); }, {{"FAKECUDA_DEVICES", "0"}});
  InClient([&] { expect("driver 11.4 is older than 12.0"); },
           {{"FAKECUDA_DRIVER_VERSION", "11040"}});
  InClient([&] { expect("CUDA_ERROR_NOT_SUPPORTED (801)"); }, {{"FAKECUDA_ATTR_103", "0"}});
  InChild([&] {
    if (::dlopen("libcuda.so.1", RTLD_NOW) != nullptr) return;  // This machine has a driver.
    expect("no CUDA driver: libcuda.so.1");
  });
}

TEST_F(DeviceTest, ManySegmentsComeInSeveralFrames) {
  AddOnDevice(OnDevice("planner", 7, 7, 130, 130));
  server_->SetLabel("planner", "stable", 7);
  server_->Start();
  InClient([&] {
    const ClientPtr client = Connect();
    const HandlePtr handle = AcquiredOn(client, "planner");
    ASSERT_NE(handle, nullptr);
    ExpectSameBytes(OwnCuda(), handle.get());
  });
}

TEST_F(DeviceTest, ASetHasItsDeviceMemoryTogether) {
  StartPlanner();
  AddOnDevice(OnDevice("detector", 1, 1));
  server_->SetLabel("detector", "stable", 1);
  InClient([&] {
    const ClientPtr client = Connect();
    mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
    options.want = MH_WANT_DEVICE;
    const char* refs[] = {"planner", "detector"};
    mh_handle* handles[2] = {};
    ASSERT_EQ(mh_acquire_set(client.get(), refs, 2, &options, handles, &error_), MH_OK)
        << error_.message;
    const OwnCuda own;
    for (mh_handle* handle : handles) {
      ExpectSameBytes(own, handle);
      mh_release(handle);
    }
  });
}

TEST_F(DeviceTest, OptionsThatMakeNoSenseAreRefused) {
  StartPlanner();
  const ClientPtr client = Connect();
  const auto status = [&](uint32_t want, uint32_t flags, const char* gpu) {
    mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
    options.want = want;
    options.device_flags = flags;
    options.gpu = gpu;
    mh_handle* handle = nullptr;
    return mh_acquire(client.get(), "planner", &options, &handle, &error_);
  };
  EXPECT_EQ(status(3, 0, nullptr), MH_INVALID_ARGUMENT);
  EXPECT_EQ(status(MH_WANT_DEVICE, 2, nullptr), MH_INVALID_ARGUMENT);
  EXPECT_EQ(status(MH_WANT_DEVICE, MH_DEVICE_SAME_ADDRESSES, nullptr), MH_INVALID_ARGUMENT);
  EXPECT_EQ(status(MH_WANT_HOST, 0, kGpu0), MH_INVALID_ARGUMENT);
  // A program of before knows no more than this.
  struct {
    size_t size;
    uint32_t wait;
    uint32_t reserved;
    uint64_t deadline_ms;
  } old = {sizeof(old), 0, 0, 0};
  mh_handle* handle = nullptr;
  EXPECT_EQ(mh_acquire(client.get(), "planner", reinterpret_cast<mh_acquire_options*>(&old),
                       &handle, &error_),
            MH_OK);
  mh_release(handle);
}

TEST_F(DeviceTest, AnOlderDaemonIsNotAsked) {
  StartPlanner();
  Faults faults;
  faults.abi_max = abi::kFrameAbiDevice - 1;
  server_->SetFaults(faults);
  InClient([&] {
    const ClientPtr client = Connect();
    HandlePtr handle;
    EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE, &handle), MH_UNIMPLEMENTED);
    EXPECT_THAT(error_.message, HasSubstr("update modelhostd"));
    EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE_IF_ANY, &handle), MH_OK);
    EXPECT_THAT(mh_handle_device_reason(handle.get()), HasSubstr("no copy"));
  });
}

// --- Other modes
// -------------------------------------------------------------------------------------------------

TEST_F(DeviceTest, RegisteredHostMemoryIsReachedThroughItsOwnMapping) {
  const FakeVersion version = OnDevice("planner", 7, 7);
  server_->Add(version);
  FakeDevice device;
  device.gpu = kGpu0;
  device.mode = abi::DeviceMode::kHostRegistered;
  for (uint32_t i = 0; i < 2; ++i) {
    const std::string bytes = SegmentBytes(version, i);
    UniqueFd fd(::memfd_create("registered", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    ASSERT_EQ(::write(fd.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    ASSERT_EQ(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
    device.fds.push_back(std::move(fd));
    device.bytes.push_back(bytes.size());
  }
  server_->SetDevice("planner", 7, std::move(device));
  server_->SetLabel("planner", "stable", 7);
  server_->Start();
  InClient(
      [&] {
        const ClientPtr client = Connect();
        const OwnCuda own;
        for (int i = 0; i < 2; ++i) {
          const HandlePtr handle = AcquiredOn(client, "planner");
          ASSERT_NE(handle, nullptr);
          EXPECT_STREQ(mh_handle_device_mode(handle.get()), "host_registered");
          for (size_t k = 0; k < mh_tensor_count(handle.get()); ++k) {
            const mh_tensor_view view = TensorOf(handle.get(), k);
            ASSERT_NE(view.device_data, nullptr);
            EXPECT_NE(view.device_data, view.data);
            EXPECT_EQ(*static_cast<const float*>(view.device_data), 7);
          }
        }
        HandlePtr handle;
        ::setenv("FAKECUDA_FAIL", "cuMemHostGetDevicePointer:1+:2", 1);
        EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE, &handle), MH_RESOURCE_EXHAUSTED);
        ::unsetenv("FAKECUDA_FAIL");
        // Nothing of the failed one is registered still.
        EXPECT_NE(AcquiredOn(client, "planner"), nullptr);
      },
      {{"FAKECUDA_ATTR_99", "1"}});
  InClient(
      [&] {
        const ClientPtr client = Connect();
        HandlePtr handle;
        EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE, &handle), MH_FAILED_PRECONDITION);
        EXPECT_THAT(error_.message, HasSubstr("register host memory"));
      },
      {{"FAKECUDA_ATTR_99", "0"}});
}

TEST_F(DeviceTest, LegacyHandlesAreOpenedWhileTheirOwnerLives) {
  const FakeVersion version = OnDevice("planner", 7, 7);
  server_->Add(version);
  FakeDevice device;
  device.gpu = kGpu0;
  device.mode = abi::DeviceMode::kCudaIpc;
  Child owner(
      [&](int socket) {
        const OwnCuda own;
        std::vector<cuda::LegacyMemory> kept;
        for (uint32_t i = 0; i < 2; ++i) {
          const std::string bytes = SegmentBytes(version, i);
          auto memory = cuda::AllocateLegacy(own.driver(), bytes.size());
          ASSERT_TRUE(memory.ok()) << memory.error().text;
          ASSERT_EQ(own.driver().call().cuMemcpyHtoD(memory->get(), bytes.data(), bytes.size()),
                    cuda::Rc::kSuccess);
          const auto handle = cuda::ExportLegacy(own.driver(), *memory);
          ASSERT_TRUE(handle.ok()) << handle.error().text;
          ASSERT_EQ(::send(socket, handle->bytes, sizeof(handle->bytes), 0), 64);
          kept.push_back(*std::move(memory));
        }
        (void)Hear(socket);
      },
      DeviceEnvironment());
  for (uint32_t i = 0; i < 2; ++i) {
    std::string handle(64, '\0');
    ASSERT_EQ(::recv(owner.socket(), handle.data(), handle.size(), 0), 64);
    device.handles.push_back(std::move(handle));
    device.bytes.push_back(kSegmentBytes);
  }
  server_->SetDevice("planner", 7, std::move(device));
  server_->SetLabel("planner", "stable", 7);
  server_->Start();
  InClient([&] {
    const ClientPtr client = Connect();
    const HandlePtr handle = AcquiredOn(client, "planner");
    ASSERT_NE(handle, nullptr);
    EXPECT_STREQ(mh_handle_device_mode(handle.get()), "cuda_ipc");
    ExpectSameBytes(OwnCuda(), handle.get());
  });
  owner.Kill();
  InClient([&] {
    const ClientPtr client = Connect();
    HandlePtr handle;
    EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE, &handle), MH_FAILED_PRECONDITION);
    EXPECT_THAT(error_.message, HasSubstr("its owner must live"));
  });
}

TEST_F(DeviceTest, AGpuThatReadsHostPagesGetsTheHostPointers) {
  FakeVersion version = OnDevice("planner", 7, 7);
  version.device_segments.clear();
  for (FakeTensor& tensor : version.tensors) tensor.device_segment = abi::kNone;
  version.tensors[0].on_device = false;
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
        const HandlePtr handle = AcquiredOn(client, "planner");
        ASSERT_NE(handle, nullptr);
        EXPECT_STREQ(mh_handle_device_mode(handle.get()), "host_direct");
        EXPECT_EQ(TensorOf(handle.get(), 1).device_data, TensorOf(handle.get(), 1).data);
        EXPECT_EQ(TensorOf(handle.get(), 0).device_data, nullptr);
      },
      {{"FAKECUDA_ATTR_88", "1"}, {"FAKECUDA_ATTR_100", "1"}});
  InClient(
      [&] {
        const ClientPtr client = Connect();
        HandlePtr handle;
        EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE, &handle), MH_FAILED_PRECONDITION);
        EXPECT_THAT(error_.message, HasSubstr("cannot read host pages"));
      },
      {{"FAKECUDA_ATTR_88", "1"}, {"FAKECUDA_ATTR_100", "0"}});
}

// --- Processes, threads, restarts
// -------------------------------------------------------------------------------------------------

TEST_F(DeviceTest, AForkedChildHasNoDeviceMemoryAndHarmsNone) {
  StartPlanner();
  InClient([&] {
    const ClientPtr client = Connect();
    HandlePtr handle = AcquiredOn(client, "planner");
    ASSERT_NE(handle, nullptr);
    const OwnCuda own;
    InChild([&] {
      const mh_tensor_view view = TensorOf(handle.get(), 0);
      EXPECT_EQ(view.device_data, nullptr);
      EXPECT_EQ(ValueOf(handle.get()), 7);
      handle.reset();
      HandlePtr again;
      EXPECT_EQ(AcquireOn(client, "planner", MH_WANT_DEVICE, &again), MH_FAILED_PRECONDITION);
      const ClientPtr fresh = Connect();
      EXPECT_EQ(AcquireOn(fresh, "planner", MH_WANT_DEVICE, &again), MH_FAILED_PRECONDITION);
      EXPECT_THAT(error_.message, HasSubstr("does not survive"));
      EXPECT_EQ(AcquireOn(fresh, "planner", MH_WANT_DEVICE_IF_ANY, &again), MH_OK);
      EXPECT_STREQ(mh_handle_device_mode(again.get()), "none");
      EXPECT_EQ(ValueOf(again.get()), 7);
    });
    ExpectSameBytes(own, handle.get());
  });
}

TEST_F(DeviceTest, ThreadsAcquireAndReleaseAtOnce) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer loses count of threads in a child of a process with threads";
#endif
  StartPlanner();
  InClient([&] {
    const ClientPtr client = Connect();
    const std::string seven(4 * 16, '\0');
    std::vector<std::thread> threads;
    std::atomic<int> good{0};
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        const OwnCuda own;
        for (int i = 0; i < 20; ++i) {
          mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
          options.want = MH_WANT_DEVICE;
          mh_handle* handle = nullptr;
          if (mh_acquire(client.get(), "planner", &options, &handle, nullptr) != MH_OK) return;
          mh_tensor_view view = MH_TENSOR_VIEW_INIT;
          if (mh_tensor_at(handle, 3, &view) != MH_OK) return;
          const std::string bytes = own.Read(view.device_data, view.nbytes);
          if (bytes == std::string(static_cast<const char*>(view.data), view.nbytes)) ++good;
          mh_release(handle);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(good.load(), 80);
  });
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 0; }));
}

TEST_F(DeviceTest, DeviceMemoryOutlivesTheDaemonAndIsDeclaredAgain) {
  StartPlanner();
  Child child(
      [&](int socket) {
        LoadFakeDriver();
        const ClientPtr client = Connect();
        const HandlePtr handle = AcquiredOn(client, "planner");
        ASSERT_NE(handle, nullptr);
        const void* before = TensorOf(handle.get(), 0).device_data;
        Say(socket, 'a');
        ASSERT_EQ(Hear(socket), 'r');
        EXPECT_EQ(TensorOf(handle.get(), 0).device_data, before);
        ExpectSameBytes(OwnCuda(), handle.get());
      },
      DeviceEnvironment(), server_->Still());
  ASSERT_EQ(Hear(child.socket()), 'a');
  server_->Stop();
  server_->Start();
  EXPECT_TRUE(FakeServer::Eventually([&] { return server_->leases() == 1; }));
  EXPECT_EQ(server_->declared_gpus(), std::vector<std::string>{kGpu0});
  Say(child.socket(), 'r');
  child.ExpectGood();
}

}  // namespace
}  // namespace modelhost::testing
