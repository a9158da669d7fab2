// What an import writes: which tensors, under which names, in which dtypes, in which order.
//
// Names are chosen by the patterns on the names of the source, before a prefix is taken off. Pure;
// any thread.
//
// Errors name the tensors:
//   INVALID_ARGUMENT  the options do not fit the source: nothing is selected, two tensors get one
//                     name, a name that the target cannot have
//   FAILED_PRECONDITION  the source has no tensors
//   UNIMPLEMENTED     a tensor that cannot be read, or that the target has no type for; the text
//                     says how to leave it out
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/format/tensor_index.h"
#include "proto/abi/dtype.h"

namespace modelhost::modelctl {

enum class ImportTarget { kSafetensors, kGguf };

struct ImportChoices {
  ImportTarget target = ImportTarget::kSafetensors;
  std::optional<abi::DType> dtype;  // F16, BF16 or F32 for floats; none = as they are.
  bool quantize_q8 = false;         // GGUF only.
  std::string strip_prefix;
  std::vector<std::string> only;     // Globs; none = all.
  std::vector<std::string> exclude;  // Globs.
};

enum class Recode {
  kCopy,     // The bytes of the source, row-major.
  kConvert,  // From one float dtype to another.
  kQ8,       // From a float dtype to Q8_0.
};

struct PlannedTensor {
  size_t source = 0;  // Number in the index.
  std::string name;
  bool stripped = false;  // In the source the prefix stands before it.
  abi::DType from = abi::DType::kInvalid;
  abi::DType to = abi::DType::kInvalid;
  Recode recode = Recode::kCopy;
  uint64_t nbytes = 0;  // In the target.
};

struct ImportPlan {
  std::vector<PlannedTensor> tensors;  // In the order of the target's data; at least one.
  std::vector<std::string> notes;      // For people.
};

absl::StatusOr<ImportPlan> PlanImport(const TensorIndex& index, const ImportChoices& choices);

}  // namespace modelhost::modelctl
