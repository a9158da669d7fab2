// Verbs that look and change nothing: ls, versions, label ls, clients, leases, health.
#include <algorithm>
#include <chrono>
#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/modelctl/messages.h"
#include "client/modelctl/ref.h"
#include "client/modelctl/render.h"
#include "client/modelctl/verbs.h"

namespace modelhost::modelctl {
namespace {

// Versions that are neither in use nor wrong are of interest only when they are new.
constexpr size_t kStagedShown = 10;

std::string AgeOf(const google::protobuf::Timestamp& since) {
  return FormatAge(absl::Now() - ToAbsl(since));
}

// A list as JSON, as one object per line, or as names.
template <typename Items, typename Write, typename Name>
bool PrintAsData(Context& context, absl::string_view kind, const Items& items, Write write,
                 Name name) {
  if (context.names()) {
    for (const auto& item : items) context.PrintLine(name(item));
    return true;
  }
  if (!context.json()) return false;
  if (context.jsonl()) {
    for (const auto& item : items) {
      JsonWriter json(JsonStyle::kOneLine);
      json.BeginDocument(kind);
      write(json, item);
      json.EndObject();
      context.Print(std::move(json).Take());
    }
    return true;
  }
  JsonWriter json(JsonStyle::kPretty);
  json.BeginDocument(absl::StrCat(kind, "List"));
  json.Key("items");
  json.BeginArray();
  for (const auto& item : items) {
    json.BeginObject();
    write(json, item);
    json.EndObject();
  }
  json.EndArray();
  json.EndObject();
  context.Print(std::move(json).Take());
  return true;
}

std::vector<Table::Column> ModelColumns(bool wide) {
  std::vector<Table::Column> columns = {{"MODEL"},
                                        {"LABELS"},
                                        {"VERSIONS READY"},
                                        {"HOST", Align::kRight},
                                        {"DEVICE", Align::kRight},
                                        {"LEASES", Align::kRight},
                                        {"HEALTH"}};
  if (wide) {
    columns.insert(columns.end(), {{"RESIDENCY"}, {"REQUIRED"}, {"KEEP PREVIOUS"}, {"WHY"}});
  }
  return columns;
}

Cell DeviceCell(const ModelSummary& summary) {
  if (summary.device_lost) return {"LOST", Tint::kBad};
  return {summary.device_bytes == 0 ? "" : FormatBytes(summary.device_bytes)};
}

std::vector<Cell> ModelRow(const v1::Model& model, bool wide) {
  const ModelSummary summary = Summarise(model);
  std::vector<Cell> row = {model.name(),
                           summary.labels,
                           summary.versions_ready,
                           summary.host_bytes == 0 ? "" : FormatBytes(summary.host_bytes),
                           DeviceCell(summary),
                           absl::StrCat(summary.leases),
                           Cell(summary.health, TintOf(summary.health))};
  if (wide) {
    row.emplace_back(model.residency());
    row.emplace_back(model.required() ? "yes" : "no");
    row.emplace_back(HumanDuration(ToAbsl(model.keep_previous())));
    row.emplace_back(model.policy_error().empty() ? summary.why : model.policy_error());
  }
  return row;
}

// One line for one model, as --watch prints it where nothing can be redrawn.
std::string WatchLine(Context& context, const v1::Model& model) {
  if (context.names()) return absl::StrCat(model.name(), "\n");
  if (context.json()) {
    JsonWriter json(JsonStyle::kOneLine);
    json.BeginDocument("Model");
    WriteModel(json, model);
    json.EndObject();
    return std::move(json).Take();
  }
  std::vector<Table::Column> columns = ModelColumns(context.wide());
  Table table(std::move(columns));
  table.Add(ModelRow(model, context.wide()));
  return table.Render(context.colour(), false);
}

Exit WatchModels(Context& context) {
  Outcome<v1::Control::StubInterface*> stub = context.Control();
  if (!stub.ok()) return stub.exit();
  grpc::ClientContext call;
  if (context.globals().timeout.has_value()) {
    call.set_deadline(std::chrono::system_clock::now() +
                      absl::ToChronoMilliseconds(*context.globals().timeout));
  }
  const auto stream = (*stub)->WatchModels(&call, v1::WatchModelsRequest());
  const bool redraw = context.terminal().out_is_tty && !context.json() && !context.names();
  std::map<std::string, v1::Model> models;
  v1::Model model;
  bool header = !context.json() && !context.names() && !redraw;
  while (stream->Read(&model)) {
    std::string text;
    if (redraw) {
      models[model.name()] = model;
      Table table(ModelColumns(context.wide()));
      for (const auto& [name, each] : models) table.Add(ModelRow(each, context.wide()));
      text = absl::StrCat("\x1b[H\x1b[2J", table.Render(context.colour()));
    } else {
      if (header) text = Table(ModelColumns(context.wide())).Render(context.colour());
      header = false;
      absl::StrAppend(&text, WatchLine(context, model));
    }
    if (!context.WriteNow(text)) {
      call.TryCancel();
      return Exit::Ok();
    }
  }
  const grpc::Status status = stream->Finish();
  // A watch that lasted as long as it was told to is no failure.
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) return Exit::Ok();
  return status.ok() ? Exit::Ok() : context.RpcExit(status, "watch");
}

}  // namespace

