// The manifest as a part of another JSON document (the computed ones in the state directory).
#pragma once

#include <simdjson.h>

#include <string>

#include "absl/status/statusor.h"
#include "daemon/store/json_writer.h"
#include "daemon/store/manifest.h"

namespace modelhost {

// As ParseManifest; `where` as in JsonObject::Of. Does not keep `json`.
absl::StatusOr<Manifest> ManifestFromJson(simdjson::dom::element json, const std::string& where);
void AppendManifest(const Manifest& manifest, JsonWriter& json);

}  // namespace modelhost
