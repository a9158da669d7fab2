#include "client/src/testing/fake_version.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <tuple>

namespace modelhost::testing {
namespace {

class Strings {
 public:
  abi::StringRef Add(const std::string& text) {
    if (text.empty()) return {};  // An empty string has no place of its own.
    const abi::StringRef ref{static_cast<uint32_t>(bytes_.size()),
                             static_cast<uint32_t>(text.size())};
    bytes_ += text;
    bytes_.push_back('\0');
    return ref;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

template <typename T>
abi::TableRef Append(std::string& index, const std::vector<T>& entries) {
  index.resize((index.size() + 7) / 8 * 8);
  const abi::TableRef ref{index.size(), entries.size()};
  index.append(reinterpret_cast<const char*>(entries.data()), entries.size() * sizeof(T));
  return ref;
}

}  // namespace

FakeVersion MakeVersion(const std::string& model, uint64_t version, size_t tensors, size_t elements,
                        float value, size_t shards) {
  FakeVersion made;
  made.model = model;
  made.version = version;
  made.digest_byte = static_cast<uint8_t>(version);
  std::string one;
  for (size_t i = 0; i < elements; ++i) {
    one.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  for (size_t shard = 0; shard < shards; ++shard) {
    FakeFile file;
    const std::string number = std::to_string(10000 + shard);
    file.path = "model-" + number + ".safetensors";
    made.files.push_back(std::move(file));
  }
  for (size_t i = 0; i < tensors; ++i) {
    FakeTensor tensor;
    tensor.name = "tensor." + std::to_string(i);
    tensor.shape = {static_cast<int64_t>(elements)};
    tensor.file = static_cast<uint32_t>(i % shards);
    tensor.offset = made.files[tensor.file].bytes.size();
    tensor.nbytes = one.size();
    made.files[tensor.file].bytes += one;
    made.tensors.push_back(std::move(tensor));
  }
  FakeFile sidecar;
  sidecar.path = "tokenizer.json";
  sidecar.role = "sidecar";
  sidecar.bytes = "{\"version\": " + std::to_string(version) + "}";
  sidecar.eager = false;
  made.files.push_back(std::move(sidecar));
  made.metadata = {{"format", "pt"}, {"note", "made for a test"}};
  return made;
}

void PutOnDevice(FakeVersion& version, uint64_t segment_bytes) {
  std::map<uint32_t, std::pair<uint32_t, uint64_t>> segments;  // By file: number and end.
  for (FakeTensor& tensor : version.tensors) {
    const auto [at, is_new] =
        segments.try_emplace(tensor.file, static_cast<uint32_t>(version.device_segments.size()), 0);
    if (is_new) version.device_segments.push_back({segment_bytes, tensor.file, 0});
    tensor.on_device = true;
    tensor.device_segment = at->second.first;
    tensor.device_offset = at->second.second;
    at->second.second += (tensor.nbytes + 511) / 512 * 512;
  }
}

std::string SegmentBytes(const FakeVersion& version, uint32_t segment) {
  std::string bytes(version.device_segments.at(segment).bytes, '\0');
  for (const FakeTensor& tensor : version.tensors) {
    if (tensor.device_segment != segment) continue;
    bytes.replace(tensor.device_offset, tensor.nbytes,
                  version.files[tensor.file].bytes.substr(tensor.offset, tensor.nbytes));
  }
  return bytes;
}

std::string BuildIndex(const FakeVersion& version) {
  Strings strings;
  abi::IndexHeader header{};
  header.hash_key = {0x0706050403020100 + version.version, 0x0f0e0d0c0b0a0908};
  std::map<std::string, uint32_t> component_numbers;
  for (const FakeTensor& tensor : version.tensors) component_numbers[tensor.component] = 0;
  std::vector<abi::ComponentEntry> components;
  for (auto& [name, number] : component_numbers) {
    number = static_cast<uint32_t>(components.size());
    components.push_back({strings.Add(name), strings.Add(version.format)});
  }
  std::vector<FakeTensor> sorted = version.tensors;
  std::sort(sorted.begin(), sorted.end(), [](const FakeTensor& a, const FakeTensor& b) {
    return std::tie(a.name, a.component) < std::tie(b.name, b.component);
  });
  std::vector<abi::TensorEntry> tensors;
  std::vector<int64_t> dims;
  for (const FakeTensor& tensor : sorted) {
    abi::TensorEntry entry{};
    entry.name = strings.Add(tensor.name);
    entry.region_offset = tensor.offset;
    entry.nbytes = tensor.nbytes;
    entry.device_segment = tensor.device_segment;
    entry.device_offset = tensor.device_offset;
    if (tensor.on_device) entry.flags |= abi::kTensorOnDevice;
    entry.region = tensor.file;
    entry.file = tensor.file;
    entry.component = component_numbers[tensor.component];
    entry.shape = static_cast<uint32_t>(dims.size());
    dims.insert(dims.end(), tensor.shape.begin(), tensor.shape.end());
    entry.strides = abi::kNone;
    if (!tensor.strides.empty()) {
      entry.strides = static_cast<uint32_t>(dims.size());
      dims.insert(dims.end(), tensor.strides.begin(), tensor.strides.end());
      entry.flags |= abi::kTensorStrided;
    }
    entry.dtype = static_cast<uint16_t>(tensor.dtype);
    entry.rank = static_cast<uint16_t>(tensor.shape.size());
    if (tensor.reason.empty()) entry.flags |= abi::kTensorMappable;
    const abi::DTypeInfo* info = abi::FindDType(tensor.dtype);
    entry.block_elements = info == nullptr ? 1 : info->block_elements;
    entry.block_bytes = info == nullptr ? 0 : info->block_bytes;
    entry.reason = strings.Add(tensor.reason);
    tensors.push_back(entry);
  }
  std::vector<abi::Bucket> buckets(tensors.empty() ? 0 : std::bit_ceil(tensors.size() * 2));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint32_t hash = abi::HashName(header.hash_key, sorted[i].name);
    size_t at = hash & (buckets.size() - 1);
    while (buckets[at].number != 0) at = (at + 1) & (buckets.size() - 1);
    buckets[at] = {hash, static_cast<uint32_t>(i + 1)};
  }
  std::vector<abi::FileEntry> files;
  std::vector<abi::RegionEntry> regions;
  for (const FakeFile& file : version.files) {
    abi::FileEntry entry{};
    entry.path = strings.Add(file.path);
    entry.role = strings.Add(file.role);
    entry.bytes = file.bytes.size();
    entry.region = static_cast<uint32_t>(regions.size());
    files.push_back(entry);
    abi::RegionEntry region{};
    region.bytes = file.bytes.size();
    region.kind = static_cast<uint32_t>(file.kind);
    region.eager = file.eager ? 1 : 0;
    regions.push_back(region);
  }
  std::vector<abi::MetadataEntry> metadata;
  for (const auto& [key, value] : version.metadata) {
    metadata.push_back({strings.Add(key), strings.Add(value)});
  }
  header.format = strings.Add(version.format);

  std::string index(sizeof(header), '\0');
  header.tensors = Append(index, tensors);
  header.buckets = Append(index, buckets);
  header.dims = Append(index, dims);
  header.files = Append(index, files);
  header.regions = Append(index, regions);
  header.components = Append(index, components);
  header.metadata = Append(index, metadata);
  header.device_segments = Append(index, version.device_segments);
  header.strings = Append(index, std::vector<char>(strings.bytes().begin(), strings.bytes().end()));
  header.magic = abi::kIndexMagic;
  header.abi_version = abi::kIndexAbi;
  header.header_bytes = sizeof(header);
  header.index_bytes = index.size();
  header.version = version.version;
  std::memcpy(header.model, version.model.data(), version.model.size());
  std::memset(header.digest, version.digest_byte, sizeof(header.digest));
  std::memcpy(index.data(), &header, sizeof(header));
  return index;
}

}  // namespace modelhost::testing
