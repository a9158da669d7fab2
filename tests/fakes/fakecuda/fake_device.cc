// Initialisation, devices, contexts, names of errors.
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "tests/fakes/fakecuda/fake_state.h"

// NOLINTBEGIN(readability-identifier-naming): the driver's names.
using namespace fakecuda;  // lint: allow(using-std) the whole file is that interface
using modelhost::cuda::ContextHandle;
using modelhost::cuda::Uuid;

FAKE_CUDA_API cuInit(uint32_t flags) {
  FAKE_CUDA_CALL("cuInit", Need::kNothing);
  FAKE_CUDA_NEED(flags == 0, Rc::kInvalidValue, "flags");
  // 34 is what the toolkit's stub says.
  const auto says = static_cast<Rc>(Number("FAKECUDA_INIT", 0));
  FAKE_CUDA_NEED(says == Rc::kSuccess, says, "as the environment asks");
  FAKE_CUDA_NEED(!VisibleGpus().empty(), Rc::kNoDevice, "no GPU is visible");
  State& state = Driver();
  FAKE_CUDA_NEED(!state.initialised || state.process == ::getpid(), Rc::kNotInitialized,
                 "initialised before fork()");
  state.initialised = true;
  state.process = ::getpid();
  return Rc::kSuccess;
}

FAKE_CUDA_API cuDriverGetVersion(int* version) {
  FAKE_CUDA_CALL("cuDriverGetVersion", Need::kNothing);
  FAKE_CUDA_NEED(version != nullptr, Rc::kInvalidValue, "null");
  *version = static_cast<int>(Number("FAKECUDA_DRIVER_VERSION", 13000));
  return Rc::kSuccess;
}

