#include "daemon/format/requires.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/json_reader.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

constexpr std::string_view kRequiresEnding = ".requires.json";
constexpr size_t kMaxKeyBytes = 64;
constexpr size_t kMaxValueBytes = 256;
constexpr size_t kMaxVersionParts = 4;
constexpr size_t kMostNamed = 3;  // Of the keys that nothing is compared with.
constexpr std::array<std::string_view, 4> kKnownKeys = {kNeedsTensorRt, kNeedsComputeCapability,
                                                        kNeedsPlatform, kNeedsCudaDriver};

std::string_view BaseName(std::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

bool IsKeyText(std::string_view key) {
  const auto word = [](char c) { return absl::ascii_islower(c) || absl::ascii_isdigit(c); };
  return !key.empty() && key.size() <= kMaxKeyBytes && word(key[0]) &&
         std::all_of(key.begin(), key.end(),
                     [&](char c) { return word(c) || c == '.' || c == '_' || c == '-'; });
}

bool IsOneLineText(std::string_view text) {
  return IsUtf8(text) && std::none_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_iscntrl(static_cast<unsigned char>(c));
         });
}

absl::Status BadValue(std::string_view key, std::string_view value, absl::string_view wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat(AsAbsl(key), ": ", Quoted(value), " cannot be compared (", wanted, ")"));
}

// Negative, 0 or positive, by as many parts as both have, but at least `least`.
int Compare(const VersionText& a, const VersionText& b, size_t least) {
  const size_t count = std::max(least, std::min(a.parts.size(), b.parts.size()));
  for (size_t i = 0; i < count; ++i) {
    const uint32_t left = i < a.parts.size() ? a.parts[i] : 0;
    const uint32_t right = i < b.parts.size() ? b.parts[i] : 0;
    if (left != right) return left < right ? -1 : 1;
  }
  return 0;
}

absl::Status CheckTensorRt(std::string_view value) {
  const auto version = ParseVersionText(value);
  if (!version.has_value() || (!version->or_newer && version->parts.size() < 3) ||
      version->parts.size() < 2) {
    return BadValue(kNeedsTensorRt, value,
                    "give all of it, as \"10.3.0\"; \"8.6+\" for an engine that was built "
                    "version-compatible");
  }
  if (version->or_newer && Compare(*version, {{8, 6}, false}, 2) < 0) {
    return BadValue(kNeedsTensorRt, value,
                    "engines of TensorRT before 8.6 run on that very version only: leave the +");
  }
  return absl::OkStatus();
}

