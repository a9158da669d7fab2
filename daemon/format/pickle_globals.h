// The names that a checkpoint's pickle may use, and what each of them means here. Exact: a name
// that is not in this list is refused, whatever its module.
//
// Thread-safe: constants.
#pragma once

#include <string_view>

#include "proto/abi/dtype.h"

namespace modelhost {

enum class GlobalRole : uint8_t {
  kOrderedDict,
  kCounter,
  kSet,
  kSize,                   // torch.Size(tuple): the tuple.
  kParameter,              // A class around a tensor: the tensor.
  kTensorClass,            // Only as an argument of _rebuild_from_type_v2.
  kOpaque,                 // May be called; the result holds no tensor.
  kConstant,               // A value only.
  kDType,                  // `dtype`: kInvalid when an index has no word for it.
  kStorage,                // The same.
  kUntypedStorage,         // Counted in bytes.
  kRebuildTensor,          // (storage, offset, size, stride)
  kRebuildTensorV2,        // (..., requires_grad, hooks[, metadata])
  kRebuildTensorV3,        // (..., requires_grad, hooks, dtype[, metadata])
  kRebuildParameter,       // (tensor, requires_grad, hooks)
  kRebuildParameterState,  // (tensor, requires_grad, hooks, state)
  kRebuildFromType,        // (rebuild function, class, its arguments, state)
  kOtherTensor,            // Makes a tensor that is no range of a stored one: refused when called.
};

struct PickleGlobal {
  std::string_view module;
  std::string_view name;
  GlobalRole role = GlobalRole::kConstant;
  abi::DType dtype = abi::DType::kInvalid;
};

// Null when the name is not in the list. Python 2's "__builtin__" is "builtins".
const PickleGlobal* FindPickleGlobal(std::string_view module, std::string_view name);

}  // namespace modelhost
