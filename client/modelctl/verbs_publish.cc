// publish: from a folder or a file of this user to an immutable version of the store.
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/modelctl/messages.h"
#include "client/modelctl/operation_run.h"
#include "client/modelctl/publish_checks.h"
#include "client/modelctl/ref.h"
#include "client/modelctl/render.h"
#include "client/modelctl/source_files.h"
#include "client/modelctl/swap_report.h"
#include "client/modelctl/upload.h"
#include "client/modelctl/verbs.h"
#include "daemon/format/format_reader.h"
#include "proto/handle/fault_point.h"

namespace modelhost::modelctl {
namespace {

struct Goal {
  std::string model;
  uint64_t version = 0;
  std::string label;
  Requirements requirements;  // Of --require, and of the version that is copied.
  std::string Name() const { return absl::StrCat(model, "@", version); }
};

Outcome<Goal> ParseGoal(const PublishFlags& flags) {
  Goal goal;
  Outcome<Ref> ref = ParseRef(flags.model);
  if (!ref.ok()) return ref.exit();
  goal.model = ref->model;
  goal.label = flags.label.empty() ? ref->label : flags.label;
  goal.version = ref->version;
  if (!flags.version.empty()) {
    const Outcome<uint64_t> version = ParseVersion(flags.version);
    if (!version.ok()) return version.exit();
    goal.version = *version;
  }
  if (goal.version == 0) {
    return Fail(ExitCode::kUsage,
                absl::StrCat("publish ", flags.path, ": no version given (add --version N)"));
  }
  if (!goal.label.empty()) {
    const Outcome<std::string> label = ParseLabelName(goal.label);
    if (!label.ok()) return label.exit();
  }
  Outcome<Requirements> requirements = ParseRequireFlags(flags.requirements);
  if (!requirements.ok()) return requirements.exit();
  goal.requirements = *std::move(requirements);
  return goal;
}

// A shard without its siblings is never what was meant.
Exit CheckSingle(const SourceSet& files, const std::string& path) {
  if (files.files.size() != 1) return Exit::Ok();
  const std::string& name = files.files[0].path;
  if (!absl::EndsWith(name, ".index.json") && !absl::StrContains(name, "-of-")) return Exit::Ok();
  if (absl::StrContains(name, "-00001-of-00001")) return Exit::Ok();
  return Fail(ExitCode::kUsage, absl::StrCat(path,
                                             ": one part of a sharded model (publish the "
                                             "folder that holds all parts)"));
}

// What would be published, and whether it would be refused. Nothing is sent.
struct Weights {
  std::string name, format;
  uint64_t tensors = 0;
};

// The weight sets that a load of these files would find. Reads headers only.
absl::StatusOr<std::vector<Weights>> FindWeights(Context& context, const SourceSet& files,
                                                 const std::vector<RequiresSource>& required) {
  std::vector<std::string> names;
  for (const SourceFile& file : files.files) names.push_back(file.path);
  SourceFileSource source(files);
  const auto components = FindComponents(names, source);
  if (!components.ok()) return components.status();
  std::vector<Weights> found;
  for (const Component& component : *components) {
    const auto index = ReadModel(component.main_file, source);
    if (!index.ok()) return index.status();
    for (const std::string& warning : index->warnings()) context.Warn(warning);
    if (index->format() == "tensorrt" && !IsBound(required, component.main_file)) {
      context.Warn(absl::StrCat(component.main_file,
                                ": nothing says for which TensorRT, GPU and platform this plan was "
                                "built, so no machine can refuse it (--require tensorrt=X.Y.Z "
                                "--require compute_capability=M.N --require platform=linux-...)"));
    }
    found.push_back({component.name, index->format(), index->size()});
  }
  if (found.empty()) {
    return absl::DataLossError("none of the files holds weights of a known format");
  }
  return found;
}

Exit DryRun(Context& context, const Goal& goal, const SourceSet& files,
            const std::vector<RequiresSource>& required, const std::string& what) {
  const auto found = FindWeights(context, files, required);
  if (!found.ok()) return FromStatus(found.status(), what);
  v1::GetVersionRequest request;
  request.set_model(goal.model);
  request.set_version(goal.version);
  const auto existing = context.Call(what, &v1::Control::StubInterface::GetVersion, request);
  if (existing.ok()) {
    return Fail(
        ExitCode::kConflict,
        absl::StrCat(goal.Name(), ": exists already, ", PhaseName(existing->phase()), ", ",
                     FormatBytes(existing->file_bytes()),
                     " (choose a higher --version; only the same bytes would be accepted)"));
  }
  if (existing.exit().code == ExitCode::kUnreachable) {
    context.Warn(
        absl::StrCat("whether ", goal.Name(), " exists was not checked: ", existing.exit().error));
  } else if (existing.exit().code != ExitCode::kNotFound) {
    return existing.exit();
  }

  WarnOfMissingFiles(context, goal.model, files);
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("PublishPlan");
    json.Field("model", goal.model);
    json.Field("version", goal.version);
    json.Field("bytes", files.bytes);
    json.Key("requires");
    json.BeginObject();
    for (const auto& [key, value] : goal.requirements) json.Field(key, value);
    json.EndObject();
    json.Key("files");
    json.BeginArray();
    for (const SourceFile& file : files.files) {
      json.BeginObject();
      json.Field("path", file.path);
      json.Field("bytes", file.bytes);
      json.EndObject();
    }
    json.EndArray();
    json.Key("components");
    json.BeginArray();
    for (const Weights& each : *found) {
      json.BeginObject();
      json.Field("name", each.name);
      json.Field("format", each.format);
      json.Field("tensors", each.tensors);
      json.EndObject();
    }
    json.EndArray();
    json.EndObject();
    context.Print(std::move(json).Take());
    return Exit::Ok();
  }
  if (context.names()) {
    for (const SourceFile& file : files.files) context.PrintLine(Printable(file.path));
    return Exit::Ok();
  }
  Table table({{"PATH"}, {"SIZE", Align::kRight}});
  for (const SourceFile& file : files.files) table.Add({file.path, FormatBytes(file.bytes)});
  context.Print(table.Render(context.colour()));
  std::vector<std::string> words;
  for (const Weights& each : *found) {
    words.push_back(absl::StrCat(each.name, " ", each.format, " ", Plural(each.tensors, "tensor")));
  }
  context.PrintLine(Printable(absl::StrCat(
      goal.Name(), " would be published  ", Plural(files.files.size(), "file"), "  ",
      FormatBytes(files.bytes), "  ", absl::StrJoin(words, ", "), "; nothing was sent")));
  return Exit::Ok();
}

v1::PublishBegin Announce(const Goal& goal, const SourceSet& files, const std::string& residency,
                          bool descriptors) {
  v1::PublishBegin begin;
  begin.set_model(goal.model);
  begin.set_version(goal.version);
  begin.set_residency(residency);
  for (const auto& [key, value] : goal.requirements) {
    (*begin.mutable_requirements())[key] = value;
  }
  begin.set_descriptors_follow(descriptors);
  for (const SourceFile& file : files.files) {
    v1::PublishFile* out = begin.add_files();
    out->set_path(file.path);
    out->set_bytes(file.bytes);
  }
  return begin;
}

struct Published {
  std::string operation;
  v1::OperationResult result;
};

// The daemon opens nothing of this user's: it is handed open descriptors.
Outcome<Published> PublishDescriptors(Context& context, Interrupts& interrupts,
                                      const std::string& what, const UniqueFd& socket,
                                      const v1::PublishBegin& begin, const SourceSet& files) {
  Outcome<v1::Control::StubInterface*> stub = context.Control();
  if (!stub.ok()) return stub.exit();
  v1::PublishResponse response;
  {
    grpc::ClientContext call;
    context.Arm(call);
    auto writer = (*stub)->Publish(&call, &response);
    v1::PublishRequest request;
    *request.mutable_begin() = begin;
    (void)writer->Write(request);  // If it cannot be written, the status says why.
    writer->WritesDone();
    if (const grpc::Status status = writer->Finish(); !status.ok()) {
      return context.RpcExit(status, what);
    }
  }
  FaultPoint("ctl.ticket");
  if (const Exit sent = SendDescriptors(socket, files, response.ticket(), interrupts); !sent.ok()) {
    // Half of the descriptors are of no use to it; without this it would wait for a minute.
    v1::GetOperationRequest request;
    request.set_id(response.operation_id());
    (void)context.Call(what, &v1::Control::StubInterface::CancelOperation, request);
    if (sent.code == ExitCode::kInterrupted) {
      context.Warn(absl::StrCat(what, ": interrupted; nothing was published"));
    }
    return sent;
  }
  const OperationEnd end = WatchOperation(context, interrupts, what, response.operation_id());
  if (!end.exit.ok()) return end.exit;
  if (end.last->state() != v1::SUCCEEDED) return FailureOf(*end.last, what);
  return Published{end.last->id(), end.last->result()};
}

Outcome<Published> PublishStream(Context& context, Interrupts& interrupts, const std::string& what,
                                 const v1::PublishBegin& begin, const SourceSet& files) {
  const auto response = StreamFiles(context, interrupts, what, begin, files);
  if (!response.ok()) return response.exit();
  return Published{response->operation_id(), response->result()};
}

// `swapped` is the operation that moved the label, where one was asked for.
void PrintPublished(Context& context, const Goal& goal, const Published& published,
                    const SwapGoal& swap, const std::optional<v1::Operation>& swapped) {
  const v1::OperationResult& result = published.result;
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("Publish");
    json.Field("operation", published.operation);
    json.Field("model", goal.model);
    json.Field("version", goal.version);
    json.Field("unchanged", result.unchanged());
    json.Field("digest", result.digest());
    json.Field("bytes", uint64_t{result.bytes()});
    json.Field("linkedBytes", uint64_t{result.linked_bytes()});
    if (swapped.has_value()) {
      json.Key("swap");
      json.BeginObject();
      WriteSwap(json, swap, *swapped);
      json.EndObject();
    }
    json.EndObject();
    context.Print(std::move(json).Take());
    return;
  }
  if (context.names()) {
    context.PrintLine(goal.Name());
    return;
  }
  std::string line = absl::StrCat(goal.Name(), result.unchanged() ? " unchanged  " : " published  ",
                                  FormatBytes(result.bytes()), "  ", ShortDigest(result.digest()));
  if (result.linked_bytes() > 0) {
    absl::StrAppend(&line, "  ", FormatBytes(result.linked_bytes()), " shared");
  }
  context.PrintLine(line);
  if (swapped.has_value()) {
    context.Print(SwapLines(*swapped, swap.model, swap.label, swap.version));
  }
}

}  // namespace

