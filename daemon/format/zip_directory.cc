#include "daemon/format/zip_directory.h"

#include <zlib.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/name_table.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

constexpr std::string_view kZipHint =
    "the file is cut, damaged or not written by torch.save: get it again";

constexpr uint32_t kLocalSignature = 0x04034b50;
constexpr uint32_t kDescriptorSignature = 0x08074b50;
constexpr uint32_t kCentralSignature = 0x02014b50;
constexpr uint32_t kEndSignature = 0x06054b50;
constexpr uint32_t kZip64EndSignature = 0x06064b50;
constexpr uint32_t kZip64LocatorSignature = 0x07064b50;

constexpr uint64_t kEndBytes = 22;
constexpr uint64_t kZip64LocatorBytes = 20;
constexpr uint64_t kZip64EndBytes = 56;  // Without an extensible part; torch writes none.
constexpr uint64_t kCentralBytes = 46;

constexpr uint16_t kNarrow16 = 0xffff;      // "See the ZIP64 record."
constexpr uint32_t kNarrow32 = 0xffffffff;  // "See the ZIP64 field."

constexpr uint16_t kEncrypted = 0x0001;
constexpr uint16_t kDeflateOptions = 0x0006;
constexpr uint16_t kDescriptor = 0x0008;
constexpr uint16_t kPatched = 0x0020;
constexpr uint16_t kStrongEncryption = 0x0040;
constexpr uint16_t kUtf8Names = 0x0800;
constexpr uint16_t kMaskedHeaders = 0x2000;
constexpr uint16_t kKnownFlags = kDeflateOptions | kDescriptor | kUtf8Names;

constexpr uint16_t kStored = 0;
constexpr uint16_t kDeflated = 8;
constexpr uint16_t kZip64Field = 1;
constexpr uint16_t kUnicodePathField = 0x7075;  // Info-ZIP: another name for the member.

// Where the central directory is.
struct CentralPlace {
  uint64_t at = 0;
  uint64_t size = 0;
  uint64_t count = 0;
};

// What only the check of the layout needs, beside each ZipMember.
struct Placement {
  uint64_t header_at = 0;
  uint16_t flags = 0;
  uint16_t method = 0;
  uint16_t time = 0;
  uint16_t date = 0;
};

class ZipReader {
 public:
  ZipReader(std::string_view file, std::span<const std::byte> bytes) : in_(file, kZipHint, bytes) {}

  bool Run() {
    CentralPlace place;
    return End(&place) && Central(place) && Locals(place.at) && CheckNames();
  }
  const absl::Status& status() const { return in_.status(); }
  std::vector<ZipMember> TakeMembers() { return std::move(members_); }

 private:
  bool Refuse(std::string_view why, std::string_view hint = kZipHint) {
    return in_.Fail(why, hint, absl::StatusCode::kUnimplemented);
  }

  bool End(CentralPlace* place) {
    if (in_.size() < kEndBytes) return in_.Fail("too short for a ZIP archive");
    const uint64_t end_at = in_.size() - kEndBytes;
    uint32_t signature = 0;
    uint16_t disk = 0, central_disk = 0, here = 0, count = 0, comment = 0;
    uint32_t size = 0, at = 0;
    if (!in_.Seek("the end record", end_at) || !in_.Little("a signature", &signature)) return false;
    if (signature != kEndSignature) {
      return in_.Fail(
          "no end record of a ZIP archive in the last 22 bytes: the file is truncated, or has "
          "something behind the archive");
    }
    if (!in_.Little("a disk", &disk) || !in_.Little("a disk", &central_disk) ||
        !in_.Little("a count", &here) || !in_.Little("a count", &count) ||
        !in_.Little("a size", &size) || !in_.Little("an offset", &at) ||
        !in_.Little("a length", &comment)) {
      return false;
    }
    if (comment != 0) return in_.Fail("the end record promises a comment that is not there");
    const bool narrow_disks = disk == kNarrow16 || central_disk == kNarrow16;
    if (!narrow_disks && (disk != 0 || central_disk != 0)) {
      return Refuse("a part of an archive in several files");
    }
    *place = {at, size, count};
    const bool narrow = size == kNarrow32 || at == kNarrow32 || count == kNarrow16 ||
                        here == kNarrow16 || narrow_disks;
    // Readers follow a ZIP64 locator wherever one stands, so the plain record alone decides nothing
    // where bytes of a member could be taken for one.
    if (end_at >= kZip64LocatorBytes) {
      if (!in_.Seek("the ZIP64 locator", end_at - kZip64LocatorBytes) ||
          !in_.Little("a signature", &signature)) {
        return false;
      }
      if (signature == kZip64LocatorSignature) return Zip64End(end_at, place, here);
    }
    if (narrow || place->at + place->size != end_at) {
      return in_.Fail("the central directory does not end where the end record starts");
    }
    if (here != count) return in_.Fail("two counts of members that differ");
    return true;
  }

