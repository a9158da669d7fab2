// inspect: the index of a path, which needs no daemon, or of a version that the daemon holds.
#include <sys/stat.h>

#include <iostream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "client/modelctl/index_render.h"
#include "client/modelctl/inspect.h"
#include "client/modelctl/messages.h"
#include "client/modelctl/ref.h"
#include "client/modelctl/verbs.h"
#include "client/modelctl/worker_lease.h"
#include "daemon/format/format_reader.h"

namespace modelhost::modelctl {
namespace {

IndexOutput OutputOf(OutputFormat output) {
  switch (output) {
    case OutputFormat::kTable:
      return IndexOutput::kTable;
    case OutputFormat::kWide:
      return IndexOutput::kWide;
    case OutputFormat::kJson:
      return IndexOutput::kJson;
    case OutputFormat::kJsonl:
      return IndexOutput::kJsonl;
    case OutputFormat::kName:
      return IndexOutput::kName;
  }
  return IndexOutput::kTable;
}

// The files of a lease, as the format readers want them.
class LeasedSource : public FileSource {
 public:
  explicit LeasedSource(const std::vector<LeasedFile>& files) : files_(files) {}
  absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override {
    for (const LeasedFile& file : files_) {
      if (file.path == name) return file.bytes;
    }
    return absl::NotFoundError(absl::StrCat(name, ": not in this version"));
  }

 private:
  const std::vector<LeasedFile>& files_;
};

Exit InspectVersion(Context& context, const Ref& ref, const InspectFlags& flags) {
  const std::string what = absl::StrCat("inspect ", ref.ToString());
  const auto lease = WorkerLease::Take(context, ref, [] { return false; });
  if (!lease.ok()) return lease.exit();
  const auto files = lease->Files();
  if (!files.ok()) return files.exit();
  std::vector<std::string> names;
  for (const LeasedFile& file : *files) names.push_back(file.path);
  LeasedSource source(*files);
  const auto components = FindComponents(names, source);
  if (!components.ok()) return FromStatus(components.status(), what);
  std::vector<NamedIndex> indexes;
  for (const Component& component : *components) {
    auto index = ReadModel(component.main_file, source);
    if (!index.ok()) return FromStatus(index.status(), what);
    indexes.push_back({component.name, component.main_file, *std::move(index)});
  }
  if (indexes.empty()) {
    return Fail(ExitCode::kIntegrity, absl::StrCat(what, ": it has no weights of a known format"));
  }
  v1::GetVersionRequest request;
  request.set_model(ref.model);
  request.set_version(lease->version());
  const auto version = context.Call(what, &v1::Control::StubInterface::GetVersion, request);
  if (!version.ok()) return version.exit();
  std::ostringstream out;
  WriteIndex(absl::StrCat(ref.model, "@", lease->version()), indexes,
             {OutputOf(context.globals().output), flags.tensors, flags.filter, true,
              RequirementsOf(*version)},
             out);
  context.Print(out.str());
  return Exit::Ok();
}

}  // namespace

Exit Inspect(Context& context, const InspectFlags& flags) {
  // What is there on disk is meant, even a link that leads nowhere; a model's name has no slash.
  struct stat info;
  const bool on_disk = ::lstat(flags.target.c_str(), &info) == 0;
  Outcome<Ref> ref = ParseRef(flags.target);
  const bool path_like = absl::StrContains(flags.target, '/') || !ref.ok();
  if (!on_disk && !path_like && !absl::StrContains(flags.target, '.')) {
    return InspectVersion(context, *ref, flags);
  }
  if (!on_disk && !path_like) {
    // "model.safetensors" may be a file that is not there, or a model of that name.
    Exit exit = InspectVersion(context, *ref, flags);
    if (exit.code == ExitCode::kNotFound || exit.code == ExitCode::kUnreachable) {
      return Fail(ExitCode::kNotFound,
                  absl::StrCat(flags.target,
                               ": no such file or folder, and no model of that name "
                               "either"));
    }
    return exit;
  }
  std::ostringstream out, err;
  InspectOptions options;
  options.output = OutputOf(context.globals().output);
  options.tensors = flags.tensors;
  options.filter_glob = flags.filter;
  const int code = InspectPath(flags.target, options, out, err);
  if (code == 0) {
    context.Print(out.str());
    return Exit::Ok();
  }
  std::string text = err.str();
  absl::string_view line = text;
  absl::ConsumePrefix(&line, "error: ");
  return Fail(static_cast<ExitCode>(code), line);
}

}  // namespace modelhost::modelctl
