#include "daemon/store/operation_journal.h"

#include <algorithm>
#include <limits>
#include <map>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"
#include "daemon/store/atomic_file.h"
#include "daemon/store/json_reader.h"
#include "daemon/store/json_writer.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

constexpr char kJournalName[] = "operations.jsonl";
constexpr char kFreshJournal[] = "operations.jsonl.tmp";
constexpr char kBrokenJournal[] = "operations.jsonl.broken";
constexpr uint64_t kJournalSchema = 1;
constexpr uint64_t kMaxJournalBytes = uint64_t{64} << 20;
constexpr size_t kMostText = 1024;
constexpr size_t kMostChanges = 64;
constexpr uint64_t kMaxCode = 16;
constexpr uint64_t kMaxId = uint64_t{1} << 62;

template <typename T, typename V>
absl::Status TakeInto(absl::StatusOr<V> value, T& into) {
  if (!value.ok()) return value.status();
  into = static_cast<T>(*std::move(value));
  return absl::OkStatus();
}

std::string Shortened(absl::string_view text) {
  if (text.size() <= kMostText) return std::string(text);
  size_t length = kMostText;
  // Not in the middle of a character.
  while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) --length;
  return std::string(text.substr(0, length));
}

absl::Status ReadChange(simdjson::dom::element json, const std::string& where,
                        JournalRecord::Change& change) {
  auto object = JsonObject::Of(json, where);
  if (!object.ok()) return object.status();
  absl::Status read = TakeInto(object->String("model"), change.model);
  if (read.ok()) read = TakeInto(object->String("label"), change.label);
  if (read.ok()) read = TakeInto(object->Uint("from"), change.from);
  if (read.ok()) read = TakeInto(object->Uint("to"), change.to);
  if (read.ok()) read = TakeInto(object->Uint("generation"), change.generation);
  if (read.ok()) read = object->Finish();
  return read;
}

absl::Status ReadEnd(JsonObject& object, JournalRecord& record) {
  absl::Status read = TakeInto(object.Time("finished"), record.finished);
  uint64_t code = 0;
  if (read.ok()) read = TakeInto(object.Uint("code"), code);
  if (code > kMaxCode) return object.ErrorAt("code", "not a canonical code");
  record.code = static_cast<uint32_t>(code);
  if (read.ok()) read = TakeInto(object.String("message"), record.message);
  if (read.ok()) read = TakeInto(object.Uint("successor"), record.successor);
  uint64_t unchanged = 0;
  if (read.ok()) read = TakeInto(object.Uint("unchanged"), unchanged);
  record.unchanged = unchanged != 0;
  if (read.ok()) read = TakeInto(object.Int("load_ns"), record.load_ns);
  if (read.ok()) read = TakeInto(object.Int("flip_ns"), record.flip_ns);
  if (read.ok()) read = TakeInto(object.Uint("draining_leases"), record.draining_leases);
  if (read.ok()) read = TakeInto(object.String("digest"), record.digest);
  if (read.ok()) read = TakeInto(object.Uint("bytes"), record.bytes);
  if (read.ok()) read = TakeInto(object.Uint("linked_bytes"), record.linked_bytes);
  if (read.ok()) read = TakeInto(object.Uint("removed"), record.removed);
  if (read.ok()) read = TakeInto(object.Uint("freed_bytes"), record.freed_bytes);
  if (!read.ok()) return read;
  auto changes = object.Array("changes");
  if (!changes.ok()) return changes.status();
  for (const simdjson::dom::element json : *changes) {
    record.changes.emplace_back();
    read = ReadChange(json, object.Place("changes"), record.changes.back());
    if (!read.ok()) return read;
  }
  if (record.finished == absl::Time()) return object.ErrorAt("finished", "not a time to end at");
  return absl::OkStatus();
}

