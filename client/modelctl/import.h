// One import: from a model of any format that is read to a safetensors or GGUF file.
//
// The source is never written. It is mapped for its index only, and read for the rest: beside the
// index memory is a few pieces of 4 MiB, for strided views tiles of 16 MiB, and for ONNX's typed
// fields the field and its tensor. The target appears complete, verified and on the disk, or not
// at all. Links no gRPC. One thread.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "client/modelctl/exit_codes.h"
#include "client/modelctl/import_metadata.h"
#include "client/modelctl/import_plan.h"

namespace modelhost::modelctl {

struct ImportOptions {
  std::string source;
  std::string out;                 // FILE.safetensors or FILE.gguf: the name decides the target.
  ImportChoices choices;           // But the target, which `out` decides.
  std::vector<AddedKey> metadata;  // Counts before the source's.
  bool verify = true;
  bool replace = false;
};

// Of one tensor, source against result. For Q8_0 the relative error is in terms of the largest
// value of the block, otherwise of the value itself. Infinite where a finite value became so.
struct ImportErrors {
  uint64_t overflowed = 0;  // Finite values that became infinite.
  double absolute = 0;
  double relative = 0;
};

struct ImportReport {
  std::string source_format;
  std::string target_format;
  uint64_t bytes = 0;  // Of the file.
  bool verified = false;
  std::vector<PlannedTensor> tensors;
  std::vector<ImportErrors> errors;  // Of each tensor.
  // Of all tensors; the errors are 0 when not verified.
  double absolute_error = 0;
  double relative_error = 0;
  std::string worst_tensor;  // Of the absolute error; empty when it is 0.
};

struct ImportWatch {
  // "write" and "verify". False: stop.
  std::function<bool(const char* phase, uint64_t done, uint64_t total)> progress;
  // Something that the user should know; not a failure.
  std::function<void(const std::string& text)> note;
};

struct ImportEnd {
  ExitCode code = ExitCode::kOk;
  std::string error;    // One line.
  ImportReport report;  // With kOk.
};

ImportEnd RunImport(const ImportOptions& options, const ImportWatch& watch);

}  // namespace modelhost::modelctl
