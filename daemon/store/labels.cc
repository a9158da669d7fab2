#include "daemon/store/labels.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/store/atomic_file.h"
#include "daemon/store/json_reader.h"
#include "daemon/store/json_writer.h"
#include "daemon/store/labels_json.h"
#include "daemon/store/manifest.h"

namespace modelhost {
namespace {

constexpr char kName[] = "labels.json";
constexpr uint64_t kLabelsSchema = 1;
constexpr uint64_t kMaxLabelsBytes = uint64_t{256} << 20;
constexpr uint64_t kMaxVersion = std::numeric_limits<int64_t>::max();

absl::Status ReadLabel(simdjson::dom::element json, std::string where, LabelFile& labels) {
  auto object = JsonObject::Of(json, std::move(where));
  if (!object.ok()) return object.status();
  auto model = object->String("model");
  if (!model.ok()) return model.status();
  auto label = object->String("label");
  if (!label.ok()) return label.status();
  if (const absl::Status good = CheckModelName(*model); !good.ok()) {
    return object->ErrorAt("model", good.message());
  }
  // Labels are spelled as models are.
  if (!CheckModelName(*label).ok()) return object->ErrorAt("label", "not a label's name");

  LabelRecord record;
  auto version = object->Uint("version");
  if (!version.ok()) return version.status();
  if (*version > kMaxVersion) return object->ErrorAt("version", "exceeds 2^63-1");
  record.version = *version;
  auto digest = object->Sha256("digest");
  if (!digest.ok()) return digest.status();
  record.digest = *digest;
  auto generation = object->Uint("generation");
  if (!generation.ok()) return generation.status();
  record.generation = *generation;
  auto previous = object->Uint("previous");
  if (!previous.ok()) return previous.status();
  if (*previous > kMaxVersion) return object->ErrorAt("previous", "exceeds 2^63-1");
  record.previous = *previous;
  auto changed = object->Time("changed");
  if (!changed.ok()) return changed.status();
  record.changed = *changed;
  if (const absl::Status done = object->Finish(); !done.ok()) return done;
  const auto key = std::make_pair(*std::move(model), *std::move(label));
  if (!labels.labels.emplace(key, record).second) {
    return object->ErrorAt("label",
                           absl::StrCat(key.first, ":", key.second, " is there a second time"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LabelFile> ParseLabels(absl::string_view text) {
  auto document = JsonDocument::Parse(kName, text);
  if (!document.ok()) return document.status();
  auto object = JsonObject::Of(document->root(), kName);
  if (!object.ok()) return object.status();
  auto schema = object->Uint("schema");
  if (!schema.ok()) return schema.status();
  if (*schema > kLabelsSchema) {
    return absl::UnimplementedError(
        absl::StrCat(kName, ": schema ", *schema, ", this build reads ", kLabelsSchema));
  }
  if (*schema != kLabelsSchema) {
    return object->ErrorAt("schema",
                           absl::StrCat("is ", *schema, ", this build reads ", kLabelsSchema));
  }
  LabelFile labels;
  auto epoch = object->Uint("epoch");
  if (!epoch.ok()) return epoch.status();
  labels.epoch = *epoch;
  auto array = object->Array("labels");
  if (!array.ok()) return array.status();
  size_t index = 0;
  for (const simdjson::dom::element label : *array) {
    const absl::Status read =
        ReadLabel(label, absl::StrCat(object->Place("labels"), "[", index++, "]"), labels);
    if (!read.ok()) return read;
  }
  if (const absl::Status done = object->Finish(); !done.ok()) return done;
  return labels;
}

std::string SerializeLabels(const LabelFile& labels) {
  JsonWriter json;
  json.BeginObject();
  json.Key("schema").Uint(kLabelsSchema);
  json.Key("epoch").Uint(labels.epoch);
  json.Key("labels").BeginArray();
  for (const auto& [name, record] : labels.labels) {
    json.BeginObject();
    json.Key("model").String(name.first);
    json.Key("label").String(name.second);
    json.Key("version").Uint(record.version);
    json.Key("digest").String(record.digest.Hex());
    json.Key("generation").Uint(record.generation);
    json.Key("previous").Uint(record.previous);
    json.Key("changed").String(FormatRfc3339(record.changed));
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
  return std::move(json).Take();
}

absl::StatusOr<LabelFile> LoadLabels(Os& os, const UniqueFd& state_dir) {
  auto text = ReadSmallFileAt(os, state_dir, kName, kMaxLabelsBytes);
  if (absl::IsNotFound(text.status())) return LabelFile{};
  if (!text.ok()) return text.status();
  auto labels = ParseLabels(*text);
  // Good, and not for us: nobody is to throw it away.
  if (absl::IsUnimplemented(labels.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat("state directory: ", labels.status().message(),
                     ": a newer modelhostd wrote it (run that one again, or put the labels.json "
                     "from before the upgrade in its place)"));
  }
  if (!labels.ok()) {
    return absl::DataLossError(absl::StrCat(
        "state directory: ", labels.status().message(),
        " (put a good copy in its place, or remove it to start with no labels at all)"));
  }
  return labels;
}

absl::Status SaveLabels(Os& os, const UniqueFd& state_dir, const LabelFile& labels) {
  return ReplaceFileAt(os, state_dir, kName, 0600, SerializeLabels(labels));
}

}  // namespace modelhost
