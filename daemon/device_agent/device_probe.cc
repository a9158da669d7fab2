#include "daemon/device_agent/device_probe.h"

#include <array>
#include <cstring>
#include <string>

namespace modelhost {
namespace {

using cuda::Access;
using cuda::Attribute;

constexpr size_t kProbeWords = 512;

Result<void> RoundTrip(const cuda::Driver& driver, cuda::Device device) {
  std::array<uint64_t, kProbeWords> sent{};
  for (size_t i = 0; i < sent.size(); ++i) sent[i] = 0x6d6f64656c686f73ULL * (i + 1);
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
    const auto copied = driver.Check(
        driver.call().cuMemcpyHtoD(writable->range().at, sent.data(), sizeof(sent)), "write");
    if (!copied.ok()) return copied;
  }
  const auto readable = cuda::ImportSegment(driver, fd, *bytes, device, Access::kRead);
  if (!readable.ok()) return readable.error();
  std::array<uint64_t, kProbeWords> got{};
  auto copied = driver.Check(
      driver.call().cuMemcpyDtoH(got.data(), readable->range().at, sizeof(got)), "read back");
  if (!copied.ok()) return copied;
  if (got != sent) return Error{Code::kDataLoss, "other bytes came back than were written", 0};
  return {};
}

Result<void> LegacyExport(const cuda::Driver& driver) {
  const auto memory = cuda::AllocateLegacy(driver, uint64_t{2} << 20);
  if (!memory.ok()) return memory.error();
  const auto handle = cuda::ExportLegacy(driver, *memory);
  if (!handle.ok()) return handle.error();
  return {};
}

}  // namespace

DeviceFacts FactsOf(const cuda::Driver& driver, cuda::Device device) {
  const auto has = [&](Attribute attribute) { return driver.AttributeOf(device, attribute) == 1; };
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
  return facts;
}

void TestDevice(const cuda::Driver& driver, cuda::Device device, DeviceFacts& facts) {
  if (facts.no_vmm.empty() && facts.vmm && facts.posix_fd) {
    const auto tested = RoundTrip(driver, device);
    facts.vmm_test = tested.ok() ? TestResult::kPassed : TestResult::kFailed;
    if (!tested.ok()) facts.vmm_failure = tested.error().text;
  }
  if (facts.has_ipc) {
    const auto tested = LegacyExport(driver);
    facts.ipc_test = tested.ok() ? TestResult::kPassed : TestResult::kFailed;
    if (!tested.ok()) facts.ipc_failure = tested.error().text;
  }
}

}  // namespace modelhost
