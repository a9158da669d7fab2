#include "daemon/format/onnx_walk.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/name_table.h"
#include "daemon/format/onnx_plain.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

// An entry of the index takes more than the few bytes that a tensor can have in the file.
constexpr uint64_t kMostTensors = uint64_t{1} << 20;
// The same is true of dimensions. No model comes near.
constexpr uint64_t kMostDims = uint64_t{1} << 24;
// Names that the walk makes come again and again from the same bytes: all of them together are at
// most as long as the file and this.
constexpr uint64_t kSpareNameBytes = uint64_t{4} << 20;
// So that names deep inside do not take more memory than the file is worth.
constexpr size_t kMostLabelBytes = 48;
constexpr size_t kMostPrefixBytes = 80;

// A part of a way: UTF-8 without control characters, cut when it is long.
std::string Label(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t bytes = Utf8CharBytes(text);
    if (out.size() + std::max<size_t>(bytes, 1) > kMostLabelBytes) return out + "...";
    if (bytes == 0 || static_cast<uint8_t>(text.front()) < 0x20) {
      out += '_';
      text.remove_prefix(1);
    } else {
      out += text.substr(0, bytes);
      text.remove_prefix(bytes);
    }
  }
  return out;
}

bool IsField(const WireField& field, OnnxModelField wanted, WireType type) {
  return field.Is(static_cast<uint32_t>(wanted), type);
}

}  // namespace

bool OnnxWalker::Run() {
  Graph main;
  main.main = true;
  bool seen = false;
  bool good = wire_.Fields([&](const WireField& field) {
    if (!IsField(field, OnnxModelField::kGraph, WireType::kBytes)) return wire_.Skip(field);
    seen = true;
    // A graph that comes in several parts is one, as Protobuf would merge them.
    WireReader::Scope scope{};
    return wire_.Enter("the graph", &scope) && Initializers(main) && wire_.Leave(scope);
  });
  if (!good) return false;
  if (!seen) return wire_.in().Fail("the model has no graph");
  wire_.in().Rewind(0);
  good = wire_.Fields([&](const WireField& field) {
    if (IsField(field, OnnxModelField::kFunctions, WireType::kBytes)) return Function();
    if (!IsField(field, OnnxModelField::kGraph, WireType::kBytes)) return wire_.Skip(field);
    WireReader::Scope scope{};
    return wire_.Enter("the graph", &scope) && Nodes(main) && wire_.Leave(scope);
  });
  return good && CheckNames(main);
}

bool OnnxWalker::Initializers(Graph& graph) {
  return wire_.Fields([&](const WireField& field) {
    if (!field.Is(5, WireType::kBytes)) return wire_.Skip(field);
    OnnxTensor tensor;
    if (!ReadOnnxTensor(wire_, &tensor)) return false;
    graph.names.push_back(tensor.name);
    if (graph.main) return Emit(tensor, tensor.name, true);
    return Emit(tensor, absl::StrCat(graph.prefix, "/", AsAbsl(tensor.name)), false);
  });
}

bool OnnxWalker::CheckNames(const Graph& graph) {
  const auto pair = NameTable(graph.names).Duplicate();
  if (!pair.has_value()) return true;
  return wire_.in().Fail(absl::StrCat("duplicate tensor name: ", Quoted(graph.names[pair->first]),
                                      " occurs twice in one graph"));
}

bool OnnxWalker::Nodes(Graph& graph) {
  return wire_.Fields([&](const WireField& field) {
    if (field.Is(1, WireType::kBytes)) return Node(graph);
    if (field.Is(15, WireType::kBytes)) return Sparse(&graph, graph.prefix);
    // Initializers() was there already.
    return SkipOnnxField(wire_, OnnxPart::kGraph, field);
  });
}

bool OnnxWalker::Subgraph(const std::string& path) {
  Graph graph;
  graph.prefix = path;
  graph.number = ++subgraphs_;
  WireReader::Scope scope{};
  if (!wire_.Enter("a subgraph", &scope) || !Initializers(graph)) return false;
  wire_.Again(scope);
  return Nodes(graph) && CheckNames(graph) && wire_.Leave(scope);
}

