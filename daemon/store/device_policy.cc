// The `device` key of a model's policy.
#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "daemon/format/text.h"
#include "daemon/store/name_patterns.h"
#include "daemon/store/policy_keys.h"

namespace modelhost {
namespace {

constexpr absl::string_view kAllGpus = "all";
constexpr absl::string_view kUuidStart = "GPU-";
constexpr size_t kMaxUuidBytes = 47;  // What a frame has room for (handle_frame.h).

bool IsGpuUuid(absl::string_view text) {
  if (!absl::ConsumePrefix(&text, kUuidStart) || text.empty()) return false;
  return text.size() + kUuidStart.size() <= kMaxUuidBytes && std::ranges::all_of(text, [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-';
         });
}

absl::Status ReadGpu(const TomlField& field, DevicePolicy& policy) {
  auto text = field.String();
  if (!text.ok()) return text.status();
  if (*text == kAllGpus) return absl::OkStatus();
  if (!IsGpuUuid(*text)) {
    return field.Error(absl::StrCat(Quoted(*text),
                                    ": expected \"all\" or a GPU's UUID (\"GPU-...\", see "
                                    "`modelctl status`)"));
  }
  policy.gpu = *std::move(text);
  return absl::OkStatus();
}

absl::Status ReadTensors(const TomlField& field, DevicePolicy& policy) {
  auto patterns = field.Strings();
  if (!patterns.ok()) return patterns.status();
  if (patterns->empty()) {
    return field.Error("no pattern (leave the key out for every tensor)");
  }
  if (const auto compiled = NamePatterns::Compile(*patterns); !compiled.ok()) {
    return field.Error(compiled.status().message());
  }
  policy.tensors = *std::move(patterns);
  return absl::OkStatus();
}

absl::Status ReadDeviceTable(const TomlField& field, DevicePolicy& policy) {
  const std::string path = field.Path();
  for (const TomlEntry& entry : field.value().table) {
    const TomlField inner(field.file(), path, entry);
    absl::Status read;
    if (entry.key == "gpu") {
      read = ReadGpu(inner, policy);
    } else if (entry.key == "tensors") {
      read = ReadTensors(inner, policy);
    } else {
      read = inner.Error("unknown (known here are gpu, tensors)");
    }
    if (!read.ok()) return read;
  }
  if (field.value().table.empty()) {
    return field.Error("says neither gpu nor tensors (say \"all\" for every tensor on every GPU)");
  }
  return absl::OkStatus();
}

// A TOML basic string.
std::string QuotedToml(absl::string_view text) {
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      absl::StrAppend(&quoted, "\\", absl::string_view(&c, 1));
    } else if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppendFormat(&quoted, "\\u%04x", byte);
    } else {
      quoted.push_back(c);
    }
  }
  return quoted + "\"";
}

}  // namespace

absl::Status ReadDevicePolicy(const TomlField& field, ModelPolicy& policy) {
  DevicePolicy device;
  if (field.value().kind == TomlValue::Kind::kTable) {
    device.wanted = true;
    if (auto read = ReadDeviceTable(field, device); !read.ok()) return read;
  } else {
    const auto text = field.String();
    if (!text.ok()) return text.status();
    if (*text != "none") {
      device.wanted = true;
      if (*text != kAllGpus && !IsGpuUuid(*text)) {
        return field.Error(
            "expected \"none\", \"all\", \"GPU-uuid\" or { gpu = \"GPU-uuid\", tensors = "
            "[\"regular expression\"] }");
      }
      if (*text != kAllGpus) device.gpu = *text;
    }
  }
  policy.device = std::move(device);
  return absl::OkStatus();
}

std::string DevicePolicyText(const DevicePolicy& policy) {
  if (!policy.wanted) return QuotedToml("none");
  const std::string gpu = QuotedToml(policy.gpu.empty() ? kAllGpus : absl::string_view(policy.gpu));
  if (policy.tensors.empty()) return gpu;
  std::string text = absl::StrCat("{ gpu = ", gpu, ", tensors = [");
  for (size_t i = 0; i < policy.tensors.size(); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", QuotedToml(policy.tensors[i]));
  }
  return text + "] }";
}

}  // namespace modelhost
