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
// True for a ZIP archive that is called like a checkpoint or starts like one: not any ZIP archive
// is weights.
bool MayBeCheckpoint(std::string_view name, std::span<const std::byte> zip);
// True for what ReadModel reads.
bool IsServed(FileFormat format);
// A file named as a TensorRT plan (.engine, .plan, .trt) that holds another format is refused:
// whoever loads it by its name would hand it to TensorRT.
absl::Status CheckPlanName(std::string_view name, FileFormat format,
                           std::span<const std::byte> bytes);
// The refusal of a file of another kind, by name and with what to do.
absl::Status RefuseFormat(std::string_view name, FileFormat format,
                          std::span<const std::byte> bytes);

}  // namespace modelhost
