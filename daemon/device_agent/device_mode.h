// How weights reach a GPU, chosen from what its driver says and what a self-test showed. Pure.
#pragma once

#include <cstdint>
#include <string>

namespace modelhost {

enum class DeviceMode : uint32_t {
  kHostOnly = 0,
  kVmmFd = 1,           // A descriptor of device memory; importers map it read-only.
  kHostDirect = 2,      // The GPU reads the host region itself: no second copy.
  kHostRegistered = 3,  // Host pages that a client registers; nothing protects them.
  kCudaIpc = 4,         // Legacy handles; nothing protects them, and the agent must live.
};
// "vmm_fd".
const char* DeviceModeName(DeviceMode mode);
// What a mode cannot do, for people; empty for those without limits.
const char* DeviceModeLimits(DeviceMode mode);

enum class TestResult : uint32_t {
  kNotRun = 0,
  kPassed = 1,
  kFailed = 2,
  kNotPossible = 3,  // Something else than what is tested kept it from running.
};

struct DeviceFacts {
  bool has_driver = false;
  std::string no_driver;  // Why there is none.
  std::string no_vmm;     // Why the driver has no memory by descriptor; empty: it has.
  bool has_ipc = false;
  // Attributes of the device.
  bool integrated = false;
  bool pageable_access = false;
  bool host_page_tables = false;
  bool host_register = false;
  bool read_only_host_register = false;
  bool vmm = false;
  bool posix_fd = false;
  // Create, fill, export, import read-only, map, read back. kNotPossible: the device is full.
  TestResult vmm_test = TestResult::kNotRun;
  std::string vmm_failure;
  // Allocate and export here (kNotPossible as above), and open in another process.
  TestResult ipc_export = TestResult::kNotRun;
  TestResult ipc_test = TestResult::kNotRun;
  std::string ipc_failure;
  // A kernel in another process reads a host page. kNotPossible: the driver runs no such kernel.
  TestResult direct_test = TestResult::kNotRun;
  std::string direct_failure;
};

struct DeviceModeChoice {
  DeviceMode mode = DeviceMode::kHostOnly;
  std::string reason;  // Why this one, and why none of those before it.
};

// `allow_registered`: the operator accepts pages that clients can write to.
DeviceModeChoice ChooseDeviceMode(const DeviceFacts& facts, bool allow_registered);

}  // namespace modelhost
