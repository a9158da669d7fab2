#include "daemon/region/requires_check.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

const MachineFact* FactOf(std::string_view key, const MachineFacts& machine) {
  if (key == kNeedsPlatform) return &machine.platform;
  if (key == kNeedsTensorRt) return &machine.tensorrt;
  if (key == kNeedsComputeCapability) return &machine.compute_capability;
  if (key == kNeedsCudaDriver) return &machine.cuda_driver;
  return nullptr;
}

// Empty when the machine fulfils it.
std::string Difference(const RequiresSource& source, const std::string& key,
                       const std::string& wanted, const MachineFact& fact) {
  const bool fulfilled =
      std::any_of(fact.values.begin(), fact.values.end(),
                  [&](const std::string& value) { return Fulfils(key, wanted, value); });
  if (fulfilled) return "";
  std::string text =
      absl::StrCat(key, " must be ", wanted, key == kNeedsCudaDriver ? " or newer" : "", " (",
                   Printable(source.where), ")");
  if (fact.known()) {
    absl::StrAppend(&text, " and is ", absl::StrJoin(fact.values, ", "),
                    fact.source.empty() ? "" : absl::StrCat(" (", fact.source, ")"));
  } else {
    absl::StrAppend(&text, " and is not known: ", fact.unknown);
  }
  return text;
}

absl::StatusOr<RequiresSource> ReadSidecar(Os& os, const VersionFiles& files, size_t number) {
  const ManifestFile& file = files.manifest->files[number];
  RequiresSource source;
  source.where = file.path;
  source.subject = std::string(RequiresSubject(file.path));
  if (file.bytes > kMaxRequiresBytes) {
    return ModelError(file.path, absl::StrCat("longer than ", kMaxRequiresBytes, " bytes"),
                      "a list of requirements is short: is it one?");
  }
  std::vector<std::byte> bytes(file.bytes);
  auto got = os.ReadAt(files.files[number], 0, bytes);
  if (!got.ok()) return got.status();
  bytes.resize(*got);
  // What decides must be what was published, whatever is verified of the weights.
  if (const Digest digest = Sha256(bytes); digest != file.sha256) {
    return absl::DataLossError(absl::StrCat(Printable(file.path), ": has sha256 ", digest.Short(),
                                            ", the manifest says ", file.sha256.Short()));
  }
  auto requirements = ParseRequires(file.path, bytes);
  if (!requirements.ok()) return requirements.status();
  source.requirements = *std::move(requirements);
  return source;
}

bool HasFile(const Manifest& manifest, const std::string& path) {
  return std::any_of(manifest.files.begin(), manifest.files.end(),
                     [&](const ManifestFile& file) { return file.path == path; });
}

}  // namespace

absl::StatusOr<std::vector<RequiresSource>> ReadRequirements(Os& os, const VersionFiles& files,
                                                             const CancelToken& cancel) {
  std::vector<RequiresSource> sources;
  const Manifest& manifest = *files.manifest;
  if (!manifest.requires_map.empty()) {
    sources.push_back({kManifestName, "", manifest.requires_map});
  }
  // Everything is checked that costs nothing before the first is read.
  std::set<std::string_view> names;
  std::vector<size_t> sidecars;
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    names.insert(manifest.files[i].path);
    if (!IsRequiresFile(manifest.files[i].path)) continue;
    if (sidecars.size() == kMostRequiresFiles) {
      return ModelError(manifest.files[i].path,
                        absl::StrCat("it is number ", kMostRequiresFiles + 1,
                                     " of the files that say what the version requires"),
                        absl::StrCat("there may be ", kMostRequiresFiles,
                                     ": say what is the same for all files in one requires.json"));
    }
    sidecars.push_back(i);
  }
  for (const size_t i : sidecars) {
    if (cancel.cancelled()) return absl::CancelledError("reading what it requires: cancelled");
    auto source = ReadSidecar(os, files, i);
    if (!source.ok()) return source.status();
    if (!source->subject.empty() && !names.contains(source->subject)) {
      return absl::FailedPreconditionError(absl::StrCat(
          Printable(source->where), ": speaks of ", Printable(source->subject),
          ", which the version does not have (give both files the same name, and publish again "
          "under a new number)"));
    }
    sources.push_back(*std::move(source));
  }
  return sources;
}

