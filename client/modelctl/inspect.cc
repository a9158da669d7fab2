#include "client/modelctl/inspect.h"

#include <new>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/modelctl/model_source.h"

namespace modelhost::modelctl {
namespace {

absl::Status Inspect(const std::string& path, const InspectOptions& options, std::ostream& out) {
  absl::StatusOr<ModelSource> source = OpenModelSource(path);
  if (!source.ok()) return source.status();
  std::vector<NamedIndex> indexes;
  for (SourceModel& model : source->models) indexes.push_back(std::move(model.named));
  WriteIndex(source->path, indexes,
             {options.output, options.tensors, options.filter_glob, source->folder}, out);
  out.flush();
  if (!out) return absl::UnknownError("standard output: cannot write");
  return absl::OkStatus();
}

}  // namespace

int InspectPath(const std::string& path, const InspectOptions& options, std::ostream& out,
                std::ostream& err) {
  absl::Status status;
  try {
    status = Inspect(path, options, out);
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError(
        absl::StrCat(path, ": not enough memory for its index (raise the limit of this process)"));
  }
  if (status.ok()) return 0;
  err << "error: " << OneLine(std::string_view(status.message().data(), status.message().size()))
      << '\n';
  return static_cast<int>(OfflineExitCode(status));
}

}  // namespace modelhost::modelctl
