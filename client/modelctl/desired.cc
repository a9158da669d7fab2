#include "client/modelctl/desired.h"

#include "absl/strings/str_cat.h"

namespace modelhost::modelctl {
namespace {

constexpr int kDesiredRowsShown = 10;

Cell DesiredSummary(const v1::DesiredStatus& desired) {
  std::string text = absl::StrCat(desired.file(), ": ", desired.state());
  if (!desired.error().empty()) {
    return {absl::StrCat(text, ": ", desired.error(), "; nothing is started until it is good"),
            Tint::kBad};
  }
  absl::StrAppend(&text, ", ", desired.in_sync(), " of ", Plural(desired.wanted(), "label"),
                  " in sync");
  if (desired.pending() > 0) absl::StrAppend(&text, ", ", desired.pending(), " pending");
  if (desired.failed() > 0) absl::StrAppend(&text, ", ", desired.failed(), " failed");
  if (desired.drifting() > 0) absl::StrAppend(&text, ", ", desired.drifting(), " drifting");
  const Tint tint = desired.failed() > 0                    ? Tint::kBad
                    : desired.in_sync() == desired.wanted() ? Tint::kGood
                                                            : Tint::kWarn;
  return {text, tint};
}

}  // namespace

void WriteDesired(JsonWriter& json, const v1::DesiredStatus& desired) {
  json.Field("file", desired.file());
  json.Field("state", desired.state());
  json.Field("error", desired.error());
  json.Field("wanted", uint64_t{desired.wanted()});
  json.Field("inSync", uint64_t{desired.in_sync()});
  json.Field("pending", uint64_t{desired.pending()});
  json.Field("failed", uint64_t{desired.failed()});
  json.Field("drifting", uint64_t{desired.drifting()});
  if (desired.has_last_read()) json.Field("lastRead", Rfc3339(ToAbsl(desired.last_read())));
  if (desired.has_last_converged()) {
    json.Field("lastConverged", Rfc3339(ToAbsl(desired.last_converged())));
  }
  json.Key("labels");
  json.BeginArray();
  for (const v1::DesiredLabel& row : desired.labels()) {
    json.BeginObject();
    json.Field("model", row.model());
    json.Field("label", row.label());
    json.Field("want", uint64_t{row.want()});
    json.Field("have", uint64_t{row.have()});
    json.Field("state", row.state());
    json.Field("drifting", row.drifting());
    json.Field("reason", row.reason());
    json.Field("line", uint64_t{row.line()});
    json.EndObject();
  }
  json.EndArray();
}

void AddDesiredRows(Table& table, const v1::DesiredStatus& desired, bool wide) {
  if (desired.file().empty()) return;
  table.Add({"desired", DesiredSummary(desired)});
  int left = 0;
  int shown = 0;
  for (const v1::DesiredLabel& row : desired.labels()) {
    if (row.state() == "in_sync") continue;
    if (!wide && shown == kDesiredRowsShown) {
      ++left;
      continue;
    }
    ++shown;
    table.Add({absl::StrCat("desired ", row.model(), ":", row.label()),
               Cell(absl::StrCat("wants ", row.want(), ", has ",
                                 row.have() == 0 ? "none" : absl::StrCat(row.have()), ", ",
                                 row.drifting() ? "drifting" : row.state(), ": ", row.reason()),
                    row.state() == "failed" ? Tint::kBad : Tint::kWarn)});
  }
  if (left > 0) table.Add({"", absl::StrCat("and ", left, " more (-o wide shows them)")});
}

void WarnIfDesired(Context& context, const std::string& model, const std::string& label,
                   uint64_t version) {
  const auto status =
      context.Call("status", &v1::Control::StubInterface::GetStatus, v1::GetStatusRequest());
  if (!status.ok()) return;
  const v1::DesiredStatus& desired = status->desired();
  for (const v1::DesiredLabel& row : desired.labels()) {
    if (row.model() != model || row.label() != label || row.want() == version) continue;
    context.Warn(absl::StrCat(
        model, ":", label, " is governed by ", desired.file(), ", which wants ", row.want(),
        desired.state() == "ok" ? ": the daemon will bring it back"
                                : ": the daemon will bring it back once the file is good again",
        " (change line ", row.line(), " of the file, or move the file away first)"));
  }
}

}  // namespace modelhost::modelctl
