// The input is the model m.onnx, a size of two bytes in front of it, and the data file w.bin.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "daemon/format/format_fuzz.h"
#include "daemon/format/model_builders.h"
#include "daemon/format/onnx.h"
#include "daemon/format/onnx_values.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using modelhost::testing::Require;
  if (size < 2) return 0;
  const std::string input(reinterpret_cast<const char*>(data) + 2, size - 2);
  const size_t model = std::min(input.size(), size_t{data[0]} | size_t{data[1]} << 8);
  modelhost::testing::MemoryFiles files;
  files.Put("m.onnx", input.substr(0, model));
  files.Put("w.bin", input.substr(model));
  modelhost::testing::CheckRead("m.onnx", files);
  Require(modelhost::FindComponents(files.Names(), files).ok());

  const auto index = modelhost::ReadModel("m.onnx", files);
  if (!index.ok() || index->format() != "onnx") return 0;
  for (size_t i = 0; i < index->size(); ++i) {
    const modelhost::TensorInfo tensor = index->at(i);
    if (tensor.mappable) continue;
    const std::string& name = index->files()[tensor.file];
    const auto bytes = files.Open(name);
    const auto values = modelhost::DecodeOnnxValues(name, *bytes, tensor);
    if (!values.ok()) continue;
    // As many values as the shape says.
    uint64_t bits = modelhost::abi::FindDType(tensor.dtype)->bits;
    for (const int64_t dim : tensor.shape) bits *= static_cast<uint64_t>(dim);
    Require(values->size() == (bits + 7) / 8);
  }
  return 0;
}