  // Stands behind the signature of the locator.
  bool Zip64End(uint64_t end_at, CentralPlace* place, uint16_t here_narrow) {
    if (end_at < kZip64LocatorBytes + kZip64EndBytes) {
      return in_.Fail("no room for a ZIP64 end record in front of its locator");
    }
    const uint64_t locator_at = end_at - kZip64LocatorBytes;
    uint32_t signature = 0, disk = 0, disks = 0;
    uint64_t record_at = 0;
    if (!in_.Little("a disk", &disk) || !in_.Little("an offset", &record_at) ||
        !in_.Little("a count", &disks)) {
      return false;
    }
    if (disk != 0 || disks > 1) return Refuse("a part of an archive in several files");
    if (record_at != locator_at - kZip64EndBytes) {
      return in_.Fail(absl::StrCat("the ZIP64 locator points to byte ", record_at, ", not to byte ",
                                   locator_at - kZip64EndBytes, " in front of it"));
    }
    uint64_t record = 0, here = 0;
    uint16_t made_by = 0, needed = 0;
    uint32_t this_disk = 0, central_disk = 0;
    CentralPlace wide;
    if (!in_.Seek("the ZIP64 end record", record_at) || !in_.Little("a signature", &signature) ||
        !in_.Little("a size", &record) || !in_.Little("a version", &made_by) ||
        !in_.Little("a version", &needed) || !in_.Little("a disk", &this_disk) ||
        !in_.Little("a disk", &central_disk) || !in_.Little("a count", &here) ||
        !in_.Little("a count", &wide.count) || !in_.Little("a size", &wide.size) ||
        !in_.Little("an offset", &wide.at)) {
      return false;
    }
    if (signature != kZip64EndSignature || record != kZip64EndBytes - 12) {
      return in_.Fail("no ZIP64 end record of 56 bytes where its locator points");
    }
    if (this_disk != 0 || central_disk != 0) return Refuse("a part of an archive in several files");
    const auto fits = [](uint64_t narrow, uint64_t most, uint64_t value) {
      return narrow == most || narrow == value;
    };
    if (here != wide.count || !fits(place->count, kNarrow16, wide.count) ||
        !fits(here_narrow, kNarrow16, here) || !fits(place->size, kNarrow32, wide.size) ||
        !fits(place->at, kNarrow32, wide.at)) {
      return in_.Fail("the end record and the ZIP64 end record differ");
    }
    if (wide.at > record_at || wide.size != record_at - wide.at) {
      return in_.Fail("the central directory does not end where the ZIP64 end record starts");
    }
    *place = wide;
    return true;
  }

  bool Central(const CentralPlace& place) {
    if (place.count > place.size / kCentralBytes) {
      return in_.Fail(absl::StrCat("a central directory of ", place.size, " bytes cannot have ",
                                   place.count, " members"));
    }
    if (!in_.Seek("the central directory", place.at)) return false;
    members_.reserve(place.count);
    placements_.reserve(place.count);
    for (uint64_t i = 0; i < place.count; ++i) {
      if (!CentralHeader()) return false;
    }
    if (in_.offset() - place.at != place.size) {
      return in_.Fail(absl::StrCat("the central directory has ", place.size, " bytes, but its ",
                                   place.count, " members take ", in_.offset() - place.at));
    }
    return true;
  }