absl::Status CheckCapabilities(std::string_view value) {
  for (const std::string& each : SplitList(value)) {
    const auto version = ParseVersionText(each);
    if (!version.has_value() || version->parts.size() != 2) {
      return BadValue(kNeedsComputeCapability, value, "write \"8.7\", \"8.7, 8.9\" or \"8.0+\"");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPlatform(std::string_view value) {
  const auto word = [](char c) {
    return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '_';
  };
  const size_t dash = value.find('-');
  const bool good = dash != std::string_view::npos && dash > 0 && dash + 1 < value.size() &&
                    std::all_of(value.begin(), value.begin() + dash, word) &&
                    std::all_of(value.begin() + dash + 1, value.end(), word);
  if (good) return absl::OkStatus();
  return BadValue(kNeedsPlatform, value, "write SYSTEM-MACHINE, as \"linux-aarch64\"");
}

absl::Status CheckDriver(std::string_view value) {
  const auto version = ParseVersionText(value);
  if (version.has_value() && version->parts.size() == 2 && !version->or_newer) {
    return absl::OkStatus();
  }
  return BadValue(kNeedsCudaDriver, value, "write the lowest CUDA version, as \"12.4\"");
}

// "8.7" of "08.7", as it is compared.
std::string Canonical(const std::string& version_text) {
  const auto version = ParseVersionText(version_text);
  if (!version.has_value()) return version_text;
  return absl::StrCat(absl::StrJoin(version->parts, "."), version->or_newer ? "+" : "");
}

bool SameRequirement(std::string_view key, const std::string& a, const std::string& b) {
  if (a == b || !IsKnownRequirement(key)) return a == b;
  const auto items = [](const std::string& text) {
    std::set<std::string> all;
    for (const std::string& item : SplitList(text)) all.insert(Canonical(item));
    return all;
  };
  return items(a) == items(b);
}

}  // namespace

bool IsKnownRequirement(std::string_view key) {
  return std::find(kKnownKeys.begin(), kKnownKeys.end(), key) != kKnownKeys.end();
}

std::string KnownRequirements() {
  return absl::StrJoin(kKnownKeys, ", ",
                       [](std::string* out, std::string_view key) { out->append(key); });
}

bool IsRequiresFile(std::string_view path) {
  const std::string_view name = BaseName(path);
  return name == kRequiresName ||
         (name.size() > kRequiresEnding.size() && name.ends_with(kRequiresEnding));
}

std::string_view RequiresSubject(std::string_view path) {
  if (BaseName(path) == kRequiresName) return {};
  path.remove_suffix(std::min(path.size(), kRequiresEnding.size()));
  return path;
}

absl::Status CheckRequiredValue(std::string_view key, std::string_view value) {
  if (key == kNeedsTensorRt) return CheckTensorRt(value);
  if (key == kNeedsComputeCapability) return CheckCapabilities(value);
  if (key == kNeedsPlatform) return CheckPlatform(value);
  if (key == kNeedsCudaDriver) return CheckDriver(value);
  return absl::OkStatus();
}

absl::Status CheckRequirement(std::string_view key, std::string_view value) {
  if (!IsKeyText(key)) {
    return absl::InvalidArgumentError(
        absl::StrCat("key ", Quoted(key), ": not a name ([a-z0-9][a-z0-9._-]{0,63})"));
  }
  if (value.empty() || value.size() > kMaxValueBytes || !IsOneLineText(value)) {
    return absl::InvalidArgumentError(absl::StrCat(AsAbsl(key), ": ", Quoted(value),
                                                   " is not a value (one line of UTF-8, from 1 to ",
                                                   kMaxValueBytes, " bytes)"));
  }
  return CheckRequiredValue(key, value);
}

absl::StatusOr<std::pair<std::string, std::string>> ParseRequirement(std::string_view text) {
  const size_t equals = text.find('=');
  if (equals == std::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat(Quoted(text), ": no '=' in it (write KEY=VALUE, as tensorrt=10.3.0)"));
  }
  const std::string_view key = text.substr(0, equals);
  const std::string_view value = text.substr(equals + 1);
  if (absl::Status good = CheckRequirement(key, value); !good.ok()) return good;
  return std::pair(std::string(key), std::string(value));
}

absl::StatusOr<Requirements> ParseRequires(std::string_view name,
                                           std::span<const std::byte> bytes) {
  constexpr std::string_view kHint =
      "an object of strings, as {\"tensorrt\": \"10.3.0\", \"platform\": \"linux-aarch64\"}";
  ByteReader in(name, kHint, bytes);
  if (bytes.size() > kMaxRequiresBytes) {
    in.Fail(absl::StrCat("longer than ", kMaxRequiresBytes, " bytes"));
    return in.status();
  }
  Requirements found;
  JsonReader json(in);
  const bool read = json.Object("the requirements", [&](std::string_view raw_key) {
    const std::string key(raw_key);
    std::string_view value;
    if (!json.String("a requirement", &value)) return false;
    if (absl::Status good = CheckRequirement(key, value); !good.ok()) {
      return in.Fail(AsStd(good.message()));
    }
    if (!found.emplace(key, value).second)
      return in.Fail(absl::StrCat(Quoted(key), " is there twice"));
    if (found.size() > kMostRequirements) {
      return in.Fail(absl::StrCat("more than ", kMostRequirements, " keys"));
    }
    return true;
  });
  if (!read || !json.End()) return in.status();
  return found;
}

absl::Status CheckAgreement(std::span<const RequiresSource> sources) {
  // By key, and by file ("": the whole version) who said something of it first.
  std::map<std::pair<std::string_view, std::string_view>, const RequiresSource*> said;
  const auto check = [](const RequiresSource& first, const RequiresSource& second,
                        const std::string& key) -> absl::Status {
    const std::string& a = first.requirements.at(key);
    const std::string& b = second.requirements.at(key);
    if (SameRequirement(key, a, b)) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(Printable(key), ": is ", Quoted(a), " in ", Printable(first.where), " and ",
                     Quoted(b), " in ", Printable(second.where),
                     " (publish it under a new number with the one that is right)"));
  };
  // What is said of the whole version first: it is compared with what is said of any file.
  for (const bool of_all : {true, false}) {
    for (const RequiresSource& source : sources) {
      if (source.subject.empty() != of_all) continue;
      for (const auto& [key, value] : source.requirements) {
        const auto [mine, first] = said.try_emplace({key, source.subject}, &source);
        const auto all = said.find({key, ""});
        if (!first) {
          if (auto same = check(*mine->second, source, key); !same.ok()) return same;
        }
        if (!of_all && all != said.end()) {
          if (auto same = check(*all->second, source, key); !same.ok()) return same;
        }
      }
    }
  }
  return absl::OkStatus();
}

