// Names from outside: version numbers, models, paths inside a version.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "daemon/format/text.h"
#include "daemon/store/manifest.h"

namespace modelhost {
namespace {

constexpr size_t kMaxNameBytes = 255;
constexpr size_t kMaxPathBytes = 1024;

absl::Status BadPath(absl::string_view path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(Quoted(AsStd(path)), ": ", why));
}

}  // namespace

absl::StatusOr<uint64_t> ParseVersionNumber(absl::string_view text) {
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  auto refuse = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("version ", Quoted(AsStd(text)), ": ", why));
  };
  if (text.empty()) return refuse("empty");
  uint64_t number = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return refuse("not a decimal number");
    const uint64_t digit = static_cast<uint64_t>(c - '0');
    if (number > (kMax - digit) / 10) return refuse("exceeds 2^63-1");
    number = number * 10 + digit;
  }
  if (text[0] == '0') return refuse(number == 0 ? "versions count from 1" : "has a leading zero");
  return number;
}

absl::Status CheckModelName(absl::string_view name) {
  auto alphanumeric = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  bool good = !name.empty() && name.size() <= 64 && alphanumeric(name[0]);
  for (const char c : name) {
    good = good && (alphanumeric(c) || c == '.' || c == '_' || c == '-');
  }
  if (good) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("model name ", Quoted(AsStd(name)),
                   ": expected 1 to 64 of a-z 0-9 . _ - beginning with a letter or digit"));
}

absl::Status CheckVersionPath(absl::string_view path) {
  if (path.empty()) return BadPath(path, "an empty name");
  if (path.size() > kMaxPathBytes) {
    return BadPath(path, absl::StrCat("longer than ", kMaxPathBytes, " bytes"));
  }
  if (path[0] == '/') return BadPath(path, "not relative");
  if (!IsUtf8(AsStd(path))) return BadPath(path, "not UTF-8");
  for (const char c : path) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f || c == '\\') {
      return BadPath(path, "has a control character or a backslash");
    }
  }
  for (const absl::string_view part : absl::StrSplit(path, '/')) {
    if (part.empty()) return BadPath(path, "has an empty part");
    if (part == "." || part == "..")
      return BadPath(path, absl::StrCat("has a \"", part, "\" part"));
    if (part.size() > kMaxNameBytes) {
      return BadPath(path, absl::StrCat("has a part longer than ", kMaxNameBytes, " bytes"));
    }
  }
  if (std::count(path.begin(), path.end(), '/') > kMostVersionDepth) {
    return BadPath(path, absl::StrCat("over ", kMostVersionDepth, " directories deep"));
  }
  if (path == kManifestName) return BadPath(path, "this name is the store's own");
  return absl::OkStatus();
}

absl::Status CheckVersionPaths(std::vector<std::string> paths) {
  if (paths.empty()) return absl::InvalidArgumentError("no files: a version has at least one");
  if (paths.size() > kMostVersionFiles) {
    return absl::InvalidArgumentError(absl::StrCat(paths.size(), " files: a version has at most ",
                                                   kMostVersionFiles, " (pack the small ones)"));
  }
  for (const std::string& path : paths) {
    if (const absl::Status plain = CheckVersionPath(path); !plain.ok()) return plain;
  }
  // With '/' taken as the lowest byte, a directory stands right before what is in it.
  auto less = [](const std::string& a, const std::string& b) {
    return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end(), [](char x, char y) {
      const int left = x == '/' ? 0 : static_cast<unsigned char>(x);
      const int right = y == '/' ? 0 : static_cast<unsigned char>(y);
      return left < right;
    });
  };
  std::sort(paths.begin(), paths.end(), less);
  for (size_t i = 1; i < paths.size(); ++i) {
    const std::string& before = paths[i - 1];
    const std::string& path = paths[i];
    if (path == before) return BadPath(path, "given twice");
    if (path.size() > before.size() && path[before.size()] == '/' &&
        path.compare(0, before.size(), before) == 0) {
      return BadPath(before, absl::StrCat("is a file, and the directory of ", Quoted(path)));
    }
  }
  return absl::OkStatus();
}

}  // namespace modelhost
