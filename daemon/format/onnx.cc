#include "daemon/format/onnx.h"

#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/onnx_external.h"
#include "daemon/format/onnx_walk.h"
#include "daemon/format/sharded.h"
#include "daemon/format/text.h"
#include "daemon/format/wire_reader.h"

namespace modelhost {
namespace {

constexpr std::string_view kOnnxHint = "the file is damaged or no ONNX model: get it again";
// No Protobuf reader takes a longer message.
constexpr uint64_t kMostModelBytes = 0x7fff'ffff;
constexpr size_t kMostOnnxWarnings = 100;

// What the model says about itself.
class OnnxHeader {
 public:
  OnnxHeader(ByteReader& in, std::string_view name, TensorIndex& index)
      : wire_(in), name_(name), index_(index) {}

  bool Run() {
    const bool good = wire_.Fields([this](const WireField& field) { return Field(field); });
    if (training_) {
      index_.AddWarning(absl::StrCat(Printable(name_), ": the tensors of training_info are left",
                                     " out: they are no weights for inference"));
    }
    return good;
  }

 private:
  bool Field(const WireField& field) {
    const bool bytes = field.type == WireType::kBytes;
    const bool varint = field.type == WireType::kVarint;
    switch (static_cast<OnnxModelField>(field.number)) {
      case OnnxModelField::kIrVersion:
        return varint ? Number("onnx.ir_version") : wire_.Skip(field);
      case OnnxModelField::kModelVersion:
        return varint ? Number("onnx.model_version") : wire_.Skip(field);
      case OnnxModelField::kProducerName:
        return bytes ? Text("onnx.producer_name") : wire_.Skip(field);
      case OnnxModelField::kProducerVersion:
        return bytes ? Text("onnx.producer_version") : wire_.Skip(field);
      case OnnxModelField::kDomain:
        return bytes ? Text("onnx.domain") : wire_.Skip(field);
      case OnnxModelField::kOpsetImport:
        return bytes ? Opset() : wire_.Skip(field);
      case OnnxModelField::kMetadataProps:
        return bytes ? Property() : wire_.Skip(field);
      case OnnxModelField::kTrainingInfo:
        training_ = training_ || bytes;
        return wire_.Skip(field);
      case OnnxModelField::kGraph:
      case OnnxModelField::kFunctions:
        break;
    }
    return wire_.Skip(field);
  }

  bool Number(std::string_view key) {
    uint64_t value = 0;
    if (!wire_.Varint(key, &value)) return false;
    Add(std::string(key), absl::StrCat(static_cast<int64_t>(value)));
    return true;
  }

  bool Text(std::string_view key) {
    std::string_view text;
    if (!wire_.Bytes(key, &text)) return false;
    if (!text.empty()) Add(std::string(key), ToUtf8(text));
    return true;
  }

  bool Opset() {
    std::string_view domain;
    uint64_t version = 0;
    if (!wire_.Message("opset_import", [&](const WireField& field) {
          if (field.Is(1, WireType::kBytes)) return wire_.Bytes("an operator domain", &domain);
          if (field.Is(2, WireType::kVarint)) return wire_.Varint("an opset version", &version);
          return wire_.Skip(field);
        })) {
      return false;
    }
    Add(absl::StrCat("onnx.opset.", domain.empty() ? "ai.onnx" : ToUtf8(domain)),
        absl::StrCat(static_cast<int64_t>(version)));
    return true;
  }

  bool Property() {
    OnnxEntry entry;
    if (!ReadOnnxEntry(wire_, &entry)) return false;
    if (!IsUtf8(entry.key)) {
      Warn(entry.key, "is not UTF-8 and left out");
    } else {
      Add(std::string(entry.key), ToUtf8(entry.value));
    }
    return true;
  }

  void Add(std::string key, std::string value) {
    if (!keys_.insert(key).second) {
      Warn(key, "occurs twice; the first value is kept");
    } else {
      index_.AddMetadata(std::move(key), std::move(value));
    }
  }

