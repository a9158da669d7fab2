#include "client/modelctl/import_plan.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/modelctl/gguf_writer.h"
#include "client/modelctl/glob.h"
#include "client/modelctl/q8_0.h"
#include "client/modelctl/safetensors_writer.h"
#include "client/modelctl/tensor_convert.h"
#include "client/modelctl/tensor_reader.h"
#include "daemon/format/text.h"

namespace modelhost::modelctl {
namespace {

using abi::DType;

bool MatchesAny(const std::vector<std::string>& globs, std::string_view name) {
  return std::any_of(globs.begin(), globs.end(),
                     [&](const std::string& glob) { return GlobMatches(glob, name); });
}

uint64_t ElementBits(DType dtype) {
  const abi::DTypeInfo* info = abi::FindDType(dtype);
  return info->block_bytes != 0 ? 8 : info->bits;
}

class Planner {
 public:
  Planner(const TensorIndex& index, const ImportChoices& choices)
      : index_(index), choices_(choices) {}

  absl::StatusOr<ImportPlan> Run() {
    plan_.tensors.reserve(index_.size());
    for (size_t i = 0; i < index_.size(); ++i) {
      if (absl::Status status = Consider(i); !status.ok()) return status;
    }
    if (plan_.tensors.empty()) return NothingSelected();
    if (absl::Status status = CheckNames(); !status.ok()) return status;
    Note();
    if (choices_.target == ImportTarget::kSafetensors) Sort();
    return std::move(plan_);
  }

 private:
  absl::Status Consider(size_t i) {
    const TensorInfo tensor = index_.at(i);
    if (!choices_.only.empty() && !MatchesAny(choices_.only, tensor.name)) return absl::OkStatus();
    if (MatchesAny(choices_.exclude, tensor.name)) return absl::OkStatus();
    if (!tensor.mappable && (index_.format() != "onnx" || tensor.dtype == DType::kString)) {
      return Refuse(tensor, tensor.reason.empty() ? "its values cannot be read" : tensor.reason);
    }
    PlannedTensor planned;
    planned.source = i;
    planned.name = std::string(tensor.name);
    planned.from = tensor.dtype;
    planned.to = tensor.dtype;
    if (!choices_.strip_prefix.empty() && absl::StartsWith(planned.name, choices_.strip_prefix)) {
      planned.name.erase(0, choices_.strip_prefix.size());
      planned.stripped = true;
      ++stripped_;
      if (planned.name.empty()) {
        return absl::InvalidArgumentError(
            absl::StrCat("tensor ", Quoted(tensor.name), ": nothing of its name is left without ",
                         "the prefix (choose a shorter --strip-prefix)"));
      }
    }
    Choose(tensor, planned);
    const std::string why = choices_.target == ImportTarget::kSafetensors
                                ? WhyNotInSafetensors(planned.name, planned.to, tensor.shape)
                                : WhyNotInGguf(planned.name, planned.to, tensor.shape);
    if (!why.empty()) return Refuse(tensor, why);
    const std::optional<uint64_t> bytes = ByteCount(planned.to, tensor.shape);
    if (!bytes.has_value()) return Refuse(tensor, "its size cannot be counted");
    planned.nbytes = *bytes;
    plan_.tensors.push_back(std::move(planned));
    return absl::OkStatus();
  }

  void Choose(const TensorInfo& tensor, PlannedTensor& planned) {
    if (!IsFloat(tensor.dtype)) {
      const DType dtype = tensor.dtype;
      if (choices_.dtype.has_value() &&
          (dtype == DType::kC64 || dtype == DType::kC128 || dtype == DType::kF4 ||
           dtype == DType::kF6E2M3 || dtype == DType::kF6E3M2)) {
        ++kept_[dtype];
      }
      return;
    }
    const bool rows = tensor.shape.size() == 2 && tensor.shape[1] > 0 &&
                      static_cast<uint64_t>(tensor.shape[1]) % kQ8BlockValues == 0;
    if (choices_.quantize_q8 && rows) {
      planned.to = DType::kQ8_0;
      planned.recode = Recode::kQ8;
    } else if (choices_.dtype.has_value() && *choices_.dtype != tensor.dtype) {
      planned.to = *choices_.dtype;
      planned.recode = Recode::kConvert;
    }
  }

  absl::Status Refuse(const TensorInfo& tensor, std::string_view why) const {
    return absl::UnimplementedError(absl::StrCat("tensor ", Quoted(tensor.name), ": ", AsAbsl(why),
                                                 " (--exclude ", Quoted(tensor.name),
                                                 " leaves it out)"));
  }

