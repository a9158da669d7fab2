// Looks at one GPU: its attributes, and whether device memory really crosses between processes.
//
// Everything here needs a current context on the calling thread, but FactsOf.
#pragma once

#include <optional>

#include "daemon/device_agent/device_mode.h"
#include "proto/cuda/handles.h"

namespace modelhost {

// What a driver says by itself. An error: it does not answer.
Result<DeviceFacts> FactsOf(const cuda::Driver& driver, cuda::Device device);
// Create, fill, export, import read-only, map, read back; where that does not work, allocate and
// export the legacy way. Leaves nothing behind.
void TestDevice(const cuda::Driver& driver, cuda::Device device, DeviceFacts& facts);

// Legacy memory for another process to open, which holds agent::TryWord.
struct LegacyTry {
  cuda::LegacyMemory memory;
  cuda::IpcHandle handle;
  uint64_t bytes = 0;
};
Result<LegacyTry> MakeLegacyTry(const cuda::Driver& driver);
// In another process than the one that made it.
Result<void> TryImport(const cuda::Driver& driver, const cuda::IpcHandle& handle);
// A kernel reads a page of a sealed memfd. Where it may not, the context is lost. UNIMPLEMENTED:
// it could not be tried.
Result<void> TryHostRead(const cuda::Driver& driver);

}  // namespace modelhost
