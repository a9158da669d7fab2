// Verbs that are one operation of the daemon on one version, the operations themselves, evict and
// rescan.
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "client/modelctl/messages.h"
#include "client/modelctl/operation_run.h"
#include "client/modelctl/ref.h"
#include "client/modelctl/render.h"
#include "client/modelctl/swap_report.h"
#include "client/modelctl/verbs.h"

namespace modelhost::modelctl {
namespace {

// The end of an operation on one version: a line, or the operation as JSON.
Exit Report(Context& context, const v1::Operation& operation, const std::string& what,
            const std::string& line) {
  if (operation.state() != v1::SUCCEEDED) return FailureOf(operation, what);
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("Operation");
    WriteOperation(json, operation);
    json.Key("result");
    json.BeginObject();
    WriteResult(json, operation.result());
    json.EndObject();
    json.EndObject();
    context.Print(std::move(json).Take());
  } else if (context.names()) {
    context.PrintLine(operation.version() == 0
                          ? operation.id()
                          : absl::StrCat(operation.model(), "@", operation.version()));
  } else {
    context.PrintLine(Printable(line));
  }
  return Exit::Ok();
}

std::string LineOf(const v1::Operation& operation) {
  const v1::OperationResult& result = operation.result();
  const std::string name = absl::StrCat(operation.model(), "@", operation.version());
  const std::string size = absl::StrCat("  ", FormatBytes(result.bytes()));
  switch (operation.kind()) {
    case v1::LOAD:
      return result.unchanged() ? absl::StrCat(name, " READY  unchanged")
                                : absl::StrCat(name, " READY", size, "  load ",
                                               HumanDuration(ToAbsl(result.load())));
    case v1::UNLOAD:
      return absl::StrCat(name, result.unchanged() ? " unloaded  unchanged" : " unloaded");
    case v1::VERIFY:
      return absl::StrCat(name, " verified", size, result.digest().empty() ? "" : "  ",
                          result.digest().empty() ? "" : ShortDigest(result.digest()));
    case v1::PUBLISH:
      return absl::StrCat(name, result.unchanged() ? " unchanged" : " published", size, "  ",
                          ShortDigest(result.digest()));
    case v1::DELETE:
      return absl::StrCat(name, " deleted  ", FormatBytes(result.freed_bytes()), " freed");
    case v1::GC:
      return result.unchanged()
                 ? std::string("nothing to collect")
                 : absl::StrCat(Plural(result.removed_versions(), "version"), " removed  ",
                                FormatBytes(result.freed_bytes()), " freed");
    case v1::SWAP:
    case v1::ROLLBACK: {
      const std::string label = operation.label().empty() ? kDefaultLabel : operation.label();
      std::string lines = SwapLines(operation, operation.model(), label, operation.version());
      return std::string(absl::StripSuffix(lines, "\n"));
    }
    default:
      return absl::StrCat(operation.id(), " ", StateName(operation.state()));
  }
}

std::string ProgressOf(const v1::Operation& operation) {
  if (operation.bytes_total() == 0) return "";
  return absl::StrCat(FormatBytes(operation.bytes_done()), " of ",
                      FormatBytes(operation.bytes_total()));
}

absl::Duration TookOf(const v1::Operation& operation) {
  if (!operation.has_started()) return absl::ZeroDuration();
  return (operation.has_finished() ? ToAbsl(operation.finished()) : absl::Now()) -
         ToAbsl(operation.started());
}

// "op-12", or "12".
Outcome<std::string> ParseOperationId(const std::string& text) {
  uint64_t number = 0;
  absl::string_view digits = text;
  absl::ConsumePrefix(&digits, "op-");
  if (!absl::SimpleAtoi(digits, &number) || number == 0) {
    return Fail(ExitCode::kUsage, absl::StrCat("'", text,
                                               "': not an operation (op-N; `modelctl ops "
                                               "ls` has them)"));
  }
  return absl::StrCat("op-", number);
}

v1::GetOperationRequest OperationRequest(const std::string& id) {
  v1::GetOperationRequest request;
  request.set_id(id);
  return request;
}

}  // namespace

Exit RunOnVersion(Context& context, const std::string& what, const OperationStarter& start) {
  Interrupts interrupts;
  const OperationEnd end = FollowOperation(context, interrupts, what, start);
  if (!end.exit.ok()) return end.exit;
  return Report(context, *end.last, what, LineOf(*end.last));
}

Exit Load(Context& context, const std::string& text) {
  const Outcome<Ref> ref = ParseVersionRef(text);
  if (!ref.ok()) return ref.exit();
  v1::LoadRequest request;
  request.set_model(ref->model);
  request.set_version(ref->version);
  return RunOnVersion(
      context, absl::StrCat("load ", text),
      [&](v1::Control::StubInterface& stub, grpc::ClientContext* call, grpc::CompletionQueue* queue,
          void* tag) { return stub.AsyncLoad(call, request, queue, tag); });
}

