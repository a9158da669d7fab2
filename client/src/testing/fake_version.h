// Versions of models for tests of the client library: their files, and their index in the layout of
// proto/abi/version_index.h, written apart from the daemon's writer so that both are tested.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "proto/abi/version_index.h"

namespace modelhost::testing {

struct FakeFile {
  std::string path;
  std::string role = "weights";
  std::string bytes;
  abi::RegionKind kind = abi::RegionKind::kSealed;
  bool eager = true;
};

struct FakeTensor {
  std::string name;
  std::string component = "main";
  abi::DType dtype = abi::DType::kF32;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // Empty: row-major.
  uint32_t file = 0;             // Number in `files`, which are in the order of their paths.
  uint64_t offset = 0;
  uint64_t nbytes = 0;
  std::string reason;  // Not empty: not mappable.
  bool on_device = false;
  uint32_t device_segment = abi::kNone;
  uint64_t device_offset = 0;
};

struct FakeVersion {
  std::string model;
  uint64_t version = 1;
  std::string format = "safetensors";
  std::vector<FakeFile> files;  // Sorted by path; each is a region of its own.
  std::vector<FakeTensor> tensors;
  std::vector<std::pair<std::string, std::string>> metadata;  // Sorted by key.
  uint8_t digest_byte = 0;                                    // The digest is 32 of these.
  std::vector<abi::DeviceSegmentEntry> device_segments;
};

// A version with `tensors` F32 tensors "tensor.N" of `elements` elements each, all of them `value`,
// spread evenly over `shards` files, and a sidecar tokenizer.json.
FakeVersion MakeVersion(const std::string& model, uint64_t version, size_t tensors, size_t elements,
                        float value, size_t shards = 1);

// Puts all tensors of `version` into one device segment of `segment_bytes` for each file that has
// any, at multiples of 512.
void PutOnDevice(FakeVersion& version, uint64_t segment_bytes);
// What the segment holds then.
std::string SegmentBytes(const FakeVersion& version, uint32_t segment);

std::string BuildIndex(const FakeVersion& version);

}  // namespace modelhost::testing