Exit ListModels(Context& context, bool watch) {
  if (watch) return WatchModels(context);
  const auto models =
      context.Call("ls", &v1::Control::StubInterface::ListModels, v1::ListModelsRequest());
  if (!models.ok()) return models.exit();
  if (PrintAsData(context, "Model", models->models(), WriteModel,
                  [](const v1::Model& model) { return model.name(); })) {
    return Exit::Ok();
  }
  Table table(ModelColumns(context.wide()));
  for (const v1::Model& model : models->models()) table.Add(ModelRow(model, context.wide()));
  context.Print(table.Render(context.colour()));
  if (table.empty()) {
    context.Note("the store has no models yet (`modelctl publish DIR --model M --version 1`)");
  }
  return Exit::Ok();
}

Exit ListVersions(Context& context, const std::string& model, bool all) {
  Outcome<std::string> name = ParseModelName(model);
  if (!name.ok()) return name.exit();
  v1::ListVersionsRequest request;
  request.set_model(*name);
  const auto answer = context.Call(absl::StrCat("versions ", model),
                                   &v1::Control::StubInterface::ListVersions, request);
  if (!answer.ok()) return answer.exit();
  if (PrintAsData(context, "Version", answer->versions(), WriteVersion, VersionName)) {
    return Exit::Ok();
  }
  std::vector<Table::Column> columns = {{"VERSION", Align::kRight},
                                        {"STATE"},
                                        {"HEALTH"},
                                        {"LABELS"},
                                        {"FORMAT"},
                                        {"SIZE", Align::kRight},
                                        {"DIGEST"},
                                        {"LEASES", Align::kRight},
                                        {"AGE", Align::kRight},
                                        {"REASON"}};
  if (context.wide()) {
    columns.insert(columns.end() - 1, {{"RESIDENCY"},
                                       {"TIER"},
                                       {"HOST", Align::kRight},
                                       {"LOCKED", Align::kRight},
                                       {"TENSORS", Align::kRight},
                                       {"CREATED"},
                                       {"REQUIRES"}});
  }
  size_t left_out = 0, staged = 0;
  std::vector<const v1::Version*> shown;
  for (auto it = answer->versions().rbegin(); it != answer->versions().rend(); ++it) {
    const bool plain = it->phase() == v1::STAGED && it->labels().empty();
    if (plain && ++staged > kStagedShown && !all) {
      ++left_out;
    } else {
      shown.push_back(&*it);
    }
  }
  std::reverse(shown.begin(), shown.end());
  Table table(std::move(columns));
  for (const v1::Version* version : shown) {
    std::vector<Cell> row = {
        version->version() == 0 ? version->name() : absl::StrCat(version->version()),
        Cell(PhaseName(version->phase()), TintOf(PhaseName(version->phase()))),
        Cell(HealthName(version->health()), TintOf(HealthName(version->health()))),
        LabelsOf(*version),
        version->format(),
        FormatBytes(version->file_bytes()),
        context.wide() && !version->digest().empty() ? absl::StrCat("sha256:", version->digest())
                                                     : ShortDigest(version->digest()),
        absl::StrCat(version->leases()),
        version->has_created() ? AgeOf(version->created()) : ""};
    if (context.wide()) {
      row.emplace_back(version->residency());
      row.emplace_back(version->tier());
      row.emplace_back(FormatBytes(version->host_bytes()));
      row.emplace_back(FormatBytes(version->locked_bytes()));
      row.emplace_back(absl::StrCat(version->tensor_count()));
      row.emplace_back(version->has_created() ? Rfc3339(ToAbsl(version->created())) : "");
      row.emplace_back(RequirementsText(*version));
    }
    row.emplace_back(ReasonOf(*version));
    table.Add(std::move(row));
  }
  context.Print(table.Render(context.colour()));
  if (left_out > 0) {
    context.Note(absl::StrCat(Plural(left_out, "older version"),
                              " on disk only not shown (--all shows them)"));
  }
  return Exit::Ok();
}

