#include "daemon/region/parked_record.h"

#include <limits>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "daemon/store/json_reader.h"
#include "daemon/store/json_writer.h"
#include "daemon/store/manifest.h"

namespace modelhost {
namespace {

constexpr uint64_t kParkedSchema = 1;
constexpr size_t kMaxNameBytes = 64;

using Names = absl::flat_hash_set<std::string>;

std::string Item(const JsonObject& object, absl::string_view key, size_t number) {
  return absl::StrCat(object.Place(key), "[", number, "]");
}

absl::Status ReadUint(JsonObject& object, absl::string_view key, uint64_t& value) {
  auto read = object.Uint(key);
  if (read.ok()) value = *read;
  return read.status();
}

absl::Status ReadString(JsonObject& object, absl::string_view key, std::string& value) {
  auto read = object.String(key);
  if (read.ok()) value = *std::move(read);
  return read.status();
}

absl::Status ReadDigest(JsonObject& object, absl::string_view key, Digest& value) {
  auto read = object.Sha256(key);
  if (read.ok()) value = *read;
  return read.status();
}

// The first of the results that is no success.
template <typename... Status>
absl::Status FirstError(const Status&... results) {
  absl::Status first;
  ((first.ok() ? void(first = results) : void()), ...);
  return first;
}

absl::Status ReadName(JsonObject& object, Names& names, std::string& name) {
  if (auto read = ReadString(object, "name", name); !read.ok()) return read;
  if (name.empty() || name.size() > kMaxNameBytes) {
    return object.ErrorAt("name", absl::StrCat("has ", name.size(), " bytes"));
  }
  if (!names.insert(name).second) {
    return object.ErrorAt("name", absl::StrCat(name, " is there a second time"));
  }
  return absl::OkStatus();
}

absl::Status ReadMemory(JsonObject& object, Names& names, ParkedMemory& memory) {
  return FirstError(ReadUint(object, "device", memory.device),
                    ReadUint(object, "inode", memory.inode),
                    ReadUint(object, "bytes", memory.bytes), ReadName(object, names, memory.name));
}

absl::StatusOr<ParkedSegment> ReadSegment(simdjson::dom::element json, std::string where,
                                          Names& names) {
  auto object = JsonObject::Of(json, std::move(where));
  if (!object.ok()) return object.status();
  ParkedSegment segment;
  absl::Status read = FirstError(ReadUint(*object, "bytes", segment.bytes),
                                 ReadUint(*object, "checksum", segment.checksum),
                                 ReadName(*object, names, segment.name));
  if (read.ok() && segment.bytes == 0) read = object->ErrorAt("bytes", "is 0");
  if (read.ok()) read = object->Finish();
  if (!read.ok()) return read;
  return segment;
}

absl::StatusOr<ParkedDevice> ReadParkedDevice(simdjson::dom::element json, std::string where,
                                              Names& names) {
  auto object = JsonObject::Of(json, std::move(where));
  if (!object.ok()) return object.status();
  ParkedDevice device;
  absl::Status read = FirstError(
      ReadString(*object, "gpu", device.gpu), ReadDigest(*object, "content", device.content),
      ReadDigest(*object, "part", device.part), ReadDigest(*object, "planned", device.planned));
  if (!read.ok()) return read;
  if (device.gpu.empty() || device.gpu.size() > kMaxNameBytes) {
    return object->ErrorAt("gpu", absl::StrCat("has ", device.gpu.size(), " bytes"));
  }
  auto segments = object->Array("segments");
  if (!segments.ok()) return segments.status();
  for (const simdjson::dom::element each : *segments) {
    auto segment = ReadSegment(each, Item(*object, "segments", device.segments.size()), names);
    if (!segment.ok()) return segment.status();
    device.segments.push_back(*std::move(segment));
  }
  if (device.segments.empty()) return object->ErrorAt("segments", "there is none");
  if (const absl::Status done = object->Finish(); !done.ok()) return done;
  return device;
}

absl::Status ReadDevices(JsonObject& object, Names& names, std::vector<ParkedDevice>& devices) {
  const auto json = object.Optional("devices");
  if (!json.has_value()) return absl::OkStatus();
  simdjson::dom::array array;
  if (json->get(array) != simdjson::SUCCESS) return object.ErrorAt("devices", "not an array");
  for (const simdjson::dom::element each : array) {
    auto device = ReadParkedDevice(each, Item(object, "devices", devices.size()), names);
    if (!device.ok()) return device.status();
    devices.push_back(*std::move(device));
  }
  return absl::OkStatus();
}

absl::StatusOr<ParkedRegion> ReadRegion(simdjson::dom::element json, std::string where,
                                        Names& names) {
  auto object = JsonObject::Of(json, std::move(where));
  if (!object.ok()) return object.status();
  ParkedRegion region;
  absl::Status read = FirstError(ReadMemory(*object, names, region.memory),
                                 ReadDigest(*object, "content", region.content));
  if (read.ok()) read = object->Finish();
  if (!read.ok()) return read;
  return region;
}

absl::Status ReadEager(JsonObject& object, size_t regions, std::vector<uint32_t>& eager) {
  auto numbers = object.Array("eager");
  if (!numbers.ok()) return numbers.status();
  for (const simdjson::dom::element json : *numbers) {
    uint64_t number = 0;
    if (json.get(number) != simdjson::SUCCESS || number >= regions) {
      return object.ErrorAt("eager", "not the number of a region");
    }
    eager.push_back(static_cast<uint32_t>(number));
  }
  return absl::OkStatus();
}

absl::Status ReadStrings(JsonObject& object, absl::string_view key,
                         std::vector<std::string>& strings) {
  auto array = object.Array(key);
  if (!array.ok()) return array.status();
  for (const simdjson::dom::element json : *array) {
    std::string_view text;
    if (json.get(text) != simdjson::SUCCESS) return object.ErrorAt(key, "not all are strings");
    strings.emplace_back(text);
  }
  return absl::OkStatus();
}

absl::StatusOr<ParkedIndex> ReadIndex(simdjson::dom::element json, std::string where,
                                      size_t regions, Names& names) {
  auto object = JsonObject::Of(json, std::move(where));
  if (!object.ok()) return object.status();
  ParkedIndex index;
  absl::Status read = FirstError(
      ReadMemory(*object, names, index.memory), ReadDigest(*object, "sha256", index.sha256),
      ReadString(*object, "builder", index.builder), ReadString(*object, "format", index.format),
      ReadUint(*object, "tensors", index.tensor_count),
      ReadUint(*object, "tensor_bytes", index.tensor_bytes),
      ReadEager(*object, regions, index.eager), ReadStrings(*object, "warnings", index.warnings));
  if (const auto device = object->Optional("gpu_layout"); device.has_value() && read.ok()) {
    std::string_view text;
    if (device->get(text) != simdjson::SUCCESS)
      read = object->ErrorAt("gpu_layout", "not a string");
    index.gpu_layout = std::string(text);
  }
  if (read.ok()) read = object->Finish();
  if (!read.ok()) return read;
  return index;
}

absl::StatusOr<ParkedVersion> ReadVersion(simdjson::dom::element json, std::string where,
                                          const Names& regions, Names& names) {
  auto object = JsonObject::Of(json, std::move(where));
  if (!object.ok()) return object.status();
  ParkedVersion version;
  std::string residency;
  std::vector<std::string> contents;
  absl::Status read = FirstError(
      ReadString(*object, "model", version.model), ReadUint(*object, "version", version.version),
      ReadDigest(*object, "digest", version.digest), ReadString(*object, "residency", residency),
      ReadStrings(*object, "contents", contents), ReadStrings(*object, "regions", version.regions));
  if (!read.ok()) return read;
  if (!CheckModelName(version.model).ok()) return object->ErrorAt("model", "not a model's name");
  if (version.version == 0 || version.version > std::numeric_limits<int64_t>::max()) {
    return object->ErrorAt("version", "not a version's number");
  }
  const auto parsed = ParseResidency(residency);
  if (!parsed.ok()) return object->ErrorAt("residency", parsed.status().message());
  version.residency = *parsed;
  for (const std::string& hex : contents) {
    const auto digest = ParseDigest(hex);
    if (!digest.ok()) return object->ErrorAt("contents", digest.status().message());
    version.contents.push_back(*digest);
  }
  for (const std::string& name : version.regions) {
    if (!regions.contains(name)) {
      return object->ErrorAt("regions", absl::StrCat(name, " is not among the regions"));
    }
  }
  if (const auto index = object->Optional("index")) {
    auto of_version = ReadIndex(*index, object->Place("index"), version.contents.size(), names);
    if (!of_version.ok()) return of_version.status();
    version.index = *std::move(of_version);
  }
  if (const absl::Status done = object->Finish(); !done.ok()) return done;
  return version;
}

void WriteMemory(const ParkedMemory& memory, JsonWriter& json) {
  json.Key("name").String(memory.name);
  json.Key("device").Uint(memory.device);
  json.Key("inode").Uint(memory.inode);
  json.Key("bytes").Uint(memory.bytes);
}

void WriteIndex(const ParkedIndex& index, JsonWriter& json) {
  json.BeginObject();
  WriteMemory(index.memory, json);
  json.Key("sha256").String(index.sha256.Hex());
  json.Key("builder").String(index.builder);
  json.Key("format").String(index.format);
  json.Key("tensors").Uint(index.tensor_count);
  json.Key("tensor_bytes").Uint(index.tensor_bytes);
  json.Key("eager").BeginArray();
  for (const uint32_t region : index.eager) json.Uint(region);
  json.EndArray();
  json.Key("warnings").BeginArray();
  for (const std::string& warning : index.warnings) json.String(warning);
  json.EndArray();
  if (!index.gpu_layout.empty()) json.Key("gpu_layout").String(index.gpu_layout);
  json.EndObject();
}

void WriteDevice(const ParkedDevice& device, JsonWriter& json) {
  json.BeginObject();
  json.Key("gpu").String(device.gpu);
  json.Key("content").String(device.content.Hex());
  json.Key("part").String(device.part.Hex());
  json.Key("planned").String(device.planned.Hex());
  json.Key("segments").BeginArray();
  for (const ParkedSegment& segment : device.segments) {
    json.BeginObject();
    json.Key("name").String(segment.name);
    json.Key("bytes").Uint(segment.bytes);
    json.Key("checksum").Uint(segment.checksum);
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
}

void WriteVersion(const ParkedVersion& version, JsonWriter& json) {
  json.BeginObject();
  json.Key("model").String(version.model);
  json.Key("version").Uint(version.version);
  json.Key("digest").String(version.digest.Hex());
  json.Key("residency").String(ResidencyName(version.residency));
  json.Key("contents").BeginArray();
  for (const Digest& content : version.contents) json.String(content.Hex());
  json.EndArray();
  json.Key("regions").BeginArray();
  for (const std::string& name : version.regions) json.String(name);
  json.EndArray();
  if (version.index.has_value()) {
    json.Key("index");
    WriteIndex(*version.index, json);
  }
  json.EndObject();
}

}  // namespace

absl::StatusOr<ParkedRecord> ParseParkedRecord(absl::string_view text) {
  auto document = JsonDocument::Parse(kParkedName, text);
  if (!document.ok()) return document.status();
  auto object = JsonObject::Of(document->root(), kParkedName);
  if (!object.ok()) return object.status();
  uint64_t schema = 0;
  if (auto read = ReadUint(*object, "schema", schema); !read.ok()) return read;
  if (schema != kParkedSchema) {
    return object->ErrorAt("schema",
                           absl::StrCat("is ", schema, ", this build reads ", kParkedSchema));
  }
  ParkedRecord record;
  Names names;
  auto regions = object->Array("regions");
  if (!regions.ok()) return regions.status();
  for (const simdjson::dom::element json : *regions) {
    auto region = ReadRegion(json, Item(*object, "regions", record.regions.size()), names);
    if (!region.ok()) return region.status();
    record.regions.push_back(*std::move(region));
  }
  const Names region_names = names;
  auto versions = object->Array("versions");
  if (!versions.ok()) return versions.status();
  for (const simdjson::dom::element json : *versions) {
    auto version =
        ReadVersion(json, Item(*object, "versions", record.versions.size()), region_names, names);
    if (!version.ok()) return version.status();
    record.versions.push_back(*std::move(version));
  }
  if (auto read = ReadDevices(*object, names, record.devices); !read.ok()) return read;
  if (const absl::Status done = object->Finish(); !done.ok()) return done;
  return record;
}

std::string SerializeParkedRecord(const ParkedRecord& record) {
  JsonWriter json;
  json.BeginObject();
  json.Key("schema").Uint(kParkedSchema);
  json.Key("regions").BeginArray();
  for (const ParkedRegion& region : record.regions) {
    json.BeginObject();
    WriteMemory(region.memory, json);
    json.Key("content").String(region.content.Hex());
    json.EndObject();
  }
  json.EndArray();
  json.Key("versions").BeginArray();
  for (const ParkedVersion& version : record.versions) WriteVersion(version, json);
  json.EndArray();
  if (!record.devices.empty()) {
    json.Key("devices").BeginArray();
    for (const ParkedDevice& device : record.devices) WriteDevice(device, json);
    json.EndArray();
  }
  json.EndObject();
  return std::move(json).Take();
}

}  // namespace modelhost
