// Data files of an ONNX model: what a tensor may name, and where its bytes lie there.
//
// A location is a plain path inside the folder of the model; the FileSource decides what is behind
// it. Every file is opened once. Errors as in onnx.h. Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/onnx_tensor.h"
#include "daemon/format/tensor_index.h"

namespace modelhost {

class OnnxDataFiles {
 public:
  // `model` is file 0 of the index. Both are lent.
  OnnxDataFiles(std::string_view model, FileSource& source, TensorIndex& index)
      : model_(model), source_(source), index_(index) {}

  // Places a checked tensor that is external; new files go into the index.
  absl::Status Place(const OnnxTensor& tensor, TensorInfo* info);

 private:
  struct DataFile {
    uint32_t number;
    uint64_t bytes;
  };

  absl::StatusOr<DataFile> Open(const OnnxTensor& tensor, std::string_view location);

  std::string model_;
  FileSource& source_;
  TensorIndex& index_;
  absl::flat_hash_map<std::string, DataFile> by_location_;  // As written.
  absl::flat_hash_map<std::string, DataFile> by_name_;      // As opened.
};

// The file that an external tensor names, relative to the folder of the model: without "." and
// doubled slashes. An error when the location is missing, given twice, or leaves the folder.
absl::StatusOr<std::string> OnnxDataFileName(std::string_view model, const OnnxTensor& tensor);

}  // namespace modelhost
