// From bytes to a TensorIndex: no system calls, no allocation beyond what the input is worth.
//
// A model may be several files (shards, split sets). The reader asks a FileSource for siblings by
// their plain relative names; who gives the bytes decides what a name may reach.
//
// Errors: INVALID_ARGUMENT the bytes are not a good model (the text names the file, the offset or
// the tensor, and the reason), also when a file of its set is missing; UNIMPLEMENTED a format or
// variant that is refused by name; others as the source gave them. Texts start with the file's
// name. Thread-safe: no state.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/format/tensor_index.h"

namespace modelhost {

class FileSource {
 public:
  virtual ~FileSource() = default;
  // The whole file, alive as long as the source. `name` is relative to the folder of the model and
  // has been checked to be a plain relative name ('/' between parts, no "..", not absolute).
  virtual absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) = 0;
};

enum class FileFormat {
  kUnknown,
  kSafetensors,
  kSafetensorsIndex,  // model.safetensors.index.json and the like: JSON with a weight_map.
  kGguf,
  kGitLfsPointer,
  kOnnx,
  kTorchZip,
  kTorchLegacy,
  kTensorRt,
  kLegacyGgml,
  kSevenZip,
};

// By content; the name only breaks ties that content cannot.
FileFormat SniffFormat(std::span<const std::byte> bytes, absl::string_view name);

// Indexes the model whose main file is `name`: a single file, a shard index with its shards, or a
// split set given by its first (or any) part.
absl::StatusOr<TensorIndex> ReadModel(const std::string& name, FileSource& source);

// One weight set of a version directory.
struct Component {
  std::string name;  // File name without shard numbers and extension: "model"; a plan's with it.
  std::string main_file;  // What to give to ReadModel.
};

// Finds the weight sets among the files of a directory (names relative to it, any order); the
// result is sorted by main file. Shards that an index or a split set claims are not components of
// their own; with a shard index, stray safetensors beside it belong to nobody. Files that are no
// weights are left out, and so are weights of formats that are not served when others are there;
// alone, they are components, for ReadModel to refuse by name. Damaged or unreadable weights are
// components too. Two components of one name get their main file's name instead.
absl::StatusOr<std::vector<Component>> FindComponents(const std::vector<std::string>& names,
                                                      FileSource& source);

// "a/b.bin" is; "", "/a", "../a", "a/../b", "a//b", "./a", names with NUL or backslash are not.
bool IsPlainRelativeName(absl::string_view name);

}  // namespace modelhost
