#include "daemon/device_agent/device_mode.h"

namespace modelhost {
namespace {

// Why memory by descriptor does not work here; empty: it does.
std::string NoVmm(const DeviceFacts& facts) {
  if (!facts.no_vmm.empty()) return facts.no_vmm;
  if (!facts.vmm) return "this GPU has no virtual memory management (attribute 102)";
  if (!facts.posix_fd) return "this GPU exports no descriptors (attribute 103)";
  if (facts.vmm_test == TestResult::kFailed) return "the self-test failed: " + facts.vmm_failure;
  if (facts.vmm_test == TestResult::kNotRun) return "the self-test did not run";
  return "";
}

std::string NoIpc(const DeviceFacts& facts) {
  if (!facts.has_ipc) return "the driver lacks legacy CUDA IPC";
  if (facts.ipc_export == TestResult::kFailed || facts.ipc_test == TestResult::kFailed) {
    return "legacy CUDA IPC fails: " + facts.ipc_failure;
  }
  if (facts.ipc_export == TestResult::kNotRun) return "legacy CUDA IPC was not tested";
  return "";
}

// What stands behind a choice for host pages.
std::string DirectReason(const DeviceFacts& facts) {
  const std::string reason =
      "the GPU reads host memory through the host's page tables (attributes 88 and 100)";
  switch (facts.direct_test) {
    case TestResult::kPassed:
      return reason + "; a kernel read a sealed host page";
    case TestResult::kNotPossible:
      return reason + "; by its attributes alone: " + facts.direct_failure;
    default:
      return reason + "; by its attributes alone";
  }
}

std::string VmmReason(const DeviceFacts& facts) {
  if (facts.vmm_test == TestResult::kPassed) {
    return "the self-test exported, imported and read back device memory";
  }
  return "by its attributes alone (102 and 103): the self-test had no room: " + facts.vmm_failure;
}

std::string IpcReason(const DeviceFacts& facts) {
  if (facts.ipc_test == TestResult::kPassed) {
    return "another process opened a legacy handle and read it back";
  }
  if (facts.ipc_export == TestResult::kNotPossible) {
    return "the driver has legacy handles; untested: " + facts.ipc_failure;
  }
  return "the driver exports legacy handles; no other process has opened one";
}

}  // namespace

const char* DeviceModeName(DeviceMode mode) {
  switch (mode) {
    case DeviceMode::kHostOnly:
      return "host_only";
    case DeviceMode::kVmmFd:
      return "vmm_fd";
    case DeviceMode::kHostDirect:
      return "host_direct";
    case DeviceMode::kHostRegistered:
      return "host_registered";
    case DeviceMode::kCudaIpc:
      return "cuda_ipc";
  }
  return "unknown";
}

const char* DeviceModeLimits(DeviceMode mode) {
  switch (mode) {
    case DeviceMode::kHostRegistered:
      return "unprotected: a client that registers the pages can write to them";
    case DeviceMode::kCudaIpc:
      return "unprotected: a client can write to the memory; the device agent must live for it; "
             "clients share its PID namespace and its MIG instance";
    default:
      return "";
  }
}

DeviceModeChoice ChooseDeviceMode(const DeviceFacts& facts, bool allow_registered) {
  if (!facts.has_driver) return {DeviceMode::kHostOnly, facts.no_driver};
  std::string why_not;
  if (facts.pageable_access && facts.host_page_tables) {
    if (facts.direct_test != TestResult::kFailed) {
      return {DeviceMode::kHostDirect, DirectReason(facts)};
    }
    why_not =
        "not host_direct: attributes 88 and 100 promise it, but " + facts.direct_failure + "; ";
  }
  const std::string no_vmm = NoVmm(facts);
  if (no_vmm.empty()) return {DeviceMode::kVmmFd, why_not + VmmReason(facts)};
  why_not += "not vmm_fd: " + no_vmm;
  if (facts.integrated && facts.host_register) {
    if (allow_registered) {
      return {DeviceMode::kHostRegistered,
              "the operator allows it for this integrated GPU; " + why_not};
    }
    why_not += "; not host_registered: it is not allowed by the configuration";
  }
  const std::string no_ipc = NoIpc(facts);
  if (no_ipc.empty()) return {DeviceMode::kCudaIpc, IpcReason(facts) + "; " + why_not};
  return {DeviceMode::kHostOnly, why_not + "; not cuda_ipc: " + no_ipc};
}

}  // namespace modelhost
