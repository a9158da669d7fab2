// events: what the daemon remembers of what happened, and what happens now.
#include <algorithm>
#include <chrono>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/modelctl/messages.h"
#include "client/modelctl/render.h"
#include "client/modelctl/verbs.h"

namespace modelhost::modelctl {
namespace {

// "10m" ago, or after the event with that number.
Outcome<v1::WatchEventsRequest> ParseSince(const std::string& text) {
  v1::WatchEventsRequest request;
  uint64_t sequence = 0;
  if (text.empty()) return request;
  if (std::all_of(text.begin(), text.end(), absl::ascii_isdigit) &&
      absl::SimpleAtoi(text, &sequence)) {
    request.set_after_sequence(sequence);
    return request;
  }
  const auto age = ParseDurationFlag("--since", text);
  if (!age.ok()) return age.exit();
  const absl::Time since = absl::Now() - *age;
  const int64_t seconds = absl::ToUnixSeconds(since);
  request.mutable_after_time()->set_seconds(seconds);
  request.mutable_after_time()->set_nanos(
      static_cast<int32_t>(absl::ToInt64Nanoseconds(since - absl::FromUnixSeconds(seconds))));
  return request;
}

std::string EventLine(Context& context, const v1::Event& event) {
  if (context.names()) return absl::StrCat(event.sequence(), "\n");
  if (context.json()) {
    JsonWriter json(JsonStyle::kOneLine);
    json.BeginDocument("Event");
    WriteEvent(json, event);
    json.EndObject();
    return std::move(json).Take();
  }
  const std::string model =
      event.version() == 0 ? event.model() : absl::StrCat(event.model(), "@", event.version());
  return absl::StrCat(Printable(absl::StrCat(event.sequence(), "  ", Rfc3339(ToAbsl(event.when())),
                                             "  ", model.empty() ? "-" : model, "  ", event.what(),
                                             event.detail().empty() ? "" : "  ", event.detail())),
                      "\n");
}

}  // namespace

Exit Events(Context& context, const EventsFlags& flags) {
  Outcome<v1::WatchEventsRequest> request = ParseSince(flags.since);
  if (!request.ok()) return request.exit();
  request->set_model(flags.model);
  request->set_follow(flags.follow);
  Outcome<v1::Control::StubInterface*> stub = context.Control();
  if (!stub.ok()) return stub.exit();
  grpc::ClientContext call;
  if (flags.follow) {
    if (context.globals().timeout.has_value()) {
      call.set_deadline(std::chrono::system_clock::now() +
                        absl::ToChronoMilliseconds(*context.globals().timeout));
    }
  } else {
    context.Arm(call);
  }
  const auto stream = (*stub)->WatchEvents(&call, *request);
  // One document can only be closed when there is an end.
  const bool list = context.json() && !context.jsonl() && !flags.follow;
  JsonWriter json(JsonStyle::kPretty);
  if (list) {
    json.BeginDocument("EventList");
    json.Key("items");
    json.BeginArray();
  }
  v1::Event event;
  while (stream->Read(&event)) {
    if (event.lost() > 0) {
      context.Warn(absl::StrCat(event.lost(), " events before number ", event.sequence(),
                                " were lost: the daemon keeps the last ones only"));
    }
    if (list) {
      json.BeginObject();
      WriteEvent(json, event);
      json.EndObject();
    } else if (flags.follow) {
      if (context.WriteNow(EventLine(context, event))) continue;
      call.TryCancel();
      return Exit::Ok();
    } else {
      context.Print(EventLine(context, event));
    }
  }
  const grpc::Status status = stream->Finish();
  // A watch that lasted as long as it was told to is no failure.
  const bool over = flags.follow && status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  if (!status.ok() && !over) return context.RpcExit(status, "events");
  if (list) {
    json.EndArray();
    json.EndObject();
    context.Print(std::move(json).Take());
  }
  return Exit::Ok();
}

}  // namespace modelhost::modelctl
