#include "daemon/format/byte_reader.h"

#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"

namespace modelhost {

bool ByteReader::Fail(std::string_view why, std::string_view hint, absl::StatusCode code) {
  if (ok()) {
    status_ = ModelError(file_, absl::StrCat("at byte ", at_, ": ", AsAbsl(why)),
                         hint.empty() ? hint_ : hint, code);
  }
  return false;
}

bool ByteReader::FailShort(std::string_view what, uint64_t size) {
  return Fail(absl::StrCat(AsAbsl(what), " needs ", size, " bytes, but only ", remaining(),
                           " are left before byte ", text_.size()));
}

bool ByteReader::Text(std::string_view what, uint64_t size, std::string_view* text) {
  if (!ok()) return false;
  if (size > remaining()) return FailShort(what, size);
  *text = text_.substr(at_, size);
  at_ += size;
  return true;
}

bool ByteReader::Skip(std::string_view what, uint64_t size) {
  std::string_view unused;
  return Text(what, size, &unused);
}

bool ByteReader::Narrow(std::string_view what, uint64_t size, uint64_t* outer) {
  if (!ok()) return false;
  if (size > remaining()) return FailShort(what, size);
  *outer = text_.size();
  text_ = text_.substr(0, at_ + size);
  return true;
}

bool ByteReader::Seek(std::string_view what, uint64_t offset) {
  if (!ok()) return false;
  if (offset > size()) {
    return Fail(absl::StrCat(AsAbsl(what), " would lie at byte ", offset,
                             ", but the file ends at byte ", size()));
  }
  at_ = offset;
  return true;
}

}  // namespace modelhost
