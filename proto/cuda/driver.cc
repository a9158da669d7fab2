#include "proto/cuda/driver.h"

#include <dlfcn.h>

#include <optional>
#include <utility>

namespace modelhost::cuda {
namespace {

// What an operator can do about what cuInit says.
std::string_view Advice(Rc rc) {
  switch (rc) {
    case Rc::kStubLibrary:
      return "this is the toolkit's stub, not a driver; take it out of the library path";
    case Rc::kNoDevice:
      return "no GPU is visible; look at CUDA_VISIBLE_DEVICES and at the container's devices";
    case Rc::kSystemDriverMismatch:
    case Rc::kCompatNotSupportedOnDevice:
      return "the driver library and the kernel module are of different versions; reboot, or "
             "install them anew";
    case Rc::kUnknown:
      return "is the kernel module loaded, and may this user open /dev/nvidia*?";
    default:
      return "look at the kernel's log for the reason";
  }
}

Code CodeOf(Rc rc) {
  switch (rc) {
    case Rc::kSuccess:
      return Code::kOk;
    case Rc::kOutOfMemory:
      return Code::kResourceExhausted;
    case Rc::kNotSupported:
    case Rc::kNotPermitted:
      return Code::kFailedPrecondition;
    case Rc::kNotFound:
      return Code::kNotFound;
    case Rc::kInvalidValue:
    case Rc::kNotInitialized:
    case Rc::kInvalidHandle:
      return Code::kInternal;
    default:
      return Code::kUnavailable;
  }
}

template <typename Function>
void Resolve(void* library, const char* symbol, Function*& entry, std::string* missing) {
  entry = reinterpret_cast<Function*>(::dlsym(library, symbol));
  if (entry == nullptr && missing != nullptr && missing->empty()) *missing = symbol;
}

}  // namespace

DriverLoad Driver::Load(const char* library) {
  const auto no = [](NoDriver why, Rc rc, std::string text) {
    return DriverLoad{.driver = nullptr, .why = why, .rc = rc, .text = std::move(text)};
  };
  void* loaded = ::dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) {
    const char* why = ::dlerror();
    return no(NoDriver::kNoLibrary, Rc::kSuccess,
              "no CUDA driver: " + std::string(why == nullptr ? library : why));
  }
  const std::shared_ptr<Driver> driver(new Driver());  // lint: allow(naked-new) private constructor
  DriverTable& table = driver->table_;
  std::string required;
  std::string vmm;
  std::string ipc;
#define MODELHOST_RESOLVE_REQUIRED(name, symbol, ...) \
  Resolve(loaded, symbol, table.name, &required);
#define MODELHOST_RESOLVE_VMM(name, symbol, ...) Resolve(loaded, symbol, table.name, &vmm);
#define MODELHOST_RESOLVE_IPC(name, symbol, ...) Resolve(loaded, symbol, table.name, &ipc);
#define MODELHOST_RESOLVE_EXTRA(name, symbol, ...) Resolve(loaded, symbol, table.name, nullptr);
  MODELHOST_CUDA_REQUIRED(MODELHOST_RESOLVE_REQUIRED)
  MODELHOST_CUDA_VMM(MODELHOST_RESOLVE_VMM)
  MODELHOST_CUDA_IPC(MODELHOST_RESOLVE_IPC)
  MODELHOST_CUDA_EXTRA(MODELHOST_RESOLVE_EXTRA)
#undef MODELHOST_RESOLVE_REQUIRED
#undef MODELHOST_RESOLVE_VMM
#undef MODELHOST_RESOLVE_IPC
#undef MODELHOST_RESOLVE_EXTRA
  if (!required.empty()) {
    return no(NoDriver::kMissingSymbol, Rc::kSuccess,
              std::string(library) + ": it lacks " + required +
                  ", which every driver that is supported has (install a newer one)");
  }
  if (const Rc rc = table.cuInit(0); rc != Rc::kSuccess) {
    return no(rc == Rc::kNoDevice ? NoDriver::kNoDevice : NoDriver::kInitFailed, rc,
              std::string(library) + ": cuInit says " + driver->Name(rc) + " (" +
                  std::string(Advice(rc)) + ")");
  }
  Rc rc = table.cuDriverGetVersion(&driver->version_);
  if (rc == Rc::kSuccess) rc = table.cuDeviceGetCount(&driver->device_count_);
  if (rc != Rc::kSuccess) {
    return no(NoDriver::kInitFailed, rc,
              std::string(library) + ": it does not say what there is: " + driver->Name(rc));
  }
  if (driver->device_count_ == 0) {
    return no(NoDriver::kNoDevice, Rc::kNoDevice,
              std::string(library) + ": it sees no GPU (look at CUDA_VISIBLE_DEVICES)");
  }
  if (!vmm.empty()) {
    driver->no_vmm_ = "the driver lacks " + vmm;
  } else if (driver->version_ < kVmmDriverVersion) {
    driver->no_vmm_ = "driver " + FormatVersion(driver->version_) + " is older than " +
                      FormatVersion(kVmmDriverVersion);
  }
  driver->has_ipc_ = ipc.empty();
  DriverLoad load;
  load.driver = driver;
  return load;
}