  absl::Status NothingSelected() const {
    if (index_.size() == 0) {
      return absl::FailedPreconditionError(
          "the model has no tensors, so there is nothing to write");
    }
    const char* const by = choices_.only.empty()      ? "--exclude"
                           : choices_.exclude.empty() ? "--only"
                                                      : "--only and --exclude";
    return absl::InvalidArgumentError(absl::StrCat(
        "none of the ", index_.size(), " tensors is selected by ", by, " (the first is ",
        Quoted(index_.at(0).name), "; `modelctl inspect SRC -o name` lists them)"));
  }

  absl::Status CheckNames() const {
    absl::flat_hash_map<std::string_view, size_t> first;
    first.reserve(plan_.tensors.size());
    for (const PlannedTensor& planned : plan_.tensors) {
      const auto [at, fresh] = first.emplace(planned.name, planned.source);
      if (fresh) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "tensors ", Quoted(index_.at(at->second).name), " and ",
          Quoted(index_.at(planned.source).name), " would both be called ", Quoted(planned.name),
          choices_.strip_prefix.empty() ? "" : " without the prefix", " (--exclude one of them)"));
    }
    return absl::OkStatus();
  }

  void Note() {
    if (!choices_.strip_prefix.empty() && stripped_ == 0) {
      plan_.notes.push_back(absl::StrCat("no selected tensor begins with ",
                                         Quoted(choices_.strip_prefix),
                                         ": --strip-prefix changed nothing"));
    }
    for (const auto& [dtype, count] : kept_) {
      plan_.notes.push_back(absl::StrCat(count, count == 1 ? " tensor" : " tensors", " of ",
                                         AsAbsl(abi::DTypeName(dtype)),
                                         " cannot be converted and stay as they are"));
    }
    NoteTied();
  }

  // Tensors that are one view of one storage; a target has a range of its own for each.
  void NoteTied() {
    std::vector<std::tuple<uint32_t, uint64_t, uint64_t, size_t>> places;
    for (const PlannedTensor& planned : plan_.tensors) {
      const TensorInfo tensor = index_.at(planned.source);
      if (tensor.nbytes > 0) {
        places.emplace_back(tensor.file, tensor.offset, tensor.nbytes, places.size());
      }
    }
    std::vector<const PlannedTensor*> with_bytes;
    for (const PlannedTensor& planned : plan_.tensors) {
      if (index_.at(planned.source).nbytes > 0) with_bytes.push_back(&planned);
    }
    std::sort(places.begin(), places.end());
    uint64_t tied = 0;
    uint64_t bytes = 0;
    std::string example;
    for (size_t i = 1; i < places.size(); ++i) {
      const auto& [file, offset, nbytes, at] = places[i];
      const auto& [last_file, last_offset, last_nbytes, last_at] = places[i - 1];
      if (file != last_file || offset != last_offset || nbytes != last_nbytes) continue;
      ++tied;
      bytes += with_bytes[at]->nbytes;
      if (example.empty()) {
        example =
            absl::StrCat(Quoted(with_bytes[at]->name), " and ", Quoted(with_bytes[last_at]->name));
      }
    }
    if (tied == 0) return;
    plan_.notes.push_back(absl::StrCat(tied, tied == 1 ? " tensor shares" : " tensors share",
                                       " the storage of another (", example,
                                       tied == 1 ? "" : ", ...", ") and each is written in full, ",
                                       bytes, " bytes more (", "--exclude leaves one out)"));
  }

  // With the widest first and every size a multiple of its elements', each tensor is aligned.
  void Sort() {
    std::sort(plan_.tensors.begin(), plan_.tensors.end(),
              [](const PlannedTensor& a, const PlannedTensor& b) {
                const uint64_t a_bits = ElementBits(a.to);
                const uint64_t b_bits = ElementBits(b.to);
                return std::tie(b_bits, a.name) < std::tie(a_bits, b.name);
              });
  }

  const TensorIndex& index_;
  const ImportChoices& choices_;
  ImportPlan plan_;
  uint64_t stripped_ = 0;
  std::map<DType, uint64_t> kept_;
};

}  // namespace

absl::StatusOr<ImportPlan> PlanImport(const TensorIndex& index, const ImportChoices& choices) {
  return Planner(index, choices).Run();
}

}  // namespace modelhost::modelctl
