// modelhost-device-reader: takes a model on a GPU, copies its tensors back, and compares them with
// the host's. A user's path: the public header, and a driver of the program's own.
//
//   modelhost-device-reader --ref planner [--device N] [--follow]
//
// One line per version. With --follow it waits for the next one on every line of stdin, and takes
// it at the same device addresses. Exit 0; 1 on an error, which is one line on stderr; 3 when bytes
// differ.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "client/examples/arguments.h"
#include "modelhost/modelhost.hpp"

namespace {

constexpr char kUsage[] =
    "modelhost-device-reader --ref REF [--runtime-dir DIR] [--device N] [--wait MS] [--follow]";

// The five calls that this program needs; one with the CUDA run-time has cudaMemcpy.
class Gpu {
 public:
  using Address = unsigned long long;  // NOLINT(runtime/int): as in cuda.h
  // Makes the primary context of device `number` current, by which libmodelhost knows which GPU is
  // meant. What went wrong; empty: it is there.
  std::string Open(int number) {
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return "no CUDA driver";
    int (*init)(unsigned) = nullptr;
    int (*get)(int*, int) = nullptr;
    int (*retain)(void**, int) = nullptr;
    int (*set)(void*) = nullptr;
    const bool all = Find(library, "cuInit", init) && Find(library, "cuDeviceGet", get) &&
                     Find(library, "cuDevicePrimaryCtxRetain", retain) &&
                     Find(library, "cuCtxSetCurrent", set) &&
                     Find(library, "cuMemcpyDtoH_v2", copy_);
    int device = 0;
    void* context = nullptr;
    if (!all || init(0) != 0 || get(&device, number) != 0 || retain(&context, device) != 0 ||
        set(context) != 0) {
      return "the CUDA driver does not start";
    }
    return "";
  }
  bool Read(void* to, const void* from, size_t bytes) const {
    return copy_(to, static_cast<Address>(reinterpret_cast<uintptr_t>(from)), bytes) == 0;
  }

 private:
  template <typename Function>
  static bool Find(void* library, const char* symbol, Function& function) {
    function = reinterpret_cast<Function>(::dlsym(library, symbol));
    return function != nullptr;
  }
  int (*copy_)(void*, Address, size_t) = nullptr;
};

int Fail(const std::string& text) {
  std::fprintf(stderr, "error: %s\n", text.c_str());
  return 1;
}

// Prints its line; the number of tensors that differ.
size_t Compare(const Gpu& gpu, const modelhost::ModelHandle& model) {
  size_t on_device = 0;
  size_t different = 0;
  const void* first = nullptr;
  std::vector<unsigned char> bytes;
  for (size_t i = 0; i < model.tensor_count(); ++i) {
    const auto tensor = model.TensorAt(i);
    if (!tensor.ok() || tensor->device_data() == nullptr) continue;
    if (on_device++ == 0) first = tensor->device_data();
    bytes.resize(static_cast<size_t>(tensor->nbytes()));
    const bool same = gpu.Read(bytes.data(), tensor->device_data(), bytes.size()) &&
                      std::memcmp(bytes.data(), tensor->data(), bytes.size()) == 0;
    different += same ? 0 : 1;
  }
  std::printf("%s: %s on %s, %zu of %zu tensors, first at %p, %zu differ\n", model.name().c_str(),
              std::string(model.device_mode()).c_str(), std::string(model.gpu()).c_str(), on_device,
              model.tensor_count(), first, different);
  std::fflush(stdout);
  return different;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments(argc, argv);
  modelhost::Client::Options client_options;
  client_options.runtime_dir = arguments.Value("--runtime-dir", "");
  const std::string ref = arguments.Value("--ref", "");
  modelhost::AcquireOptions options;
  options.want = modelhost::Want::kDevice;
  const int device = static_cast<int>(arguments.Number("--device", 0));
  const long wait_ms = arguments.Number("--wait", 0);
  options.wait = wait_ms != 0;
  options.deadline = std::chrono::milliseconds(wait_ms);
  options.same_addresses = arguments.Switch("--follow");
  arguments.Done(kUsage);
  if (ref.empty()) return Fail(std::string("--ref is missing\nusage: ") + kUsage);

  Gpu gpu;
  if (const std::string why = gpu.Open(device); !why.empty()) return Fail(why);
  auto client = modelhost::Client::Connect(client_options);
  if (!client.ok()) return Fail(client.error().message);
  if (!options.same_addresses) {
    const auto model = client->Acquire(ref, options);
    if (!model.ok()) return Fail(model.error().message);
    return Compare(gpu, *model) == 0 ? 0 : 3;
  }
  auto live = client->Follow(ref, options);
  if (!live.ok()) return Fail(live.error().message);
  size_t different = Compare(gpu, live->current());
  while (std::getchar() != EOF) {
    const auto model = live->Remap();  // Nothing of ours runs on the GPU now.
    if (!model.ok()) return Fail(model.error().message);
    different += Compare(gpu, *model);
  }
  return different == 0 ? 0 : 3;
}
