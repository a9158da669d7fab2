#include "daemon/device_agent/device_probe.h"

#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "daemon/device_agent/agent_wire.h"
#include "proto/cuda/kernels.h"
#include "proto/handle/mapping.h"
#include "proto/handle/region.h"

namespace modelhost {
namespace {

using agent::TryWord;
using cuda::Access;
using cuda::Attribute;
using cuda::Rc;

constexpr uint64_t kLegacyBytes = uint64_t{2} << 20;  // Whole pages of a GPU: no neighbours in it.

using Words = std::array<uint64_t, agent::kTryWords>;

Words TryPattern() {
  Words words{};
  for (size_t i = 0; i < words.size(); ++i) words[i] = TryWord(i);
  return words;
}

Result<void> FillPattern(const cuda::Driver& driver, cuda::DevicePtr at) {
  const Words words = TryPattern();
  return driver.Check(driver.call().cuMemcpyHtoD(at, words.data(), sizeof(words)), "write");
}

Result<void> ComparePattern(const cuda::Driver& driver, cuda::DevicePtr at) {
  Words words{};
  const Rc rc = driver.call().cuMemcpyDtoH(words.data(), at, sizeof(words));
  if (rc != Rc::kSuccess) return driver.ToError(rc, "read back");
  if (words != TryPattern()) {
    return Error{Code::kDataLoss, "other bytes came back than were written", 0};
  }
  return {};
}

Result<void> RoundTrip(const cuda::Driver& driver, cuda::Device device) {
  const auto bytes = cuda::MinimumGranularity(driver, device);
  if (!bytes.ok()) return bytes.error();
  UniqueFd fd;
  {
    const auto made = cuda::CreateAllocation(driver, device, *bytes);
    if (!made.ok()) return made.error();
    auto exported = cuda::ExportAllocation(driver, *made);
    if (!exported.ok()) return exported.error();
    fd = *std::move(exported);
  }
  {
    const auto writable = cuda::ImportSegment(driver, fd, *bytes, device, Access::kReadWrite);
    if (!writable.ok()) return writable.error();
    if (auto filled = FillPattern(driver, writable->range().at); !filled.ok()) return filled;
  }
  const auto readable = cuda::ImportSegment(driver, fd, *bytes, device, Access::kRead);
  if (!readable.ok()) return readable.error();
  return ComparePattern(driver, readable->range().at);
}

// A full device says nothing about what it can do.
TestResult ResultOf(const Result<void>& tested, std::string& failure) {
  if (tested.ok()) return TestResult::kPassed;
  failure = tested.error().text;
  return tested.error().code == Code::kResourceExhausted ? TestResult::kNotPossible
                                                         : TestResult::kFailed;
}

}  // namespace

Result<DeviceFacts> FactsOf(const cuda::Driver& driver, cuda::Device device) {
  std::optional<Error> failed;
  const auto has = [&](Attribute attribute) {
    int value = 0;
    const Rc rc = driver.call().cuDeviceGetAttribute(&value, attribute, device);
    // An attribute that is newer than the driver is one that the device does not have.
    if (rc != Rc::kSuccess && rc != Rc::kInvalidValue) {
      failed = driver.ToError(rc, "attribute " + std::to_string(static_cast<int>(attribute)));
    }
    return rc == Rc::kSuccess && value == 1;
  };
  DeviceFacts facts;
  facts.has_driver = true;
  facts.no_vmm = driver.no_vmm();
  facts.has_ipc = driver.has_ipc();
  facts.integrated = has(Attribute::kIntegrated);
  facts.pageable_access = has(Attribute::kPageableMemoryAccess);
  facts.host_page_tables = has(Attribute::kPageableUsesHostPageTables);
  facts.host_register = has(Attribute::kHostRegister);
  facts.read_only_host_register = has(Attribute::kReadOnlyHostRegister);
  facts.vmm = has(Attribute::kVirtualMemoryManagement);
  facts.posix_fd = has(Attribute::kPosixFdHandles);
  if (failed.has_value()) return *std::move(failed);
  return facts;
}

void TestDevice(const cuda::Driver& driver, cuda::Device device, DeviceFacts& facts) {
  if (facts.no_vmm.empty() && facts.vmm && facts.posix_fd) {
    facts.vmm_test = ResultOf(RoundTrip(driver, device), facts.vmm_failure);
    if (facts.vmm_test != TestResult::kFailed) return;
  }
  if (facts.has_ipc) {
    const auto made = MakeLegacyTry(driver);
    facts.ipc_export =
        ResultOf(made.ok() ? Result<void>() : Result<void>(made.error()), facts.ipc_failure);
  }
}

Result<LegacyTry> MakeLegacyTry(const cuda::Driver& driver) {
  auto memory = cuda::AllocateLegacy(driver, kLegacyBytes);
  if (!memory.ok()) return std::move(memory).error();
  if (auto filled = FillPattern(driver, memory->get()); !filled.ok()) {
    return std::move(filled).error();
  }
  const auto handle = cuda::ExportLegacy(driver, *memory);
  if (!handle.ok()) return handle.error();
  return LegacyTry{*std::move(memory), *handle, kLegacyBytes};
}

Result<void> TryImport(const cuda::Driver& driver, const cuda::IpcHandle& handle) {
  const auto opened = cuda::OpenLegacy(driver, handle);
  if (!opened.ok()) return opened.error();
  return ComparePattern(driver, opened->get());
}

Result<void> TryHostRead(const cuda::Driver& driver) {
  const cuda::DriverTable& call = driver.call();
  const auto cannot = [](std::string why) {
    return Error{Code::kUnimplemented, std::move(why), 0};
  };
  if (call.cuModuleLoadData == nullptr || call.cuModuleUnload == nullptr ||
      call.cuModuleGetFunction == nullptr || call.cuLaunchKernel == nullptr) {
    return cannot("the driver lacks the calls for kernels");
  }
  auto page = WritableRegion::Create("modelhost:self-test", sizeof(Words), HugePages::kOff);
  if (!page.ok()) return cannot(page.error().text);
  const Words words = TryPattern();
  std::memcpy(page->bytes().data(), words.data(), sizeof(words));
  const auto sealed = std::move(*page).Seal();
  if (!sealed.ok()) return cannot(sealed.error().text);
  const auto mapped = ReadOnlyMapping::MapSealed(sealed->fd, sealed->bytes, Align::kPage);
  if (!mapped.ok()) return cannot(mapped.error().text);

  cuda::ModuleHandle loaded = nullptr;
  Rc rc = call.cuModuleLoadData(&loaded, cuda::kKernels);
  if (rc != Rc::kSuccess) return cannot("it compiles no PTX: " + driver.Name(rc));
  const cuda::Module module(driver, loaded);
  cuda::FunctionHandle kernel = nullptr;
  rc = call.cuModuleGetFunction(&kernel, loaded, cuda::kPeekKernel);
  if (rc != Rc::kSuccess) return cannot("it does not find the kernel: " + driver.Name(rc));
  const auto memory = cuda::AllocateLegacy(driver, sizeof(uint64_t));
  if (!memory.ok()) return cannot(memory.error().text);
  const auto stream = cuda::CreateStream(driver);
  if (!stream.ok()) return cannot(stream.error().text);
  for (const size_t index : {size_t{0}, words.size() - 1}) {
    // With one address space the device uses the host's addresses.
    auto from = static_cast<cuda::DevicePtr>(
        reinterpret_cast<uintptr_t>(mapped->bytes().data() + index * sizeof(uint64_t)));
    cuda::DevicePtr to = memory->get();
    std::array<void*, 2> arguments = {&from, &to};
    rc = call.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream->get(), arguments.data(), nullptr);
    if (rc == Rc::kSuccess) rc = call.cuStreamSynchronize(stream->get());
    uint64_t word = 0;
    if (rc == Rc::kSuccess) rc = call.cuMemcpyDtoH(&word, to, sizeof(word));
    if (rc != Rc::kSuccess) return driver.ToError(rc, "a kernel that reads a host page");
    if (word != words[index]) {
      return Error{Code::kDataLoss, "a kernel read other bytes than a host page holds", 0};
    }
  }
  return {};
}

}  // namespace modelhost
