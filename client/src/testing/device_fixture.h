// What the tests of device memory share: a fake daemon here, the fake driver in processes of their
// own (a driver does not survive fork), and device memory that one of them made.
#pragma once

#include <dlfcn.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/src/testing/client_fixture.h"
#include "proto/cuda/handles.h"
#include "tests/fakes/fakecuda/in_child.h"

namespace modelhost::testing {

inline constexpr uint64_t kSegmentBytes = uint64_t{64} << 10;
inline constexpr char kGpu0[] = "GPU-00fafafa-fafa-fafa-fafa-fafafafafa00";
inline constexpr char kGpu1[] = "GPU-01fafafa-fafa-fafa-fafa-fafafafafa01";

// The GPUs of a machine of this test's own.
inline Environment DeviceEnvironment(const Environment& more = {}) {
  Environment environment = {{"FAKECUDA_DEVICES", "2"},
                             {"FAKECUDA_GRANULARITY_KB", "64"},
                             {"FAKECUDA_MACHINE", "client" + std::to_string(::getpid())}};
  for (const auto& [name, value] : more) environment[name] = value;
  return environment;
}

// Makes the fake what libmodelhost finds under the name of the driver.
inline void LoadFakeDriver() {
  ASSERT_NE(::dlopen(FAKECUDA_PATH, RTLD_NOW), nullptr) << ::dlerror();
}

inline std::string UuidText(int gpu) { return gpu == 0 ? kGpu0 : kGpu1; }

// The driver as a program beside the library uses it.
class OwnCuda {
 public:
  explicit OwnCuda(int device = 0) {
    cuda::DriverLoad load = cuda::Driver::Load(FAKECUDA_PATH);
    driver_ = std::move(load.driver);
    if (driver_ == nullptr) std::abort();
    auto context = cuda::PrimaryContext::Retain(*driver_, device);
    if (!context.ok() || !context->MakeCurrent().ok()) std::abort();
    context_ = std::make_unique<cuda::PrimaryContext>(*std::move(context));
  }
  const cuda::Driver& driver() const { return *driver_; }
  // "" when the GPU cannot read it.
  std::string Read(const void* at, uint64_t bytes) const {
    std::string out(bytes, '\0');
    const auto from = static_cast<cuda::DevicePtr>(reinterpret_cast<uintptr_t>(at));
    return driver_->call().cuMemcpyDtoH(out.data(), from, bytes) == cuda::Rc::kSuccess ? out : "";
  }

 private:
  std::shared_ptr<const cuda::Driver> driver_;
  std::unique_ptr<cuda::PrimaryContext> context_;
};

// Device memory with these bytes, which lives as long as its descriptor.
inline UniqueFd MakeSegment(int gpu, const std::string& bytes) {
  UniqueFd fd;
  Child maker(
      [&](int socket) {
        const OwnCuda own(gpu);
        const auto made = cuda::CreateAllocation(own.driver(), gpu, bytes.size());
        ASSERT_TRUE(made.ok()) << made.error().text;
        const auto exported = cuda::ExportAllocation(own.driver(), *made);
        ASSERT_TRUE(exported.ok()) << exported.error().text;
        {
          const auto mapped = cuda::ImportSegment(own.driver(), *exported, bytes.size(), gpu,
                                                  cuda::Access::kReadWrite);
          ASSERT_TRUE(mapped.ok()) << mapped.error().text;
          ASSERT_EQ(
              own.driver().call().cuMemcpyHtoD(mapped->range().at, bytes.data(), bytes.size()),
              cuda::Rc::kSuccess);
        }
        Say(socket, 's', exported->get());
        (void)Hear(socket);  // Until the descriptor has arrived.
      },
      DeviceEnvironment());
  EXPECT_EQ(Hear(maker.socket(), &fd), 's');
  Say(maker.socket(), 'x');
  maker.ExpectGood();
  return fd;
}

class DeviceTest : public ClientTest {
 protected:
  // `shards` files with `tensors` tensors of `elements` F32 each, all of them `value`, each file in
  // a device segment of its own.
  FakeVersion OnDevice(const std::string& model, uint64_t version, float value, size_t tensors = 6,
                       size_t shards = 2, size_t elements = 16) {
    FakeVersion made = MakeVersion(model, version, tensors, elements, value, shards);
    PutOnDevice(made, kSegmentBytes);
    return made;
  }
  void AddOnDevice(const FakeVersion& version, int gpu = 0) {
    server_->Add(version);
    FakeDevice device;
    device.gpu = UuidText(gpu);
    for (uint32_t i = 0; i < version.device_segments.size(); ++i) {
      device.fds.push_back(MakeSegment(gpu, SegmentBytes(version, i)));
      device.bytes.push_back(version.device_segments[i].bytes);
    }
    server_->SetDevice(version.model, version.version, std::move(device));
  }
  // planner:stable is version 7, on GPU 0, and 8 is there too; all values of version N are N.
  void StartPlanner() {
    AddOnDevice(OnDevice("planner", 7, 7));
    AddOnDevice(OnDevice("planner", 8, 8));
    server_->SetLabel("planner", "stable", 7);
    server_->Start();
  }

  // A client process with the fake driver. `body` may use the fixture, but not the server.
  void InClient(const std::function<void()>& body, const Environment& environment = {}) {
    InChild(
        [&] {
          LoadFakeDriver();
          if (!HasFatalFailure()) body();
        },
        DeviceEnvironment(environment), server_->Still());
  }

  mh_status AcquireOn(const ClientPtr& client, const char* ref, uint32_t want, HandlePtr* handle,
                      const char* gpu = nullptr) {
    mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
    options.want = want;
    options.gpu = gpu;
    mh_handle* made = nullptr;
    const mh_status status = mh_acquire(client.get(), ref, &options, &made, &error_);
    handle->reset(made);
    return status;
  }
  HandlePtr AcquiredOn(const ClientPtr& client, const char* ref, const char* gpu = nullptr) {
    HandlePtr handle;
    EXPECT_EQ(AcquireOn(client, ref, MH_WANT_DEVICE, &handle, gpu), MH_OK) << error_.message;
    return handle;
  }
  static mh_tensor_view TensorOf(const mh_handle* handle, size_t number) {
    mh_tensor_view view = MH_TENSOR_VIEW_INIT;
    EXPECT_EQ(mh_tensor_at(handle, number, &view), MH_OK);
    return view;
  }
  // Whether the GPU has of every tensor what the host has.
  static void ExpectSameBytes(const OwnCuda& own, const mh_handle* handle) {
    for (size_t i = 0; i < mh_tensor_count(handle); ++i) {
      const mh_tensor_view view = TensorOf(handle, i);
      ASSERT_NE(view.device_data, nullptr) << view.name;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(view.device_data) % 512, 0U) << view.name;
      EXPECT_EQ(own.Read(view.device_data, view.nbytes),
                std::string(static_cast<const char*>(view.data), view.nbytes))
          << view.name;
    }
  }
  static size_t OpenDescriptors() {
    size_t count = 0;
    for ([[maybe_unused]] const auto& each : std::filesystem::directory_iterator("/proc/self/fd")) {
      ++count;
    }
    return count;
  }
};

}  // namespace modelhost::testing