Exit Verify(Context& context, const std::string& text) {
  const Outcome<Ref> ref = ParseVersionRef(text);
  if (!ref.ok()) return ref.exit();
  v1::VerifyRequest request;
  request.set_model(ref->model);
  request.set_version(ref->version);
  return RunOnVersion(
      context, absl::StrCat("verify ", text),
      [&](v1::Control::StubInterface& stub, grpc::ClientContext* call, grpc::CompletionQueue* queue,
          void* tag) { return stub.AsyncVerify(call, request, queue, tag); });
}

Exit Unload(Context& context, const UnloadFlags& flags) {
  const Outcome<Ref> ref = ParseVersionRef(flags.ref);
  if (!ref.ok()) return ref.exit();
  v1::UnloadRequest request;
  request.set_model(ref->model);
  request.set_version(ref->version);
  if (!flags.drain_timeout.empty()) {
    const auto timeout = ParseDurationFlag("--drain-timeout", flags.drain_timeout);
    if (!timeout.ok()) return timeout.exit();
    *request.mutable_drain_timeout() = ToProto(*timeout);
  }
  request.set_release_on_deadline(flags.on_deadline == "release");
  return RunOnVersion(
      context, absl::StrCat("unload ", flags.ref),
      [&](v1::Control::StubInterface& stub, grpc::ClientContext* call, grpc::CompletionQueue* queue,
          void* tag) { return stub.AsyncUnload(call, request, queue, tag); });
}

Exit OpsList(Context& context) {
  const auto answer = context.Call("ops ls", &v1::Control::StubInterface::ListOperations,
                                   v1::ListOperationsRequest());
  if (!answer.ok()) return answer.exit();
  if (context.names()) {
    for (const v1::Operation& operation : answer->operations()) context.PrintLine(operation.id());
    return Exit::Ok();
  }
  if (context.jsonl()) {
    for (const v1::Operation& operation : answer->operations()) {
      JsonWriter json(JsonStyle::kOneLine);
      json.BeginDocument("Operation");
      WriteOperation(json, operation);
      json.EndObject();
      context.Print(std::move(json).Take());
    }
    return Exit::Ok();
  }
  if (context.json()) {
    JsonWriter json(JsonStyle::kPretty);
    json.BeginDocument("OperationList");
    json.Key("items");
    json.BeginArray();
    for (const v1::Operation& operation : answer->operations()) {
      json.BeginObject();
      WriteOperation(json, operation);
      json.EndObject();
    }
    json.EndArray();
    json.EndObject();
    context.Print(std::move(json).Take());
    return Exit::Ok();
  }
  Table table({{"ID"},
               {"KIND"},
               {"STATE"},
               {"MODEL"},
               {"VERSION", Align::kRight},
               {"PHASE"},
               {"PROGRESS"},
               {"UID", Align::kRight},
               {"TOOK", Align::kRight},
               {"AGE", Align::kRight},
               {"MESSAGE"}});
  for (const v1::Operation& operation : answer->operations()) {
    const bool running = !IsFinished(operation.state());
    table.Add({operation.id(), KindName(operation.kind()), StateName(operation.state()),
               operation.model(), operation.version() == 0 ? "" : absl::StrCat(operation.version()),
               running ? operation.phase() : "", running ? ProgressOf(operation) : "",
               absl::StrCat(operation.requested_by_uid()), HumanDuration(TookOf(operation)),
               operation.has_started() ? FormatAge(absl::Now() - ToAbsl(operation.started())) : "",
               operation.has_failure() ? operation.failure().message() : operation.message()});
  }
  context.Print(table.Render(context.colour()));
  return Exit::Ok();
}

