// config show and config reload.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "client/modelctl/render.h"
#include "client/modelctl/verbs.h"

namespace modelhost::modelctl {

Exit ConfigShow(Context& context) {
  const auto config =
      context.Call("config show", &v1::Control::StubInterface::GetConfig, v1::GetConfigRequest());
  if (!config.ok()) return config.exit();
  if (context.names()) {
    for (const v1::ConfigEntry& entry : config->entries()) context.PrintLine(entry.key());
    return Exit::Ok();
  }
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("Config");
    json.Field("file", config->file());
    json.Key("entries");
    json.BeginArray();
    for (const v1::ConfigEntry& entry : config->entries()) {
      json.BeginObject();
      json.Field("key", entry.key());
      json.Field("value", entry.value());
      json.Field("source", entry.source());
      json.Field("reloadable", entry.reloadable());
      json.EndObject();
    }
    json.EndArray();
    json.EndObject();
    context.Print(std::move(json).Take());
    return Exit::Ok();
  }
  std::vector<Table::Column> columns = {{"KEY"}, {"VALUE"}, {"FROM"}};
  if (context.wide()) columns.push_back({"CHANGES BY"});
  Table table(std::move(columns));
  for (const v1::ConfigEntry& entry : config->entries()) {
    std::vector<Cell> row = {
        entry.key(), entry.value(),
        Cell(entry.source(), entry.source() == "default" ? Tint::kDim : Tint::kNone)};
    if (context.wide()) row.emplace_back(entry.reloadable() ? "reload" : "restart");
    table.Add(std::move(row));
  }
  context.Print(table.Render(context.colour()));
  if (config->file().empty()) context.Note("the daemon runs without a configuration file");
  return Exit::Ok();
}

Exit ConfigReload(Context& context) {
  const auto report = context.Call("config reload", &v1::Control::StubInterface::ReloadConfig,
                                   v1::ReloadConfigRequest());
  if (!report.ok()) return report.exit();
  if (context.names()) {
    for (const v1::ConfigChange& change : report->changes()) context.PrintLine(change.key());
  } else if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("ConfigReload");
    json.Field("file", report->file());
    json.Key("changes");
    json.BeginArray();
    for (const v1::ConfigChange& change : report->changes()) {
      json.BeginObject();
      json.Field("key", change.key());
      json.Field("from", change.from());
      json.Field("to", change.to());
      json.Field("needsRestart", change.needs_restart());
      json.EndObject();
    }
    json.EndArray();
    json.Field("storeError", report->store_error());
    json.EndObject();
    context.Print(std::move(json).Take());
  } else {
    for (const v1::ConfigChange& change : report->changes()) {
      context.PrintLine(absl::StrCat(change.key(), "  ", change.from(), " -> ", change.to(),
                                     change.needs_restart() ? "  needs a restart" : ""));
    }
    context.PrintLine(absl::StrCat(
        report->file().empty() ? "no configuration file" : report->file(), ": read again, ",
        report->changes().empty() ? "nothing changed" : Plural(report->changes_size(), "change")));
  }
  if (!report->store_error().empty()) {
    context.Warn(absl::StrCat("the store cannot be read now: ", report->store_error()));
  }
  const auto restart =
      std::count_if(report->changes().begin(), report->changes().end(),
                    [](const v1::ConfigChange& change) { return change.needs_restart(); });
  if (restart > 0) {
    context.Warn(absl::StrCat(Plural(static_cast<uint64_t>(restart), "change"),
                              " not in force before a restart (systemctl restart modelhostd; "
                              "clients keep what they have mapped)"));
  }
  return Exit::Ok();
}

}  // namespace modelhost::modelctl
