// What a version needs of the machine that is to run it: keys and values, from its manifest
// ("requires") and from sidecars ("requires.json" for the whole version, "x.engine.requires.json"
// for x.engine: a JSON object of strings). A sidecar has at most kMaxRequiresBytes and
// kMostRequirements keys, a version at most kMostRequiresFiles of them.
//
//   tensorrt            "10.3.0" that very version, patch level too; "8.6+" or "8.6.1+" that or a
//                       newer one, for engines built version-compatible (8.6 was the first)
//   compute_capability  "8.7", or "8.7, 8.9": a GPU of one of these; "8.0+" that or newer
//   platform            "linux-x86_64", "linux-aarch64"
//   cuda_driver         "12.4": the driver knows that CUDA version or a newer one
//
// Other keys are kept and compared with nothing. Pure functions; any thread. Errors are
// INVALID_ARGUMENT with the key, what is wrong, and what would be right.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace modelhost {

using Requirements = std::map<std::string, std::string>;

inline constexpr char kRequiresName[] = "requires.json";
inline constexpr uint64_t kMaxRequiresBytes = uint64_t{64} << 10;
inline constexpr size_t kMostRequirements = 64;
inline constexpr size_t kMostRequiresFiles = 64;
inline constexpr char kNeedsTensorRt[] = "tensorrt";
inline constexpr char kNeedsComputeCapability[] = "compute_capability";
inline constexpr char kNeedsPlatform[] = "platform";
inline constexpr char kNeedsCudaDriver[] = "cuda_driver";

// One of the four above.
bool IsKnownRequirement(std::string_view key);
// "tensorrt, compute_capability, platform, cuda_driver", for messages.
std::string KnownRequirements();

// By its name, whatever folder it is in.
bool IsRequiresFile(std::string_view path);
// The file that such a sidecar speaks of ("a/x.engine" of "a/x.engine.requires.json"); empty for
// requires.json, which speaks of the version.
std::string_view RequiresSubject(std::string_view path);

// The form of a key ([a-z0-9][a-z0-9._-]{0,63}) and of its value: UTF-8 on one line, at most 256
// bytes, and for a known key what can be compared.
absl::Status CheckRequirement(std::string_view key, std::string_view value);
// The same for the value of a known key alone; others are good.
absl::Status CheckRequiredValue(std::string_view key, std::string_view value);
// "KEY=VALUE".
absl::StatusOr<std::pair<std::string, std::string>> ParseRequirement(std::string_view text);
// A sidecar. `name` is for messages. No key twice, nothing but strings, each as CheckRequirement
// wants it.
absl::StatusOr<Requirements> ParseRequires(std::string_view name, std::span<const std::byte> bytes);

// What one file of a version says.
struct RequiresSource {
  std::string where;    // "manifest.json", "requires.json", "a.engine.requires.json"
  std::string subject;  // The file that it speaks of; empty for the whole version.
  Requirements requirements;
};
// FAILED_PRECONDITION showing both values, when two that speak of the same file say different
// things: "8.7,8.9" and "8.9, 8.7" are the same.
absl::Status CheckAgreement(std::span<const RequiresSource> sources);
// Keys that nothing is compared with: one text for each source that has some, with a few of them.
std::vector<std::string> UnknownRequirements(std::span<const RequiresSource> sources);
// Whether something says where the plan `file` may run.
bool IsBound(std::span<const RequiresSource> sources, std::string_view file);

// A version text, for the comparison: "10.3.0", with `or_newer` for a "+" at its end.
struct VersionText {
  std::vector<uint32_t> parts;
  bool or_newer = false;
};
// 1 to 4 numbers with dots between; nullopt for anything else.
std::optional<VersionText> ParseVersionText(std::string_view text);
// Split at commas, without the blanks around each.
std::vector<std::string> SplitList(std::string_view text);
// Whether `wanted` (a value that CheckRequiredValue took) is fulfilled by one value of the machine.
bool Fulfils(std::string_view key, std::string_view wanted, std::string_view machine);

}  // namespace modelhost
