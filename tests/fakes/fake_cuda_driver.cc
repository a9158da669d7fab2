// A libcuda.so.1 with just enough of a driver to be asked what there is. The environment says what:
//   FAKE_CUDA_GPUS    "8.7,8.9"; empty: cuInit answers 100, no device
//   FAKE_CUDA_DRIVER  "12040"
//   FAKE_CUDA_FAULT   "hang" or "crash", in cuInit
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int kInvalidValue = 1;
constexpr int kNotInitialized = 3;
constexpr int kNoDevice = 100;
constexpr int kCapabilityMajor = 75;
constexpr int kCapabilityMinor = 76;

bool* Initialised() {
  static bool initialised = false;
  return &initialised;
}

std::string Setting(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::vector<std::string> Gpus() {
  std::vector<std::string> gpus;
  std::string one;
  for (const char c : Setting("FAKE_CUDA_GPUS") + ",") {
    if (c != ',') {
      one += c;
    } else if (!one.empty()) {
      gpus.push_back(one);
      one.clear();
    }
  }
  return gpus;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int cuInit(unsigned flags) {
  if (flags != 0) return kInvalidValue;
  if (Setting("FAKE_CUDA_FAULT") == "crash") std::abort();
  while (Setting("FAKE_CUDA_FAULT") == "hang") ::pause();
  if (Gpus().empty()) return kNoDevice;
  *Initialised() = true;
  return 0;
}

EXPORTED int cuDriverGetVersion(int* version) {
  const std::string text = Setting("FAKE_CUDA_DRIVER");
  *version = text.empty() ? 0 : std::stoi(text);
  return 0;
}

EXPORTED int cuDeviceGetCount(int* count) {
  if (!*Initialised()) return kNotInitialized;
  *count = static_cast<int>(Gpus().size());
  return 0;
}

EXPORTED int cuDeviceGet(int* device, int ordinal) {
  if (!*Initialised()) return kNotInitialized;
  if (ordinal < 0 || ordinal >= static_cast<int>(Gpus().size())) return kInvalidValue;
  *device = ordinal;
  return 0;
}

EXPORTED int cuDeviceGetAttribute(int* value, int attribute, int device) {
  if (!*Initialised()) return kNotInitialized;
  const std::vector<std::string> gpus = Gpus();
  if (device < 0 || device >= static_cast<int>(gpus.size())) return kInvalidValue;
  const std::string& gpu = gpus[static_cast<size_t>(device)];
  const size_t dot = gpu.find('.');
  if (attribute == kCapabilityMajor) {
    *value = std::stoi(gpu.substr(0, dot));
  } else if (attribute == kCapabilityMinor) {
    *value = std::stoi(gpu.substr(dot + 1));
  } else {
    return kInvalidValue;
  }
  return 0;
}
