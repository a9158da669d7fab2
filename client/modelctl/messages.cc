#include "client/modelctl/messages.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/modelctl/desired.h"
#include "client/modelctl/render.h"

namespace modelhost::modelctl {
namespace {

double SecondsOf(const google::protobuf::Duration& duration) {
  return absl::ToDoubleSeconds(ToAbsl(duration));
}

template <typename Items, typename Write>
void WriteArray(JsonWriter& json, absl::string_view key, const Items& items, Write write) {
  json.Key(key);
  json.BeginArray();
  for (const auto& item : items) write(item);
  json.EndArray();
}

template <typename Items, typename Write>
void WriteObjects(JsonWriter& json, absl::string_view key, const Items& items, Write write) {
  WriteArray(json, key, items, [&](const auto& item) {
    json.BeginObject();
    write(json, item);
    json.EndObject();
  });
}

template <typename Texts>
void WriteTexts(JsonWriter& json, absl::string_view key, const Texts& texts) {
  WriteArray(json, key, texts, [&](const std::string& text) { json.String(text); });
}

void WriteLoad(JsonWriter& json, const v1::LoadReport& load) {
  json.Field("source", load.source());
  json.FieldSeconds("durationSeconds", SecondsOf(load.duration()));
  WriteObjects(json, "phases", load.phases(), [](JsonWriter& out, const v1::LoadPhase& phase) {
    out.Field("name", phase.name());
    out.FieldSeconds("durationSeconds", SecondsOf(phase.duration()));
    out.Field("bytes", uint64_t{phase.bytes()});
  });
  json.Field("diskBytes", uint64_t{load.disk_bytes()});
  json.Field("sharedBytes", uint64_t{load.shared_bytes()});
  json.Field("restoredBytes", uint64_t{load.restored_bytes()});
  json.Field("restoredIndex", load.restored_index());
  WriteTexts(json, "warnings", load.warnings());
}

}  // namespace

// Of a newer daemon: shown, never taken for something else.
std::string UnknownEnum(int number) { return absl::StrCat("UNKNOWN_", number); }

std::string PhaseName(v1::VersionPhase phase) {
  if (phase == v1::VERSION_PHASE_UNSPECIFIED) return "";
  const std::string name = v1::VersionPhase_Name(phase);
  return name.empty() ? UnknownEnum(phase) : name;
}

std::string HealthName(v1::Health health) {
  if (health == v1::HEALTH_UNSPECIFIED) return "";
  const std::string name = v1::Health_Name(health);
  return name.empty() ? UnknownEnum(health) : name;
}

std::string VersionName(const v1::Version& version) {
  return absl::StrCat(version.model(), "@",
                      version.version() == 0 ? version.name() : absl::StrCat(version.version()));
}

std::map<std::string, std::string> RequirementsOf(const v1::Version& version) {
  return {version.requirements().begin(), version.requirements().end()};
}

std::string RequirementsText(const v1::Version& version) {
  return absl::StrJoin(RequirementsOf(version), ", ", absl::PairFormatter("="));
}

std::string LabelsOf(const v1::Version& version) { return absl::StrJoin(version.labels(), ","); }

std::string ReasonOf(const v1::Version& version) {
  if (version.phase() == v1::LOADING && version.load_bytes_total() > 0) {
    return absl::StrCat(version.load_phase(), " ", FormatBytes(version.load_bytes_done()), " of ",
                        FormatBytes(version.load_bytes_total()));
  }
  if (!version.reason().empty()) return version.reason();
  return version.health_reason();
}

std::string Move(const v1::LabelChange& change) {
  const auto number = [](uint64_t version) {
    return version == 0 ? std::string("none") : absl::StrCat(version);
  };
  return absl::StrCat(number(change.from()), " -> ", number(change.to()));
}

ModelSummary Summarise(const v1::Model& model) {
  ModelSummary summary;
  summary.labels = absl::StrJoin(model.labels(), ",", [](std::string* out, const v1::Label& label) {
    absl::StrAppend(out, label.label(), "=", label.version());
  });
  std::vector<uint64_t> ready;
  v1::Health worst = v1::HEALTH_UNSPECIFIED;
  for (const v1::Version& version : model.versions()) {
    summary.host_bytes += version.host_bytes();
    summary.device_bytes += version.device_bytes();
    summary.device_lost |= version.device_state() == "LOST";
    summary.leases += version.leases();
    if (version.phase() != v1::READY) continue;
    ready.push_back(version.version());
    if (version.health() > worst) {
      worst = version.health();
      summary.why = absl::StrCat(VersionName(version), " ", version.health_reason());
    }
  }
  if (worst <= v1::OK) summary.why.clear();
  summary.versions_ready = absl::StrJoin(ready, ",");
  summary.health = HealthName(worst);
  for (const v1::Label& label : model.labels()) {
    const v1::Version* named = nullptr;
    for (const v1::Version& version : model.versions()) {
      if (version.version() == label.version()) named = &version;
    }
    if (named != nullptr && named->phase() == v1::READY) continue;
    summary.health = "NOT_READY";
    summary.broken = named == nullptr || named->phase() == v1::FAILED ||
                     named->phase() == v1::QUARANTINED || named->phase() == v1::INVALID;
    summary.why = absl::StrCat(label.label(), " names ", label.version(), ", which is ",
                               named == nullptr ? "gone" : PhaseName(named->phase()));
    if (named != nullptr && !ReasonOf(*named).empty()) {
      absl::StrAppend(&summary.why, ": ", ReasonOf(*named));
    }
    break;
  }
  return summary;
}

void WriteLabel(JsonWriter& json, const v1::Label& label) {
  json.Field("model", label.model());
  json.Field("label", label.label());
  json.Field("version", uint64_t{label.version()});
  json.Field("generation", uint64_t{label.generation()});
  json.Field("previous", uint64_t{label.previous()});
  if (label.has_changed()) json.Field("changed", Rfc3339(ToAbsl(label.changed())));
  json.Field("digest", label.digest());
}

void WriteVersion(JsonWriter& json, const v1::Version& version) {
  json.Field("model", version.model());
  json.Field("version", uint64_t{version.version()});
  json.Field("name", version.name());
  json.Field("state", PhaseName(version.phase()));
  json.Field("health", HealthName(version.health()));
  json.Field("healthReason", version.health_reason());
  json.Field("reason", version.reason());
  WriteTexts(json, "labels", version.labels());
  json.Field("digest", version.digest());
  json.Field("format", version.format());
  json.Field("fileBytes", uint64_t{version.file_bytes()});
  if (version.has_created()) json.Field("created", Rfc3339(ToAbsl(version.created())));
  json.Field("leases", uint64_t{version.leases()});
  json.Field("residency", version.residency());
  json.Field("tier", version.tier());
  json.Field("hostBytes", uint64_t{version.host_bytes()});
  json.Field("lockedBytes", uint64_t{version.locked_bytes()});
  json.Field("deviceBytes", uint64_t{version.device_bytes()});
  json.Field("deviceState", version.device_state());
  WriteObjects(json, "devices", version.devices(), [](JsonWriter& out, const v1::DeviceCopy& copy) {
    out.Field("gpu", copy.gpu());
    out.Field("mode", copy.mode());
    out.Field("bytes", uint64_t{copy.bytes()});
    out.Field("segments", uint64_t{copy.segments()});
    out.Field("lost", copy.lost());
  });
  json.Field("tensorCount", uint64_t{version.tensor_count()});
  json.Field("tensorBytes", uint64_t{version.tensor_bytes()});
  json.Key("requires");
  json.BeginObject();
  for (const auto& [key, value] : RequirementsOf(version)) json.Field(key, value);
  json.EndObject();
  if (version.phase() == v1::LOADING) {
    json.Key("loading");
    json.BeginObject();
    json.Field("phase", version.load_phase());
    json.Field("bytesDone", uint64_t{version.load_bytes_done()});
    json.Field("bytesTotal", uint64_t{version.load_bytes_total()});
    json.EndObject();
  }
  if (version.has_last_load()) {
    json.Key("lastLoad");
    json.BeginObject();
    WriteLoad(json, version.last_load());
    json.EndObject();
  }
  if (version.files_size() > 0) {
    WriteObjects(json, "files", version.files(), [](JsonWriter& out, const v1::FileInfo& file) {
      out.Field("path", file.path());
      out.Field("role", file.role());
      out.Field("bytes", uint64_t{file.bytes()});
      out.Field("sha256", file.sha256());
    });
  }
  if (version.regions_size() > 0) {
    WriteObjects(json, "regions", version.regions(),
                 [](JsonWriter& out, const v1::RegionInfo& region) {
                   out.Field("sha256", region.sha256());
                   out.Field("bytes", uint64_t{region.bytes()});
                   out.Field("regionKind", region.kind());
                   out.Field("tier", region.tier());
                   out.Field("residentBytes", uint64_t{region.resident_bytes()});
                 });
  }
  if (version.events_size() > 0) {
    WriteObjects(json, "events", version.events(), [](JsonWriter& out, const v1::Event& event) {
      out.Field("when", Rfc3339(ToAbsl(event.when())));
      out.Field("what", event.what());
      out.Field("version", uint64_t{event.version()});
      out.Field("detail", event.detail());
    });
  }
}

void WriteModel(JsonWriter& json, const v1::Model& model) {
  const ModelSummary summary = Summarise(model);
  json.Field("name", model.name());
  WriteObjects(json, "labels", model.labels(), WriteLabel);
  WriteObjects(json, "versions", model.versions(), WriteVersion);
  json.Field("residency", model.residency());
  json.Field("required", model.required());
  json.FieldSeconds("keepPreviousSeconds", SecondsOf(model.keep_previous()));
  json.Field("policyError", model.policy_error());
  json.Field("hostBytes", summary.host_bytes);
  json.Field("deviceBytes", summary.device_bytes);
  json.Field("device", model.device());
  json.Field("leases", summary.leases);
  json.Field("health", summary.health);
}

void WriteLease(JsonWriter& json, const v1::Lease& lease) {
  json.Field("id", uint64_t{lease.id()});
  json.Field("session", uint64_t{lease.session()});
  json.Field("model", lease.model());
  json.Field("version", uint64_t{lease.version()});
  json.Field("label", lease.label());
  json.Field("transport", lease.transport());
  json.Field("gpu", lease.gpu());
  if (lease.has_since()) json.Field("since", Rfc3339(ToAbsl(lease.since())));
  json.Field("pid", lease.pid());
  json.Field("uid", lease.uid());
  json.Field("comm", lease.comm());
  json.Field("stale", lease.stale());
  if (lease.has_stale_for()) json.FieldSeconds("staleSeconds", SecondsOf(lease.stale_for()));
  json.Field("released", lease.released());
}

void WriteClient(JsonWriter& json, const v1::ClientInfo& client) {
  json.Field("session", uint64_t{client.session()});
  json.Field("pid", client.pid());
  json.Field("uid", client.uid());
  json.Field("comm", client.comm());
  json.Field("transport", client.transport());
  if (client.has_since()) json.Field("since", Rfc3339(ToAbsl(client.since())));
  WriteObjects(json, "leases", client.leases(), WriteLease);
}

void WriteChange(JsonWriter& json, const v1::LabelChange& change) {
  json.Field("model", change.model());
  json.Field("label", change.label());
  json.Field("from", uint64_t{change.from()});
  json.Field("to", uint64_t{change.to()});
  json.Field("generation", uint64_t{change.generation()});
}

void WriteStatus(JsonWriter& json, const v1::GetStatusResponse& status) {
  json.Field("version", status.version());
  json.Field("revision", status.revision());
  json.Field("epoch", uint64_t{status.epoch()});
  json.Field("pid", status.pid());
  if (status.has_started()) json.Field("started", Rfc3339(ToAbsl(status.started())));
  json.FieldSeconds("uptimeSeconds", SecondsOf(status.uptime()));
  json.Field("ready", status.ready());
  WriteTexts(json, "notReady", status.not_ready());
  json.Field("store", status.store());
  json.Field("storeError", status.store_error());
  json.Field("runtimeDir", status.runtime_dir());
  json.Field("metricsAddress", status.metrics_address());
  WriteObjects(json, "budgets", status.pools(), [](JsonWriter& out, const v1::BudgetPool& pool) {
    out.Field("name", pool.name());
    out.Field("unlimited", pool.unlimited());
    out.Key("limitBytes");
    if (pool.unlimited()) {
      out.Null();
    } else {
      out.Uint(pool.limit_bytes());
    }
    out.Field("reservedBytes", uint64_t{pool.reserved_bytes()});
  });
  json.Field("memlock", status.memlock_policy());
  json.Field("fileProtection", status.file_protection());
  json.Field("clients", uint64_t{status.clients()});
  json.Field("leases", uint64_t{status.leases()});
  json.Field("models", uint64_t{status.models()});
  json.Field("invalidTransitions", uint64_t{status.invalid_transitions()});
  json.Field("journalError", status.journal_error());
  const v1::RestartStatus& restart = status.restart();
  json.Key("restart");
  json.BeginObject();
  json.Field("fdStore", restart.fd_store());
  json.Field("parked", uint64_t{restart.parked()});
  json.Field("received", uint64_t{restart.received()});
  json.Field("foreign", uint64_t{restart.foreign()});
  json.Field("restoredVersions", uint64_t{restart.restored_versions()});
  json.Field("restoredBytes", uint64_t{restart.restored_bytes()});
  json.Field("rereadVersions", uint64_t{restart.reread_versions()});
  json.Field("failedVersions", uint64_t{restart.failed_versions()});
  json.Field("problem", restart.problem());
  json.EndObject();
  json.Key("desired");
  json.BeginObject();
  WriteDesired(json, status.desired());
  json.EndObject();
  json.Key("device");
  json.BeginObject();
  json.Field("mode", status.device_mode());
  json.Field("reason", status.device_reason());
  WriteObjects(json, "devices", status.devices(),
               [](JsonWriter& out, const v1::DeviceStatus& device) {
                 out.Field("uuid", device.uuid());
                 out.Field("name", device.name());
                 out.Field("driver", device.driver());
                 out.Field("mode", device.mode());
                 out.Field("reason", device.reason());
                 out.Field("limits", device.limits());
                 out.Field("usable", device.usable());
                 out.Field("problem", device.problem());
                 out.Field("totalBytes", uint64_t{device.total_bytes()});
                 out.Field("budgetBytes", uint64_t{device.budget_bytes()});
                 out.Field("reservedBytes", uint64_t{device.reserved_bytes()});
                 out.Field("copies", uint64_t{device.copies()});
                 out.Field("copiedBytes", uint64_t{device.copied_bytes()});
                 out.Field("importers", uint64_t{device.importers()});
                 out.Field("lostCopies", uint64_t{device.lost_copies()});
               });
  json.EndObject();
}

void WriteEvent(JsonWriter& json, const v1::Event& event) {
  json.Field("sequence", uint64_t{event.sequence()});
  json.Field("epoch", uint64_t{event.epoch()});
  json.Field("when", Rfc3339(ToAbsl(event.when())));
  json.Field("what", event.what());
  json.Field("model", event.model());
  json.Field("version", uint64_t{event.version()});
  json.Field("detail", event.detail());
  json.Field("lost", uint64_t{event.lost()});
}

void WriteResult(JsonWriter& json, const v1::OperationResult& result) {
  json.Field("unchanged", result.unchanged());
  WriteObjects(json, "changes", result.changes(), WriteChange);
  json.FieldSeconds("loadSeconds", SecondsOf(result.load()));
  json.FieldSeconds("flipSeconds", SecondsOf(result.flip()));
  json.Field("drainingLeases", uint64_t{result.draining_leases()});
  json.Field("digest", result.digest());
  json.Field("bytes", uint64_t{result.bytes()});
  json.Field("linkedBytes", uint64_t{result.linked_bytes()});
  json.Field("removedVersions", uint64_t{result.removed_versions()});
  json.Field("freedBytes", uint64_t{result.freed_bytes()});
  if (!result.strategy().empty()) json.Field("strategy", result.strategy());
  if (result.has_gap()) json.FieldSeconds("gapSeconds", SecondsOf(result.gap()));
}

}  // namespace modelhost::modelctl