  bool CentralHeader() {
    uint32_t signature = 0;
    uint16_t made_by = 0, needed = 0;
    uint16_t name_size = 0, extra_size = 0, comment_size = 0, disk = 0, internal = 0;
    uint32_t stored = 0, bytes = 0, external = 0, header_at = 0;
    ZipMember member;
    Placement placement;
    if (!in_.Little("a signature", &signature)) return false;
    if (signature != kCentralSignature) return in_.Fail("no member of the central directory here");
    std::string_view extra;
    if (!in_.Little("a version", &made_by) || !in_.Little("a version", &needed) ||
        !in_.Little("flags", &placement.flags) || !in_.Little("a method", &placement.method) ||
        !in_.Little("a time", &placement.time) || !in_.Little("a date", &placement.date) ||
        !in_.Little("a CRC", &member.crc32) || !in_.Little("a size", &stored) ||
        !in_.Little("a size", &bytes) || !in_.Little("a length", &name_size) ||
        !in_.Little("a length", &extra_size) || !in_.Little("a length", &comment_size) ||
        !in_.Little("a disk", &disk) || !in_.Little("attributes", &internal) ||
        !in_.Little("attributes", &external) || !in_.Little("an offset", &header_at) ||
        !in_.Text("a member's name", name_size, &member.name) ||
        !in_.Text("an extra field", extra_size, &extra)) {
      return false;
    }
    if (comment_size != 0) {
      return in_.Fail(absl::StrCat("member ", Quoted(member.name), " has a comment"));
    }
    member.stored_bytes = stored;
    member.bytes = bytes;
    placement.header_at = header_at;
    if (!CheckName(member.name) || !CheckFlags(member.name, placement)) return false;
    if (disk != 0) return Refuse("a member that lies in another file of a set");

    std::optional<std::string_view> wide;
    if (!FindZip64(member.name, extra, &wide)) return false;
    ByteReader fields("", "", std::as_bytes(std::span<const char>(wide.value_or(""))));
    for (const auto& [narrow, value] :
         {std::pair(bytes, &member.bytes), std::pair(stored, &member.stored_bytes),
          std::pair(header_at, &placement.header_at)}) {
      if (narrow == kNarrow32 && !fields.Little("", value)) {
        return in_.Fail(absl::StrCat("member ", Quoted(member.name),
                                     " has no ZIP64 field with all the numbers that it needs"));
      }
    }
    member.deflated = placement.method == kDeflated;
    if (!member.deflated && member.stored_bytes != member.bytes) {
      return in_.Fail(absl::StrCat("member ", Quoted(member.name), " is stored, but has the sizes ",
                                   member.stored_bytes, " and ", member.bytes));
    }
    members_.push_back(member);
    placements_.push_back(placement);
    return true;
  }

  bool CheckName(std::string_view name) {
    std::string_view plain = name;
    if (plain.ends_with('/')) plain.remove_suffix(1);  // A folder.
    if (!IsPlainRelativeName(AsAbsl(plain)) || !IsUtf8(plain)) {
      return in_.Fail(absl::StrCat("member ", Quoted(name), " has no plain relative name"));
    }
    return true;
  }

  bool CheckFlags(std::string_view name, const Placement& placement) {
    constexpr uint16_t kEncryption = kEncrypted | kStrongEncryption | kMaskedHeaders;
    const auto flags = absl::StrCat(" (flag bits 0x", absl::Hex(placement.flags), ")");
    if ((placement.flags & kEncryption) != 0) {
      return Refuse(absl::StrCat("member ", Quoted(name), " is encrypted", flags),
                    "save it without encryption");
    }
    if ((placement.flags & kPatched) != 0) {
      return Refuse(absl::StrCat("member ", Quoted(name), " is patched data", flags));
    }
    if ((placement.flags & ~kKnownFlags) != 0) {
      return Refuse(absl::StrCat("member ", Quoted(name), " has unknown flags", flags));
    }
    if (placement.method != kStored && placement.method != kDeflated) {
      return Refuse(absl::StrCat("member ", Quoted(name), " is compressed with the unknown method ",
                                 placement.method));
    }
    return true;
  }