// The record of a line, or of the header its next number alone.
absl::Status ReadLine(absl::string_view line, JournalRecord& record, uint64_t& next_id) {
  auto document = JsonDocument::Parse(kJournalName, line);
  if (!document.ok()) return document.status();
  auto object = JsonObject::Of(document->root(), kJournalName);
  if (!object.ok()) return object.status();
  if (object->Optional("schema").has_value()) {
    auto schema = object->Uint("schema");
    if (!schema.ok()) return schema.status();
    if (*schema != kJournalSchema) {
      return object->ErrorAt("schema",
                             absl::StrCat("is ", *schema, ", this build reads ", kJournalSchema));
    }
    auto next = object->Uint("next");
    if (!next.ok()) return next.status();
    if (*next == 0 || *next > kMaxId) return object->ErrorAt("next", "not a number of ours");
    next_id = *next;
    return object->Finish();
  }
  absl::Status read = TakeInto(object->Uint("id"), record.id);
  if (read.ok()) read = TakeInto(object->String("kind"), record.kind);
  if (read.ok()) read = TakeInto(object->String("state"), record.state);
  if (read.ok()) read = TakeInto(object->String("model"), record.model);
  if (read.ok()) read = TakeInto(object->Uint("version"), record.version);
  if (read.ok()) read = TakeInto(object->String("label"), record.label);
  uint64_t uid = 0;
  if (read.ok()) read = TakeInto(object->Uint("uid"), uid);
  if (read.ok()) read = TakeInto(object->Time("started"), record.started);
  if (!read.ok()) return read;
  if (record.id == 0 || record.id >= kMaxId) return object->ErrorAt("id", "not a number of ours");
  if (uid > std::numeric_limits<uint32_t>::max()) return object->ErrorAt("uid", "not a uid");
  record.uid = static_cast<uint32_t>(uid);
  if (object->Optional("finished").has_value()) {
    if (read = ReadEnd(*object, record); !read.ok()) return read;
  }
  return object->Finish();
}

}  // namespace

JournalContents ParseJournal(absl::string_view text) {
  JournalContents contents;
  std::map<uint64_t, JournalRecord> records;
  size_t offset = 0;
  while (offset < text.size()) {
    const size_t end = text.find('\n', offset);
    if (end == absl::string_view::npos) break;  // Torn by a crash.
    const absl::string_view line = text.substr(offset, end - offset);
    JournalRecord record;
    uint64_t next_id = 0;
    const absl::Status read = ReadLine(line, record, next_id);
    if (!read.ok()) {
      if (contents.bad_lines++ == 0) {
        contents.first_bad = absl::StrCat("line at byte ", offset, ": ", read.message());
      }
    } else if (next_id != 0) {
      contents.next_id = std::max(contents.next_id, next_id);
    } else {
      contents.next_id = std::max(contents.next_id, record.id + 1);
      records[record.id] = std::move(record);
    }
    offset = end + 1;
  }
  for (auto& [id, record] : records) contents.records.push_back(std::move(record));
  return contents;
}

std::string SerializeJournalHeader(uint64_t next_id) {
  JsonWriter json(JsonWriter::Layout::kOneLine);
  json.BeginObject();
  json.Key("schema").Uint(kJournalSchema);
  json.Key("next").Uint(next_id);
  json.EndObject();
  return std::move(json).Take();
}

std::string SerializeJournalRecord(const JournalRecord& record) {
  JsonWriter json(JsonWriter::Layout::kOneLine);
  json.BeginObject();
  json.Key("id").Uint(record.id);
  json.Key("kind").String(record.kind);
  json.Key("state").String(record.state);
  json.Key("model").String(record.model);
  json.Key("version").Uint(record.version);
  json.Key("label").String(record.label);
  json.Key("uid").Uint(record.uid);
  json.Key("started").String(FormatRfc3339(record.started));
  if (record.ended()) {
    json.Key("finished").String(FormatRfc3339(record.finished));
    json.Key("code").Uint(record.code);
    json.Key("message").String(Shortened(record.message));
    json.Key("successor").Uint(record.successor);
    json.Key("unchanged").Uint(record.unchanged ? 1 : 0);
    json.Key("load_ns").Int(record.load_ns);
    json.Key("flip_ns").Int(record.flip_ns);
    json.Key("draining_leases").Uint(record.draining_leases);
    json.Key("digest").String(Shortened(record.digest));
    json.Key("bytes").Uint(record.bytes);
    json.Key("linked_bytes").Uint(record.linked_bytes);
    json.Key("removed").Uint(record.removed);
    json.Key("freed_bytes").Uint(record.freed_bytes);
    json.Key("changes").BeginArray();
    for (size_t i = 0; i < std::min(record.changes.size(), kMostChanges); ++i) {
      const JournalRecord::Change& change = record.changes[i];
      json.BeginObject();
      json.Key("model").String(change.model);
      json.Key("label").String(change.label);
      json.Key("from").Uint(change.from);
      json.Key("to").Uint(change.to);
      json.Key("generation").Uint(change.generation);
      json.EndObject();
    }
    json.EndArray();
  }
  json.EndObject();
  return std::move(json).Take();
}

