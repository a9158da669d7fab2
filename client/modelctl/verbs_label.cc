// label set and label rm: one label, one version that is READY already.
#include "absl/strings/str_cat.h"
#include "client/modelctl/desired.h"
#include "client/modelctl/messages.h"
#include "client/modelctl/ref.h"
#include "client/modelctl/verbs.h"

namespace modelhost::modelctl {
namespace {

struct LabelArguments {
  std::string model;
  std::string label;
  uint64_t version = 0;
};

Outcome<LabelArguments> ParseArguments(const std::vector<std::string>& arguments, bool with_version,
                                       const char* usage) {
  LabelArguments parsed;
  Outcome<Ref> ref = ParseRef(arguments.empty() ? "" : arguments[0]);
  if (!ref.ok()) return ref.exit();
  parsed.model = ref->model;
  parsed.label = ref->label;
  parsed.version = ref->version;
  size_t next = 1;
  if (parsed.label.empty() && next < arguments.size()) {
    Outcome<std::string> label = ParseLabelName(arguments[next++]);
    if (!label.ok()) return label.exit();
    parsed.label = *std::move(label);
  }
  if (with_version && parsed.version == 0 && next < arguments.size()) {
    const Outcome<uint64_t> version = ParseVersion(arguments[next++]);
    if (!version.ok()) return version.exit();
    parsed.version = *version;
  }
  if (next != arguments.size() || parsed.label.empty() || (parsed.version != 0) != with_version) {
    return Fail(ExitCode::kUsage, usage);
  }
  return parsed;
}

Exit PrintChange(Context& context, const v1::LabelChange& change) {
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("LabelChange");
    WriteChange(json, change);
    json.EndObject();
    context.Print(std::move(json).Take());
  } else if (context.names()) {
    context.PrintLine(absl::StrCat(change.model(), ":", change.label()));
  } else if (change.from() == change.to()) {
    context.PrintLine(
        absl::StrCat(change.model(), ":", change.label(), " ", change.to(), "  unchanged"));
  } else {
    context.PrintLine(absl::StrCat(change.model(), ":", change.label(), " ", Move(change),
                                   "  generation ", change.generation()));
  }
  return Exit::Ok();
}

// Sets if_current of either request from its flag.
template <typename Request>
Exit SetIfCurrent(const std::string& text, Request& request) {
  if (text.empty()) return Exit::Ok();
  if (text == "none" || text == "0") {
    request.set_if_current(0);
    return Exit::Ok();
  }
  const Outcome<uint64_t> version = ParseVersion(text);
  if (!version.ok()) return version.exit();
  request.set_if_current(*version);
  return Exit::Ok();
}

}  // namespace

Exit LabelSet(Context& context, const std::vector<std::string>& arguments,
              const std::string& if_current) {
  const auto parsed = ParseArguments(
      arguments, true, "label set: expects MODEL:LABEL N (or MODEL LABEL N, or MODEL@N LABEL)");
  if (!parsed.ok()) return parsed.exit();
  v1::SetLabelRequest request;
  request.set_model(parsed->model);
  request.set_label(parsed->label);
  request.set_version(parsed->version);
  if (Exit exit = SetIfCurrent(if_current, request); !exit.ok()) return exit;
  const auto change = context.Call(absl::StrCat("label set ", parsed->model, ":", parsed->label),
                                   &v1::Control::StubInterface::SetLabel, request);
  if (!change.ok()) return change.exit();
  WarnIfDesired(context, parsed->model, parsed->label, change->to());
  return PrintChange(context, *change);
}

Exit LabelRemove(Context& context, const std::vector<std::string>& arguments,
                 const std::string& if_current) {
  const auto parsed =
      ParseArguments(arguments, false, "label rm: expects MODEL:LABEL (or MODEL LABEL)");
  if (!parsed.ok()) return parsed.exit();
  v1::RemoveLabelRequest request;
  request.set_model(parsed->model);
  request.set_label(parsed->label);
  if (Exit exit = SetIfCurrent(if_current, request); !exit.ok()) return exit;
  const auto change = context.Call(absl::StrCat("label rm ", parsed->model, ":", parsed->label),
                                   &v1::Control::StubInterface::RemoveLabel, request);
  if (!change.ok()) return change.exit();
  WarnIfDesired(context, parsed->model, parsed->label, change->to());
  return PrintChange(context, *change);
}

}  // namespace modelhost::modelctl
