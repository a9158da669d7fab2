// describe: one version, and where the time of its last load went.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/modelctl/messages.h"
#include "client/modelctl/ref.h"
#include "client/modelctl/render.h"
#include "client/modelctl/verbs.h"

namespace modelhost::modelctl {
namespace {

constexpr int kPhaseBarWidth = 30;
constexpr int kFilesShown = 16;

std::string Heading(absl::string_view text) { return absl::StrCat("\n", text, "\n"); }

// The first question of every slow start: which phase, and how fast was the disk?
std::string DescribeLoad(const v1::LoadReport& load, bool colour) {
  const absl::Duration took = ToAbsl(load.duration());
  std::string title = absl::StrCat("last load: ", load.source(), ", ", HumanDuration(took));
  if (load.disk_bytes() > 0) {
    absl::StrAppend(&title, ", ", FormatBytes(load.disk_bytes()), " from disk at ",
                    FormatRate(load.disk_bytes(), took));
  }
  if (load.restored_bytes() > 0) {
    absl::StrAppend(&title, ", ", FormatBytes(load.restored_bytes()), " kept over a restart");
  }
  if (load.shared_bytes() > 0) {
    absl::StrAppend(&title, ", ", FormatBytes(load.shared_bytes()), " shared with other versions");
  }
  std::string out = Heading(title);
  absl::Duration sum = absl::ZeroDuration();
  for (const v1::LoadPhase& phase : load.phases()) sum += ToAbsl(phase.duration());
  const absl::Duration whole = std::max(took, sum);
  Table table({{"PHASE"},
               {"TIME", Align::kRight},
               {"SHARE"},
               {"BYTES", Align::kRight},
               {"SPEED", Align::kRight}});
  for (const v1::LoadPhase& phase : load.phases()) {
    const absl::Duration part = ToAbsl(phase.duration());
    table.Add({phase.name(), HumanDuration(part),
               Bar(static_cast<uint64_t>(absl::ToInt64Nanoseconds(part)),
                   static_cast<uint64_t>(absl::ToInt64Nanoseconds(whole)), kPhaseBarWidth),
               phase.bytes() == 0 ? "" : FormatBytes(phase.bytes()),
               FormatRate(phase.bytes(), part)});
  }
  if (!table.empty()) absl::StrAppend(&out, table.Render(colour, true, 2));
  for (const std::string& warning : load.warnings()) {
    absl::StrAppend(&out, "  warning: ", Printable(warning), "\n");
  }
  return out;
}

std::string DescribeVersion(Context& context, const v1::Version& version,
                            const std::vector<v1::Lease>& leases) {
  const bool colour = context.colour();
  const auto age = [](const google::protobuf::Timestamp& when) {
    return FormatAge(absl::Now() - ToAbsl(when));
  };
  Table facts({{"KEY"}, {"VALUE"}});
  const std::string phase = PhaseName(version.phase());
  const std::string health = HealthName(version.health());
  facts.Add({"version", VersionName(version)});
  facts.Add({"state", Cell(phase, TintOf(phase))});
  facts.Add({"health", Cell(version.health_reason().empty()
                                ? health
                                : absl::StrCat(health, ": ", version.health_reason()),
                            TintOf(health))});
  if (!ReasonOf(version).empty()) facts.Add({"reason", ReasonOf(version)});
  facts.Add({"labels", LabelsOf(version)});
  facts.Add({"digest", version.digest().empty() ? "" : absl::StrCat("sha256:", version.digest())});
  facts.Add({"format", version.format()});
  if (version.requirements_size() > 0) facts.Add({"requires", RequirementsText(version)});
  facts.Add({"tensors", version.format().empty()
                            ? ""
                            : absl::StrCat(version.tensor_count(), ", ",
                                           FormatBytes(version.tensor_bytes()))});
  facts.Add({"files", version.files_size() == 0 ? FormatBytes(version.file_bytes())
                                                : absl::StrCat(version.files_size(), ", ",
                                                               FormatBytes(version.file_bytes()))});
  facts.Add(
      {"residency", version.tier().empty() || version.tier() == version.residency()
                        ? version.residency()
                        : absl::StrCat(version.tier(), " (", version.residency(), " asked for)")});
  facts.Add({"host", absl::StrCat(FormatBytes(version.host_bytes()), ", ",
                                  FormatBytes(version.locked_bytes()), " locked")});
  for (const v1::DeviceCopy& copy : version.devices()) {
    facts.Add({copy.gpu(), absl::StrCat(copy.mode(), ", ", FormatBytes(copy.bytes()),
                                        copy.lost() ? ", lost" : "")});
  }
  facts.Add({"leases", absl::StrCat(version.leases())});
  facts.Add({"created", version.has_created() ? absl::StrCat(Rfc3339(ToAbsl(version.created())),
                                                             "  (", age(version.created()), " ago)")
                                              : ""});
  std::string out = facts.Render(colour, false);

  if (version.has_last_load()) absl::StrAppend(&out, DescribeLoad(version.last_load(), colour));

  if (version.files_size() > 0) {
    absl::StrAppend(&out, Heading("files"));
    Table table({{"PATH"}, {"ROLE"}, {"SIZE", Align::kRight}, {"SHA256"}});
    const int shown =
        context.wide() ? version.files_size() : std::min(version.files_size(), kFilesShown);
    for (int i = 0; i < shown; ++i) {
      const v1::FileInfo& file = version.files(i);
      table.Add({file.path(), file.role(), FormatBytes(file.bytes()),
                 context.wide() ? file.sha256() : file.sha256().substr(0, 12)});
    }
    absl::StrAppend(&out, table.Render(colour, true, 2));
    if (shown < version.files_size()) {
      absl::StrAppend(&out, "  and ", version.files_size() - shown, " more (-o wide)\n");
    }
  }
  if (version.regions_size() > 0) {
    absl::StrAppend(&out, Heading("regions"));
    Table table({{"SHA256"}, {"KIND"}, {"TIER"}, {"SIZE", Align::kRight}, {"RESIDENT"}});
    for (const v1::RegionInfo& region : version.regions()) {
      table.Add({region.sha256().substr(0, 12), region.kind(), region.tier(),
                 FormatBytes(region.bytes()),
                 absl::StrCat(Bar(region.resident_bytes(), region.bytes(), 10), " ",
                              FormatBytes(region.resident_bytes()))});
    }
    absl::StrAppend(&out, table.Render(colour, true, 2));
  }
  if (!leases.empty()) {
    absl::StrAppend(&out, Heading("leases"));
    Table table({{"LEASE", Align::kRight},
                 {"PID", Align::kRight},
                 {"COMM"},
                 {"UID", Align::kRight},
                 {"LABEL"},
                 {"TRANSPORT"},
                 {"AGE", Align::kRight}});
    for (const v1::Lease& lease : leases) {
      table.Add({absl::StrCat(lease.id()), absl::StrCat(lease.pid()), lease.comm(),
                 absl::StrCat(lease.uid()), lease.label(), lease.transport(), age(lease.since())});
    }
    absl::StrAppend(&out, table.Render(colour, true, 2));
  }
  if (version.events_size() > 0) {
    absl::StrAppend(&out, Heading("events"));
    Table table({{"WHEN"}, {"WHAT"}, {"VERSION", Align::kRight}, {"DETAIL"}});
    for (const v1::Event& event : version.events()) {
      table.Add({Rfc3339(ToAbsl(event.when())), event.what(),
                 event.version() == 0 ? "" : absl::StrCat(event.version()), event.detail()});
    }
    absl::StrAppend(&out, table.Render(colour, true, 2));
  }
  return out;
}

// The version that a bare model name means: what stable names, else the newest that is READY, else
// the newest.
uint64_t Representative(const v1::Model& model) {
  uint64_t ready = 0, newest = 0;
  for (const v1::Label& label : model.labels()) {
    if (label.label() == kDefaultLabel) return label.version();
  }
  for (const v1::Version& version : model.versions()) {
    newest = std::max(newest, uint64_t{version.version()});
    if (version.phase() == v1::READY) ready = std::max(ready, uint64_t{version.version()});
  }
  return ready != 0 ? ready : newest;
}

}  // namespace

Exit Describe(Context& context, const std::string& text) {
  Outcome<Ref> ref = ParseRef(text);
  if (!ref.ok()) return ref.exit();
  const std::string what = absl::StrCat("describe ", text);
  v1::GetModelRequest model_request;
  model_request.set_model(ref->model);
  const auto model = context.Call(what, &v1::Control::StubInterface::GetModel, model_request);
  if (!model.ok()) return model.exit();

  v1::GetVersionRequest version_request;
  version_request.set_model(ref->model);
  version_request.set_label(ref->label);
  version_request.set_version(ref->version);
  if (ref->version == 0 && ref->label.empty()) version_request.set_version(Representative(*model));
  if (version_request.version() == 0 && ref->label.empty()) {
    return Fail(ExitCode::kNotFound,
                absl::StrCat(what, ": it has no usable version (`modelctl versions ", ref->model,
                             "` says why)"));
  }
  const auto version = context.Call(what, &v1::Control::StubInterface::GetVersion, version_request);
  if (!version.ok()) return version.exit();

  v1::ListLeasesRequest lease_request;
  lease_request.set_model(ref->model);
  const auto all = context.Call(what, &v1::Control::StubInterface::ListLeases, lease_request);
  if (!all.ok()) return all.exit();
  std::vector<v1::Lease> leases;
  for (const v1::Lease& lease : all->leases()) {
    if (lease.version() == version->version()) leases.push_back(lease);
  }

  if (context.names()) {
    context.PrintLine(VersionName(*version));
    return Exit::Ok();
  }
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("Description");
    json.Key("model");
    json.BeginObject();
    WriteModel(json, *model);
    json.EndObject();
    json.Key("version");
    json.BeginObject();
    WriteVersion(json, *version);
    json.EndObject();
    json.Key("leases");
    json.BeginArray();
    for (const v1::Lease& lease : leases) {
      json.BeginObject();
      WriteLease(json, lease);
      json.EndObject();
    }
    json.EndArray();
    json.EndObject();
    context.Print(std::move(json).Take());
    return Exit::Ok();
  }
  const ModelSummary summary = Summarise(*model);
  Table table({{"KEY"}, {"VALUE"}});
  table.Add({"model", model->name()});
  table.Add({"labels", summary.labels});
  table.Add({"versions ready", summary.versions_ready});
  if (!model->policy_error().empty()) {
    table.Add({"policy", Cell(model->policy_error(), Tint::kBad)});
  }
  context.Print(table.Render(context.colour(), false));
  context.Print("\n");
  context.Print(DescribeVersion(context, *version, leases));
  return Exit::Ok();
}

}  // namespace modelhost::modelctl
