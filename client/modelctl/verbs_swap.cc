// swap and rollback.
#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/modelctl/desired.h"
#include "client/modelctl/messages.h"
#include "client/modelctl/operation_run.h"
#include "client/modelctl/ref.h"
#include "client/modelctl/render.h"
#include "client/modelctl/swap_plan.h"
#include "client/modelctl/swap_report.h"
#include "client/modelctl/verbs.h"

namespace modelhost::modelctl {
namespace {

// What the label names now.
struct Serving {
  bool known = false;   // The daemon was asked and answered.
  uint64_t named = 0;   // 0: the label is not set.
  uint64_t serves = 0;  // The same, if that version is READY.
};

Serving LookAtLabel(Context& context, const std::string& model, const std::string& label) {
  v1::GetModelRequest request;
  request.set_model(model);
  const auto found =
      context.Call("look at the label", &v1::Control::StubInterface::GetModel, request);
  if (!found.ok()) return {};
  Serving now{.known = true};
  for (const v1::Label& each : found->labels()) {
    if (each.label() == label) now.named = each.version();
  }
  for (const v1::Version& version : found->versions()) {
    if (version.version() == now.named && version.phase() == v1::READY) now.serves = now.named;
  }
  return now;
}

Outcome<uint64_t> ParseIfCurrent(const std::string& text) {
  if (text == "none" || text == "0") return uint64_t{0};  // The label must not be set.
  return ParseVersion(text);
}

}  // namespace

std::string SwapLines(const v1::Operation& operation, const std::string& model,
                      const std::string& label, uint64_t version) {
  const v1::OperationResult& result = operation.result();
  if (result.unchanged() || result.changes().empty()) {
    if (version == 0 && !result.changes().empty()) version = result.changes(0).to();
    if (version == 0) version = operation.version();
    return absl::StrCat(model, ":", label, " ", version, "  unchanged\n");
  }
  std::string out;
  for (int i = 0; i < result.changes_size(); ++i) {
    const v1::LabelChange& change = result.changes(i);
    absl::StrAppend(&out, change.model(), ":", change.label(), " ", Move(change), "  generation ",
                    change.generation());
    if (i == 0) {
      absl::StrAppend(&out, "  load ", HumanDuration(ToAbsl(result.load())), "  flip ",
                      HumanDuration(ToAbsl(result.flip())), "  draining ",
                      Plural(result.draining_leases(), "lease"));
      if (result.has_gap()) absl::StrAppend(&out, "  gap ", HumanDuration(ToAbsl(result.gap())));
    }
    out.push_back('\n');
  }
  return out;
}

Outcome<v1::Operation> FollowSwap(Context& context, Interrupts& interrupts, const SwapGoal& goal,
                                  const OperationStarter& start) {
  FollowOptions options;
  options.wait = goal.wait;
  const OperationEnd end = FollowOperation(context, interrupts, goal.what, start, options);
  if (!end.exit.ok()) return end.exit;
  const v1::Operation& operation = *end.last;

  if (goal.wait && operation.state() != v1::SUCCEEDED) {
    Exit failure = FailureOf(operation, goal.what);
    const auto code = static_cast<Code>(operation.failure().code());
    // Cancelled, no such version, and a lost comparison have codes that say more than "failed".
    if (failure.code == ExitCode::kSuperseded || code == Code::kNotFound) return failure;
    const Serving now = LookAtLabel(context, goal.model, goal.label);
    if (code == Code::kFailedPrecondition && goal.if_current.has_value() && now.known &&
        now.named != *goal.if_current) {
      return failure;
    }
    const uint64_t serving = now.serves;
    if (serving == 0 || serving == goal.version) return failure;
    return Fail(ExitCode::kOldServes, absl::StrCat(failure.error, "; ", goal.model, ":", goal.label,
                                                   " stays at ", serving));
  }

  return operation;
}

void WriteSwap(JsonWriter& json, const SwapGoal& goal, const v1::Operation& operation) {
  json.Field("operation", operation.id());
  json.Field("state", StateName(operation.state()));
  json.Field("model", goal.model);
  json.Field("label", goal.label);
  if (goal.wait) WriteResult(json, operation.result());
}

Exit RunSwap(Context& context, Interrupts& interrupts, const SwapGoal& goal,
             const OperationStarter& start) {
  const Outcome<v1::Operation> followed = FollowSwap(context, interrupts, goal, start);
  if (!followed.ok()) return followed.exit();
  const v1::Operation& operation = *followed;
  if (context.names()) {
    context.PrintLine(goal.wait && goal.version != 0 ? absl::StrCat(goal.model, "@", goal.version)
                                                     : operation.id());
  } else if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument(goal.kind);
    WriteSwap(json, goal, operation);
    json.EndObject();
    context.Print(std::move(json).Take());
  } else if (goal.wait) {
    context.Print(SwapLines(operation, goal.model, goal.label, goal.version));
  } else {
    context.PrintLine(absl::StrCat(operation.id(), " started: ", goal.what));
  }
  if (goal.wait) {
    for (const v1::LabelChange& change : operation.result().changes()) {
      WarnIfDesired(context, change.model(), change.label(), change.to());
    }
  } else if (goal.version != 0) {
    WarnIfDesired(context, goal.model, goal.label, goal.version);
    for (const auto& [model, version] : goal.others) {
      WarnIfDesired(context, model, goal.label, version);
    }
  }
  return Exit::Ok();
}