Exit LabelList(Context& context, const std::string& model) {
  std::vector<v1::Label> labels;
  if (model.empty()) {
    const auto models =
        context.Call("label ls", &v1::Control::StubInterface::ListModels, v1::ListModelsRequest());
    if (!models.ok()) return models.exit();
    for (const v1::Model& each : models->models()) {
      labels.insert(labels.end(), each.labels().begin(), each.labels().end());
    }
  } else {
    Outcome<std::string> name = ParseModelName(model);
    if (!name.ok()) return name.exit();
    v1::GetModelRequest request;
    request.set_model(*name);
    const auto found = context.Call(absl::StrCat("label ls ", model),
                                    &v1::Control::StubInterface::GetModel, request);
    if (!found.ok()) return found.exit();
    labels.assign(found->labels().begin(), found->labels().end());
  }
  if (PrintAsData(context, "Label", labels, WriteLabel, [](const v1::Label& label) {
        return absl::StrCat(label.model(), ":", label.label());
      })) {
    return Exit::Ok();
  }
  Table table({{"MODEL"},
               {"LABEL"},
               {"VERSION", Align::kRight},
               {"GENERATION", Align::kRight},
               {"PREVIOUS", Align::kRight},
               {"DIGEST"},
               {"CHANGED", Align::kRight}});
  for (const v1::Label& label : labels) {
    table.Add({label.model(), label.label(), absl::StrCat(label.version()),
               absl::StrCat(label.generation()),
               label.previous() == 0 ? "" : absl::StrCat(label.previous()),
               ShortDigest(label.digest()), label.has_changed() ? AgeOf(label.changed()) : ""});
  }
  context.Print(table.Render(context.colour()));
  return Exit::Ok();
}

Exit Clients(Context& context, const std::string& model) {
  v1::ListClientsRequest request;
  if (!model.empty()) {
    Outcome<std::string> name = ParseModelName(model);
    if (!name.ok()) return name.exit();
  }
  request.set_model(model);
  const auto answer = context.Call("clients", &v1::Control::StubInterface::ListClients, request);
  if (!answer.ok()) return answer.exit();
  if (PrintAsData(context, "Client", answer->clients(), WriteClient,
                  [](const v1::ClientInfo& client) { return absl::StrCat(client.pid()); })) {
    return Exit::Ok();
  }
  Table table({{"PID", Align::kRight},
               {"COMM"},
               {"UID", Align::kRight},
               {"MODEL"},
               {"VERSION"},
               {"TRANSPORT"},
               {"AGE", Align::kRight}});
  for (const v1::ClientInfo& client : answer->clients()) {
    const auto row = [&](std::string name, std::string version) {
      table.Add({absl::StrCat(client.pid()), client.comm(), absl::StrCat(client.uid()),
                 std::move(name), std::move(version), client.transport(),
                 client.has_since() ? AgeOf(client.since()) : ""});
    };
    if (client.leases().empty()) row("", "");
    for (const v1::Lease& lease : client.leases()) {
      row(lease.model(), absl::StrCat(lease.version()));
    }
  }
  context.Print(table.Render(context.colour()));
  return Exit::Ok();
}

namespace {

Cell StaleCell(const v1::Lease& lease) {
  if (lease.released()) return Cell("released", Tint::kWarn);
  if (!lease.stale()) return Cell("");
  return Cell(lease.has_stale_for() ? HumanDuration(ToAbsl(lease.stale_for())) : "stale",
              Tint::kWarn);
}

}  // namespace

Exit Leases(Context& context, const std::string& model, bool stale) {
  v1::ListLeasesRequest request;
  if (!model.empty()) {
    Outcome<std::string> name = ParseModelName(model);
    if (!name.ok()) return name.exit();
  }
  request.set_model(model);
  request.set_stale_only(stale);
  const auto answer = context.Call("leases", &v1::Control::StubInterface::ListLeases, request);
  if (!answer.ok()) return answer.exit();
  if (PrintAsData(context, "Lease", answer->leases(), WriteLease,
                  [](const v1::Lease& lease) { return absl::StrCat(lease.id()); })) {
    return Exit::Ok();
  }
  Table table({{"LEASE", Align::kRight},
               {"PID", Align::kRight},
               {"COMM"},
               {"UID", Align::kRight},
               {"MODEL"},
               {"VERSION", Align::kRight},
               {"LABEL"},
               {"TRANSPORT"},
               {"AGE", Align::kRight},
               {"STALE"}});
  for (const v1::Lease& lease : answer->leases()) {
    table.Add({absl::StrCat(lease.id()), absl::StrCat(lease.pid()), lease.comm(),
               absl::StrCat(lease.uid()), lease.model(), absl::StrCat(lease.version()),
               lease.label(), lease.transport(), lease.has_since() ? AgeOf(lease.since()) : "",
               StaleCell(lease)});
  }
  context.Print(table.Render(context.colour()));
  return Exit::Ok();
}