FAKE_CUDA_API cuGetErrorName(Rc rc, const char** name) {
  FAKE_CUDA_CALL("cuGetErrorName", Need::kNothing);
  FAKE_CUDA_NEED(name != nullptr, Rc::kInvalidValue, "null");
  switch (rc) {
#define FAKE_CUDA_NAME(value, text) \
  case Rc::value:                   \
    *name = text;                   \
    return Rc::kSuccess
    FAKE_CUDA_NAME(kSuccess, "CUDA_SUCCESS");
    FAKE_CUDA_NAME(kInvalidValue, "CUDA_ERROR_INVALID_VALUE");
    FAKE_CUDA_NAME(kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY");
    FAKE_CUDA_NAME(kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED");
    FAKE_CUDA_NAME(kDeinitialized, "CUDA_ERROR_DEINITIALIZED");
    FAKE_CUDA_NAME(kStubLibrary, "CUDA_ERROR_STUB_LIBRARY");
    FAKE_CUDA_NAME(kNoDevice, "CUDA_ERROR_NO_DEVICE");
    FAKE_CUDA_NAME(kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE");
    FAKE_CUDA_NAME(kInvalidImage, "CUDA_ERROR_INVALID_IMAGE");
    FAKE_CUDA_NAME(kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT");
    FAKE_CUDA_NAME(kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE");
    FAKE_CUDA_NAME(kNotFound, "CUDA_ERROR_NOT_FOUND");
    FAKE_CUDA_NAME(kNotReady, "CUDA_ERROR_NOT_READY");
    FAKE_CUDA_NAME(kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS");
    FAKE_CUDA_NAME(kHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED");
    FAKE_CUDA_NAME(kHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED");
    FAKE_CUDA_NAME(kNotPermitted, "CUDA_ERROR_NOT_PERMITTED");
    FAKE_CUDA_NAME(kNotSupported, "CUDA_ERROR_NOT_SUPPORTED");
    FAKE_CUDA_NAME(kSystemDriverMismatch, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH");
    FAKE_CUDA_NAME(kCompatNotSupportedOnDevice, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE");
    FAKE_CUDA_NAME(kUnknown, "CUDA_ERROR_UNKNOWN");
#undef FAKE_CUDA_NAME
  }
  *name = nullptr;
  return call.No(Rc::kInvalidValue, "an error that the fake does not know");
}

FAKE_CUDA_API cuGetErrorString(Rc rc, const char** text) { return cuGetErrorName(rc, text); }

FAKE_CUDA_API cuDeviceGetCount(int* count) {
  FAKE_CUDA_CALL("cuDeviceGetCount", Need::kInit);
  FAKE_CUDA_NEED(count != nullptr, Rc::kInvalidValue, "null");
  *count = static_cast<int>(VisibleGpus().size());
  return Rc::kSuccess;
}

FAKE_CUDA_API cuDeviceGet(Device* device, int ordinal) {
  FAKE_CUDA_CALL("cuDeviceGet", Need::kInit);
  FAKE_CUDA_NEED(device != nullptr, Rc::kInvalidValue, "null");
  FAKE_CUDA_NEED(GpuOf(ordinal) >= 0, Rc::kInvalidDevice, "ordinal");
  *device = ordinal;
  return Rc::kSuccess;
}

FAKE_CUDA_API cuDeviceGetName(char* name, int bytes, Device device) {
  FAKE_CUDA_CALL("cuDeviceGetName", Need::kInit);
  FAKE_CUDA_NEED(name != nullptr && bytes > 0, Rc::kInvalidValue, "null");
  FAKE_CUDA_NEED(GpuOf(device) >= 0, Rc::kInvalidDevice, "device");
  std::snprintf(name, static_cast<size_t>(bytes), "Fake GPU %d", GpuOf(device));
  return Rc::kSuccess;
}

FAKE_CUDA_API cuDeviceTotalMem_v2(size_t* bytes, Device device) {
  FAKE_CUDA_CALL("cuDeviceTotalMem", Need::kInit);
  FAKE_CUDA_NEED(bytes != nullptr, Rc::kInvalidValue, "null");
  FAKE_CUDA_NEED(GpuOf(device) >= 0, Rc::kInvalidDevice, "device");
  *bytes = MemoryBytes();
  return Rc::kSuccess;
}

FAKE_CUDA_API cuDeviceGetUuid_v2(Uuid* uuid, Device device) {
  FAKE_CUDA_CALL("cuDeviceGetUuid", Need::kInit);
  FAKE_CUDA_NEED(uuid != nullptr, Rc::kInvalidValue, "null");
  FAKE_CUDA_NEED(GpuOf(device) >= 0, Rc::kInvalidDevice, "device");
  *uuid = UuidOf(GpuOf(device));
  return Rc::kSuccess;
}

FAKE_CUDA_API cuDeviceGetUuid(Uuid* uuid, Device device) {
  return cuDeviceGetUuid_v2(uuid, device);
}

FAKE_CUDA_API cuDeviceGetAttribute(int* value, Attribute attribute, Device device) {
  FAKE_CUDA_CALL("cuDeviceGetAttribute", Need::kInit);
  FAKE_CUDA_NEED(value != nullptr, Rc::kInvalidValue, "null");
  FAKE_CUDA_NEED(GpuOf(device) >= 0, Rc::kInvalidDevice, "device");
  const auto known = AttributeOf(GpuOf(device), attribute);
  FAKE_CUDA_NEED(known.has_value(), Rc::kInvalidValue, "an attribute that the fake does not know");
  *value = *known;
  return Rc::kSuccess;
}

FAKE_CUDA_API cuDevicePrimaryCtxRetain(ContextHandle* context, Device device) {
  FAKE_CUDA_CALL("cuDevicePrimaryCtxRetain", Need::kInit);
  FAKE_CUDA_NEED(context != nullptr, Rc::kInvalidValue, "null");
  const int gpu = GpuOf(device);
  FAKE_CUDA_NEED(gpu >= 0, Rc::kInvalidDevice, "device");
  auto& held = Driver().contexts[gpu];
  if (held == nullptr) held = std::make_unique<Context>(Context{gpu, 0});
  ++held->retained;
  *context = reinterpret_cast<ContextHandle>(held.get());
  return Rc::kSuccess;
}

FAKE_CUDA_API cuDevicePrimaryCtxRelease_v2(Device device) {
  FAKE_CUDA_CALL("cuDevicePrimaryCtxRelease", Need::kInit);
  const int gpu = GpuOf(device);
  FAKE_CUDA_NEED(gpu >= 0, Rc::kInvalidDevice, "device");
  State& state = Driver();
  const auto found = state.contexts.find(gpu);
  FAKE_CUDA_NEED(found != state.contexts.end() && found->second->retained > 0, Rc::kInvalidContext,
                 "it was not retained");
  Context* const context = found->second.get();
  if (context->retained > 1) {
    --context->retained;
    return Rc::kSuccess;
  }
  // A real driver would take these away under their owner.
  for (const FakeStream* stream : state.streams) {
    FAKE_CUDA_NEED(stream->context != context, Rc::kInvalidContext, "a stream of it is left");
  }
  for (const FakeEvent* event : state.events) {
    FAKE_CUDA_NEED(event->context != context, Rc::kInvalidContext, "an event of it is left");
  }
  --context->retained;
  return Rc::kSuccess;
}

FAKE_CUDA_API cuDevicePrimaryCtxGetState(Device device, uint32_t* flags, int* active) {
  FAKE_CUDA_CALL("cuDevicePrimaryCtxGetState", Need::kInit);
  const int gpu = GpuOf(device);
  FAKE_CUDA_NEED(gpu >= 0, Rc::kInvalidDevice, "device");
  FAKE_CUDA_NEED(flags != nullptr && active != nullptr, Rc::kInvalidValue, "null");
  const auto found = Driver().contexts.find(gpu);
  *flags = 0;
  *active = found != Driver().contexts.end() && found->second->retained > 0 ? 1 : 0;
  return Rc::kSuccess;
}

FAKE_CUDA_API cuCtxGetDevice(Device* device) {
  FAKE_CUDA_CALL("cuCtxGetDevice", Need::kContext);
  FAKE_CUDA_NEED(device != nullptr, Rc::kInvalidValue, "null");
  *device = DeviceOf(Current()->gpu);
  return Rc::kSuccess;
}

FAKE_CUDA_API cuCtxSetCurrent(ContextHandle context) {
  FAKE_CUDA_CALL("cuCtxSetCurrent", Need::kInit);
  auto* const wanted = reinterpret_cast<Context*>(context);
  bool known = wanted == nullptr;
  for (const auto& [gpu, held] : Driver().contexts) {
    known = known || (held.get() == wanted && held->retained > 0);
  }
  FAKE_CUDA_NEED(known, Rc::kInvalidContext, "not a context, or a released one");
  Current() = wanted;
  return Rc::kSuccess;
}

FAKE_CUDA_API cuCtxGetCurrent(ContextHandle* context) {
  FAKE_CUDA_CALL("cuCtxGetCurrent", Need::kInit);
  FAKE_CUDA_NEED(context != nullptr, Rc::kInvalidValue, "null");
  *context = reinterpret_cast<ContextHandle>(Current());
  return Rc::kSuccess;
}

FAKE_CUDA_API cuCtxSynchronize() {
  FAKE_CUDA_CALL("cuCtxSynchronize", Need::kContext);
  for (FakeStream* stream : Driver().streams) {
    if (stream->context == Current()) Run(*stream, UINT64_MAX);
  }
  return call.No(Driver().sticky, "what was queued failed");
}

FAKE_CUDA_API cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  FAKE_CUDA_CALL("cuMemGetInfo", Need::kContext);
  FAKE_CUDA_NEED(free_bytes != nullptr && total != nullptr, Rc::kInvalidValue, "null");
  const uint64_t used = UsedBytes(Current()->gpu);
  *total = MemoryBytes();
  *free_bytes = used > *total ? 0 : *total - used;
  return Rc::kSuccess;
}
// NOLINTEND(readability-identifier-naming)
