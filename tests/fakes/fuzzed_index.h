// Bytes of a fuzzer as those of an index of proto/abi/version_index.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "proto/abi/version_index.h"

namespace modelhost {

// Of exactly this size, so that a sanitizer sees the first byte too many. Every second one has a
// header that fits: what a mutation breaks first would otherwise hide all the rest.
inline std::vector<uint8_t> FuzzedIndex(const uint8_t* data, size_t size) {
  std::vector<uint8_t> bytes(data, data + size);
  if (size < sizeof(abi::IndexHeader) || size % 2 != 0) return bytes;
  abi::IndexHeader header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  header.magic = abi::kIndexMagic;
  header.abi_version = abi::kIndexAbi;
  header.header_bytes = sizeof(header);
  header.index_bytes = size;
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

}  // namespace modelhost
