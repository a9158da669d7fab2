// Any bytes as an index: every look-up must end, with every pointer inside the bytes.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "client/src/index_reader.h"
#include "tests/fakes/fuzzed_index.h"

namespace {

// Touches all of a string and its NUL, which must lie in `bytes`.
void Read(std::string_view text) {
  volatile char sink = 0;
  for (size_t i = 0; i <= text.size(); ++i) sink = text.data()[i];
  if (sink != '\0') std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<uint8_t> copy = modelhost::FuzzedIndex(data, size);
  auto opened = modelhost::IndexReader::Open(std::as_bytes(std::span(copy)));
  if (!opened.ok()) return 0;
  const modelhost::IndexReader& reader = *opened;
  Read(reader.format());
  std::vector<std::string> names = {"tensor.1", "main/tensor.1", "a/b/c", ""};
  for (size_t i = 0; i < reader.tensor_count(); ++i) {
    modelhost::IndexTensor tensor;
    if (!reader.Tensor(i, &tensor)) continue;
    Read(tensor.name);
    Read(tensor.component);
    Read(tensor.file);
    Read(tensor.reason);
    volatile int64_t sum = 0;
    for (uint16_t k = 0; k < tensor.entry->rank; ++k) {
      sum = tensor.shape[k];
      if (tensor.strides != nullptr) sum = tensor.strides[k];
    }
    (void)sum;
    if ((tensor.entry->flags & modelhost::abi::kTensorOnDevice) != 0 &&
        tensor.entry->device_segment != modelhost::abi::kNone &&
        tensor.entry->device_offset + tensor.entry->nbytes >
            reader.device_segments()[tensor.entry->device_segment].bytes) {
      std::abort();
    }
    if (names.size() < 16) names.push_back(std::string(tensor.name));
    if (names.size() < 16) {
      names.push_back(std::string(tensor.component) + "/" + std::string(tensor.name));
    }
  }
  for (const std::string& name : names) {
    size_t number = 0;
    const modelhost::Find find = reader.FindTensor(name, &number);
    if (find == modelhost::Find::kFound && number >= reader.tensor_count()) std::abort();
    Read(reader.ExplainTensor(name, find));
    if (reader.FindFile(name, &number) == modelhost::Find::kFound &&
        number >= reader.file_count()) {
      std::abort();
    }
    Read(reader.ExplainFile(name, modelhost::Find::kMissing));
    (void)reader.FindMetadata(name, &number);
  }
  for (size_t i = 0; i < reader.file_count(); ++i) {
    modelhost::IndexFile file;
    if (!reader.File(i, &file)) continue;
    Read(file.path);
    Read(file.role);
    if (file.entry->region >= reader.regions().size()) std::abort();
  }
  for (size_t i = 0; i < reader.metadata_count(); ++i) {
    std::string_view key;
    std::string_view value;
    if (!reader.Metadata(i, &key, &value)) continue;
    Read(key);
    Read(value);
  }
  for (size_t i = 0; i < reader.component_count(); ++i) {
    std::string_view name;
    std::string_view format;
    if (reader.Component(i, &name, &format)) Read(name);
  }
  return 0;
}
