#include "client/python/native/device.h"

#include <dlfcn.h>

#include <array>
#include <cstddef>
#include <memory>
#include <string>

namespace modelhost::python {
namespace {

using DeviceGetCount = int (*)(int* count);
using DeviceGet = int (*)(int* device, int ordinal);
using DeviceGetUuid = int (*)(std::array<unsigned char, 16>* uuid, int device);

struct LibraryCloser {
  void operator()(void* library) const { dlclose(library); }
};

std::string UuidText(const std::array<unsigned char, 16>& uuid) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string text = "GPU";
  for (size_t i = 0; i < uuid.size(); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kHex[uuid[i] >> 4];
    text += kHex[uuid[i] & 15];
  }
  return text;
}

}  // namespace

std::optional<int> OrdinalOf(std::string_view uuid) {
  const std::unique_ptr<void, LibraryCloser> driver(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD));
  if (driver == nullptr) return std::nullopt;
  const auto get_count = reinterpret_cast<DeviceGetCount>(dlsym(driver.get(), "cuDeviceGetCount"));
  const auto get = reinterpret_cast<DeviceGet>(dlsym(driver.get(), "cuDeviceGet"));
  void* get_uuid_symbol = dlsym(driver.get(), "cuDeviceGetUuid_v2");
  if (get_uuid_symbol == nullptr) get_uuid_symbol = dlsym(driver.get(), "cuDeviceGetUuid");
  const auto get_uuid = reinterpret_cast<DeviceGetUuid>(get_uuid_symbol);
  if (get_count == nullptr || get == nullptr || get_uuid == nullptr) return std::nullopt;
  int count = 0;
  if (get_count(&count) != 0) return std::nullopt;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int device = 0;
    std::array<unsigned char, 16> bytes = {};
    if (get(&device, ordinal) == 0 && get_uuid(&bytes, device) == 0 && UuidText(bytes) == uuid) {
      return ordinal;
    }
  }
  return std::nullopt;
}

}  // namespace modelhost::python