JournalContents OperationJournal::Read(absl::Status* problem) {
  *problem = absl::OkStatus();
  JournalContents contents;
  absl::Status wrong;
  auto text = ReadSmallFileAt(os_, state_dir_, kJournalName, kMaxJournalBytes);
  if (absl::IsNotFound(text.status())) return contents;
  if (text.ok()) {
    contents = ParseJournal(*text);
    if (contents.bad_lines == 0) return contents;
    wrong = absl::DataLossError(absl::StrCat(contents.bad_lines, " of its lines cannot be read (",
                                             contents.first_bad, ")"));
  } else {
    wrong = text.status();
  }
  const absl::Status aside = os_.Rename(state_dir_, kJournalName, state_dir_, kBrokenJournal);
  *problem = absl::Status(
      wrong.code(),
      absl::StrCat(kJournalName, ": ", wrong.message(), "; ", contents.records.size(),
                   " operations are kept, the file ",
                   aside.ok() ? absl::StrCat("is now ", kBrokenJournal)
                              : absl::StrCat("could not be moved aside (", aside.message(), ")")));
  return contents;
}

absl::Status OperationJournal::Append(const std::vector<JournalRecord>& records) {
  std::string text;
  for (const JournalRecord& record : records) text += SerializeJournalRecord(record);
  absl::Status done = os_.WriteAt(file_, bytes_, std::as_bytes(std::span(text)));
  FaultPoint("journal.written");
  if (done.ok()) done = os_.Sync(file_);
  if (!done.ok()) {
    // Whatever is behind the last good line now, the next write does not build on it.
    file_ = UniqueFd();
    return Prefix(kJournalName, done);
  }
  bytes_ += text.size();
  lines_ += records.size();
  return absl::OkStatus();
}

absl::Status OperationJournal::Rewrite(const std::vector<JournalRecord>& all, uint64_t next_id) {
  file_ = UniqueFd();
  std::string text = SerializeJournalHeader(next_id);
  for (const JournalRecord& record : all) text += SerializeJournalRecord(record);
  absl::Status done = os_.RemoveFileAt(state_dir_, kFreshJournal);
  if (absl::IsNotFound(done)) done = absl::OkStatus();
  absl::StatusOr<UniqueFd> file = absl::UnknownError("not opened");
  if (done.ok()) {
    file = os_.CreateFileAt(state_dir_, kFreshJournal, 0600);
    done = file.status();
  }
  if (done.ok()) done = os_.WriteAt(*file, 0, std::as_bytes(std::span(text)));
  if (done.ok()) done = os_.Sync(*file);
  FaultPoint("journal.fresh");
  if (done.ok()) done = os_.Rename(state_dir_, kFreshJournal, state_dir_, kJournalName);
  FaultPoint("journal.renamed");
  if (done.ok()) done = os_.Sync(state_dir_);
  if (!done.ok()) {
    (void)os_.RemoveFileAt(state_dir_, kFreshJournal);  // If it is there.
    return Prefix(kJournalName, done);
  }
  file_ = *std::move(file);
  bytes_ = text.size();
  lines_ = 0;
  return absl::OkStatus();
}

}  // namespace modelhost
