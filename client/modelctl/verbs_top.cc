// top: what is resident, who holds it, and what is under way, drawn again and again.
//
// On a terminal it goes on until Ctrl-C or --timeout; anywhere else it prints one picture and ends.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "client/modelctl/interrupts.h"
#include "client/modelctl/messages.h"
#include "client/modelctl/progress.h"
#include "client/modelctl/render.h"
#include "client/modelctl/verbs.h"

namespace modelhost::modelctl {
namespace {

constexpr absl::Duration kTopTick = absl::Milliseconds(50);

std::string TopHead(const v1::GetStatusResponse& status) {
  std::string line = absl::StrCat(
      "modelhostd ", status.version(), "  epoch ", status.epoch(), "  up ",
      HumanDuration(ToAbsl(status.uptime())), "  ",
      status.ready() ? "ready" : absl::StrCat("NOT READY: ", status.not_ready(0)), "  ",
      Plural(status.clients(), "client"), "  ", Plural(status.leases(), "lease"));
  for (const v1::BudgetPool& pool : status.pools()) {
    absl::StrAppend(&line, "  ", pool.name(), " ", FormatBytes(pool.reserved_bytes()), " of ",
                    pool.unlimited() ? "unlimited" : FormatBytes(pool.limit_bytes()));
  }
  return Printable(line);
}

std::string TopModels(Context& context, const v1::ListModelsResponse& models) {
  Table table({{"MODEL"},
               {"LABELS"},
               {"READY"},
               {"HOST", Align::kRight},
               {"LEASES", Align::kRight},
               {"HEALTH"},
               {"WHY"}});
  for (const v1::Model& model : models.models()) {
    const ModelSummary summary = Summarise(model);
    table.Add({model.name(), summary.labels, summary.versions_ready,
               FormatBytes(summary.host_bytes), absl::StrCat(summary.leases),
               Cell(summary.health, TintOf(summary.health)), summary.why});
  }
  return table.Render(context.colour());
}

std::string TopOperations(Context& context, const v1::ListOperationsResponse& operations) {
  Table table({{"OPERATION"}, {"KIND"}, {"MODEL"}, {"PHASE"}, {"PROGRESS"}, {"MESSAGE"}});
  for (const v1::Operation& operation : operations.operations()) {
    if (IsFinished(operation.state())) continue;
    table.Add({operation.id(), KindName(operation.kind()),
               operation.version() == 0 ? operation.model()
                                        : absl::StrCat(operation.model(), "@", operation.version()),
               operation.phase(),
               operation.bytes_total() == 0
                   ? std::string()
                   : absl::StrCat("[", Bar(operation.bytes_done(), operation.bytes_total(), 20),
                                  "] ", FormatBytes(operation.bytes_done())),
               operation.message()});
  }
  return table.empty() ? std::string() : absl::StrCat("\n", table.Render(context.colour()));
}

Outcome<std::string> TopPicture(Context& context) {
  const auto status =
      context.Call("top", &v1::Control::StubInterface::GetStatus, v1::GetStatusRequest());
  if (!status.ok()) return status.exit();
  const auto models =
      context.Call("top", &v1::Control::StubInterface::ListModels, v1::ListModelsRequest());
  if (!models.ok()) return models.exit();
  const auto operations =
      context.Call("top", &v1::Control::StubInterface::ListOperations, v1::ListOperationsRequest());
  if (!operations.ok()) return operations.exit();
  return absl::StrCat(TopHead(*status), "\n\n", TopModels(context, *models),
                      TopOperations(context, *operations));
}

}  // namespace

Exit Top(Context& context, const std::string& interval) {
  if (context.json() || context.jsonl() || context.names()) {
    return Fail(ExitCode::kUsage,
                "top: it draws a picture for people (`modelctl status`, `ls` and `ops ls` have the "
                "same with --output)");
  }
  absl::Duration pause = absl::Seconds(1);
  if (!interval.empty()) {
    const auto given = ParseDurationFlag("--interval", interval);
    if (!given.ok()) return given.exit();
    pause = *given;
  }
  if (!context.terminal().out_is_tty) {
    const Outcome<std::string> picture = TopPicture(context);
    if (!picture.ok()) return picture.exit();
    context.Print(*picture);
    return Exit::Ok();
  }
  Interrupts interrupts;
  const absl::Time end = context.globals().timeout.has_value()
                             ? absl::Now() + *context.globals().timeout
                             : absl::InfiniteFuture();
  while (absl::Now() < end) {
    const Outcome<std::string> picture = TopPicture(context);
    if (!picture.ok()) return picture.exit();
    if (!context.WriteNow(absl::StrCat("\x1b[H\x1b[2J", *picture))) return Exit::Ok();
    const absl::Time next = std::min(absl::Now() + pause, end);
    while (absl::Now() < next) {
      if (interrupts.Take()) return Exit::Ok();
      absl::SleepFor(kTopTick);
    }
  }
  return Exit::Ok();
}

}  // namespace modelhost::modelctl