// Whoever writes a node need not name it, but what it computes has a name that is the only one.
bool OnnxWalker::Node(Graph& graph) {
  std::string_view name;
  std::string_view output;
  std::string_view type;
  bool attributes = false;
  WireReader::Scope scope{};
  const uint64_t number = graph.nodes++;
  if (!wire_.Enter("a node", &scope)) return false;
  if (!wire_.Fields([&](const WireField& field) {
        if (field.Is(2, WireType::kBytes) && output.empty()) return wire_.Bytes("output", &output);
        if (field.Is(3, WireType::kBytes)) return wire_.Bytes("a node's name", &name);
        if (field.Is(4, WireType::kBytes)) return wire_.Bytes("op_type", &type);
        attributes = attributes || field.Is(5, WireType::kBytes);
        return SkipOnnxField(wire_, OnnxPart::kNode, field);
      })) {
    return false;
  }
  if (!attributes) return wire_.Leave(scope);
  const std::string label = !name.empty()     ? Label(name)
                            : !output.empty() ? Label(output)
                                              : absl::StrCat(Label(type), "#", number);
  const std::string owner = PathOf(graph, label);
  wire_.Again(scope);
  return wire_.Fields([&](const WireField& field) {
    return field.Is(5, WireType::kBytes) ? Attribute(owner) : wire_.Skip(field);
  }) && wire_.Leave(scope);
}

bool OnnxWalker::Attribute(const std::string& owner) {
  std::string_view name;
  bool holds = false;
  WireReader::Scope scope{};
  if (!wire_.Enter("an attribute", &scope)) return false;
  if (!wire_.Fields([&](const WireField& field) {
        if (field.Is(1, WireType::kBytes)) return wire_.Bytes("an attribute's name", &name);
        holds = holds || field.type == WireType::kBytes;
        return SkipOnnxField(wire_, OnnxPart::kAttribute, field);
      })) {
    return false;
  }
  if (!holds) return wire_.Leave(scope);
  const std::string path = absl::StrCat(owner, ".", Label(name));
  // Protobuf would merge a second value into the first: no one writes that, so no one shall read
  // two things in it.
  bool tensor = false;
  bool subgraph = false;
  bool sparse = false;
  uint64_t tensors = 0;
  uint64_t subgraphs = 0;
  uint64_t sparses = 0;
  const auto once = [&](bool* seen, std::string_view what) {
    return !std::exchange(*seen, true) ||
           wire_.in().Fail(absl::StrCat("an attribute has two ", AsAbsl(what), "s in one place"));
  };
  const auto numbered = [&](uint64_t* next) { return absl::StrCat(path, "[", (*next)++, "]"); };
  wire_.Again(scope);
  return wire_.Fields([&](const WireField& field) {
    if (field.type != WireType::kBytes) return wire_.Skip(field);
    switch (field.number) {
      case 5:
        return once(&tensor, "tensor") && Tensor(path);
      case 6:
        return once(&subgraph, "subgraph") && Subgraph(path);
      case 10:
        return Tensor(numbered(&tensors));
      case 11:
        return Subgraph(numbered(&subgraphs));
      case 22:
        return once(&sparse, "sparse tensor") && Sparse(nullptr, path);
      case 23:
        return Sparse(nullptr, numbered(&sparses));
      default:
        return wire_.Skip(field);
    }
  }) && wire_.Leave(scope);
}

bool OnnxWalker::Function() {
  std::string_view name;
  std::string_view domain;
  WireReader::Scope scope{};
  if (!wire_.Enter("a function", &scope)) return false;
  if (!wire_.Fields([&](const WireField& field) {
        if (field.Is(1, WireType::kBytes)) return wire_.Bytes("a function's name", &name);
        if (field.Is(10, WireType::kBytes)) return wire_.Bytes("a function's domain", &domain);
        return SkipOnnxField(wire_, OnnxPart::kFunction, field);
      })) {
    return false;
  }
  Graph graph;
  graph.prefix = absl::StrCat("functions/", Label(domain), domain.empty() ? "" : ".", Label(name));
  wire_.Again(scope);
  return wire_.Fields([&](const WireField& field) {
    if (field.Is(7, WireType::kBytes)) return Node(graph);
    // Defaults of the function's attributes.
    return field.Is(11, WireType::kBytes) ? Attribute(graph.prefix) : wire_.Skip(field);
  }) && wire_.Leave(scope);
}

