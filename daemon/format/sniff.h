// What a file is, by its content, and how one is refused that is not served.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "daemon/format/format_reader.h"

namespace modelhost {

// True for a name that claims to be weights: "x.safetensors", "x.gguf", "x.onnx", "x.pt", ...
bool HasWeightsExtension(std::string_view name);
// True for what ReadModel reads: safetensors, its index, GGUF, ONNX.
bool IsServed(FileFormat format);
// The refusal of a file of another kind, by name and with what to do.
absl::Status RefuseFormat(std::string_view name, FileFormat format,
                          std::span<const std::byte> bytes);

}  // namespace modelhost
