#include "daemon/store/json_writer.h"

#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"

namespace modelhost {

void JsonWriter::NewLine() {
  if (layout_ == Layout::kOneLine) return;
  out_.push_back('\n');
  out_.append(static_cast<size_t>(2 * depth_), ' ');
}

void JsonWriter::BeforeValue() {
  if (after_key_) {
    after_key_ = false;
    return;
  }
  if (depth_ == 0) return;
  if (!empty_) out_.push_back(',');
  NewLine();
  empty_ = false;
}

void JsonWriter::Open(char bracket) {
  BeforeValue();
  out_.push_back(bracket);
  ++depth_;
  empty_ = true;
}

void JsonWriter::Close(char bracket) {
  --depth_;
  if (!empty_) NewLine();
  out_.push_back(bracket);
  empty_ = false;
}

JsonWriter& JsonWriter::BeginObject() {
  Open('{');
  return *this;
}

JsonWriter& JsonWriter::EndObject() {
  Close('}');
  return *this;
}

JsonWriter& JsonWriter::BeginArray() {
  Open('[');
  return *this;
}

JsonWriter& JsonWriter::EndArray() {
  Close(']');
  return *this;
}

JsonWriter& JsonWriter::Key(absl::string_view key) {
  BeforeValue();
  Quote(key);
  out_.append(": ");
  after_key_ = true;
  return *this;
}

JsonWriter& JsonWriter::String(absl::string_view value) {
  BeforeValue();
  Quote(value);
  return *this;
}

JsonWriter& JsonWriter::Uint(uint64_t value) {
  BeforeValue();
  absl::StrAppend(&out_, value);
  return *this;
}

JsonWriter& JsonWriter::Int(int64_t value) {
  BeforeValue();
  absl::StrAppend(&out_, value);
  return *this;
}

void JsonWriter::Quote(absl::string_view value) { AppendJsonString(AsStd(value), &out_); }

std::string JsonWriter::Take() && {
  out_.push_back('\n');
  return std::move(out_);
}

}  // namespace modelhost
