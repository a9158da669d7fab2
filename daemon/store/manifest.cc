#include "daemon/store/manifest.h"

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"
#include "daemon/store/json_reader.h"
#include "daemon/store/json_writer.h"
#include "daemon/store/manifest_json.h"

namespace modelhost {
namespace {

constexpr uint64_t kManifestSchema = 1;
constexpr uint64_t kMaxBytes = std::numeric_limits<int64_t>::max();
// Chunks are hashed in place in mappings, by pages.
constexpr uint64_t kChunkGrain = 4096;

absl::StatusOr<ManifestFile> FileFrom(simdjson::dom::element json, std::string where) {
  auto object = JsonObject::Of(json, std::move(where));
  if (!object.ok()) return object.status();
  ManifestFile file;

  auto path = object->String("path");
  if (!path.ok()) return path.status();
  file.path = *std::move(path);
  if (const absl::Status plain = CheckVersionPath(file.path); !plain.ok()) {
    return object->ErrorAt("path", plain.message());
  }
  auto bytes = object->Uint("size");
  if (!bytes.ok()) return bytes.status();
  if (*bytes > kMaxBytes) return object->ErrorAt("size", "larger than any file");
  file.bytes = *bytes;
  auto sha256 = object->Sha256("sha256");
  if (!sha256.ok()) return sha256.status();
  file.sha256 = *sha256;
  auto role = object->String("role");
  if (!role.ok()) return role.status();
  if (*role != "weights" && *role != "sidecar") {
    return object->ErrorAt("role", "expected \"weights\" or \"sidecar\"");
  }
  file.role = *std::move(role);

  auto chunk_bytes = object->Uint("chunk_bytes");
  if (!chunk_bytes.ok()) return chunk_bytes.status();
  if (*chunk_bytes == 0 || *chunk_bytes % kChunkGrain != 0 || *chunk_bytes > kMaxBytes) {
    return object->ErrorAt("chunk_bytes",
                           absl::StrCat("expected a positive multiple of ", kChunkGrain));
  }
  file.chunk_bytes = *chunk_bytes;
  auto chunks = object->Array("chunk_sha256");
  if (!chunks.ok()) return chunks.status();
  for (const simdjson::dom::element chunk : *chunks) {
    std::string_view hex;
    if (chunk.get(hex) != simdjson::SUCCESS) {
      return object->ErrorAt("chunk_sha256", "expected strings");
    }
    auto digest = ParseDigest(AsAbsl(hex));
    if (!digest.ok()) return object->ErrorAt("chunk_sha256", digest.status().message());
    file.chunks.push_back(*digest);
  }
  const uint64_t due = file.bytes / file.chunk_bytes + (file.bytes % file.chunk_bytes != 0 ? 1 : 0);
  if (file.chunks.size() != due) {
    return object->ErrorAt("chunk_sha256",
                           absl::StrCat("has ", file.chunks.size(), " digests for ", due,
                                        " chunks of ", file.chunk_bytes, " bytes in ", file.bytes));
  }
  if (due == 1 && file.chunks[0] != file.sha256) {
    return object->ErrorAt("chunk_sha256", "the only chunk has another digest than the file");
  }
  if (const absl::Status done = object->Finish(); !done.ok()) return done;
  return file;
}

absl::Status ReadRequires(JsonObject& object, Manifest& manifest) {
  const auto element = object.Optional("requires");
  if (!element.has_value()) return absl::OkStatus();
  simdjson::dom::object fields;
  if (element->get(fields) != simdjson::SUCCESS) {
    return object.ErrorAt("requires", "expected an object of strings");
  }
  for (const auto& field : fields) {
    std::string_view value;
    if (field.value.get(value) != simdjson::SUCCESS) {
      return object.ErrorAt("requires", "expected an object of strings");
    }
    if (!manifest.requires_map.emplace(field.key, value).second) {
      return object.ErrorAt("requires", "has a key twice");
    }
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t Manifest::TotalBytes() const {
  uint64_t total = 0;
  for (const ManifestFile& file : files) total += file.bytes;
  return total;
}

Digest VersionDigest(const std::vector<ManifestFile>& files) {
  std::vector<const ManifestFile*> sorted;
  sorted.reserve(files.size());
  for (const ManifestFile& file : files) sorted.push_back(&file);
  std::sort(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->path < b->path; });
  Sha256Stream stream;
  for (const ManifestFile* file : sorted) {
    const std::string line = absl::StrCat(file->sha256.Hex(), "  ", file->path, "\n");
    stream.Update(std::as_bytes(std::span(line)));
  }
  return stream.Finish();
}

absl::StatusOr<Manifest> ManifestFromJson(simdjson::dom::element json, const std::string& where) {
  auto object = JsonObject::Of(json, where);
  if (!object.ok()) return object.status();
  Manifest manifest;

  auto schema = object->Uint("schema");
  if (!schema.ok()) return schema.status();
  if (*schema != kManifestSchema) {
    return object->ErrorAt("schema",
                           absl::StrCat("is ", *schema, ", this build reads ", kManifestSchema));
  }
  auto model = object->String("model");
  if (!model.ok()) return model.status();
  if (const absl::Status name = CheckModelName(*model); !name.ok()) {
    return object->ErrorAt("model", name.message());
  }
  manifest.model = *std::move(model);
  auto version = object->Uint("version");
  if (!version.ok()) return version.status();
  if (*version == 0 || *version > kMaxBytes) {
    return object->ErrorAt("version", "expected a number from 1 to 2^63-1");
  }
  manifest.version = *version;
  auto created = object->Time("created");
  if (!created.ok()) return created.status();
  manifest.created = *created;
  auto digest = object->Sha256("digest");
  if (!digest.ok()) return digest.status();
  manifest.digest = *digest;
  if (const absl::Status read = ReadRequires(*object, manifest); !read.ok()) return read;

  auto files = object->Array("files");
  if (!files.ok()) return files.status();
  uint64_t total = 0;
  std::vector<std::string> paths;
  for (const simdjson::dom::element file_json : *files) {
    auto file =
        FileFrom(file_json, absl::StrCat(object->Place("files"), "[", manifest.files.size(), "]"));
    if (!file.ok()) return file.status();
    if (file->bytes > kMaxBytes - total) {
      return object->ErrorAt("files", "the sizes add up to more than 2^63-1 bytes");
    }
    total += file->bytes;
    paths.push_back(file->path);
    manifest.files.push_back(*std::move(file));
  }
  if (const absl::Status names = CheckVersionPaths(std::move(paths)); !names.ok()) {
    return object->ErrorAt("files", names.message());
  }
  if (const absl::Status done = object->Finish(); !done.ok()) return done;

  std::sort(manifest.files.begin(), manifest.files.end(),
            [](const ManifestFile& a, const ManifestFile& b) { return a.path < b.path; });
  if (const Digest computed = VersionDigest(manifest.files); computed != manifest.digest) {
    return object->ErrorAt("digest", absl::StrCat("says ", manifest.digest.Hex(),
                                                  ", the files listed make ", computed.Hex()));
  }
  return manifest;
}

absl::StatusOr<Manifest> ParseManifest(absl::string_view json) {
  auto document = JsonDocument::Parse(kManifestName, json);
  if (!document.ok()) return document.status();
  return ManifestFromJson(document->root(), kManifestName);
}

void AppendManifest(const Manifest& manifest, JsonWriter& json) {
  json.BeginObject();
  json.Key("schema").Uint(kManifestSchema);
  json.Key("model").String(manifest.model);
  json.Key("version").Uint(manifest.version);
  json.Key("created").String(FormatRfc3339(manifest.created));
  json.Key("digest").String(manifest.digest.Hex());
  json.Key("requires").BeginObject();
  for (const auto& [key, value] : manifest.requires_map) json.Key(key).String(value);
  json.EndObject();
  json.Key("files").BeginArray();
  for (const ManifestFile& file : manifest.files) {
    json.BeginObject();
    json.Key("path").String(file.path);
    json.Key("size").Uint(file.bytes);
    json.Key("sha256").String(file.sha256.Hex());
    json.Key("role").String(file.role);
    json.Key("chunk_bytes").Uint(file.chunk_bytes);
    json.Key("chunk_sha256").BeginArray();
    for (const Digest& chunk : file.chunks) json.String(chunk.Hex());
    json.EndArray();
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
}

std::string SerializeManifest(const Manifest& manifest) {
  JsonWriter json;
  AppendManifest(manifest, json);
  return std::move(json).Take();
}

}  // namespace modelhost