std::vector<std::string> UnknownRequirements(std::span<const RequiresSource> sources) {
  std::vector<std::string> texts;
  for (const RequiresSource& source : sources) {
    std::vector<std::string> some;
    size_t count = 0;
    for (const auto& [key, value] : source.requirements) {
      if (IsKnownRequirement(key)) continue;
      if (++count <= kMostNamed) some.push_back(absl::StrCat(Quoted(key), " = ", Quoted(value)));
    }
    if (count == 0) continue;
    if (count > kMostNamed) some.push_back(absl::StrCat(count - kMostNamed, " more"));
    texts.push_back(absl::StrCat(Printable(source.where), ": requires ", absl::StrJoin(some, ", "),
                                 ", compared with nothing (known are ", KnownRequirements(), ")"));
  }
  return texts;
}

bool IsBound(std::span<const RequiresSource> sources, std::string_view file) {
  return std::any_of(sources.begin(), sources.end(), [&](const RequiresSource& source) {
    return (source.subject.empty() || source.subject == file) &&
           std::any_of(source.requirements.begin(), source.requirements.end(),
                       [](const auto& entry) { return IsKnownRequirement(entry.first); });
  });
}

std::optional<VersionText> ParseVersionText(std::string_view text) {
  VersionText version;
  absl::string_view rest = AsAbsl(text);
  version.or_newer = absl::ConsumeSuffix(&rest, "+");
  for (const absl::string_view part : absl::StrSplit(rest, '.')) {
    uint32_t number = 0;
    const bool digits = !part.empty() && part.size() <= 9 &&
                        std::all_of(part.begin(), part.end(), absl::ascii_isdigit);
    if (!digits || version.parts.size() == kMaxVersionParts || !absl::SimpleAtoi(part, &number)) {
      return std::nullopt;
    }
    version.parts.push_back(number);
  }
  return version;
}

std::vector<std::string> SplitList(std::string_view text) {
  std::vector<std::string> items;
  for (const absl::string_view item : absl::StrSplit(AsAbsl(text), ',')) {
    items.emplace_back(absl::StripAsciiWhitespace(item));
  }
  return items;
}

bool Fulfils(std::string_view key, std::string_view wanted, std::string_view machine) {
  if (key == kNeedsPlatform) return wanted == machine;
  const auto have = ParseVersionText(machine);
  if (!have.has_value()) return false;
  for (const std::string& each : SplitList(wanted)) {
    const auto want = ParseVersionText(each);
    if (!want.has_value()) continue;
    // Version 10.3.0.26 of one side and 10.3.0 of the other are the same as far as both can tell.
    const int order = Compare(*have, *want, want->parts.size() < 3 ? want->parts.size() : 3);
    if (order == 0 || (order > 0 && (want->or_newer || key == kNeedsCudaDriver))) return true;
  }
  return false;
}

}  // namespace modelhost
