// What a target says beside its tensors.
//
// Errors are those of the source's bytes. Pure but for the notes; one thread.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/modelctl/gguf_writer.h"
#include "client/modelctl/import_plan.h"
#include "daemon/format/format_reader.h"

namespace modelhost::modelctl {

// Of --meta. Safetensors has text only, whatever the type.
struct AddedKey {
  std::string key;
  std::string value;
  GgufValueType type = GgufValueType::kByLook;
};

struct MetadataSource {
  const TensorIndex& index;
  FileSource& files;
  const std::vector<AddedKey>& added;  // Count before the source's.
  const std::function<void(const std::string&)>& note;
};

// Text of the source, and "format": "pt" for PyTorch. Lists that the index only counts stay behind.
std::vector<MetadataItem> SafetensorsMetadata(const MetadataSource& from);

// Of a GGUF source all keys with their types; of others the text. An architecture is always there,
// since readers insist on one.
absl::StatusOr<GgufKeys> GgufMetadata(const MetadataSource& from, const ImportChoices& choices);

}  // namespace modelhost::modelctl
