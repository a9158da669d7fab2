#include "daemon/store/json_reader.h"

#include <memory>
#include <span>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/json_reader.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

using simdjson::dom::element;
using simdjson::dom::element_type;

absl::string_view TypeName(element_type type) {
  switch (type) {
    case element_type::ARRAY:
      return "an array";
    case element_type::OBJECT:
      return "an object";
    case element_type::INT64:
      return "a negative integer";
    case element_type::UINT64:
      return "an integer beyond 63 bits";
    case element_type::DOUBLE:
      return "a number with a fraction or exponent";
    case element_type::STRING:
      return "a string";
    case element_type::BOOL:
      return "a boolean";
    case element_type::NULL_VALUE:
      return "null";
  }
  return "something else";
}

}  // namespace

absl::StatusOr<JsonDocument> JsonDocument::Parse(absl::string_view file, absl::string_view text) {
  JsonDocument document;
  document.parser_ = std::make_unique<simdjson::dom::parser>();
  // parse() copies into a padded buffer of its own.
  const auto error = document.parser_->parse(text.data(), text.size(), /*realloc_if_needed=*/true)
                         .get(document.root_);
  if (error == simdjson::SUCCESS) return document;
  // The DOM parser does not say where. The pull reader does.
  ByteReader bytes(AsStd(file), "", std::as_bytes(std::span(text.data(), text.size())));
  JsonReader reader(bytes);
  if (!reader.Skip() || !reader.End()) return bytes.status();
  return absl::InvalidArgumentError(
      absl::StrCat(file, ": not valid JSON: ", simdjson::error_message(error)));
}

absl::StatusOr<JsonObject> JsonObject::Of(element json, std::string where) {
  JsonObject object;
  object.top_ = !absl::StrContains(where, ": ");
  object.where_ = std::move(where);
  simdjson::dom::object fields;
  if (json.get(fields) != simdjson::SUCCESS) {
    return absl::InvalidArgumentError(
        absl::StrCat(object.where_, ": expected an object, found ", TypeName(json.type())));
  }
  object.fields_.reserve(fields.size());
  for (const auto& field : fields) {
    const bool fresh =
        object.fields_.try_emplace(std::string(field.key), Field{field.value}).second;
    if (!fresh) return object.ErrorAt(AsAbsl(field.key), "given twice");
  }
  return object;
}

std::string JsonObject::Place(absl::string_view key) const {
  return absl::StrCat(where_, top_ ? ": " : ".", key);
}

absl::Status JsonObject::ErrorAt(absl::string_view key, absl::string_view why) const {
  return absl::InvalidArgumentError(absl::StrCat(Place(key), ": ", why));
}

std::optional<element> JsonObject::Optional(absl::string_view key) {
  const auto it = fields_.find(key);
  if (it == fields_.end()) return std::nullopt;
  it->second.used = true;
  return it->second.element;
}

absl::StatusOr<element> JsonObject::Element(absl::string_view key) {
  const std::optional<element> found = Optional(key);
  if (!found.has_value()) return ErrorAt(key, "missing");
  return *found;
}

absl::StatusOr<uint64_t> JsonObject::Uint(absl::string_view key) {
  absl::StatusOr<element> json = Element(key);
  if (!json.ok()) return json.status();
  uint64_t value = 0;
  if (json->get(value) != simdjson::SUCCESS) {
    return ErrorAt(key,
                   absl::StrCat("expected a non-negative integer, found ", TypeName(json->type())));
  }
  return value;
}

absl::StatusOr<int64_t> JsonObject::Int(absl::string_view key) {
  absl::StatusOr<element> json = Element(key);
  if (!json.ok()) return json.status();
  int64_t value = 0;
  if (json->get(value) != simdjson::SUCCESS) {
    return ErrorAt(key, absl::StrCat("expected an integer, found ", TypeName(json->type())));
  }
  return value;
}

absl::StatusOr<std::string> JsonObject::String(absl::string_view key) {
  absl::StatusOr<element> json = Element(key);
  if (!json.ok()) return json.status();
  std::string_view value;
  if (json->get(value) != simdjson::SUCCESS) {
    return ErrorAt(key, absl::StrCat("expected a string, found ", TypeName(json->type())));
  }
  return std::string(value);
}

absl::StatusOr<Digest> JsonObject::Sha256(absl::string_view key) {
  absl::StatusOr<std::string> text = String(key);
  if (!text.ok()) return text.status();
  absl::StatusOr<Digest> digest = ParseDigest(*text);
  if (!digest.ok()) return ErrorAt(key, digest.status().message());
  return digest;
}

absl::StatusOr<absl::Time> JsonObject::Time(absl::string_view key) {
  absl::StatusOr<std::string> text = String(key);
  if (!text.ok()) return text.status();
  absl::Time time;
  std::string error;
  if (!absl::ParseTime(absl::RFC3339_full, *text, &time, &error) ||
      time == absl::InfiniteFuture() || time == absl::InfinitePast()) {
    return ErrorAt(key, "expected a time such as 2026-01-01T00:00:00Z");
  }
  return time;
}

absl::StatusOr<simdjson::dom::array> JsonObject::Array(absl::string_view key) {
  absl::StatusOr<element> json = Element(key);
  if (!json.ok()) return json.status();
  simdjson::dom::array value;
  if (json->get(value) != simdjson::SUCCESS) {
    return ErrorAt(key, absl::StrCat("expected an array, found ", TypeName(json->type())));
  }
  return value;
}

absl::Status JsonObject::Finish() const {
  const std::string* first = nullptr;
  for (const auto& [key, field] : fields_) {
    if (!field.used && (first == nullptr || key < *first)) first = &key;
  }
  return first == nullptr ? absl::OkStatus() : ErrorAt(*first, "unknown field");
}

std::string FormatRfc3339(absl::Time time) {
  return absl::FormatTime("%Y-%m-%d%ET%H:%M:%E*SZ", time, absl::UTCTimeZone());
}

}  // namespace modelhost
