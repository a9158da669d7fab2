// Pinned host memory, streams, events, copies, and the two kernels that checks launch.
//
// A copy from pinned memory happens when somebody waits for it and not before: whoever fills a slot
// of a ring again too early sees wrong bytes on the device every time, not once in a thousand.
#include <sys/uio.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/fakes/fakecuda/fake_state.h"

using namespace fakecuda;  // lint: allow(using-std) the whole file is that interface
using modelhost::cuda::EventHandle;
using modelhost::cuda::FunctionHandle;
using modelhost::cuda::ModuleHandle;
using modelhost::cuda::StreamHandle;

namespace {

template <typename Object, typename Handle>
Object* Find(const std::set<Object*>& known, Handle handle) {
  auto* const object = reinterpret_cast<Object*>(handle);
  return known.contains(object) ? object : nullptr;
}

// Whether all of a host range is mapped, and writable.
bool HostRangeIs(uintptr_t at, uint64_t bytes, bool* writable) {
  *writable = true;
  std::FILE* const maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) std::abort();
  char line[512];
  uintptr_t reached = at;
  while (reached < at + bytes && std::fgets(line, sizeof line, maps) != nullptr) {
    unsigned long first = 0;  // NOLINT(runtime/int): scanf's
    unsigned long end = 0;    // NOLINT(runtime/int)
    char rights[5] = "";
    if (std::sscanf(line, "%lx-%lx %4s", &first, &end, rights) != 3) continue;
    if (first > reached || reached >= end) continue;
    *writable = *writable && rights[1] == 'w';
    reached = end;
  }
  std::fclose(maps);
  return reached >= at + bytes;
}

// Host memory under its own address: registered or allocated with a mapping for devices, or any
// where the GPU has the host's page tables.
bool DeviceReadsHost(int gpu, DevicePtr from, uint64_t bytes) {
  DevicePtr base = 0;
  if (FindMapping(from, &base) != nullptr) return false;
  auto range = Driver().host.upper_bound(from);
  if (range != Driver().host.begin()) {
    --range;
    const uint64_t inside = from - range->first;
    if (range->second.device_mapped && inside < range->second.bytes) {
      return bytes <= range->second.bytes - inside;
    }
  }
  return AttributeOf(gpu, Attribute::kPageableMemoryAccess) == 1 &&
         AttributeOf(gpu, Attribute::kPageableUsesHostPageTables) == 1;
}

void RunAll(const Context* context) {
  for (FakeStream* stream : Driver().streams) {
    if (stream->context == context) Run(*stream, UINT64_MAX);
  }
}

}  // namespace