  // The ZIP64 field among the extra fields, which must fill their place. Others are for dates,
  // owners and padding.
  bool FindZip64(std::string_view name, std::string_view extra,
                 std::optional<std::string_view>* found) {
    ByteReader fields("", "", std::as_bytes(std::span<const char>(extra)));
    while (fields.remaining() > 0) {
      uint16_t id = 0, size = 0;
      std::string_view value;
      if (!fields.Little("", &id) || !fields.Little("", &size) || !fields.Text("", size, &value)) {
        return in_.Fail(absl::StrCat("member ", Quoted(name), " has a damaged extra field"));
      }
      if (id == kUnicodePathField) {
        return in_.Fail(absl::StrCat("member ", Quoted(name), " has a second name"));
      }
      if (id != kZip64Field) continue;
      if (found->has_value()) {
        return in_.Fail(absl::StrCat("member ", Quoted(name), " has two ZIP64 fields"));
      }
      *found = value;
    }
    return true;
  }

  // Local headers, data and descriptors follow each other without a gap, from 0 to the directory.
  bool Locals(uint64_t central_at) {
    std::vector<size_t> order(members_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [this](size_t a, size_t b) {
      return placements_[a].header_at < placements_[b].header_at;
    });
    if (!in_.Seek("the first member", 0)) return false;
    for (size_t i = 0; i < order.size(); ++i) {
      const bool last = i + 1 == order.size();
      const uint64_t end = last ? central_at : placements_[order[i + 1]].header_at;
      if (!Local(members_[order[i]], placements_[order[i]], end)) return false;
    }
    if (in_.offset() != central_at) {
      return in_.Fail("bytes that belong to no member in front of the central directory");
    }
    return true;
  }

  bool Local(ZipMember& member, const Placement& placement, uint64_t end) {
    const auto fail = [&](std::string_view why) {
      return in_.Fail(absl::StrCat("member ", Quoted(member.name), " ", AsAbsl(why)));
    };
    if (in_.offset() != placement.header_at) {
      return fail(absl::StrCat("has its header at byte ", placement.header_at,
                               ": an overlap, or bytes that belong to no member"));
    }
    uint32_t signature = 0, crc = 0, stored = 0, bytes = 0;
    uint16_t needed = 0, flags = 0, method = 0, time = 0, date = 0, name_size = 0, extra_size = 0;
    std::string_view name, extra;
    if (!in_.Little("a local header", &signature)) return false;
    if (signature != kLocalSignature) return fail("has no local header where the directory says");
    if (!in_.Little("a version", &needed) || !in_.Little("flags", &flags) ||
        !in_.Little("a method", &method) || !in_.Little("a time", &time) ||
        !in_.Little("a date", &date) || !in_.Little("a CRC", &crc) ||
        !in_.Little("a size", &stored) || !in_.Little("a size", &bytes) ||
        !in_.Little("a length", &name_size) || !in_.Little("a length", &extra_size) ||
        !in_.Text("a local name", name_size, &name) ||
        !in_.Text("a local extra field", extra_size, &extra)) {
      return false;
    }
    if (name != member.name) {
      return fail(absl::StrCat("is called ", Quoted(name), " in its local header"));
    }
    if (flags != placement.flags || method != placement.method) {
      return fail("has other flags or another method in its local header");
    }
    // The version is not compared: writers raise it in the directory when a start needs ZIP64.
    if (time != placement.time || date != placement.date) {
      return fail("has another time in its local header");
    }
    const bool described = (flags & kDescriptor) != 0;
    if (crc != member.crc32 && !(described && crc == 0)) {
      return fail("has another CRC in its local header");
    }
    std::optional<std::string_view> wide;
    if (!FindZip64(member.name, extra, &wide)) return false;
    ByteReader fields("", "", std::as_bytes(std::span<const char>(wide.value_or(""))));
    for (const auto& [narrow, value] :
         {std::pair(bytes, member.bytes), std::pair(stored, member.stored_bytes)}) {
      uint64_t local = narrow;
      if (narrow == kNarrow32 && !fields.Little("", &local)) {
        return fail("has no ZIP64 field with its sizes in its local header");
      }
      if (local != value && !(described && local == 0)) {
        return fail(absl::StrCat("has the size ", local, " in its local header, but ", value,
                                 " in the directory"));
      }
    }
    member.data_at = in_.offset();
    // Not beyond the next header, and so no sum that wraps.
    if (end < member.data_at || member.stored_bytes > end - member.data_at) {
      return fail(absl::StrCat("needs ", member.stored_bytes, " bytes, but only ",
                               end < member.data_at ? 0 : end - member.data_at,
                               " are there before what comes next"));
    }
    return in_.Skip("a member's data", member.stored_bytes) &&
           (!described || Descriptor(member, end - in_.offset()));
  }

