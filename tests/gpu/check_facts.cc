// What the driver says of itself, and the ways that are not device memory by descriptor.
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "daemon/device_agent/device_probe.h"
#include "tests/gpu/gpu_check.h"

namespace modelhost::gpu {
namespace {

using cuda::Rc;

struct NamedAttribute {
  int number;
  const char* name;
};
constexpr NamedAttribute kAttributes[] = {
    {18, "integrated"},
    {41, "unified_addressing"},
    {75, "capability_major"},
    {76, "capability_minor"},
    {88, "pageable_memory_access"},
    {99, "host_register"},
    {100, "pageable_uses_host_page_tables"},
    {102, "virtual_memory_management"},
    {103, "posix_fd_handles"},
    {110, "gpu_direct_rdma_with_vmm"},
    {113, "read_only_host_register"},
    {115, "memory_pools"},
    {119, "memory_pool_handle_types"},
    {124, "dma_buf"},
    {125, "ipc_events"},
    {128, "fabric_handles"},
    {133, "mps"},
    {141, "host_numa_vmm"},
    {145, "host_vmm"},
};

std::string Number(Rc rc) { return std::to_string(static_cast<int>(rc)); }

cuda::AllocationProp Shareable() {
  cuda::AllocationProp prop{};
  prop.type = cuda::AllocationType::kPinned;
  prop.handle_types = cuda::HandleType::kPosixFd;
  prop.location = {cuda::LocationType::kDevice, 0};
  return prop;
}

}  // namespace

void CheckFacts(const Machine& machine) {
  const bool told = Good(Spawn([] {
    const cuda::DriverLoad load = cuda::Driver::Load();
    if (load.driver == nullptr) Fail(load.text);
    for (const NamedAttribute& one : kAttributes) {
      int value = 0;
      const Rc rc = load.driver->call().cuDeviceGetAttribute(
          &value, static_cast<cuda::Attribute>(one.number), 0);
      Print("attribute." + std::to_string(one.number) + "." + one.name,
            rc == Rc::kSuccess ? std::to_string(value) : "unknown, rc " + Number(rc));
    }
    const cuda::AllocationProp prop = Shareable();
    for (const auto& [name, option] :
         {std::pair("granularity_minimum", cuda::Granularity::kMinimum),
          std::pair("granularity_recommended", cuda::Granularity::kRecommended)}) {
      size_t bytes = 0;
      const Rc rc = load.driver->call().cuMemGetAllocationGranularity(&bytes, &prop, option);
      Print(name, rc == Rc::kSuccess ? std::to_string(bytes) : "rc " + Number(rc));
    }
    return 0;
  }));
  Verdict("the_driver_says_what_it_has", told);
  (void)machine;
}

// A process that makes memory and hands it on needs no context; what maps without one is told.
void CheckOwner(const Machine& machine) {
  auto ends = Must(MakeSeqpacketPair());
  const pid_t owner = Spawn([&] {
    ends.first.Reset();
    const cuda::DriverLoad load = cuda::Driver::Load();
    if (load.driver == nullptr) Fail(load.text);
    const cuda::DriverTable& call = load.driver->call();
    const auto one = Must(cuda::CreateAllocation(*load.driver, 0, machine.bytes));
    const auto two = Must(cuda::CreateAllocation(*load.driver, 0, machine.bytes));
    int number = -1;
    const Rc rc =
        call.cuMemExportToShareableHandle(&number, one.get(), cuda::HandleType::kPosixFd, 0);
    if (rc != Rc::kSuccess) Fail("export: " + load.driver->Name(rc));
    const UniqueFd fd(number);
    std::array<char, 256> link{};
    (void)!::readlink(("/proc/self/fd/" + std::to_string(number)).c_str(), link.data(),
                      link.size() - 1);
    Print("exported_descriptor_is", std::string(link.data()));
    Print("exported_descriptor_close_on_exec",
          std::string((::fcntl(number, F_GETFD) & FD_CLOEXEC) != 0 ? "yes" : "no"));
    const auto addresses = cuda::ReserveAddresses(*load.driver, machine.bytes);
    Print("reserve_without_context",
          addresses.ok() ? std::string("works") : addresses.error().text);
    if (addresses.ok()) {
      const auto mapped =
          cuda::MapAllocation(*load.driver, one, addresses->get(), 0, cuda::Access::kReadWrite);
      Print("map_without_context", mapped.ok() ? std::string("works") : mapped.error().text);
    }
    Say(ends.second, 1);
    return Hear(ends.second) == 2 ? 0 : 1;
  });
  ends.second.Reset();
  const bool made = Hear(ends.first) == 1;
  const uint64_t used = made ? UsedBytes(machine) : 0;
  if (made) Print("used_mib_2_allocations", static_cast<double>((used - machine.base) >> 20));
  Say(ends.first, 2);
  Verdict("an_owner_needs_no_context",
          Good(owner) && made && used >= machine.base + machine.bytes * 3 / 2);
}

// Legacy handles and host pages, for the machines that have nothing better: told, not promised.
void CheckOtherWays() {
  auto ends = Must(MakeSeqpacketPair());
  const pid_t exporter = Spawn([&ends] {
    ends.first.Reset();
    const Gpu gpu;
    const auto made = MakeLegacyTry(*gpu.driver);
    if (!made.ok()) {
      Print("legacy_handle", made.error().text);
      return 1;
    }
    // A handle is 64 bytes, of which a frame's number carries four.
    std::array<uint32_t, sizeof(made->handle) / sizeof(uint32_t)> words{};
    std::memcpy(words.data(), made->handle.bytes, sizeof(made->handle));
    for (const uint32_t word : words) Say(ends.second, word);
    (void)Hear(ends.second);
    return 0;
  });
  ends.second.Reset();
  const pid_t importer = Spawn([&ends] {
    cuda::IpcHandle handle{};
    std::array<uint32_t, sizeof(handle) / sizeof(uint32_t)> words{};
    for (uint32_t& word : words) word = Hear(ends.first);
    std::memcpy(handle.bytes, words.data(), sizeof(handle));
    const Gpu gpu;
    const auto opened = TryImport(*gpu.driver, handle);
    Print("legacy_handle_in_another_process",
          opened.ok() ? std::string("opened and read back") : opened.error().text);
    return 0;
  });
  (void)Good(importer);
  Say(ends.first, 1);
  (void)Good(exporter);
  (void)Good(Spawn([] {
    const Gpu gpu;
    const auto read = TryHostRead(*gpu.driver);
    Print("kernel_reads_sealed_host_page", read.ok() ? std::string("yes") : read.error().text);
    std::fflush(stdout);
    std::_Exit(0);  // The context may be dead: there is nothing to give back to.
    return 0;
  }));
}

}  // namespace modelhost::gpu