Exit Publish(Context& context, const PublishFlags& flags) {
  Outcome<Goal> goal = ParseGoal(flags);
  if (!goal.ok()) return goal.exit();
  const std::string what = absl::StrCat("publish ", goal->Name());
  const Outcome<SourceSet> files = CollectSource(flags.path);
  if (!files.ok()) return files.exit();
  if (Exit exit = CheckSingle(*files, flags.path); !exit.ok()) return exit;
  for (const std::string& skipped : files->skipped) {
    context.Warn(absl::StrCat("not published: ", skipped));
  }
  const auto required = CollectRequirements(context, *files, goal->requirements);
  if (!required.ok()) return required.exit();
  // They agree, or it would have ended here.
  goal->requirements.insert(files->manifest_requires.begin(), files->manifest_requires.end());
  if (flags.dry_run) return DryRun(context, *goal, *files, *required, what);
  // A store may hold what cannot be served, and the daemon judges; but nobody should learn of it
  // at the swap only.
  if (const auto weights = FindWeights(context, *files, *required); !weights.ok()) {
    context.Warn(absl::StrCat(weights.status().message(),
                              "; published as it is, it will not serve tensors"));
  }

  Interrupts interrupts;
  const Outcome<Sockets> sockets = context.sockets();
  if (!sockets.ok()) return sockets.exit();
  if (const auto control = context.Control(); !control.ok()) return control.exit();
  WarnOfMissingFiles(context, goal->model, *files);
  bool stream = flags.stream;
  UniqueFd handles;
  if (!stream) {
    Outcome<UniqueFd> connected = ConnectHandles(sockets->handles);
    if (connected.ok()) {
      handles = *std::move(connected);
    } else {
      context.Verbose(absl::StrCat(connected.exit().error, "; the bytes go over control.sock"));
      stream = true;
    }
  }
  const v1::PublishBegin begin = Announce(*goal, *files, flags.residency, !stream);
  const Outcome<Published> published =
      stream ? PublishStream(context, interrupts, what, begin, *files)
             : PublishDescriptors(context, interrupts, what, handles, begin, *files);
  if (!published.ok()) return published.exit();
  SwapGoal swap;
  if (goal->label.empty()) {
    PrintPublished(context, *goal, *published, swap, std::nullopt);
    return Exit::Ok();
  }

  // Printed when both are done: the end of a failure is its one line on stderr, and nothing else.
  swap.what = absl::StrCat("swap ", goal->model, ":", goal->label, " to ", goal->version);
  swap.kind = "Swap";
  swap.model = goal->model;
  swap.label = goal->label;
  swap.version = goal->version;
  v1::SwapRequest request;
  request.set_label(goal->label);
  request.add_targets()->set_model(goal->model);
  request.mutable_targets(0)->set_version(goal->version);
  const Outcome<v1::Operation> swapped = FollowSwap(
      context, interrupts, swap,
      [&](v1::Control::StubInterface& stub, grpc::ClientContext* call, grpc::CompletionQueue* queue,
          void* tag) { return stub.AsyncSwap(call, request, queue, tag); });
  if (swapped.ok()) {
    PrintPublished(context, *goal, *published, swap, *swapped);
    return Exit::Ok();
  }
  Exit exit = swapped.exit();
  if (!exit.error.empty()) {
    absl::StrAppend(&exit.error, " (", goal->Name(), " is published; `modelctl swap ", goal->model,
                    " --version ", goal->version, " --label ", goal->label, "` tries again)");
  } else {
    context.Warn(absl::StrCat(goal->Name(), " is published"));
  }
  return exit;
}

}  // namespace modelhost::modelctl
