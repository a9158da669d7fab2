#include "client/python/native/device.h"

#include <dlfcn.h>

#include <cstdint>
#include <memory>

namespace modelhost::python {
namespace {

constexpr int kPointerDeviceOrdinal = 9;  // CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
using GetAttribute = int (*)(void* value, int attribute, uint64_t address);

struct LibraryCloser {
  void operator()(void* library) const { dlclose(library); }
};

}  // namespace

std::optional<int> OrdinalOf(const void* device_data) {
  const std::unique_ptr<void, LibraryCloser> driver(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD));
  if (driver == nullptr) return std::nullopt;
  const auto get = reinterpret_cast<GetAttribute>(dlsym(driver.get(), "cuPointerGetAttribute"));
  int ordinal = -1;
  if (get == nullptr ||
      get(&ordinal, kPointerDeviceOrdinal, reinterpret_cast<uintptr_t>(device_data)) != 0) {
    return std::nullopt;
  }
  return ordinal;
}

}  // namespace modelhost::python