Exit Swap(Context& context, const SwapFlags& flags) {
  Outcome<Ref> ref = ParseRef(flags.target);
  if (!ref.ok()) return ref.exit();
  if (!flags.label.empty() && !ref->label.empty() && flags.label != ref->label) {
    return Fail(ExitCode::kUsage, absl::StrCat("swap ", flags.target, ": --label ", flags.label,
                                               " names another label"));
  }
  SwapGoal goal;
  goal.kind = "Swap";
  goal.model = ref->model;
  goal.label = !flags.label.empty()  ? flags.label
               : !ref->label.empty() ? ref->label
                                     : kDefaultLabel;
  goal.wait = !flags.no_wait;
  if (Outcome<std::string> label = ParseLabelName(goal.label); !label.ok()) return label.exit();
  goal.version = ref->version;
  if (!flags.version.empty()) {
    const Outcome<uint64_t> version = ParseVersion(flags.version);
    if (!version.ok()) return version.exit();
    if (goal.version != 0 && goal.version != *version) {
      return Fail(ExitCode::kUsage, absl::StrCat("swap ", flags.target, ": --version ",
                                                 flags.version, " names another version"));
    }
    goal.version = *version;
  }
  if (goal.version == 0) {
    return Fail(ExitCode::kUsage,
                absl::StrCat("swap ", flags.target, ": no version given (add --version N)"));
  }

  v1::SwapRequest request;
  request.set_label(goal.label);
  const auto add = [&](const std::string& model, uint64_t version) {
    v1::SwapTarget* target = request.add_targets();
    target->set_model(model);
    target->set_version(version);
  };
  add(goal.model, goal.version);
  for (const std::string& text : flags.set) {
    const Outcome<Ref> other = ParseAssignment(text);
    if (!other.ok()) return other.exit();
    for (const v1::SwapTarget& target : request.targets()) {
      if (target.model() == other->model) {
        return Fail(ExitCode::kUsage,
                    absl::StrCat("swap: ", other->model, " is named twice (one version each)"));
      }
    }
    add(other->model, other->version);
    goal.others.emplace_back(other->model, other->version);
  }
  if (!flags.if_current.empty()) {
    const Outcome<uint64_t> current = ParseIfCurrent(flags.if_current);
    if (!current.ok()) return current.exit();
    request.set_if_current(*current);
    goal.if_current = *current;
  }
  request.set_strategy(flags.strategy);
  request.set_allow_downtime(flags.allow_downtime);
  goal.what = absl::StrCat("swap ", goal.model, ":", goal.label, " to ", goal.version);

  if (flags.dry_run) {
    const auto plan = context.Call(goal.what, &v1::Control::StubInterface::PlanSwap, request);
    return plan.ok() ? PrintSwapPlan(context, *plan, goal.what) : plan.exit();
  }
  Interrupts interrupts;
  return RunSwap(
      context, interrupts, goal,
      [&](v1::Control::StubInterface& stub, grpc::ClientContext* call, grpc::CompletionQueue* queue,
          void* tag) { return stub.AsyncSwap(call, request, queue, tag); });
}

Exit Rollback(Context& context, const RollbackFlags& flags) {
  Outcome<Ref> ref = ParseRef(flags.target);
  if (!ref.ok()) return ref.exit();
  if (ref->version != 0 || (!flags.label.empty() && !ref->label.empty())) {
    return Fail(ExitCode::kUsage, absl::StrCat("rollback ", flags.target,
                                               ": name a model, with --label L and --to N"));
  }
  SwapGoal goal;
  goal.kind = "Rollback";
  goal.model = ref->model;
  goal.label = !flags.label.empty()  ? flags.label
               : !ref->label.empty() ? ref->label
                                     : kDefaultLabel;
  goal.wait = !flags.no_wait;
  if (Outcome<std::string> label = ParseLabelName(goal.label); !label.ok()) return label.exit();
  if (!flags.to.empty()) {
    const Outcome<uint64_t> to = ParseVersion(flags.to);
    if (!to.ok()) return to.exit();
    goal.version = *to;
  }
  v1::RollbackRequest request;
  request.set_model(goal.model);
  request.set_label(goal.label);
  request.set_to(goal.version);
  request.set_strategy(flags.strategy);
  request.set_allow_downtime(flags.allow_downtime);
  goal.what = absl::StrCat("rollback ", goal.model, ":", goal.label);
  if (goal.version != 0) absl::StrAppend(&goal.what, " to ", goal.version);
  Interrupts interrupts;
  return RunSwap(
      context, interrupts, goal,
      [&](v1::Control::StubInterface& stub, grpc::ClientContext* call, grpc::CompletionQueue* queue,
          void* tag) { return stub.AsyncRollback(call, request, queue, tag); });
}

}  // namespace modelhost::modelctl