std::string Driver::Name(Rc rc) const {
  const char* name = nullptr;
  // A driver that does not know the number leaves no name.
  if (table_.cuGetErrorName(rc, &name) != Rc::kSuccess || name == nullptr) name = "CUDA error";
  return std::string(name) + " (" + std::to_string(static_cast<int>(rc)) + ")";
}

Error Driver::ToError(Rc rc, std::string_view what) const {
  return Error{CodeOf(rc), std::string(what) + ": " + Name(rc), 0};
}

Result<void> Driver::Check(Rc rc, std::string_view what) const {
  if (rc == Rc::kSuccess) return {};
  return ToError(rc, what);
}

Result<std::string> Driver::UuidText(Device device) const {
  auto* ask = table_.cuDeviceGetUuid != nullptr ? table_.cuDeviceGetUuid : table_.cuDeviceGetUuidV1;
  if (ask == nullptr) {
    return Error{Code::kUnimplemented, "the driver does not say the UUID of a GPU", 0};
  }
  Uuid uuid{};
  if (const Rc rc = ask(&uuid, device); rc != Rc::kSuccess) {
    return ToError(rc, "the UUID of GPU " + std::to_string(device));
  }
  return FormatUuid(uuid);
}

int Driver::AttributeOf(Device device, Attribute attribute) const {
  int value = 0;
  return table_.cuDeviceGetAttribute(&value, attribute, device) == Rc::kSuccess ? value : 0;
}

Result<Device> Driver::FindDevice(std::string_view uuid) const {
  std::optional<Error> failed;
  for (int ordinal = 0; ordinal < device_count_; ++ordinal) {
    Device device = 0;
    auto text = Result<std::string>(std::string());
    if (const Rc rc = table_.cuDeviceGet(&device, ordinal); rc == Rc::kSuccess) {
      text = UuidText(device);
    } else {
      text = ToError(rc, "find GPU " + std::to_string(ordinal));
    }
    if (text.ok() && *text == uuid) return device;
    if (!text.ok()) failed = text.error();
  }
  if (failed.has_value()) return *std::move(failed);  // It may have been that one.
  return Error{Code::kNotFound,
               std::string(uuid) +
                   ": this process does not see that GPU (look at "
                   "CUDA_VISIBLE_DEVICES and at the container's devices)",
               0};
}

std::string FormatUuid(const Uuid& uuid) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[uuid.bytes[i] >> 4];
    text += kDigits[uuid.bytes[i] & 15];
  }
  return text;
}

std::string FormatVersion(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

bool IsSticky(Rc rc) {
  switch (rc) {
    case Rc::kSuccess:
    case Rc::kInvalidValue:
    case Rc::kOutOfMemory:
    case Rc::kInvalidDevice:
    case Rc::kInvalidContext:
    case Rc::kInvalidHandle:
    case Rc::kNotFound:
    case Rc::kNotReady:
    case Rc::kHostMemoryAlreadyRegistered:
    case Rc::kHostMemoryNotRegistered:
    case Rc::kNotPermitted:
    case Rc::kNotSupported:
      return false;
    default:
      return true;  // Also what is not known: a fresh process is the safe way on.
  }
}

}  // namespace modelhost::cuda
