// Strict reading of our own small JSON documents (simdjson parses; this checks the shape).
//
// Every error is INVALID_ARGUMENT and names the file and the byte offset (syntax) or the place, as
// in "labels.json: labels[3].version" (shape). Unknown and duplicate fields are errors. Memory is
// in proportion to the text. Not thread-safe.
#pragma once

#include <simdjson.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/store/digest.h"

namespace modelhost {

// Owns the parsed document; elements live as long as it does.
class JsonDocument {
 public:
  static absl::StatusOr<JsonDocument> Parse(absl::string_view file, absl::string_view text);
  simdjson::dom::element root() const { return root_; }

 private:
  std::unique_ptr<simdjson::dom::parser> parser_;
  simdjson::dom::element root_;
};

// The fields of one object, each to be asked for once by name, then Finish.
class JsonObject {
 public:
  // `where` is the place for messages: a file's name, or the Place of a field.
  static absl::StatusOr<JsonObject> Of(simdjson::dom::element element, std::string where);

  absl::StatusOr<uint64_t> Uint(absl::string_view key);
  absl::StatusOr<int64_t> Int(absl::string_view key);
  absl::StatusOr<std::string> String(absl::string_view key);
  absl::StatusOr<Digest> Sha256(absl::string_view key);
  absl::StatusOr<absl::Time> Time(absl::string_view key);  // RFC 3339.
  absl::StatusOr<simdjson::dom::array> Array(absl::string_view key);
  absl::StatusOr<simdjson::dom::element> Element(absl::string_view key);
  std::optional<simdjson::dom::element> Optional(absl::string_view key);
  // The first field that nobody asked for is an error.
  absl::Status Finish() const;

  absl::Status ErrorAt(absl::string_view key, absl::string_view why) const;
  // "labels.json: labels", "labels.json: labels[3].version".
  std::string Place(absl::string_view key) const;

 private:
  struct Field {
    simdjson::dom::element element;
    bool used = false;
  };
  std::string where_;
  bool top_ = false;  // `where_` is the file alone.
  absl::flat_hash_map<std::string, Field> fields_;
};

std::string FormatRfc3339(absl::Time time);

}  // namespace modelhost
