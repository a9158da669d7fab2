// All tensors of an ONNX model: where the format keeps them, and what they are called.
//
// Initializers of the main graph come first and have their own names. The name of any other tensor
// is the way to it (README.md), cut where it gets long. Recursion ends at 100 messages, as in
// Protobuf; the cost is linear in the messages walked. Errors stick in the reader. Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/onnx_tensor.h"
#include "daemon/format/wire_reader.h"

namespace modelhost {

// The numbers of the fields of ModelProto that are used here.
enum class OnnxModelField : uint32_t {
  kIrVersion = 1,
  kProducerName = 2,
  kProducerVersion = 3,
  kDomain = 4,
  kModelVersion = 5,
  kGraph = 7,
  kOpsetImport = 8,
  kMetadataProps = 14,
  kTrainingInfo = 20,
  kFunctions = 25,
};

class OnnxWalker {
 public:
  // Gets every tensor, checked, and its name; `exact` when it is an initializer's own. Names that
  // are not exact may occur several times. Returns false to stop.
  using OnTensor =
      absl::FunctionRef<bool(const OnnxTensor& tensor, std::string_view name, bool exact)>;

  // `in` stands at the begin of the model. Both are lent.
  OnnxWalker(ByteReader& in, OnTensor on_tensor)
      : wire_(in), on_tensor_(on_tensor), file_bytes_(in.size()) {}

  // False after a failure, which is in the reader, and when `on_tensor` stopped it.
  bool Run();

 private:
  // Initializers and nodes of a graph; `prefix` is empty for the main graph.
  struct Graph {
    std::string prefix;
    bool main = false;
    std::vector<std::string_view> names;
    uint64_t nodes = 0;
    uint64_t number = 0;  // Among the subgraphs.
  };

  bool Initializers(Graph& graph);
  bool CheckNames(const Graph& graph);
  bool Nodes(Graph& graph);
  bool Subgraph(const std::string& path);
  bool Node(Graph& graph);
  bool Attribute(const std::string& owner);
  bool Function();
  bool Tensor(const std::string& name);
  bool Sparse(Graph* graph, const std::string& name);
  bool Emit(OnnxTensor& tensor, std::string_view name, bool exact);
  static std::string PathOf(const Graph& graph, std::string_view label);

  WireReader wire_;
  OnTensor on_tensor_;
  const uint64_t file_bytes_;
  uint64_t tensors_ = 0;
  uint64_t dims_ = 0;
  uint64_t made_name_bytes_ = 0;
  uint64_t subgraphs_ = 0;
};

}  // namespace modelhost
