// Small model files for tests, written byte by byte.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

namespace modelhost {

struct TestTensor {
  std::string name;
  std::vector<float> values;  // Shape [values.size()].
};

// A safetensors file of F32 tensors.
inline std::string SafetensorsBytes(const std::vector<TestTensor>& tensors) {
  std::string header = "{";
  uint64_t offset = 0;
  for (const TestTensor& tensor : tensors) {
    const uint64_t bytes = tensor.values.size() * sizeof(float);
    if (header.size() > 1) header += ",";
    header += "\"" + tensor.name + "\":{\"dtype\":\"F32\",\"shape\":[" +
              std::to_string(tensor.values.size()) + "],\"data_offsets\":[" +
              std::to_string(offset) + "," + std::to_string(offset + bytes) + "]}";
    offset += bytes;
  }
  header += "}";
  while (header.size() % 8 != 0) header += " ";
  const uint64_t header_bytes = header.size();
  std::string file(sizeof(header_bytes), '\0');
  std::memcpy(file.data(), &header_bytes, sizeof(header_bytes));
  file += header;
  for (const TestTensor& tensor : tensors) {
    const size_t at = file.size();
    file.resize(at + tensor.values.size() * sizeof(float));
    std::memcpy(file.data() + at, tensor.values.data(), tensor.values.size() * sizeof(float));
  }
  return file;
}

inline void WriteFile(const std::filesystem::path& path, const std::string& bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

// A version directory as an operator's rsync and mv would leave it: no manifest, write-protected.
inline void WriteVersion(const std::filesystem::path& store, const std::string& model,
                         uint64_t version,
                         const std::vector<std::pair<std::string, std::string>>& files) {
  const auto dir = store / "models" / model / "versions" / std::to_string(version);
  for (const auto& [name, bytes] : files) {
    WriteFile(dir / name, bytes);
    std::filesystem::permissions(dir / name, std::filesystem::perms(0444));
  }
  using std::filesystem::perms;
  std::filesystem::permissions(dir, perms(0555));
}

}  // namespace modelhost
