#include "client/modelctl/progress.h"

#include <algorithm>
#include <map>
#include <ostream>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/modelctl/exit_code.h"
#include "client/modelctl/messages.h"
#include "client/modelctl/render.h"

namespace modelhost::modelctl {
namespace {

constexpr absl::Duration kPlainInterval = absl::Seconds(5);
constexpr int kBarWidth = 24;
constexpr absl::Duration kReadable = absl::Milliseconds(300);

int Percent(uint64_t done, uint64_t total) {
  if (total == 0) return 0;
  return static_cast<int>(100.0 * static_cast<double>(std::min(done, total)) /
                          static_cast<double>(total));
}

}  // namespace

std::string KindName(v1::OperationKind kind) {
  if (kind == v1::OPERATION_KIND_UNSPECIFIED) return "operation";
  const std::string name = v1::OperationKind_Name(kind);
  return absl::AsciiStrToLower(name.empty() ? UnknownEnum(kind) : name);
}

std::string StateName(v1::OperationState state) {
  switch (state) {
    case v1::OPERATION_STATE_UNSPECIFIED:
      return "unknown";
    case v1::OPERATION_FAILED:
      return "failed";
    default: {
      const std::string name = v1::OperationState_Name(state);
      return absl::AsciiStrToLower(name.empty() ? UnknownEnum(state) : name);
    }
  }
}

bool IsFinished(v1::OperationState state) {
  return state == v1::SUCCEEDED || state == v1::OPERATION_FAILED || state == v1::CANCELLED ||
         state == v1::ABORTED;
}

void WriteOperation(JsonWriter& json, const v1::Operation& operation) {
  json.Field("id", operation.id());
  json.Field("operationKind", KindName(operation.kind()));
  json.Field("state", StateName(operation.state()));
  json.Field("model", operation.model());
  json.Field("version", uint64_t{operation.version()});
  json.Field("label", operation.label());
  json.Field("requestedByUid", operation.requested_by_uid());
  json.Field("trigger", operation.trigger());
  if (operation.has_started()) json.Field("started", Rfc3339(ToAbsl(operation.started())));
  if (operation.has_finished()) json.Field("finished", Rfc3339(ToAbsl(operation.finished())));
  json.Field("sequence", uint64_t{operation.sequence()});
  json.Field("phase", operation.phase());
  json.Field("bytesDone", uint64_t{operation.bytes_done()});
  json.Field("bytesTotal", uint64_t{operation.bytes_total()});
  json.Field("message", operation.message());
  if (operation.has_failure()) {
    json.Key("failure");
    json.BeginObject();
    json.Field("code", operation.failure().code());
    json.Field("message", operation.failure().message());
    json.Field("reason", operation.failure().reason());
    json.Key("metadata");
    json.BeginObject();
    const std::map<std::string, std::string> metadata(operation.failure().metadata().begin(),
                                                      operation.failure().metadata().end());
    for (const auto& [key, value] : metadata) json.Field(key, value);
    json.EndObject();
    json.EndObject();
  }
  if (!operation.successor().empty()) json.Field("successor", operation.successor());
  if (operation.attempts() > 0) json.Field("attempts", operation.attempts());
  if (operation.has_next_try()) json.Field("nextTry", Rfc3339(ToAbsl(operation.next_try())));
}

Progress::Progress(ProgressMode mode, std::ostream& out, int columns, std::string what)
    : mode_(mode), out_(out), columns_(columns), what_(std::move(what)) {}

void Progress::Update(const v1::Operation& operation, absl::Time now) {
  if (mode_ == ProgressMode::kNone) return;
  if (mode_ == ProgressMode::kJson) {
    JsonWriter json(JsonStyle::kOneLine);
    json.BeginDocument("OperationEvent");
    WriteOperation(json, operation);
    json.EndObject();
    out_ << std::move(json).Take() << std::flush;
    return;
  }
  const bool new_phase = !seen_ || operation.phase() != last_.phase();
  if (mode_ == ProgressMode::kBar) {
    if (!seen_) {
      out_ << Printable(absl::StrCat(operation.id(), operation.id().empty() ? "" : "  ", what_))
           << '\n';
    }
    if (new_phase) LeaveLine(now);
  }
  last_ = operation;
  if (new_phase) {
    phase_began_ = now;
    phase_first_bytes_ = operation.bytes_done();
  }
  seen_ = true;
  if (IsFinished(operation.state())) return;  // What comes of it is the last line's to tell.
  if (mode_ == ProgressMode::kBar) {
    Draw(now);
  } else if (new_phase || now - last_line_ >= kPlainInterval) {
    Plain(now);
  }
}

void Progress::Tick(absl::Time now) {
  if (!seen_ || IsFinished(last_.state())) return;
  if (mode_ == ProgressMode::kBar) Draw(now);
  if (mode_ == ProgressMode::kPlain && now - last_line_ >= kPlainInterval) Plain(now);
}

void Progress::Finish(absl::Time now) {
  LeaveLine(now);
  if (line_open_) out_ << "\r\x1b[K" << std::flush;
  line_open_ = false;
}

// A line that stays open is overwritten by the next one.
void Progress::LeaveLine(absl::Time now) {
  if (!line_open_ || now - phase_began_ < kReadable) return;
  Draw(now);
  out_ << '\n' << std::flush;
  line_open_ = false;
}

std::string Progress::Amount(absl::Time now) const {
  if (last_.bytes_total() == 0) return "";
  std::string text =
      absl::StrCat(FormatBytes(last_.bytes_done()), " of ", FormatBytes(last_.bytes_total()), " (",
                   Percent(last_.bytes_done(), last_.bytes_total()), " %)");
  const absl::Duration took = now - phase_began_;
  if (took >= absl::Milliseconds(200) && last_.bytes_done() > phase_first_bytes_) {
    const uint64_t moved = last_.bytes_done() - phase_first_bytes_;
    absl::StrAppend(&text, "  ", FormatRate(moved, took));
    if (last_.bytes_total() > last_.bytes_done()) {
      const double left = static_cast<double>(last_.bytes_total() - last_.bytes_done()) /
                          static_cast<double>(moved);
      absl::StrAppend(&text, "  eta ", HumanDuration(took * left));
    }
  }
  return text;
}

void Progress::Plain(absl::Time now) {
  last_line_ = now;
  std::string line = absl::StrCat(last_.id(), last_.id().empty() ? "" : "  ", what_, "  ",
                                  last_.phase().empty() ? StateName(last_.state()) : last_.phase());
  const std::string amount = Amount(now);
  if (!amount.empty()) absl::StrAppend(&line, "  ", amount);
  if (!last_.message().empty()) absl::StrAppend(&line, "  ", last_.message());
  out_ << Printable(line) << '\n' << std::flush;
}

void Progress::Draw(absl::Time now) {
  const std::string phase =
      last_.phase().empty() ? StateName(last_.state()) : Printable(last_.phase());
  std::string line = absl::StrCat("  ", phase);
  if (last_.bytes_total() > 0) {
    absl::StrAppend(&line, "  [", Bar(last_.bytes_done(), last_.bytes_total(), kBarWidth), "]  ",
                    Amount(now));
  } else if (!last_.message().empty()) {
    absl::StrAppend(&line, "  ", Printable(last_.message()));
  } else {
    absl::StrAppend(&line, "  ", HumanDuration(now - phase_began_));
  }
  // A line that wraps cannot be redrawn.
  if (columns_ > 1 && line.size() >= static_cast<size_t>(columns_)) {
    line.resize(static_cast<size_t>(columns_ - 1));
  }
  out_ << "\r\x1b[K" << line << std::flush;
  line_open_ = true;
}

}  // namespace modelhost::modelctl
