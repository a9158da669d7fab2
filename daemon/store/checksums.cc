// checksums.sha256, as sha256sum writes it.
#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "daemon/format/text.h"
#include "daemon/store/manifest.h"

namespace modelhost {
namespace {

constexpr size_t kHexDigits = 64;

absl::Status BadLine(size_t number, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat(kChecksumsName, ":", number, ": ", why));
}

}  // namespace

absl::StatusOr<std::map<std::string, Digest>> ParseChecksums(absl::string_view text) {
  std::map<std::string, Digest> checksums;
  size_t number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    absl::ConsumeSuffix(&line, "\r");
    if (line.empty() || line[0] == '#') continue;
    if (line[0] == '\\') return BadLine(number, "an escaped name (rename the file)");
    if (absl::StartsWith(line, "SHA256 (")) {
      return BadLine(number, "the form of `sha256sum --tag` (write it without --tag)");
    }
    if (line.size() < kHexDigits + 3 || line[kHexDigits] != ' ' ||
        (line[kHexDigits + 1] != ' ' && line[kHexDigits + 1] != '*')) {
      return BadLine(number,
                     "expected 64 hexadecimal digits, two characters \"  \" or \" *\", and a name");
    }
    const auto digest = ParseDigest(line.substr(0, kHexDigits));
    if (!digest.ok()) return BadLine(number, digest.status().message());
    absl::string_view name = line.substr(kHexDigits + 2);
    while (absl::ConsumePrefix(&name, "./")) {
    }
    if (name == kChecksumsName) continue;
    if (const absl::Status plain = CheckVersionPath(name); !plain.ok()) {
      return BadLine(number, plain.message());
    }
    const auto [it, fresh] = checksums.emplace(std::string(name), *digest);
    if (!fresh && it->second != *digest) {
      return BadLine(number, absl::StrCat(Quoted(AsStd(name)), ": given twice, differently"));
    }
  }
  return checksums;
}

absl::Status CheckAgainst(const std::map<std::string, Digest>& checksums,
                          const std::vector<ManifestFile>& files) {
  absl::flat_hash_map<absl::string_view, const ManifestFile*> by_path;
  for (const ManifestFile& file : files) by_path.emplace(file.path, &file);
  for (const auto& [path, expected] : checksums) {
    const auto it = by_path.find(path);
    if (it == by_path.end()) {
      return absl::DataLossError(
          absl::StrCat(path, ": listed in ", kChecksumsName, ", but not there"));
    }
    if (it->second->sha256 != expected) {
      return absl::DataLossError(absl::StrCat(path, ": its sha256 is ", it->second->sha256.Hex(),
                                              ", ", kChecksumsName, " says ", expected.Hex()));
    }
  }
  return absl::OkStatus();
}

}  // namespace modelhost