  void Warn(std::string_view key, std::string_view what) {
    if (index_.warnings().size() >= kMostOnnxWarnings) return;
    index_.AddWarning(
        absl::StrCat(Printable(name_), ": the metadata key ", Quoted(key), " ", AsAbsl(what)));
  }

  WireReader wire_;
  std::string_view name_;
  TensorIndex& index_;
  absl::flat_hash_set<std::string> keys_;
  bool training_ = false;
};

// Takes the tensors of a walk into an index. An index has no name twice: a name of the walk that is
// taken gets "#2", "#3" and so on.
class OnnxCollector {
 public:
  OnnxCollector(std::string_view model, FileSource& source, TensorIndex& index)
      : files_(model, source, index), index_(index) {}

  const absl::Status& status() const { return status_; }

  bool Take(const OnnxTensor& tensor, std::string_view name, bool exact) {
    TensorInfo info;
    if (!tensor.is_external()) {
      PlaceOnnxTensor(tensor, &info);
    } else if (status_ = files_.Place(tensor, &info); !status_.ok()) {
      return false;
    }
    info.name = name;
    std::string unique;
    if (!exact) {
      unique = Unique(name);
      info.name = unique;
    }
    index_.Add(info);
    return true;
  }

 private:
  // The cost of all calls is linear: "a#2" that is taken is tried once for "a", never again.
  std::string Unique(std::string_view name) {
    // The exact names come first, and most models have no others.
    if (next_.empty()) {
      for (size_t i = 0; i < index_.size(); ++i) next_.try_emplace(std::string(index_.at(i).name), 2);
    }
    const auto [at, added] = next_.try_emplace(std::string(name), 2);
    if (added) return std::string(name);
    uint64_t number = at->second;
    std::string candidate = absl::StrCat(AsAbsl(name), "#", number++);
    while (next_.contains(candidate)) candidate = absl::StrCat(AsAbsl(name), "#", number++);
    at->second = number;
    next_.try_emplace(candidate, 2);
    return candidate;
  }

  OnnxDataFiles files_;
  TensorIndex& index_;
  absl::flat_hash_map<std::string, uint64_t> next_;  // By name: the suffix to try next.
  absl::Status status_;
};

}  // namespace

absl::Status ReadOnnx(const std::string& name, std::span<const std::byte> bytes, FileSource& source,
                      TensorIndex& index) {
  if (absl::EndsWithIgnoreCase(name, ".engine") || absl::EndsWithIgnoreCase(name, ".plan")) {
    return ModelError(name, "an ONNX model under the name of a TensorRT plan",
                      "build the engine from it, or rename it to .onnx");
  }
  if (bytes.size() > kMostModelBytes) {
    return ModelError(name,
                      absl::StrCat("the ONNX model has ", bytes.size(),
                                   " bytes; no reader takes one of 2 GiB and more"),
                      "save it again with external data, or get the file again");
  }
  ByteReader header(name, kOnnxHint, bytes);
  if (!OnnxHeader(header, name, index).Run()) return header.status();

  ByteReader in(name, kOnnxHint, bytes);
  OnnxCollector collector(name, source, index);
  const auto take = [&collector](const OnnxTensor& tensor, std::string_view tensor_name,
                                 bool exact) { return collector.Take(tensor, tensor_name, exact); };
  if (OnnxWalker(in, take).Run()) return absl::OkStatus();
  return collector.status().ok() ? in.status() : collector.status();
}

std::vector<std::string> OnnxDataFilesOf(const std::string& name,
                                         std::span<const std::byte> bytes) {
  std::vector<std::string> files;
  absl::flat_hash_set<std::string> known;
  ByteReader in(name, kOnnxHint, bytes);
  const auto take = [&](const OnnxTensor& tensor, std::string_view, bool) {
    if (!tensor.is_external()) return true;
    const absl::StatusOr<std::string> plain = OnnxDataFileName(name, tensor);
    if (!plain.ok()) return true;
    std::string path = SiblingName(name, *plain);
    if (known.insert(path).second) files.push_back(std::move(path));
    return true;
  };
  OnnxWalker(in, take).Run();
  return files;
}

}  // namespace modelhost
