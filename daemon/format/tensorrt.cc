#include "daemon/format/tensorrt.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/json_reader.h"
#include "daemon/format/sniff.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

constexpr std::string_view kPlanHint = "build the engine again on the machine that is to run it";
constexpr uint64_t kPlanHeaderBytes = 24;
// The exporter's JSON is some hundred bytes; its length has a zero high byte.
constexpr uint32_t kMaxPrefixBytes = uint32_t{1} << 24;
constexpr size_t kMaxPrefixValue = 4096;
constexpr size_t kTextLookedAt = 512;

bool IsOneOf(uint32_t version, std::initializer_list<uint32_t> known) {
  return std::find(known.begin(), known.end(), version) != known.end();
}

// What people put under a plan's name by mistake, beside the formats that SniffFormat knows.
std::string_view ForeignKind(std::span<const std::byte> bytes) {
  constexpr auto kKinds = std::to_array<std::pair<std::string_view, std::string_view>>({
      {"\x1f\x8b", "a gzip file (unpack it)"},
      {"\x28\xb5\x2f\xfd", "a Zstandard file (unpack it)"},
      {"\xfd"
       "7zXZ",
       "an xz file (unpack it)"},
      {"BZh", "a bzip2 file (unpack it)"},
      {"\x7f"
       "ELF",
       "a program or library"},
      {"\x89HDF", "an HDF5 file"},
      {"\x93NUMPY", "a NumPy array"},
  });
  for (const auto& [magic, kind] : kKinds) {
    ByteReader in("", "", bytes);
    std::string_view found;
    if (in.Text("", magic.size(), &found) && found == magic) return kind;
  }
  ByteReader in("", "", bytes);
  std::string_view tflite;
  if (in.Skip("", 4) && in.Text("", 4, &tflite) && tflite == "TFL3")
    return "a TensorFlow Lite file";

  ByteReader text("", "", bytes.first(std::min(bytes.size(), kTextLookedAt)));
  const bool page = text.Peek() == '<';
  text.TakeWhile([](uint8_t c) { return (c >= ' ' && c < 0x7f) || (c >= '\t' && c <= '\r'); });
  if (text.remaining() == 0) return page ? "a web page or XML (the download failed)" : "text";
  ByteReader zeros("", "", bytes.first(std::min<size_t>(bytes.size(), kPlanHeaderBytes)));
  zeros.TakeWhile([](uint8_t c) { return c == 0; });
  if (zeros.remaining() == 0) return "zeros where a header should be (an unfinished copy?)";
  return "";
}

class PlanReader {
 public:
  PlanReader(const std::string& name, std::span<const std::byte> bytes, TensorIndex& index)
      : name_(name), bytes_(bytes), index_(index), in_(name, kPlanHint, bytes) {}

  absl::Status Read() {
    if (HasPrefix(bytes_)) ReadPrefix();
    if (in_.ok() && in_.offset() > 0) {
      if (absl::Status status = CheckBehindPrefix(); !status.ok()) return status;
    }
    if (in_.ok()) ReadPlan();
    return in_.status();
  }

 private:
  static bool HasPrefix(std::span<const std::byte> bytes) {
    ByteReader in("", "", bytes);
    uint32_t length = 0;
    return in.Little("", &length) && length < kMaxPrefixBytes && in.Peek() == '{';
  }

  bool ReadPrefix() {
    uint32_t length = 0;
    std::string_view text;
    if (!in_.Little("the length of the JSON text", &length) ||
        !in_.Text("the JSON text before the plan", length, &text)) {
      return false;
    }
    Report("json_prefix_bytes", length);
    ByteReader bytes(name_, "", std::as_bytes(std::span(text)));
    JsonReader json(bytes);
    absl::flat_hash_set<std::string> keys;
    const bool read = json.Object("the JSON text", [&](std::string_view raw_key) {
      std::string key = absl::StrCat("prefix.", AsAbsl(raw_key));
      const bool is_text = json.PeekValue() == '"';
      const uint64_t from = bytes.offset();
      std::string_view value;
      if (is_text ? !json.String("a value", &value) : !json.Skip()) return false;
      if (!is_text) value = bytes.Since(from);
      if (!keys.insert(key).second) return bytes.Fail(absl::StrCat(Quoted(key), " is there twice"));
      index_.AddMetadata(std::move(key), value.size() <= kMaxPrefixValue
                                             ? std::string(value)
                                             : absl::StrCat("{\"bytes\":", value.size(), "}"));
      return true;
    });
    if (!read || !json.End()) {
      Warn(absl::StrCat("the JSON text before the plan is damaged: ", bytes.status().message()));
    }
    if (in_.remaining() == 0) return in_.Fail("only a JSON text: no plan follows it");
    return true;
  }

