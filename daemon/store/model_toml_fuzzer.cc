// A good model.toml stays good when its residency is changed, and only that changes. What it says
// of devices comes back from its own text.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/string_view.h"
#include "daemon/store/model_policy.h"
#include "daemon/store/model_toml_edit.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using modelhost::ParseModelToml;
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  auto before = ParseModelToml(text, "model.toml");
  (void)modelhost::ParseDuration(text);
  (void)modelhost::ParseBytes(text);
  if (!before.ok()) return 0;
  if (before->device.has_value()) {
    const std::string device = "device = " + modelhost::DevicePolicyText(*before->device);
    const auto again = ParseModelToml(device, "model.toml");
    if (!again.ok() || again->device != before->device) std::abort();
  }
  auto edited = modelhost::WithResidency(text, "model.toml", modelhost::Residency::kSealed);
  if (!edited.ok()) {
    if (absl::IsInternal(edited.status())) std::abort();
    return 0;
  }
  auto after = ParseModelToml(*edited, "model.toml");
  if (!after.ok() || after->residency != modelhost::Residency::kSealed ||
      after->required != before->required || after->device != before->device ||
      after->keep_on_disk != before->keep_on_disk || after->read_groups != before->read_groups ||
      after->requires_files != before->requires_files ||
      after->keep_previous != before->keep_previous) {
    std::abort();
  }
  return 0;
}
