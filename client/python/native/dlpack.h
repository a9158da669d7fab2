// Tensors as DLPack capsules.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <utility>

#include "client/python/native/tensor.h"

namespace modelhost::python {

// (device type, ordinal): the GPU where the tensor is on one, else (kDLCPU, 0).
std::pair<int, int> DlpackDevice(const Tensor& tensor);

struct DlpackRequest {
  // The newest DLPack that the consumer knows. Without it, or below 1.0: the capsule of before 1.0,
  // which cannot say that the memory is read-only.
  std::optional<std::pair<uint32_t, uint32_t>> max_version;
  std::optional<std::pair<int, int>> device;  // Empty: where it is.
  bool copy = false;                          // A writable copy of its own, on the host.
  bool as_bytes = false;                      // Types newer than DLPack 1.0 as unsigned bytes.
};

// Raises BufferError for what DLPack cannot say, with the way that can.
pybind11::capsule Dlpack(Tensor& tensor, const DlpackRequest& request);

}  // namespace modelhost::python