  // The text says nothing about what it stands in front of.
  absl::Status CheckBehindPrefix() {
    const std::span<const std::byte> rest = bytes_.subspan(in_.offset());
    const FileFormat format = SniffFormat(rest, name_);
    if (format != FileFormat::kTensorRt) return CheckPlanName(name_, format, rest);
    if (HasPrefix(rest)) in_.Fail("a second JSON text where the plan should begin");
    return in_.status();
  }

  bool ReadPlan() {
    if (in_.remaining() < kPlanHeaderBytes) {
      return in_.Fail(absl::StrCat("only ", in_.remaining(), " bytes: the header of a plan takes ",
                                   kPlanHeaderBytes),
                      "the file is cut: get it again");
    }
    const std::span<const std::byte> plan = bytes_.subspan(in_.offset());
    std::string_view magic;
    if (!in_.Text("the magic", 4, &magic)) return false;
    if (magic == "ptrt" || magic == "ftrt") return ReadHeader(magic);
    if (const std::string_view kind = ForeignKind(plan); !kind.empty()) {
      return in_.Fail(absl::StrCat("not a TensorRT plan, but ", AsAbsl(kind)));
    }
    ByteReader container("", "", plan);
    uint64_t size = 0;
    if (container.Little("", &size) && size == plan.size()) {
      index_.AddMetadata("tensorrt.container", "flatbuffers");
    }
    Warn("the header is of no generation known here: the file is served as it is, unchecked");
    return true;
  }

  bool ReadHeader(std::string_view magic) {
    uint32_t safe = 0;
    uint32_t standard = 0;
    if (!in_.Little("the safe serialization version", &safe) ||
        !in_.Little("the serialization version", &standard)) {
      return false;
    }
    index_.AddMetadata("tensorrt.magic", std::string(magic));
    Report("safe_serialization_version", safe);
    Report("serialization_version", standard);
    if (IsOneOf(safe, {0x57, 0x59, 0x60, 0x61})) return ReadSizes(/*size_first=*/true, true);
    // Less is known of the older ones, so either place may have the size.
    if (IsOneOf(safe, {0x00, 0x2b})) return ReadSizes(false, false);
    Warn(absl::StrCat("safe serialization version ", safe,
                      " is not known here: the rest of the header was not read, and whether the "
                      "file is whole was not checked"));
    return true;
  }

  bool ReadSizes(bool size_first, bool only_there) {
    const uint64_t at = in_.offset();
    uint64_t payload = 0;
    uint32_t word = 0;
    const bool read = size_first ? in_.Little("the payload size", &payload) &&
                                       in_.Little("the header's last field", &word)
                                 : in_.Little("a header field", &word) &&
                                       in_.Little("the payload size", &payload);
    if (!read) return false;
    const uint64_t have = in_.remaining();
    if (payload != have && !only_there) {
      ByteReader other("", "", bytes_.subspan(at));
      uint64_t elsewhere = 0;
      if (other.Little("", &elsewhere) && elsewhere == have) payload = have;
    }
    if (payload != have) {
      const std::string why = absl::StrCat("the header promises a payload of ", payload,
                                           " bytes, the file has ", have, " after it");
      return in_.Fail(why, payload > have ? "the file is cut: get it again"
                                          : "something was added to the file: get it again");
    }
    Report("payload_bytes", payload);
    return true;
  }

  void Report(std::string_view key, uint64_t value) {
    index_.AddMetadata(absl::StrCat("tensorrt.", AsAbsl(key)), absl::StrCat(value));
  }
  void Warn(absl::string_view text) {
    index_.AddWarning(absl::StrCat(Printable(name_), ": ", text));
  }

  const std::string& name_;
  const std::span<const std::byte> bytes_;
  TensorIndex& index_;
  ByteReader in_;
};

}  // namespace

absl::Status ReadTensorRt(const std::string& name, std::span<const std::byte> bytes,
                          TensorIndex& index) {
  return PlanReader(name, bytes, index).Read();
}

}  // namespace modelhost
