// Whatever stands in the file, it is read; what was read comes back the same from its own text.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "absl/strings/string_view.h"
#include "daemon/store/operation_journal.h"

namespace {

std::string Written(const modelhost::JournalContents& contents) {
  std::string text = modelhost::SerializeJournalHeader(contents.next_id);
  for (const auto& record : contents.records) text += modelhost::SerializeJournalRecord(record);
  return text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto contents =
      modelhost::ParseJournal(absl::string_view(reinterpret_cast<const char*>(data), size));
  const std::string written = Written(contents);
  const auto again = modelhost::ParseJournal(written);
  if (again.bad_lines != 0 || again.next_id != contents.next_id) std::abort();
  if (again.records.size() != contents.records.size() || Written(again) != written) std::abort();
  return 0;
}