bool OnnxWalker::Tensor(const std::string& name) {
  OnnxTensor tensor;
  return ReadOnnxTensor(wire_, &tensor) && Emit(tensor, name, false);
}

// A sparse tensor is two: the values that are not zero, and where they stand. In a graph the name
// of the values is that of the whole.
bool OnnxWalker::Sparse(Graph* graph, const std::string& name) {
  OnnxTensor values;
  OnnxTensor indices;
  bool has_values = false;
  bool has_indices = false;
  if (!wire_.Message("a sparse tensor", [&](const WireField& field) {
        const bool is_values = field.Is(1, WireType::kBytes);
        if (!is_values && !field.Is(2, WireType::kBytes)) return wire_.Skip(field);
        if (std::exchange(is_values ? has_values : has_indices, true)) {
          return wire_.in().Fail("a sparse tensor has two tensors in one place");
        }
        return ReadOnnxTensor(wire_, is_values ? &values : &indices);
      })) {
    return false;
  }
  if (!has_values) return wire_.in().Fail("a sparse tensor has no values");
  std::string base = name;
  if (graph != nullptr) {
    graph->names.push_back(values.name);
    base = absl::StrCat(name, name.empty() ? "" : "/", AsAbsl(values.name));
  }
  if (!Emit(values, base + ".values", false)) return false;
  if (values.dims.size() != 1) {
    return FailOnnxTensor(wire_.in(), values, "are the values of a sparse tensor, but not a row");
  }
  if (!has_indices) {
    return values.elements == 0 ||
           FailOnnxTensor(wire_.in(), values, "has the values of a sparse tensor without indices");
  }
  if (!Emit(indices, base + ".indices", false)) return false;
  if (indices.dtype->dtype == abi::DType::kI64 &&
      (indices.dims.size() == 1 || indices.dims.size() == 2) && indices.dims[0] == values.dims[0]) {
    return true;
  }
  return FailOnnxTensor(wire_.in(), indices,
                        absl::StrCat("has indices of a sparse tensor that do not fit its ",
                                     values.elements, " values"));
}

bool OnnxWalker::Emit(OnnxTensor& tensor, std::string_view name, bool exact) {
  if (!CheckOnnxTensor(wire_.in(), &tensor)) return false;
  if (++tensors_ > kMostTensors) {
    return wire_.in().Fail(absl::StrCat("the model has more than ", kMostTensors, " tensors"));
  }
  dims_ += tensor.dims.size();
  if (dims_ > kMostDims) {
    return wire_.in().Fail(absl::StrCat("the tensors have more than ", kMostDims, " dimensions"));
  }
  if (!exact) made_name_bytes_ += name.size();
  if (made_name_bytes_ > file_bytes_ + kSpareNameBytes) {
    return FailOnnxTensor(wire_.in(), tensor,
                          absl::StrCat("is one of so many inside nodes that their names take more "
                                       "than the model itself and ",
                                       kSpareNameBytes, " bytes"),
                          "save large sets of tensors as initializers");
  }
  return on_tensor_(tensor, name, exact);
}

// Where a way gets too long, the number of the subgraph stands for what lies before.
std::string OnnxWalker::PathOf(const Graph& graph, std::string_view label) {
  if (graph.prefix.empty()) return std::string(label);
  if (graph.prefix.size() > kMostPrefixBytes) {
    return absl::StrCat("subgraph#", graph.number, "/", AsAbsl(label));
  }
  return absl::StrCat(graph.prefix, "/", AsAbsl(label));
}

}  // namespace modelhost
