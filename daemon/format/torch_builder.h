// PyTorch checkpoints made in memory, for tests and fuzzers: good ones by default, wrong ones by
// hand.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/format/model_builders.h"

namespace modelhost::testing {

constexpr std::array<uint32_t, 256> MakeCrcTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < table.size(); ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320 : 0);
    table[i] = crc;
  }
  return table;
}
inline constexpr std::array<uint32_t, 256> kCrcTable = MakeCrcTable();

// Written out here so that the reader's own is checked by another one.
inline uint32_t Crc32(std::string_view bytes) {
  uint32_t crc = 0xffffffff;
  for (const char c : bytes) crc = crc >> 8 ^ kCrcTable[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  return ~crc;
}

// One member, as both headers tell of it. What is set by hand is written as it is.
struct ZipEntry {
  std::string name;
  std::string data;
  uint16_t flags = 0x0808;
  uint16_t method = 0;
  uint32_t crc = 0;
  uint64_t bytes = 0;   // Of the content.
  uint64_t stored = 0;  // Of the data, as the headers say.
  std::string extra;    // In the central directory.
  uint16_t disk = 0;
  std::string comment;
  uint32_t date = 0;  // And time.
  // The local header, where it differs.
  std::string local_name;
  std::string local_extra;
  uint16_t local_flags = 0;
  uint16_t local_method = 0;
  uint32_t local_crc = 0;
  uint32_t local_bytes = 0;
  uint32_t local_stored = 0;
  uint32_t local_date = 0;
  std::string descriptor;
  // The central directory, where it is not what follows from the above.
  std::string before;        // Bytes in front of the local header.
  int64_t header_error = 0;  // Added to the offset of the local header.
};

// An archive as torch.save writes it: streamed members at multiples of `alignment`, ZIP64 end
// records always.
class ZipBuilder {
 public:
  uint64_t alignment = 64;
  bool zip64_end = true;
  std::string tail;              // Behind everything.
  std::string before_directory;  // In front of the central directory.
  std::string comment;           // With its length in the end record.
  int count_error = 0;           // Added to the counts of members.
  int64_t directory_at_error = 0;
  int64_t directory_size_error = 0;

  ZipEntry& Add(std::string name, std::string data) {
    ZipEntry entry;
    entry.name = entry.local_name = std::move(name);
    entry.data = std::move(data);
    entry.crc = Crc32(entry.data);
    entry.bytes = entry.stored = entry.data.size();
    if (entry.data.empty()) entry.flags = 0x0800;
    entry.local_flags = entry.flags;
    if ((entry.flags & 8) != 0) {
      entry.descriptor = Le(0x08074b50u) + Le(entry.crc) + Le(static_cast<uint32_t>(entry.stored)) +
                         Le(static_cast<uint32_t>(entry.bytes));
    }
    entries_.push_back(std::move(entry));
    return entries_.back();
  }
  ZipEntry& At(size_t i) { return entries_[i]; }
  // The entry whose name ends so.
  ZipEntry& Named(std::string_view ending) {
    for (ZipEntry& entry : entries_) {
      if (std::string_view(entry.name).ends_with(ending)) return entry;
    }
    std::abort();
  }
  std::vector<ZipEntry>& entries() { return entries_; }

  std::string Build() const {
    std::string out;
    std::string central;
    for (const ZipEntry& entry : entries_) {
      out += entry.before;
      const uint64_t header_at = out.size() + static_cast<uint64_t>(entry.header_error);
      std::string extra = entry.local_extra;
      // "FB" and its size, then what is missing to the next multiple.
      const uint64_t bare = out.size() + 30 + entry.local_name.size() + extra.size() + 4;
      const uint64_t pad = alignment == 0 ? 0 : (alignment - bare % alignment) % alignment;
      if (alignment != 0) extra += "FB" + Le(static_cast<uint16_t>(pad)) + std::string(pad, 'Z');
      out += Le(0x04034b50u) + Le<uint16_t>(0) + Le(entry.local_flags) + Le(entry.local_method) +
             Le(entry.local_date) + Le(entry.local_crc) + Le(entry.local_stored) +
             Le(entry.local_bytes) + Le(static_cast<uint16_t>(entry.local_name.size())) +
             Le(static_cast<uint16_t>(extra.size())) + entry.local_name + extra + entry.data +
             entry.descriptor;
      central += Le(0x02014b50u) + Le(0u) + Le(entry.flags) + Le(entry.method) + Le(entry.date) +
                 Le(entry.crc) + Le(Narrow(entry.stored)) + Le(Narrow(entry.bytes)) +
                 Le(static_cast<uint16_t>(entry.name.size())) +
                 Le(static_cast<uint16_t>(entry.extra.size())) +
                 Le(static_cast<uint16_t>(entry.comment.size())) + Le(entry.disk) +
                 Le<uint16_t>(0) + Le(0u) + Le(Narrow(header_at)) + entry.name + entry.extra +
                 entry.comment;
    }
    out += before_directory;
    const uint64_t at = out.size() + static_cast<uint64_t>(directory_at_error);
    const uint64_t size = central.size() + static_cast<uint64_t>(directory_size_error);
    const uint64_t count = entries_.size() + static_cast<uint64_t>(count_error);
    out += central;
    const uint64_t wide_at = out.size();
    if (zip64_end) {
      out += Le(0x06064b50u) + Le<uint64_t>(44) + Le<uint16_t>(30) + Le<uint16_t>(45) + Le(0u) +
             Le(0u) + Le(count) + Le(count) + Le(size) + Le(at);
      out += Le(0x07064b50u) + Le(0u) + Le(wide_at) + Le(1u);
    }
    out += Le(0x06054b50u) + Le(0u) + Le(Narrow16(count)) + Le(Narrow16(count)) + Le(Narrow(size)) +
           Le(Narrow(at)) + Le(static_cast<uint16_t>(comment.size())) + comment;
    return out + tail;
  }

 private:
  static uint32_t Narrow(uint64_t value) {
    return value >= 0xffffffff ? 0xffffffff : static_cast<uint32_t>(value);
  }
  static uint16_t Narrow16(uint64_t value) {
    return value >= 0xffff ? uint16_t{0xffff} : static_cast<uint16_t>(value);
  }

  std::vector<ZipEntry> entries_;
};

// Pieces of pickles.
namespace pickled {

inline std::string Text(std::string_view text) {
  return "X" + Le(static_cast<uint32_t>(text.size())) + std::string(text);
}
inline std::string Int(int64_t value) {
  if (value >= 0 && value < 256) return "K" + Le(static_cast<uint8_t>(value));
  return std::string("\x8a\x08", 2) + Le(value);
}
inline std::string Global(std::string_view module, std::string_view name) {
  return "c" + std::string(module) + "\n" + std::string(name) + "\n";
}
inline std::string Tuple(const std::vector<std::string>& parts) {
  std::string out = "(";
  for (const std::string& part : parts) out += part;
  return out + "t";
}
inline std::string Ints(const std::vector<int64_t>& values) {
  std::vector<std::string> parts;
  for (const int64_t value : values) parts.push_back(Int(value));
  return Tuple(parts);
}
inline std::string Dict(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string out = "}(";
  for (const auto& [key, value] : items) out += key + value;
  return out + "u";
}
inline std::string List(const std::vector<std::string>& items) {
  std::string out = "](";
  for (const std::string& item : items) out += item;
  return out + "e";
}
inline std::string Call(std::string_view module, std::string_view name,
                        const std::vector<std::string>& args) {
  return Global(module, name) + Tuple(args) + "R";
}
inline std::string Storage(std::string_view type, std::string_view key, int64_t count,
                           std::string_view module = "torch") {
  return Tuple({Text("storage"), Global(module, type), Text(key), Text("cpu"), Int(count)}) + "Q";
}
inline std::string NoHooks() { return Call("collections", "OrderedDict", {}); }
inline std::string View(const std::string& storage, int64_t offset,
                        const std::vector<int64_t>& size, const std::vector<int64_t>& stride) {
  return Call("torch._utils", "_rebuild_tensor_v2",
              {storage, Int(offset), Ints(size), Ints(stride), "\x89", NoHooks()});
}
// Four F32 of storage `key`.
inline std::string Four(std::string_view key = "0") {
  return View(Storage("FloatStorage", key, 4), 0, {4}, {1});
}
inline std::string Whole(const std::string& value) { return "\x80\x02" + value + "."; }

}  // namespace pickled

// A checkpoint in the folder m/: data.pkl, then the storages with their keys, then version.
inline ZipBuilder Checkpoint(const std::string& pickle,
                             const std::vector<std::pair<std::string, std::string>>& storages) {
  ZipBuilder zip;
  zip.Add("m/data.pkl", pickle);
  zip.Add("m/byteorder", "little");
  for (const auto& [key, bytes] : storages) zip.Add("m/data/" + key, bytes);
  zip.Add("m/version", "3\n");
  return zip;
}

// One tensor w of four F32.
inline ZipBuilder SmallCheckpoint() {
  return Checkpoint(pickled::Whole(pickled::Dict({{pickled::Text("w"), pickled::Four()}})),
                    {{"0", std::string(16, 'd')}});
}

}  // namespace modelhost::testing
