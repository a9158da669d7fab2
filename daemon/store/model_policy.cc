#include "daemon/store/model_policy.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"
#include "daemon/store/manifest.h"
#include "daemon/store/policy_keys.h"

namespace modelhost {
namespace {

absl::Status ReadResidency(const TomlField& field, ModelPolicy& policy) {
  auto text = field.String();
  if (!text.ok()) return text.status();
  auto residency = ParseResidency(*text);
  if (!residency.ok()) return field.Error(residency.status().message());
  policy.residency = *residency;
  return absl::OkStatus();
}

absl::Status ReadHugePages(const TomlField& field, ModelPolicy& policy) {
  auto text = field.String();
  if (!text.ok()) return text.status();
  if (*text != "auto" && *text != "off") return field.Error("expected \"auto\" or \"off\"");
  policy.huge_pages_auto = *text == "auto";
  return absl::OkStatus();
}

absl::Status ReadDuration(const TomlField& field, std::optional<absl::Duration>& into) {
  auto text = field.String();
  if (!text.ok()) return text.status();
  auto duration = ParseDuration(*text);
  if (!duration.ok()) return field.Error(duration.status().message());
  into = *duration;
  return absl::OkStatus();
}

absl::Status ReadKeepOnDisk(const TomlField& field, ModelPolicy& policy) {
  auto number = field.Integer();
  if (!number.ok()) return number.status();
  if (*number < 0) return field.Error("expected 0 or more versions");
  policy.keep_on_disk = *number;
  return absl::OkStatus();
}

absl::Status ReadRequiresFiles(const TomlField& field, ModelPolicy& policy) {
  auto paths = field.Strings();
  if (!paths.ok()) return paths.status();
  for (const std::string& path : *paths) {
    const absl::Status plain = CheckVersionPath(path);
    if (!plain.ok()) return field.Error(plain.message());
  }
  policy.requires_files = *std::move(paths);
  return absl::OkStatus();
}

absl::Status ReadOnDrainDeadline(const TomlField& field, ModelPolicy& policy) {
  auto text = field.String();
  if (!text.ok()) return text.status();
  if (*text != "wait" && *text != "release") return field.Error("expected \"wait\" or \"release\"");
  policy.on_drain_deadline = *std::move(text);
  return absl::OkStatus();
}

template <typename T>
absl::Status Put(absl::StatusOr<T> value, std::optional<T>& into) {
  if (!value.ok()) return value.status();
  into = *std::move(value);
  return absl::OkStatus();
}

}  // namespace

absl::string_view ResidencyName(Residency residency) {
  switch (residency) {
    case Residency::kMapped:
      return "mapped";
    case Residency::kWarm:
      return "warm";
    case Residency::kPinned:
      return "pinned";
    case Residency::kSealed:
      return "sealed";
  }
  return "unknown";
}

absl::StatusOr<Residency> ParseResidency(absl::string_view name) {
  for (const Residency residency :
       {Residency::kMapped, Residency::kWarm, Residency::kPinned, Residency::kSealed}) {
    if (name == ResidencyName(residency)) return residency;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("residency ", Quoted(AsStd(name)),
                   ": expected \"mapped\", \"warm\", \"pinned\" or \"sealed\""));
}

absl::StatusOr<bool> ReadPolicyKey(const TomlField& field, ModelPolicy& policy) {
  const std::string& key = field.key();
  absl::Status read;
  if (key == "residency") {
    read = ReadResidency(field, policy);
  } else if (key == "huge_pages") {
    read = ReadHugePages(field, policy);
  } else if (key == "device") {
    read = ReadDevicePolicy(field, policy);
  } else if (key == "required") {
    read = Put(field.Boolean(), policy.required);
  } else if (key == "keep_previous") {
    read = ReadDuration(field, policy.keep_previous);
  } else if (key == "keep_on_disk") {
    read = ReadKeepOnDisk(field, policy);
  } else if (key == "requires_files") {
    read = ReadRequiresFiles(field, policy);
  } else if (key == "read_groups") {
    read = Put(field.Strings(), policy.read_groups);
  } else if (key == "on_drain_deadline") {
    read = ReadOnDrainDeadline(field, policy);
  } else if (key == "drain_timeout") {
    read = ReadDuration(field, policy.drain_timeout);
  } else {
    return false;
  }
  if (!read.ok()) return read;
  return true;
}

absl::StatusOr<ModelPolicy> ParseModelToml(absl::string_view text, absl::string_view file) {
  auto top = ParseToml(text, file);
  if (!top.ok()) return top.status();
  ModelPolicy policy;
  for (const TomlEntry& entry : top->table) {
    const TomlField field(file, "", entry);
    auto known = ReadPolicyKey(field, policy);
    if (!known.ok()) return known.status();
    if (!*known) return field.Error(absl::StrCat("unknown (known are ", kPolicyKeys, ")"));
  }
  return policy;
}

EffectivePolicy Resolve(const ModelPolicy& base, const ModelPolicy& over) {
  EffectivePolicy policy;
  auto pick = [](const auto& low, const auto& high, auto& into) {
    if (high.has_value()) {
      into = *high;
    } else if (low.has_value()) {
      into = *low;
    }
  };
  pick(base.residency, over.residency, policy.residency);
  pick(base.huge_pages_auto, over.huge_pages_auto, policy.huge_pages_auto);
  pick(base.device, over.device, policy.device);
  pick(base.required, over.required, policy.required);
  pick(base.keep_previous, over.keep_previous, policy.keep_previous);
  pick(base.keep_on_disk, over.keep_on_disk, policy.keep_on_disk);
  pick(base.requires_files, over.requires_files, policy.requires_files);
  pick(base.read_groups, over.read_groups, policy.read_groups);
  pick(base.on_drain_deadline, over.on_drain_deadline, policy.on_drain_deadline);
  pick(base.drain_timeout, over.drain_timeout, policy.drain_timeout);
  return policy;
}

}  // namespace modelhost
