#include "daemon/format/onnx.h"

#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
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
// An item of the index takes more than the few bytes that it can have in the file.
constexpr size_t kMostOnnxMetadata = size_t{1} << 16;
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
    return Add(std::string(key), absl::StrCat(static_cast<int64_t>(value)));
  }

  bool Text(std::string_view key) {
    std::string_view text;
    if (!wire_.Bytes(key, &text)) return false;
    return text.empty() || Add(std::string(key), ToUtf8(text));
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
    return Add(absl::StrCat("onnx.opset.", domain.empty() ? "ai.onnx" : ToUtf8(domain)),
               absl::StrCat(static_cast<int64_t>(version)));
  }

  bool Property() {
    OnnxEntry entry;
    if (!ReadOnnxEntry(wire_, &entry)) return false;
    if (IsUtf8(entry.key)) return Add(std::string(entry.key), ToUtf8(entry.value));
    Warn(entry.key, "is not UTF-8 and left out");
    return true;
  }

  bool Add(std::string key, std::string value) {
    if (!keys_.insert(key).second) {
      Warn(key, "occurs twice; the first value is kept");
      return true;
    }
    if (keys_.size() > kMostOnnxMetadata) {
      return wire_.in().Fail(
          absl::StrCat("the model has more than ", kMostOnnxMetadata, " items of metadata"));
    }
    index_.AddMetadata(std::move(key), std::move(value));
    return true;
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
      : files_(model, source, index),
        index_(index),
        taken_(0, TakenHash{&index}, TakenEqual{&index}) {}

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
  // By its number, so that no name is kept twice.
  struct Taken {
    uint32_t tensor;
    mutable uint32_t next;  // The suffix to try next.
  };
  struct TakenHash {
    using is_transparent = void;
    const TensorIndex* index;
    size_t operator()(std::string_view name) const {
      return absl::Hash<absl::string_view>()(AsAbsl(name));
    }
    size_t operator()(const Taken& taken) const { return (*this)(index->at(taken.tensor).name); }
  };
  struct TakenEqual {
    using is_transparent = void;
    const TensorIndex* index;
    std::string_view Name(const Taken& taken) const { return index->at(taken.tensor).name; }
    static std::string_view Name(std::string_view name) { return name; }
    template <typename A, typename B>
    bool operator()(const A& a, const B& b) const {
      return Name(a) == Name(b);
    }
  };

  // Has to go into the index next. The cost of all calls is linear: "a#2" that is taken is tried
  // once for "a", never again.
  std::string Unique(std::string_view name) {
    // The exact names come first, and most models have no others.
    while (seen_ < index_.size()) taken_.insert(Taken{seen_++, 2});
    const auto at = taken_.find(name);
    if (at == taken_.end()) return std::string(name);
    std::string candidate;
    do {
      candidate = absl::StrCat(AsAbsl(name), "#", at->next++);
    } while (taken_.contains(std::string_view(candidate)));
    return candidate;
  }

  OnnxDataFiles files_;
  TensorIndex& index_;
  absl::flat_hash_set<Taken, TakenHash, TakenEqual> taken_;
  uint32_t seen_ = 0;  // So many tensors of the index are in it.
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
