// The CUDA driver of this machine, reached by dlopen: one binary runs with and without a GPU.
//
// Nothing links libcuda. Whatever is missing is an answer with its reason, never a failure of the
// program. A process that used a driver must not use it after fork(): load it in the child.
// Thread-safe after Load.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "proto/cuda/driver_table.h"
#include "proto/handle/error.h"

namespace modelhost::cuda {

inline constexpr char kDriverLibrary[] = "libcuda.so.1";

enum class NoDriver {
  kNone,           // There is one.
  kNoLibrary,      // Nothing is installed, or it cannot be loaded.
  kMissingSymbol,  // Older than anything that is known to work.
  kInitFailed,     // cuInit says no: a stub, no kernel module, versions that do not fit.
  kNoDevice,       // A driver that sees no GPU.
};

class Driver;

struct DriverLoad {
  std::shared_ptr<const Driver> driver;  // Null when `why` is not kNone.
  NoDriver why = NoDriver::kNone;
  Rc rc = Rc::kSuccess;  // What cuInit or a later call said.
  std::string text;      // WHAT: WHY (what to do); empty with a driver.
};

class Driver {
 public:
  // Loads `library`, fills the table, initialises it and asks for what Driver says below. The
  // library stays loaded until the process ends: a driver does not survive being unloaded.
  static DriverLoad Load(const char* library = kDriverLibrary);

  const DriverTable& call() const { return table_; }
  int version() const { return version_; }  // 12040 is 12.4.
  int device_count() const { return device_count_; }
  // Whether memory can be handed on as a descriptor, as far as the driver goes; a device may still
  // lack it. Empty: yes; else why not.
  const std::string& no_vmm() const { return no_vmm_; }
  bool has_ipc() const { return has_ipc_; }

  // "CUDA_ERROR_OUT_OF_MEMORY (2)".
  std::string Name(Rc rc) const;
  // OK for kSuccess. "what: CUDA_ERROR_... (N)" with RESOURCE_EXHAUSTED for missing memory,
  // UNAVAILABLE for a context that is dead, FAILED_PRECONDITION for what is not supported or
  // allowed, INTERNAL for what only a bug of ours can cause.
  Result<void> Check(Rc rc, std::string_view what) const;
  Error ToError(Rc rc, std::string_view what) const;

  // The device's UUID as "GPU-1b4e28ba-2fa1-11d2-883f-0016d3cca427".
  Result<std::string> UuidText(Device device) const;
  // 0 for an attribute that this driver does not know.
  int AttributeOf(Device device, Attribute attribute) const;
  // The device of a UUID, in this process's numbering (CUDA_VISIBLE_DEVICES renumbers). NOT_FOUND
  Result<Device> FindDevice(std::string_view uuid) const;

  // How often the driver refused to take something back (handles.h): it is lost until the process
  // ends.
  uint64_t lost_handles() const { return lost_; }
  void GaveBack(Rc rc) const {
    if (rc != Rc::kSuccess && rc != Rc::kDeinitialized) ++lost_;
  }

 private:
  Driver() = default;

  DriverTable table_;
  int version_ = 0;
  int device_count_ = 0;
  std::string no_vmm_;
  bool has_ipc_ = false;
  mutable std::atomic<uint64_t> lost_{0};
};

std::string FormatUuid(const Uuid& uuid);
// "12.4".
std::string FormatVersion(int version);
// Errors after which a process can use its context no more.
bool IsSticky(Rc rc);

}  // namespace modelhost::cuda