  bool Descriptor(const ZipMember& member, uint64_t room) {
    const bool wide = room == 24;
    uint32_t signature = 0, crc = 0;
    uint64_t stored = 0, bytes = 0;
    uint32_t narrow_stored = 0, narrow_bytes = 0;
    if (room != 16 && room != 24) {
      return in_.Fail(absl::StrCat("member ", Quoted(member.name), " has ", room,
                                   " bytes behind its data, where a descriptor has 16 or 24"));
    }
    if (!in_.Little("a descriptor", &signature) || !in_.Little("a CRC", &crc)) return false;
    if (wide) {
      if (!in_.Little("a size", &stored) || !in_.Little("a size", &bytes)) return false;
    } else {
      if (!in_.Little("a size", &narrow_stored) || !in_.Little("a size", &narrow_bytes)) {
        return false;
      }
      stored = narrow_stored;
      bytes = narrow_bytes;
    }
    if (signature != kDescriptorSignature || crc != member.crc32 || stored != member.stored_bytes ||
        bytes != member.bytes) {
      return in_.Fail(absl::StrCat("member ", Quoted(member.name),
                                   " has a descriptor that is not what the directory says"));
    }
    return true;
  }

  bool CheckNames() {
    // Some readers do not look at the case of letters.
    std::string lower;
    size_t total = 0;
    for (const ZipMember& member : members_) total += member.name.size();
    lower.reserve(total);
    std::vector<std::string_view> names;
    names.reserve(members_.size());
    for (const ZipMember& member : members_) {
      const size_t at = lower.size();
      for (const char c : member.name) lower += absl::ascii_tolower(static_cast<unsigned char>(c));
      names.push_back(std::string_view(lower).substr(at));
    }
    if (const auto pair = NameTable(std::move(names)).Duplicate()) {
      return in_.Fail(absl::StrCat("duplicate member: ", Quoted(members_[pair->first].name),
                                   " and ", Quoted(members_[pair->second].name)));
    }
    return true;
  }

  ByteReader in_;
  std::vector<ZipMember> members_;
  std::vector<Placement> placements_;
};

}  // namespace

absl::StatusOr<ZipDirectory> ZipDirectory::Read(std::string_view file,
                                                std::span<const std::byte> bytes) {
  ZipReader reader(file, bytes);
  if (!reader.Run()) return reader.status();
  return ZipDirectory(reader.TakeMembers());
}

std::span<const std::byte> StoredBytes(std::span<const std::byte> file, const ZipMember& member) {
  return file.subspan(member.data_at, member.stored_bytes);
}

bool HasGoodCrc(std::span<const std::byte> file, const ZipMember& member) {
  const std::span<const std::byte> bytes = StoredBytes(file, member);
  const uLong crc = ::crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()),
                              static_cast<z_size_t>(bytes.size()));
  return crc == member.crc32;
}

}  // namespace modelhost