Exit VersionVerb(Context& context) {
  const auto print = [&](const char* daemon_version) {
    if (context.json()) {
      JsonWriter json(context.json_style());
      json.BeginDocument("ProgramVersion");
      json.Field("modelctl", kVersion);
      json.Key("modelhostd");
      daemon_version == nullptr ? json.Null() : json.String(daemon_version);
      json.EndObject();
      context.Print(std::move(json).Take());
      return;
    }
    context.PrintLine(absl::StrCat("modelctl ", kVersion));
    if (daemon_version != nullptr) context.PrintLine(absl::StrCat("modelhostd ", daemon_version));
  };
  // The daemon's own is an extra: without a daemon the answer is still right.
  const auto status =
      context.Call("version", &v1::Control::StubInterface::GetStatus, v1::GetStatusRequest());
  if (!status.ok()) context.Verbose(status.exit().error);
  print(status.ok() ? status->version().c_str() : nullptr);
  return Exit::Ok();
}

Exit Health(Context& context, const std::string& model) {
  std::vector<v1::Model> models;
  std::vector<std::string> not_ready, degraded;
  if (model.empty()) {
    const auto status =
        context.Call("health", &v1::Control::StubInterface::GetStatus, v1::GetStatusRequest());
    if (!status.ok()) return status.exit();
    const auto all =
        context.Call("health", &v1::Control::StubInterface::ListModels, v1::ListModelsRequest());
    if (!all.ok()) return all.exit();
    models.assign(all->models().begin(), all->models().end());
    not_ready.assign(status->not_ready().begin(), status->not_ready().end());
    if (!status->ready() && not_ready.empty())
      not_ready.emplace_back("the daemon is not ready yet");
    if (status->ready()) not_ready.clear();
    if (!status->store_error().empty()) degraded.push_back(status->store_error());
  } else {
    Outcome<std::string> name = ParseModelName(model);
    if (!name.ok()) return name.exit();
    v1::GetModelRequest request;
    request.set_model(*name);
    const auto found = context.Call(absl::StrCat("health ", model),
                                    &v1::Control::StubInterface::GetModel, request);
    if (!found.ok()) return found.exit();
    models.push_back(*found);
    const ModelSummary summary = Summarise(*found);
    if (found->labels().empty()) {
      not_ready.emplace_back("no label names a version (`modelctl swap` sets one)");
    } else if (summary.health == "NOT_READY") {
      not_ready.push_back(summary.why);
    }
  }
  for (const v1::Model& each : models) {
    const ModelSummary summary = Summarise(each);
    // Of the whole daemon only required models decide whether it is ready, and a load under way is
    // no illness.
    if (summary.health == "DEGRADED" || summary.health == "SUSPECT" ||
        (model.empty() && summary.broken)) {
      degraded.push_back(absl::StrCat(each.name(), " ", summary.health, ": ", summary.why));
    }
    if (!each.policy_error().empty()) degraded.push_back(each.policy_error());
  }
  if (!not_ready.empty()) {
    return Fail(ExitCode::kOther, absl::StrCat(model.empty() ? "daemon" : model,
                                               ": not ready: ", absl::StrJoin(not_ready, "; ")));
  }
  const char* verdict = degraded.empty() ? "ok" : "degraded";
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("Health");
    json.Field("model", model);
    json.Field("health", verdict);
    json.Key("reasons");
    json.BeginArray();
    for (const std::string& reason : degraded) json.String(reason);
    json.EndArray();
    json.EndObject();
    context.Print(std::move(json).Take());
  } else if (!context.globals().quiet) {
    context.PrintLine(Printable(
        degraded.empty() ? verdict : absl::StrCat(verdict, ": ", absl::StrJoin(degraded, "; "))));
  }
  return Exit{degraded.empty() ? ExitCode::kOk : ExitCode::kDegraded, ""};
}

}  // namespace modelhost::modelctl