Exit OpsShow(Context& context, const std::string& text) {
  const Outcome<std::string> id = ParseOperationId(text);
  if (!id.ok()) return id.exit();
  const auto operation =
      context.Call(absl::StrCat("ops show ", *id), &v1::Control::StubInterface::GetOperation,
                   OperationRequest(*id));
  if (!operation.ok()) return operation.exit();
  if (context.names()) {
    context.PrintLine(operation->id());
    return Exit::Ok();
  }
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("Operation");
    WriteOperation(json, *operation);
    if (operation->has_result()) {
      json.Key("result");
      json.BeginObject();
      WriteResult(json, operation->result());
      json.EndObject();
    }
    json.EndObject();
    context.Print(std::move(json).Take());
    return Exit::Ok();
  }
  Table table({{"KEY"}, {"VALUE"}});
  table.Add({"operation", operation->id()});
  table.Add({"kind", KindName(operation->kind())});
  table.Add({"state", StateName(operation->state())});
  table.Add({"model", operation->version() == 0
                          ? std::string(operation->model())
                          : absl::StrCat(operation->model(), "@", operation->version())});
  if (!operation->label().empty()) table.Add({"label", operation->label()});
  table.Add({"phase", operation->phase()});
  table.Add({"progress", ProgressOf(*operation)});
  table.Add({"asked for by", operation->trigger() == "desired"
                                 ? "the desired state file"
                                 : absl::StrCat("uid ", operation->requested_by_uid())});
  table.Add({"started", operation->has_started() ? Rfc3339(ToAbsl(operation->started())) : ""});
  table.Add({"took", HumanDuration(TookOf(*operation))});
  if (!operation->message().empty()) table.Add({"message", operation->message()});
  if (operation->attempts() > 0) {
    table.Add({"failed tries", absl::StrCat(operation->attempts())});
  }
  if (operation->has_next_try()) {
    table.Add({"next try", Rfc3339(ToAbsl(operation->next_try()))});
  }
  if (!operation->successor().empty()) table.Add({"superseded by", operation->successor()});
  if (operation->has_failure() && !operation->failure().message().empty()) {
    table.Add({"failure", Cell(operation->failure().message(), Tint::kBad)});
  }
  if (operation->state() == v1::SUCCEEDED) table.Add({"result", LineOf(*operation)});
  context.Print(table.Render(context.colour(), false));
  return Exit::Ok();
}

Exit OpsWatch(Context& context, const std::string& text) {
  const Outcome<std::string> id = ParseOperationId(text);
  if (!id.ok()) return id.exit();
  Interrupts interrupts;
  const OperationEnd end = WatchOperation(context, interrupts, absl::StrCat("watch ", *id), *id);
  if (!end.exit.ok()) return end.exit;
  const v1::Operation& operation = *end.last;
  return Report(context, operation,
                absl::StrCat(KindName(operation.kind()), " ", operation.model(), " (", *id, ")"),
                LineOf(operation));
}

Exit OpsCancel(Context& context, const std::string& text) {
  const Outcome<std::string> id = ParseOperationId(text);
  if (!id.ok()) return id.exit();
  const auto operation =
      context.Call(absl::StrCat("ops cancel ", *id), &v1::Control::StubInterface::CancelOperation,
                   OperationRequest(*id));
  if (!operation.ok()) return operation.exit();
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("Operation");
    WriteOperation(json, *operation);
    json.EndObject();
    context.Print(std::move(json).Take());
  } else if (context.names()) {
    context.PrintLine(operation->id());
  } else {
    context.PrintLine(
        absl::StrCat(operation->id(), IsFinished(operation->state())
                                          ? absl::StrCat(" ", StateName(operation->state()))
                                          : " was told to stop"));
  }
  return Exit::Ok();
}

Exit Evict(Context& context, const std::string& text) {
  uint64_t id = 0;
  if (!absl::SimpleAtoi(text, &id) || id == 0) {
    return Fail(ExitCode::kUsage, absl::StrCat("evict: '", text,
                                               "' is not a lease (a number; "
                                               "`modelctl leases` has them)"));
  }
  const Exit confirmed =
      Confirm(context, absl::StrCat("evict ", id),
              absl::StrCat("End lease ", id,
                           " in the daemon's books? Its client keeps what it has mapped."));
  if (!confirmed.ok()) return confirmed;
  v1::EvictLeaseRequest request;
  request.set_lease(id);
  const auto lease =
      context.Call(absl::StrCat("evict ", id), &v1::Control::StubInterface::EvictLease, request);
  if (!lease.ok()) return lease.exit();
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("Lease");
    WriteLease(json, *lease);
    json.EndObject();
    context.Print(std::move(json).Take());
  } else if (context.names()) {
    context.PrintLine(absl::StrCat(lease->id()));
  } else {
    context.PrintLine(
        Printable(absl::StrCat("lease ", lease->id(), " of ", lease->model(), "@", lease->version(),
                               " evicted  pid ", lease->pid(), " ", lease->comm())));
  }
  return Exit::Ok();
}

Exit Rescan(Context& context) {
  const auto result =
      context.Call("rescan", &v1::Control::StubInterface::Rescan, v1::RescanRequest());
  if (!result.ok()) return result.exit();
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("Rescan");
    json.Field("models", uint64_t{result->models()});
    json.Field("versions", uint64_t{result->versions()});
    json.Field("added", uint64_t{result->added()});
    json.Field("gone", uint64_t{result->gone()});
    json.Field("invalid", uint64_t{result->invalid()});
    json.EndObject();
    context.Print(std::move(json).Take());
  } else if (!context.names()) {
    context.PrintLine(absl::StrCat(
        Plural(result->models(), "model"), ", ", Plural(result->versions(), "version"), "  ",
        result->added(), " new  ", result->gone(), " gone  ", result->invalid(), " invalid"));
  }
  return Exit::Ok();
}

}  // namespace modelhost::modelctl
