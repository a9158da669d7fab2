// A version index (proto/abi/version_index.h) laid out by hand, for tests that read one and may not
// know daemon/publish. Any thread.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/region/loader.h"
#include "proto/abi/version_index.h"
#include "proto/handle/region.h"

namespace modelhost {

class HandIndex {
 public:
  abi::StringRef Text(const std::string& text) {
    const abi::StringRef ref{static_cast<uint32_t>(strings.size()),
                             static_cast<uint32_t>(text.size())};
    strings.insert(strings.end(), text.begin(), text.end());
    strings.push_back('\0');
    return ref;
  }
  // A tensor of bytes, in region 0, that is all there.
  abi::TensorEntry& Add(const std::string& name, uint64_t offset, uint64_t nbytes) {
    abi::TensorEntry entry{};
    entry.name = Text(name);
    entry.region_offset = offset;
    entry.nbytes = nbytes;
    entry.device_segment = abi::kNone;
    entry.strides = abi::kNone;
    entry.shape = static_cast<uint32_t>(dims.size());
    dims.push_back(static_cast<int64_t>(nbytes));
    entry.rank = 1;
    entry.dtype = static_cast<uint16_t>(abi::DType::kU8);
    entry.flags = abi::kTensorMappable;
    entry.block_elements = 1;
    tensors.push_back(entry);
    return tensors.back();
  }
  void AddMetadata(const std::string& key, const std::string& value) {
    metadata.push_back({Text(key), Text(value)});
  }

  std::vector<std::byte> Bytes() {
    header.magic = abi::kIndexMagic;
    header.abi_version = abi::kIndexAbi;
    header.header_bytes = sizeof(header);
    while (buckets.size() <= tensors.size())
      buckets.resize(buckets.empty() ? 1 : buckets.size() * 2);
    std::vector<std::byte> out(sizeof(header));
    Put(components, header.components, out);
    Put(regions, header.regions, out);
    Put(files, header.files, out);
    Put(dims, header.dims, out);
    Put(strings, header.strings, out);
    Put(tensors, header.tensors, out);
    Put(buckets, header.buckets, out);
    Put(metadata, header.metadata, out);
    Put(segments, header.device_segments, out);
    header.index_bytes = out.size();
    std::memcpy(out.data(), &header, sizeof(header));
    return out;
  }

  absl::StatusOr<SealedRegion> Seal() {
    const std::vector<std::byte> bytes = Bytes();
    auto region = WritableRegion::Create("index", bytes.size(), HugePages::kOff);
    if (!region.ok()) return absl::ResourceExhaustedError(region.error().text);
    std::memcpy(region->bytes().data(), bytes.data(), bytes.size());
    auto sealed = std::move(*region).Seal();
    if (!sealed.ok()) return absl::InternalError(sealed.error().text);
    return *std::move(sealed);
  }

  abi::IndexHeader header{};
  std::vector<abi::ComponentEntry> components;
  std::vector<abi::RegionEntry> regions;
  std::vector<abi::FileEntry> files;
  std::vector<int64_t> dims;
  std::vector<char> strings;
  std::vector<abi::TensorEntry> tensors;
  std::vector<abi::Bucket> buckets;
  std::vector<abi::MetadataEntry> metadata;
  std::vector<abi::DeviceSegmentEntry> segments;

 private:
  template <typename T>
  static void Put(const std::vector<T>& table, abi::TableRef& ref, std::vector<std::byte>& out) {
    ref = {out.size(), table.size()};
    out.resize(out.size() + (table.size() * sizeof(T) + 7) / 8 * 8);
    if (!table.empty())
      std::memcpy(out.data() + ref.offset, table.data(), table.size() * sizeof(T));
  }
};

// Every version gets an index with one tensor "w", which is all of its first region.
class HandIndexBuilder : public IndexBuilder {
 public:
  absl::StatusOr<SealedRegion> Build(const ResidentVersion& version,
                                     const std::vector<ComponentIndex>&,
                                     const DevicePlan&) override {
    HandIndex index;
    version.manifest->model.copy(index.header.model, abi::kNameBytes - 1);
    index.header.version = version.manifest->version;
    const uint64_t bytes = version.regions[0]->bytes();
    index.regions.push_back({bytes, {}, static_cast<uint32_t>(abi::RegionKind::kFile), 1});
    index.components.push_back({index.Text("main"), index.Text("safetensors")});
    index.Add("w", 0, bytes);
    return index.Seal();
  }
};

}  // namespace modelhost
