// The input is an indexer's answer, about two files of 100 and 50 bytes.
#include <cstddef>
#include <cstdint>
#include <span>

#include "daemon/format/format_fuzz.h"
#include "daemon/format/index_codec.h"
#include "daemon/format/model_builders.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using modelhost::testing::Require;
  const modelhost::IndexRequest asked{.files = {{"a.safetensors", 100}, {"b.gguf", 50}}};
  modelhost::testing::MemoryFiles files(
      {{"a.safetensors", std::string(100, 'x')}, {"b.gguf", std::string(50, 'x')}});
  const auto components =
      modelhost::DecodeIndexes(std::as_bytes(std::span<const uint8_t>(data, size)), asked);
  if (!components.ok()) return 0;
  for (const modelhost::ComponentIndex& component : *components) {
    for (size_t i = 0; i < component.index.size(); ++i) {
      const modelhost::TensorInfo tensor = component.index.at(i);
      const auto bytes = files.Open(component.index.files().at(tensor.file));
      Require(bytes.ok());
      Require(tensor.offset <= bytes->size() && tensor.nbytes <= bytes->size() - tensor.offset);
      Require(modelhost::IsUtf8(tensor.name));
    }
  }
  // What was read is written and read again, and is the same.
  const std::string again = modelhost::EncodeIndexes(components);
  const auto back = modelhost::DecodeIndexes(std::as_bytes(std::span<const char>(again)), asked);
  Require(back.ok() && modelhost::EncodeIndexes(back) == again);
  return 0;
}
