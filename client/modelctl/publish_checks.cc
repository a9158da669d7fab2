#include "client/modelctl/publish_checks.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/format/text.h"

namespace modelhost::modelctl {
namespace {

bool HasFile(const SourceSet& files, std::string_view path) {
  return std::any_of(files.files.begin(), files.files.end(),
                     [&](const SourceFile& file) { return file.path == path; });
}

}  // namespace

Outcome<Requirements> ParseRequireFlags(const std::vector<std::string>& flags) {
  Requirements requirements;
  for (const std::string& flag : flags) {
    auto parsed = ParseRequirement(flag);
    if (!parsed.ok()) {
      return Fail(ExitCode::kUsage, absl::StrCat("--require ", parsed.status().message()));
    }
    if (!requirements.insert(*parsed).second) {
      return Fail(ExitCode::kUsage,
                  absl::StrCat("--require ", parsed->first,
                               ": given twice (separate several GPUs with commas: "
                               "compute_capability=8.7,8.9)"));
    }
  }
  return requirements;
}

Outcome<std::vector<RequiresSource>> CollectRequirements(Context& context, const SourceSet& files,
                                                         const Requirements& flags) {
  std::vector<RequiresSource> sources;
  if (!flags.empty()) sources.push_back({"--require", "", flags});
  if (!files.manifest_requires.empty()) {
    sources.push_back({"manifest.json", "", files.manifest_requires});
  }
  SourceFileSource source(files);
  size_t sidecars = 0;
  for (const SourceFile& file : files.files) {
    if (!IsRequiresFile(file.path)) continue;
    if (++sidecars > kMostRequiresFiles) {
      return FromStatus(
          absl::InvalidArgumentError(absl::StrCat(
              "more than ", kMostRequiresFiles,
              " files that say what the version requires (say what is the same for all files in "
              "one requires.json)")),
          file.path);
    }
    const auto bytes = source.Open(file.path);
    if (!bytes.ok()) return FromStatus(bytes.status(), file.path);
    auto requirements = ParseRequires(file.path, *bytes);
    if (!requirements.ok()) return FromStatus(requirements.status(), file.path);
    const std::string subject(RequiresSubject(file.path));
    if (!subject.empty() && !HasFile(files, subject)) {
      return Fail(ExitCode::kConflict,
                  absl::StrCat(file.path, ": speaks of ", subject,
                               ", which is not there (give both files the same name)"));
    }
    sources.push_back({file.path, subject, *std::move(requirements)});
  }
  if (const auto agree = CheckAgreement(sources); !agree.ok()) {
    return FromStatus(agree, "what it requires");
  }
  for (const std::string& text : UnknownRequirements(sources)) context.Warn(text);
  return sources;
}

void WarnOfMissingFiles(Context& context, const std::string& model, const SourceSet& files) {
  v1::GetModelRequest request;
  request.set_model(model);
  const auto answer =
      context.Call(absl::StrCat("publish ", model), &v1::Control::StubInterface::GetModel, request);
  if (!answer.ok()) return;
  std::vector<std::string> missing;
  for (const std::string& file : answer->requires_files()) {
    if (!HasFile(files, file)) missing.push_back(file);
  }
  if (missing.empty()) return;
  context.Warn(absl::StrCat(absl::StrJoin(missing, ", "), missing.size() == 1 ? " is" : " are",
                            " not there, and requires_files of ", model,
                            " asks for it: the version will never be READY (add it before "
                            "publishing: a version never changes)"));
}

}  // namespace modelhost::modelctl
