// Looks at one GPU: its attributes, and whether device memory really crosses as a descriptor.
#pragma once

#include "daemon/device_agent/device_mode.h"
#include "proto/cuda/handles.h"

namespace modelhost {

// What needs no context.
DeviceFacts FactsOf(const cuda::Driver& driver, cuda::Device device);
// Create, fill, export, import read-only, map, read back; allocate and export the legacy way. Needs
// a current context; leaves nothing behind.
void TestDevice(const cuda::Driver& driver, cuda::Device device, DeviceFacts& facts);

}  // namespace modelhost