FAKE_CUDA_API cuMemHostAlloc(void** host, size_t bytes, uint32_t flags) {
  FAKE_CUDA_CALL("cuMemHostAlloc", Need::kContext);
  FAKE_CUDA_NEED(host != nullptr && bytes != 0 && flags <= 7, Rc::kInvalidValue, "arguments");
  FAKE_CUDA_NEED(::posix_memalign(host, kPage, bytes) == 0, Rc::kOutOfMemory, "no host memory");
  Driver().host[reinterpret_cast<uintptr_t>(*host)] = {bytes, false, true};
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemFreeHost(void* host) {
  FAKE_CUDA_CALL("cuMemFreeHost", Need::kInit);
  const auto found = Driver().host.find(reinterpret_cast<uintptr_t>(host));
  FAKE_CUDA_NEED(found != Driver().host.end() && !found->second.registered, Rc::kInvalidValue,
                 "not from cuMemHostAlloc");
  FAKE_CUDA_NEED(!CopiesFromHost(host, found->second.bytes), Rc::kInvalidValue,
                 "copies from it are in flight");
  Driver().host.erase(found);
  std::free(host);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemHostRegister_v2(void* host, size_t bytes, uint32_t flags) {
  FAKE_CUDA_CALL("cuMemHostRegister", Need::kContext);
  const auto at = reinterpret_cast<uintptr_t>(host);
  FAKE_CUDA_NEED(host != nullptr && bytes != 0 && flags <= 15, Rc::kInvalidValue, "arguments");
  FAKE_CUDA_NEED(at % kPage == 0 && bytes % kPage == 0, Rc::kInvalidValue, "not whole pages");
  const int gpu = Current()->gpu;
  FAKE_CUDA_NEED(AttributeOf(gpu, Attribute::kHostRegister) == 1, Rc::kNotSupported,
                 "attribute 99 is 0");
  const bool read_only = (flags & modelhost::cuda::kHostRegisterReadOnly) != 0;
  FAKE_CUDA_NEED(!read_only || AttributeOf(gpu, Attribute::kReadOnlyHostRegister) == 1,
                 Rc::kNotSupported, "attribute 113 is 0");
  FAKE_CUDA_NEED(!IsPinned(host, 1), Rc::kHostMemoryAlreadyRegistered, "registered already");
  bool writable = false;
  FAKE_CUDA_NEED(HostRangeIs(at, bytes, &writable), Rc::kInvalidValue, "not all of it is mapped");
  FAKE_CUDA_NEED(writable || read_only, Rc::kInvalidValue,
                 "read-only pages need CU_MEMHOSTREGISTER_READ_ONLY");
  Driver().host[at] = {bytes, true, (flags & modelhost::cuda::kHostRegisterDeviceMap) != 0};
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemHostUnregister(void* host) {
  FAKE_CUDA_CALL("cuMemHostUnregister", Need::kInit);
  const auto found = Driver().host.find(reinterpret_cast<uintptr_t>(host));
  FAKE_CUDA_NEED(found != Driver().host.end() && found->second.registered,
                 Rc::kHostMemoryNotRegistered, "not registered");
  FAKE_CUDA_NEED(!CopiesFromHost(host, found->second.bytes), Rc::kInvalidValue,
                 "copies from it are in flight");
  Driver().host.erase(found);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemHostGetDevicePointer_v2(DevicePtr* at, void* host, uint32_t flags) {
  FAKE_CUDA_CALL("cuMemHostGetDevicePointer", Need::kContext);
  const auto found = Driver().host.find(reinterpret_cast<uintptr_t>(host));
  FAKE_CUDA_NEED(
      at != nullptr && flags == 0 && found != Driver().host.end() && found->second.device_mapped,
      Rc::kInvalidValue, "not the start of host memory that is mapped for devices");
  *at = found->first;
  return Rc::kSuccess;
}

FAKE_CUDA_API cuMemcpyHtoD_v2(DevicePtr to, const void* from, size_t bytes) {
  FAKE_CUDA_CALL("cuMemcpyHtoD", Need::kContext);
  FAKE_CUDA_NEED(from != nullptr && bytes != 0, Rc::kInvalidValue, "arguments");
  RunAll(Current());
  return call.No(Store(Current()->gpu, to, from, bytes), "not mapped for writing");
}

FAKE_CUDA_API cuMemcpyDtoH_v2(void* to, DevicePtr from, size_t bytes) {
  FAKE_CUDA_CALL("cuMemcpyDtoH", Need::kContext);
  FAKE_CUDA_NEED(to != nullptr && bytes != 0, Rc::kInvalidValue, "arguments");
  RunAll(Current());
  FAKE_CUDA_NEED(Driver().sticky == Rc::kSuccess, Driver().sticky, "what was queued failed");
  const int gpu = Current()->gpu;
  if (DeviceReadsHost(gpu, from, bytes)) {
    const iovec here{to, bytes};
    const iovec there{reinterpret_cast<void*>(from), bytes};
    FAKE_CUDA_NEED(
        ::process_vm_readv(::getpid(), &here, 1, &there, 1, 0) == static_cast<ssize_t>(bytes),
        Rc::kInvalidValue, "not host memory of this process");
    return Rc::kSuccess;
  }
  return call.No(Fetch(gpu, to, from, bytes), "not mapped for reading");
}

FAKE_CUDA_API cuMemsetD8_v2(DevicePtr to, unsigned char value, size_t bytes) {
  FAKE_CUDA_CALL("cuMemsetD8", Need::kContext);
  FAKE_CUDA_NEED(bytes != 0, Rc::kInvalidValue, "arguments");
  RunAll(Current());
  const std::vector<unsigned char> filled(bytes, value);
  return call.No(Store(Current()->gpu, to, filled.data(), bytes), "not mapped for writing");
}

FAKE_CUDA_API cuMemcpyHtoDAsync_v2(DevicePtr to, const void* from, size_t bytes,
                                   StreamHandle handle) {
  FAKE_CUDA_CALL("cuMemcpyHtoDAsync", Need::kContext);
  FakeStream* const stream = Find(Driver().streams, handle);
  FAKE_CUDA_NEED(stream != nullptr, Rc::kInvalidHandle, "stream (the null stream is not modelled)");
  FAKE_CUDA_NEED(stream->context == Current(), Rc::kInvalidContext, "a stream of another context");
  DevicePtr base = 0;
  FAKE_CUDA_NEED(from != nullptr && bytes != 0 && FindMapping(to, &base) != nullptr &&
                     FindMapping(to + bytes - 1, &base) != nullptr,
                 Rc::kInvalidValue, "not mapped");
  stream->queue.push_back({Operation::Kind::kFromHost, to, from, bytes, 0, 0});
  ++stream->queued;
  if (!IsPinned(from, bytes)) Run(*stream, stream->queued);  // Staged before it returns.
  return call.No(Driver().sticky, "the copy failed");
}

FAKE_CUDA_API cuStreamCreate(StreamHandle* handle, uint32_t flags) {
  FAKE_CUDA_CALL("cuStreamCreate", Need::kContext);
  FAKE_CUDA_NEED(handle != nullptr && flags <= 1, Rc::kInvalidValue, "arguments");
  auto* const stream = new FakeStream;
  stream->context = Current();
  Driver().streams.insert(stream);
  *handle = reinterpret_cast<StreamHandle>(stream);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuStreamDestroy_v2(StreamHandle handle) {
  FAKE_CUDA_CALL("cuStreamDestroy", Need::kInit);
  FakeStream* const stream = Find(Driver().streams, handle);
  FAKE_CUDA_NEED(stream != nullptr, Rc::kInvalidHandle, "stream");
  Run(*stream, UINT64_MAX);
  Driver().streams.erase(stream);
  for (FakeEvent* event : Driver().events) {
    if (event->stream == stream) event->stream = nullptr;
  }
  delete stream;
  return Rc::kSuccess;
}

FAKE_CUDA_API cuStreamSynchronize(StreamHandle handle) {
  FAKE_CUDA_CALL("cuStreamSynchronize", Need::kContext);
  FakeStream* const stream = Find(Driver().streams, handle);
  FAKE_CUDA_NEED(stream != nullptr, Rc::kInvalidHandle, "stream");
  Run(*stream, UINT64_MAX);
  return call.No(Driver().sticky, "what was queued failed");
}

FAKE_CUDA_API cuEventCreate(EventHandle* handle, uint32_t flags) {
  FAKE_CUDA_CALL("cuEventCreate", Need::kContext);
  FAKE_CUDA_NEED(handle != nullptr && flags <= 3, Rc::kInvalidValue, "arguments");
  auto* const event = new FakeEvent;
  event->context = Current();
  Driver().events.insert(event);
  *handle = reinterpret_cast<EventHandle>(event);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuEventDestroy_v2(EventHandle handle) {
  FAKE_CUDA_CALL("cuEventDestroy", Need::kInit);
  FakeEvent* const event = Find(Driver().events, handle);
  FAKE_CUDA_NEED(event != nullptr, Rc::kInvalidHandle, "event");
  Driver().events.erase(event);
  delete event;
  return Rc::kSuccess;
}

FAKE_CUDA_API cuEventRecord(EventHandle handle, StreamHandle stream_handle) {
  FAKE_CUDA_CALL("cuEventRecord", Need::kContext);
  FakeEvent* const event = Find(Driver().events, handle);
  FakeStream* const stream = Find(Driver().streams, stream_handle);
  FAKE_CUDA_NEED(event != nullptr && stream != nullptr, Rc::kInvalidHandle, "event or stream");
  FAKE_CUDA_NEED(event->context == stream->context, Rc::kInvalidHandle, "of two contexts");
  event->stream = stream;
  event->after = stream->queued;
  return Rc::kSuccess;
}

FAKE_CUDA_API cuEventQuery(EventHandle handle) {
  FAKE_CUDA_CALL("cuEventQuery", Need::kContext);
  FakeEvent* const event = Find(Driver().events, handle);
  FAKE_CUDA_NEED(event != nullptr, Rc::kInvalidHandle, "event");
  if (event->stream == nullptr || event->stream->done >= event->after) return Rc::kSuccess;
  Run(*event->stream, event->stream->done + 1);
  FAKE_CUDA_NEED(Driver().sticky == Rc::kSuccess, Driver().sticky, "what was queued failed");
  return event->stream->done >= event->after ? Rc::kSuccess : Rc::kNotReady;
}

FAKE_CUDA_API cuEventSynchronize(EventHandle handle) {
  FAKE_CUDA_CALL("cuEventSynchronize", Need::kContext);
  FakeEvent* const event = Find(Driver().events, handle);
  FAKE_CUDA_NEED(event != nullptr, Rc::kInvalidHandle, "event");
  if (event->stream != nullptr) Run(*event->stream, event->after);
  return call.No(Driver().sticky, "what was queued failed");
}

// The kernels of tests/gpu are known by their names: the text is not compiled.
FAKE_CUDA_API cuModuleLoadData(ModuleHandle* handle, const void* image) {
  FAKE_CUDA_CALL("cuModuleLoadData", Need::kContext);
  FAKE_CUDA_NEED(handle != nullptr && image != nullptr, Rc::kInvalidValue, "null");
  std::string text(static_cast<const char*>(image));
  FAKE_CUDA_NEED(
      text.find(".version") != std::string::npos && text.find(".entry") != std::string::npos,
      Rc::kInvalidImage, "not PTX");
  auto* const module = new FakeModule{std::move(text)};
  Driver().modules.insert(module);
  *handle = reinterpret_cast<ModuleHandle>(module);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuModuleUnload(ModuleHandle handle) {
  FAKE_CUDA_CALL("cuModuleUnload", Need::kInit);
  FakeModule* const module = Find(Driver().modules, handle);
  FAKE_CUDA_NEED(module != nullptr, Rc::kInvalidHandle, "module");
  Driver().modules.erase(module);
  delete module;
  return Rc::kSuccess;
}

FAKE_CUDA_API cuModuleGetFunction(FunctionHandle* handle, ModuleHandle module_handle,
                                  const char* name) {
  FAKE_CUDA_CALL("cuModuleGetFunction", Need::kContext);
  FakeModule* const module = Find(Driver().modules, module_handle);
  FAKE_CUDA_NEED(handle != nullptr && module != nullptr && name != nullptr, Rc::kInvalidHandle,
                 "module");
  const std::string wanted(name);
  FAKE_CUDA_NEED((wanted == "modelhost_poke" || wanted == "modelhost_peek") &&
                     module->image.find(".entry " + wanted) != std::string::npos,
                 Rc::kNotFound, "a kernel that the fake does not know");
  auto* const function = new FakeFunction{wanted};
  Driver().functions.insert(function);  // Of the module, for good.
  *handle = reinterpret_cast<FunctionHandle>(function);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuLaunchKernel(FunctionHandle handle, uint32_t, uint32_t, uint32_t, uint32_t,
                             uint32_t, uint32_t, uint32_t, StreamHandle stream_handle,
                             void** arguments, void** extra) {
  FAKE_CUDA_CALL("cuLaunchKernel", Need::kContext);
  FakeFunction* const function = Find(Driver().functions, handle);
  FakeStream* const stream = Find(Driver().streams, stream_handle);
  FAKE_CUDA_NEED(function != nullptr && stream != nullptr, Rc::kInvalidHandle,
                 "function or stream (the null stream is not modelled)");
  FAKE_CUDA_NEED(arguments != nullptr && extra == nullptr, Rc::kInvalidValue, "arguments");
  Operation operation;
  const DevicePtr first = *static_cast<DevicePtr*>(arguments[0]);
  if (function->name == "modelhost_poke") {  // *(uint32_t*)a = 0xdeadbeef
    operation.kind = Operation::Kind::kStore32;
    operation.to = first;
    operation.value = 0xdeadbeefU;
    operation.bytes = sizeof(uint32_t);
  } else {  // modelhost_peek: *(uint64_t*)b = *(uint64_t*)a
    operation.kind = Operation::Kind::kLoad64;
    operation.from = first;
    operation.to = *static_cast<DevicePtr*>(arguments[1]);
    operation.bytes = sizeof(uint64_t);
  }
  stream->queue.push_back(operation);
  ++stream->queued;
  return Rc::kSuccess;
}
