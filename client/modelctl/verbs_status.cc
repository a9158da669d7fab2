// modelctl status.
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/modelctl/desired.h"
#include "client/modelctl/messages.h"
#include "client/modelctl/render.h"
#include "client/modelctl/verbs.h"

namespace modelhost::modelctl {
namespace {

std::string Budget(const v1::BudgetPool& pool) {
  return absl::StrCat(FormatBytes(pool.reserved_bytes()), " of ",
                      pool.unlimited() ? "unlimited" : FormatBytes(pool.limit_bytes()));
}

Cell Restart(const v1::RestartStatus& restart) {
  if (!restart.fd_store()) return Cell("reads from disk: there is no fd store");
  std::string text = absl::StrCat(Plural(restart.parked(), "descriptor"), " in the fd store");
  if (restart.received() > 0) {
    absl::StrAppend(&text, "; after the last one ", restart.restored_versions(),
                    " restored without a read, ", restart.reread_versions(), " read again, ",
                    restart.failed_versions(), " lost");
  }
  if (restart.problem().empty()) return Cell(text);
  return Cell(absl::StrCat(text, ": ", restart.problem()), Tint::kBad);
}

void AddDeviceRows(Table& table, const v1::DeviceStatus& device, bool wide) {
  std::string text =
      absl::StrCat(device.mode(), device.reason().empty() ? "" : ": ", device.reason());
  if (!device.usable()) {
    table.Add(
        {device.uuid(), Cell(absl::StrCat("does not answer: ", device.problem()), Tint::kBad)});
  } else {
    table.Add({device.uuid(), text});
  }
  table.Add({"", absl::StrCat(device.name(), ", driver ", device.driver(), ", ",
                              FormatBytes(device.total_bytes()))});
  if (!device.limits().empty()) table.Add({"", Cell(device.limits(), Tint::kWarn)});
  if (device.copies() > 0 || wide) {
    table.Add({"", absl::StrCat(FormatBytes(device.copied_bytes()), " in copies of ",
                                Plural(device.copies(), "file"), ", ",
                                Plural(device.importers(), "lease"),
                                device.lost_copies() == 0
                                    ? ""
                                    : absl::StrCat(", ", device.lost_copies(), " lost so far"))});
  }
}

}  // namespace

Exit Status(Context& context) {
  const auto status =
      context.Call("status", &v1::Control::StubInterface::GetStatus, v1::GetStatusRequest());
  if (!status.ok()) return status.exit();
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("Status");
    WriteStatus(json, *status);
    json.EndObject();
    context.Print(std::move(json).Take());
    return Exit::Ok();
  }
  if (context.names()) {
    context.PrintLine("modelhostd");
    return Exit::Ok();
  }
  Table table({{"KEY"}, {"VALUE"}});
  table.Add({"version", status->revision().empty()
                            ? status->version()
                            : absl::StrCat(status->version(), " (", status->revision(), ")")});
  table.Add({"epoch", absl::StrCat(status->epoch())});
  table.Add({"uptime",
             absl::StrCat(HumanDuration(ToAbsl(status->uptime())), "  (pid ", status->pid(), ")")});
  table.Add({"ready", status->ready()
                          ? Cell("yes", Tint::kGood)
                          : Cell(absl::StrCat("no: ", absl::StrJoin(status->not_ready(), "; ")),
                                 Tint::kBad)});
  table.Add({"store",
             status->store_error().empty()
                 ? Cell(status->store())
                 : Cell(absl::StrCat(status->store(), ": ", status->store_error()), Tint::kBad)});
  table.Add({"sockets", status->runtime_dir()});
  table.Add({"metrics", status->metrics_address().empty() ? "off" : status->metrics_address()});
  for (const v1::BudgetPool& pool : status->pools()) {
    table.Add({absl::StrCat("budget ", pool.name()), Budget(pool)});
  }
  table.Add({"memlock", status->memlock_policy()});
  table.Add({"file protection", status->file_protection()});
  table.Add({"device", status->device_reason().empty()
                           ? status->device_mode()
                           : absl::StrCat(status->device_mode(), ": ", status->device_reason())});
  for (const v1::DeviceStatus& device : status->devices()) {
    AddDeviceRows(table, device, context.wide());
  }
  AddDesiredRows(table, status->desired(), context.wide());
  table.Add({"models", absl::StrCat(status->models())});
  table.Add({"clients", absl::StrCat(status->clients(), ", ", Plural(status->leases(), "lease"))});
  if (status->restart().fd_store() || context.wide()) {
    table.Add({"restart", Restart(status->restart())});
  }
  if (status->invalid_transitions() > 0 || context.wide()) {
    table.Add({"invalid transitions", absl::StrCat(status->invalid_transitions())});
  }
  context.Print(table.Render(context.colour(), false));
  return Exit::Ok();
}

}  // namespace modelhost::modelctl