namespace {

absl::Status CompareSources(std::string_view version, std::span<const RequiresSource> sources,
                            const MachineFacts& machine, bool only_known) {
  std::vector<std::string> differences;
  std::vector<std::string> keys;
  bool known = true;
  for (const RequiresSource& source : sources) {
    for (const auto& [key, wanted] : source.requirements) {
      if (absl::Status good = CheckRequiredValue(key, wanted); !good.ok()) {
        return absl::InvalidArgumentError(
            absl::StrCat(Printable(source.where), ": ", good.message()));
      }
      const MachineFact* fact = FactOf(key, machine);
      if (fact == nullptr || (only_known && !fact->known())) continue;
      std::string difference = Difference(source, key, wanted, *fact);
      if (difference.empty()) continue;
      differences.push_back(std::move(difference));
      known = known && fact->known();
      const std::string setting = absl::StrCat("machine.", key);
      if (std::find(keys.begin(), keys.end(), setting) == keys.end()) keys.push_back(setting);
    }
  }
  if (differences.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "not for this machine: ", absl::StrJoin(differences, "; "), " (",
      known ? "build it again for this machine and publish that under a new number; if the machine "
              "is not what it is taken for, set "
            : "say what this machine has: set ",
      absl::StrJoin(keys, ", "), " in modelhostd.toml and reload",
      known ? ""
            : absl::StrCat("; or, when it is there by now, as a driver that came up late, "
                           "`modelctl load ",
                           AsAbsl(version), "`"),
      ")"));
}

}  // namespace

absl::Status CheckRequires(std::string_view version, std::span<const RequiresSource> sources,
                           const MachineFacts& machine) {
  if (absl::Status agree = CheckAgreement(sources); !agree.ok()) return agree;
  return CompareSources(version, sources, machine, /*only_known=*/false);
}

absl::Status CheckStillFits(std::string_view version, std::span<const RequiresSource> sources,
                            const MachineFacts& machine) {
  return CompareSources(version, sources, machine, /*only_known=*/true);
}

FactsNeeded NeededFacts(std::span<const RequiresSource> sources) {
  FactsNeeded needed;
  for (const RequiresSource& source : sources) {
    const auto wants = [&](const char* key) { return source.requirements.contains(key); };
    needed.tensorrt = needed.tensorrt || wants(kNeedsTensorRt);
    needed.compute_capability = needed.compute_capability || wants(kNeedsComputeCapability);
    needed.cuda_driver = needed.cuda_driver || wants(kNeedsCudaDriver);
  }
  return needed;
}

std::vector<RequiresSource> Compared(std::span<const RequiresSource> sources) {
  std::vector<RequiresSource> compared;
  for (const RequiresSource& source : sources) {
    RequiresSource known{source.where, source.subject, {}};
    for (const auto& entry : source.requirements) {
      if (IsKnownRequirement(entry.first)) known.requirements.insert(entry);
    }
    if (!known.requirements.empty()) compared.push_back(std::move(known));
  }
  return compared;
}

Requirements Flatten(std::span<const RequiresSource> sources) {
  Requirements all;
  for (const RequiresSource& source : sources) {
    for (const auto& [key, value] : source.requirements) {
      all.emplace(source.subject.empty() ? key : absl::StrCat(source.subject, ": ", key), value);
    }
  }
  return all;
}

absl::Status CheckRequiredFiles(const EffectivePolicy& policy, const Manifest& manifest) {
  std::vector<std::string> missing;
  for (const std::string& wanted : policy.requires_files) {
    if (!HasFile(manifest, wanted)) missing.push_back(Printable(wanted));
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "it has no file ", absl::StrJoin(missing, ", "),
      ", which requires_files of the model names (publish it with the file under a new number, or "
      "change requires_files in the model.toml of the model or in modelhostd.toml)"));
}

}  // namespace modelhost
