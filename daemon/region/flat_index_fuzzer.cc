// Any bytes as an index: every entry is read, and nothing outside of the bytes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "daemon/region/flat_index.h"
#include "tests/fakes/fuzzed_index.h"

namespace modelhost {
namespace {

template <typename Bytes>
void Touch(const Bytes& bytes) {
  volatile int64_t sink = 0;
  for (const auto& byte : bytes) sink = static_cast<int64_t>(byte);
  (void)sink;
}

void Walk(const FlatIndex& tables) {
  Touch(tables.model());
  Touch(tables.digest());
  if (const auto format = tables.format(); format.ok()) Touch(*format);
  for (uint64_t i = 0; i < tables.region_count(); ++i) Touch(tables.RegionAt(i).digest);
  for (uint64_t i = 0; i < tables.file_count(); ++i) {
    const auto file = tables.FileAt(i);
    if (!file.ok()) continue;
    Touch(file->path);
    Touch(file->role);
  }
  for (uint64_t i = 0; i < tables.component_count(); ++i) {
    if (const auto pair = tables.ComponentAt(i); pair.ok()) Touch(pair->first);
  }
  for (uint64_t i = 0; i < tables.metadata_count(); ++i) {
    if (const auto pair = tables.MetadataAt(i); pair.ok()) Touch(pair->second);
  }
  for (uint64_t i = 0; i < tables.segment_count(); ++i) (void)tables.SegmentAt(i);
  for (uint64_t i = 0; i < tables.tensor_count(); ++i) {
    const auto tensor = tables.TensorAt(i);
    if (!tensor.ok()) continue;
    Touch(tensor->name);
    Touch(tensor->reason);
    Touch(tensor->shape);
    Touch(tensor->strides);
    if (tensor->mappable &&
        tensor->offset + tensor->nbytes > tables.RegionAt(tensor->region).bytes) {
      std::abort();
    }
  }
}

}  // namespace
}  // namespace modelhost

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::vector<uint8_t> copy = modelhost::FuzzedIndex(data, size);
  const auto tables = modelhost::FlatIndex::Read(std::as_bytes(std::span(copy)));
  if (tables.ok()) modelhost::Walk(*tables);
  return 0;
}
