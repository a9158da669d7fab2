// Any bytes as an index: every entry is read, and nothing outside of the bytes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "daemon/region/flat_index.h"

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
  // Of exactly this size, so that a sanitizer sees the first byte too many.
  std::vector<uint8_t> copy(data, data + size);
  if (size >= sizeof(modelhost::abi::IndexHeader) && size % 2 == 0) {
    // What a mutation breaks first would otherwise hide all the rest.
    modelhost::abi::IndexHeader header;
    std::memcpy(&header, copy.data(), sizeof(header));
    header.magic = modelhost::abi::kIndexMagic;
    header.abi_version = modelhost::abi::kIndexAbi;
    header.header_bytes = sizeof(header);
    header.index_bytes = size;
    std::memcpy(copy.data(), &header, sizeof(header));
  }
  const auto tables = modelhost::FlatIndex::Read(std::as_bytes(std::span(copy)));
  if (tables.ok()) modelhost::Walk(*tables);
  return 0;
}
