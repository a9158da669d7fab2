// The members of a ZIP archive as torch.save lays it out, and nothing that two readers could see in
// two ways.
//
// Every byte of the file belongs to exactly one thing: local header, data, descriptor, central
// directory, end records. So there is nothing before, between or after, no overlap and no comment,
// neither of the archive nor of a member; the local headers say what the central directory says; a
// member has one name, whatever the case of its letters. Sizes come from the central directory,
// starts from the local headers. ZIP64 is read.
//
// Linear but for one sort. Errors: INVALID_ARGUMENT, UNIMPLEMENTED encryption and methods that are
// not read. The bytes are lent: names point into them. Immutable once read; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

namespace modelhost {

struct ZipMember {
  std::string_view name;
  uint64_t data_at = 0;       // Absolute in the file.
  uint64_t stored_bytes = 0;  // As in the file.
  uint64_t bytes = 0;         // Of the content; the same when it is not deflated.
  uint32_t crc32 = 0;         // As the directory says; see HasGoodCrc.
  bool deflated = false;
};

class ZipDirectory {
 public:
  static absl::StatusOr<ZipDirectory> Read(std::string_view file, std::span<const std::byte> bytes);

  // In the order of the central directory.
  const std::vector<ZipMember>& members() const& { return members_; }
  std::vector<ZipMember> members() && { return std::move(members_); }

 private:
  explicit ZipDirectory(std::vector<ZipMember> members) : members_(std::move(members)) {}

  std::vector<ZipMember> members_;
};

// The bytes of a member as they are in the file.
std::span<const std::byte> StoredBytes(std::span<const std::byte> file, const ZipMember& member);
// True when a member that is not deflated has the CRC-32 that the directory gives it.
bool HasGoodCrc(std::span<const std::byte> file, const ZipMember& member);

}  // namespace modelhost
