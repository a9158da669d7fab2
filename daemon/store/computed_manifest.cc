#include "daemon/store/computed_manifest.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/text.h"
#include "daemon/store/atomic_file.h"
#include "daemon/store/content_hash.h"
#include "daemon/store/json_reader.h"
#include "daemon/store/json_writer.h"
#include "daemon/store/manifest_json.h"

namespace modelhost {
namespace {

constexpr char kWhere[] = "computed manifest";
constexpr char kDir[] = "manifests";
constexpr uint64_t kSchema = 1;
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 30;
constexpr uint64_t kSniffBytes = 4096;

std::string FileName(uint64_t version) { return absl::StrCat(version, ".json"); }

// By the beginning of its content, as far as that tells; the loader looks at all of it.
absl::StatusOr<std::string> RoleOf(Os& os, const TreeFile& file) {
  std::vector<std::byte> head(std::min<uint64_t>(kSniffBytes, file.info.bytes));
  auto got = os.ReadAt(file.fd, 0, head);
  if (!got.ok()) return got.status();
  head.resize(*got);
  switch (SniffFormat(head, file.path)) {
    case FileFormat::kUnknown:
    case FileFormat::kSafetensorsIndex:
    case FileFormat::kGitLfsPointer:
      return std::string("sidecar");
    default:
      return std::string("weights");
  }
}

absl::StatusOr<UniqueFd> MakeAndOpen(Os& os, const UniqueFd& parent, const std::string& name) {
  const absl::Status made = os.MakeDirAt(parent, name, 0700);
  if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
  return os.OpenDirAt(parent, name);
}

}  // namespace

bool ComputedManifest::Fits(const std::vector<TreeFile>& tree) const {
  if (tree.size() != manifest.files.size()) return false;
  for (size_t i = 0; i < tree.size(); ++i) {
    if (tree[i].path != manifest.files[i].path) return false;
    if (!(IdentityOf(tree[i].info) == identities[i])) return false;
  }
  return true;
}

absl::StatusOr<ComputedManifest> ParseComputedManifest(absl::string_view text) {
  auto document = JsonDocument::Parse(kWhere, text);
  if (!document.ok()) return document.status();
  auto object = JsonObject::Of(document->root(), kWhere);
  if (!object.ok()) return object.status();
  auto schema = object->Uint("schema");
  if (!schema.ok()) return schema.status();
  if (*schema != kSchema) return object->ErrorAt("schema", "unknown");
  auto manifest_json = object->Element("manifest");
  if (!manifest_json.ok()) return manifest_json.status();
  auto manifest = ManifestFromJson(*manifest_json, object->Place("manifest"));
  if (!manifest.ok()) return manifest.status();
  ComputedManifest computed;
  computed.manifest = *std::move(manifest);
  auto identities = object->Array("identities");
  if (!identities.ok()) return identities.status();
  for (const simdjson::dom::element json : *identities) {
    auto item = JsonObject::Of(json, object->Place("identities"));
    if (!item.ok()) return item.status();
    auto path = item->String("path");
    if (!path.ok()) return path.status();
    auto identity = ReadIdentity(*item);
    if (!identity.ok()) return identity.status();
    if (const absl::Status done = item->Finish(); !done.ok()) return done;
    const size_t at = computed.identities.size();
    if (at >= computed.manifest.files.size() || computed.manifest.files[at].path != *path) {
      return object->ErrorAt("identities", "other files than in the manifest");
    }
    computed.identities.push_back(*identity);
  }
  if (computed.identities.size() != computed.manifest.files.size()) {
    return object->ErrorAt("identities", "fewer files than in the manifest");
  }
  if (const absl::Status done = object->Finish(); !done.ok()) return done;
  return computed;
}

std::string SerializeComputedManifest(const ComputedManifest& computed) {
  JsonWriter json;
  json.BeginObject();
  json.Key("schema").Uint(kSchema);
  json.Key("identities").BeginArray();
  for (size_t i = 0; i < computed.identities.size(); ++i) {
    json.BeginObject();
    json.Key("path").String(computed.manifest.files[i].path);
    AppendIdentity(computed.identities[i], json);
    json.EndObject();
  }
  json.EndArray();
  json.Key("manifest");
  AppendManifest(computed.manifest, json);
  json.EndObject();
  return std::move(json).Take();
}

absl::StatusOr<ComputedManifest> LoadComputedManifest(Os& os, const UniqueFd& state_dir,
                                                      const std::string& model, uint64_t version) {
  auto text = ReadSmallFileAt(os, state_dir, absl::StrCat(kDir, "/", model, "/", FileName(version)),
                              kMaxFileBytes);
  if (!text.ok()) return text.status();
  auto computed = ParseComputedManifest(*text);
  if (!computed.ok()) return absl::NotFoundError(computed.status().message());
  if (computed->manifest.model != model || computed->manifest.version != version) {
    return absl::NotFoundError(absl::StrCat(kWhere, ": of another version"));
  }
  return computed;
}

absl::Status SaveComputedManifest(Os& os, const UniqueFd& state_dir,
                                  const ComputedManifest& computed) {
  auto all = MakeAndOpen(os, state_dir, kDir);
  if (!all.ok()) return all.status();
  auto dir = MakeAndOpen(os, *all, computed.manifest.model);
  if (!dir.ok()) return dir.status();
  return ReplaceFileAt(os, *dir, FileName(computed.manifest.version), 0600,
                       SerializeComputedManifest(computed));
}

absl::StatusOr<ComputedManifest> ComputeManifest(
    Os& os, const std::string& model, uint64_t version, absl::Time created,
    const std::vector<TreeFile>& tree, const std::function<bool(uint64_t bytes_done)>& progress) {
  std::vector<std::string> paths;
  for (const TreeFile& file : tree) paths.push_back(file.path);
  if (const absl::Status names = CheckVersionPaths(std::move(paths)); !names.ok()) return names;

  ComputedManifest computed;
  computed.manifest.model = model;
  computed.manifest.version = version;
  computed.manifest.created = created;
  std::vector<std::byte> buffer;
  uint64_t done = 0;
  for (const TreeFile& file : tree) {
    ManifestFile entry;
    entry.path = file.path;
    auto role = RoleOf(os, file);
    if (!role.ok()) return role.status();
    entry.role = *std::move(role);
    ContentHash hash;
    const absl::Status read =
        ReadInOrder(os, file.fd, file.path, file.info.bytes, buffer,
                    [&](uint64_t, std::span<const std::byte> piece) -> absl::Status {
                      hash.Update(piece);
                      done += piece.size();
                      if (progress && !progress(done)) return absl::CancelledError("cancelled");
                      return absl::OkStatus();
                    });
    if (!read.ok()) return read;
    auto after = os.Stat(file.fd);
    if (!after.ok()) return after.status();
    const absl::Status unchanged = CheckUnchanged(file.path, file.info, *after);
    if (!unchanged.ok()) return unchanged;
    hash.Finish(entry);
    computed.manifest.files.push_back(std::move(entry));
    computed.identities.push_back(IdentityOf(file.info));
  }
  computed.manifest.digest = VersionDigest(computed.manifest.files);
  return computed;
}

}  // namespace modelhost
