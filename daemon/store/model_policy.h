// What an operator may say about one model: [[models]] in modelhostd.toml, or the same keys in
// <store>/models/<model>/model.toml. The former wins, key by key.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace modelhost {

enum class Residency { kMapped, kWarm, kPinned, kSealed };
enum class MemlockPolicy { kRequired, kBestEffort, kOff };

absl::string_view ResidencyName(Residency residency);
absl::StatusOr<Residency> ParseResidency(absl::string_view name);

// What goes to a GPU: device = "none" | "all" | "GPU-uuid" | { gpu = "...", tensors = [...] }.
struct DevicePolicy {
  bool wanted = false;               // False: "none".
  std::string gpu;                   // Empty: a copy on every GPU that holds any ("all").
  std::vector<std::string> tensors;  // RE2, matched against the whole name; empty: every tensor.
  friend bool operator==(const DevicePolicy&, const DevicePolicy&) = default;
};
// As TOML writes it; equal texts choose the same.
std::string DevicePolicyText(const DevicePolicy& policy);

// Unset keys take the default of EffectivePolicy.
struct ModelPolicy {
  std::optional<Residency> residency;
  std::optional<bool> huge_pages_auto;
  std::optional<DevicePolicy> device;
  std::optional<bool> required;
  std::optional<absl::Duration> keep_previous;
  std::optional<int64_t> keep_on_disk;
  std::optional<std::vector<std::string>> requires_files;
  std::optional<std::vector<std::string>> read_groups;
  std::optional<std::string> on_drain_deadline;
  std::optional<absl::Duration> drain_timeout;
};

struct EffectivePolicy {
  Residency residency = Residency::kPinned;
  bool huge_pages_auto = true;
  DevicePolicy device;
  bool required = false;
  absl::Duration keep_previous = absl::Minutes(10);
  int64_t keep_on_disk = 5;
  std::vector<std::string> requires_files;
  std::optional<std::vector<std::string>> read_groups;  // Unset: those of [access].
  std::string on_drain_deadline = "wait";
  absl::Duration drain_timeout = absl::Minutes(5);
};

// `over` wins where it is set.
EffectivePolicy Resolve(const ModelPolicy& base, const ModelPolicy& over);

// Text of a model.toml. Errors name `file`, the line and the key.
absl::StatusOr<ModelPolicy> ParseModelToml(absl::string_view text, absl::string_view file);

// "90s", "10m", "1h30m", "500ms"; "12GiB", "128MiB", "4096", "1.5GiB".
absl::StatusOr<absl::Duration> ParseDuration(absl::string_view text);
absl::StatusOr<uint64_t> ParseBytes(absl::string_view text);

}  // namespace modelhost
