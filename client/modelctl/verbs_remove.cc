// delete and gc: what goes from the store, after a look at what would.
#include <iostream>

#include "absl/strings/str_cat.h"
#include "client/modelctl/messages.h"
#include "client/modelctl/operation_run.h"
#include "client/modelctl/ref.h"
#include "client/modelctl/render.h"
#include "client/modelctl/verbs.h"

namespace modelhost::modelctl {
namespace {

Exit PrintDeletePlan(Context& context, const v1::DeletePlan& plan) {
  const std::string name = absl::StrCat(plan.model(), "@", plan.version());
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("DeletePlan");
    json.Field("model", plan.model());
    json.Field("version", uint64_t{plan.version()});
    json.Field("files", uint64_t{plan.files()});
    json.Field("bytes", uint64_t{plan.bytes()});
    json.Field("freedBytes", uint64_t{plan.freed_bytes()});
    json.Key("warnings");
    json.BeginArray();
    for (const std::string& warning : plan.warnings()) json.String(warning);
    json.EndArray();
    json.EndObject();
    context.Print(std::move(json).Take());
    return Exit::Ok();
  }
  if (context.names()) {
    context.PrintLine(name);
    return Exit::Ok();
  }
  context.PrintLine(Printable(absl::StrCat(
      name, ": ", Plural(plan.files(), "file"), ", ", FormatBytes(plan.bytes()), ", of which ",
      FormatBytes(plan.freed_bytes()), " would be freed; nothing was changed")));
  return Exit::Ok();
}

Exit PrintGarbagePlan(Context& context, const v1::GarbagePlan& plan) {
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("GarbagePlan");
    json.Key("items");
    json.BeginArray();
    for (const v1::GarbageItem& item : plan.items()) {
      json.BeginObject();
      json.Field("itemKind", item.kind());
      json.Field("model", item.model());
      json.Field("version", uint64_t{item.version()});
      json.Field("name", item.name());
      json.Field("bytes", uint64_t{item.bytes()});
      json.Field("reason", item.reason());
      json.EndObject();
    }
    json.EndArray();
    json.Field("bytes", uint64_t{plan.bytes()});
    json.Field("freedBytes", uint64_t{plan.freed_bytes()});
    json.EndObject();
    context.Print(std::move(json).Take());
    return Exit::Ok();
  }
  Table table({{"KIND"}, {"NAME"}, {"SIZE", Align::kRight}, {"WHY"}});
  for (const v1::GarbageItem& item : plan.items()) {
    const std::string name =
        item.version() == 0 ? item.name() : absl::StrCat(item.model(), "@", item.version());
    if (context.names()) {
      context.PrintLine(name);
      continue;
    }
    table.Add({item.kind(), name, FormatBytes(item.bytes()), item.reason()});
  }
  if (context.names()) return Exit::Ok();
  if (!table.empty()) context.Print(table.Render(context.colour()));
  context.PrintLine(absl::StrCat(Plural(static_cast<uint64_t>(plan.items_size()), "item"), ", ",
                                 FormatBytes(plan.freed_bytes()),
                                 " would be freed; nothing was changed"));
  return Exit::Ok();
}

}  // namespace

Exit Confirm(Context& context, const std::string& what, const std::string& question) {
  if (context.globals().yes) return Exit::Ok();
  if (!context.terminal().in_is_tty || !context.terminal().err_is_tty) {
    return Fail(ExitCode::kUsage,
                absl::StrCat(what, ": needs a yes (add --yes where nobody can be asked)"));
  }
  context.err() << Printable(question) << " [y/N] " << std::flush;
  std::string answer;
  std::getline(std::cin, answer);
  if (answer == "y" || answer == "Y" || answer == "yes") return Exit::Ok();
  return Fail(ExitCode::kOther, absl::StrCat(what, ": not confirmed; nothing was changed"));
}

Exit Delete(Context& context, const std::string& text, bool dry_run) {
  const Outcome<Ref> ref = ParseVersionRef(text);
  if (!ref.ok()) return ref.exit();
  v1::DeleteVersionRequest request;
  request.set_model(ref->model);
  request.set_version(ref->version);
  const std::string what = absl::StrCat("delete ", text);
  const auto plan = context.Call(what, &v1::Control::StubInterface::PlanDelete, request);
  if (!plan.ok()) return plan.exit();
  for (const std::string& warning : plan->warnings()) {
    context.Warn(Printable(absl::StrCat(text, ": ", warning)));
  }
  if (dry_run) return PrintDeletePlan(context, *plan);
  const Exit confirmed =
      Confirm(context, what,
              absl::StrCat("Remove ", text, " from the store (", FormatBytes(plan->freed_bytes()),
                           " are freed)? It cannot be undone."));
  if (!confirmed.ok()) return confirmed;
  return RunOnVersion(
      context, what,
      [&](v1::Control::StubInterface& stub, grpc::ClientContext* call, grpc::CompletionQueue* queue,
          void* tag) { return stub.AsyncDeleteVersion(call, request, queue, tag); });
}

Exit CollectGarbage(Context& context, const std::string& model, bool dry_run) {
  v1::CollectGarbageRequest request;
  request.set_model(model);
  const std::string what = absl::StrCat("gc", model.empty() ? "" : " ", model);
  if (dry_run) {
    const auto plan = context.Call(what, &v1::Control::StubInterface::PlanGarbage, request);
    return plan.ok() ? PrintGarbagePlan(context, *plan) : plan.exit();
  }
  return RunOnVersion(
      context, what,
      [&](v1::Control::StubInterface& stub, grpc::ClientContext* call, grpc::CompletionQueue* queue,
          void* tag) { return stub.AsyncCollectGarbage(call, request, queue, tag); });
}

}  // namespace modelhost::modelctl
