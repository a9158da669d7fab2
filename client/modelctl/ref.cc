#include "client/modelctl/ref.h"

#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace modelhost::modelctl {
namespace {

constexpr size_t kMaxNameBytes = 64;

bool IsName(absl::string_view text) {
  const auto alnum = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  if (text.empty() || text.size() > kMaxNameBytes || !alnum(text[0])) return false;
  for (const char c : text) {
    if (!alnum(c) && c != '.' && c != '_' && c != '-') return false;
  }
  return true;
}

Exit BadName(absl::string_view kind, absl::string_view text) {
  return Fail(ExitCode::kUsage,
              absl::StrCat("'", text, "': not a ", kind,
                           " name (lower-case letters, digits, '.', '_', '-'; a letter or digit "
                           "first; at most 64 characters)"));
}

}  // namespace

std::string Ref::ToString() const {
  if (version != 0) return absl::StrCat(model, "@", version);
  return label.empty() ? model : absl::StrCat(model, ":", label);
}

Outcome<std::string> ParseModelName(absl::string_view text) {
  if (!IsName(text)) return BadName("model", text);
  return std::string(text);
}

Outcome<std::string> ParseLabelName(absl::string_view text) {
  if (!IsName(text)) return BadName("label", text);
  return std::string(text);
}

Outcome<uint64_t> ParseVersion(absl::string_view text) {
  uint64_t version = 0;
  if (text.empty() || text[0] < '1' || text[0] > '9' || !absl::SimpleAtoi(text, &version) ||
      version > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return Fail(ExitCode::kUsage,
                absl::StrCat("'", text,
                             "': not a version (a number from 1 on, without zeros in "
                             "front)"));
  }
  return version;
}

Outcome<Ref> ParseRef(absl::string_view text) {
  Ref ref;
  const size_t mark = text.find_first_of("@:");
  Outcome<std::string> model = ParseModelName(text.substr(0, mark));
  if (!model.ok()) return model.exit();
  ref.model = *std::move(model);
  if (mark == absl::string_view::npos) return ref;
  const absl::string_view rest = text.substr(mark + 1);
  if (text[mark] == '@') {
    const Outcome<uint64_t> version = ParseVersion(rest);
    if (!version.ok()) return version.exit();
    ref.version = *version;
  } else {
    Outcome<std::string> label = ParseLabelName(rest);
    if (!label.ok()) return label.exit();
    ref.label = *std::move(label);
  }
  return ref;
}

Outcome<Ref> ParseVersionRef(absl::string_view text) {
  Outcome<Ref> ref = ParseRef(text);
  if (ref.ok() && ref->version == 0) {
    return Fail(
        ExitCode::kUsage,
        absl::StrCat("'", text, "': names no version (write MODEL@N, as in ", ref->model, "@7)"));
  }
  return ref;
}

Outcome<Ref> ParseAssignment(absl::string_view text) {
  const size_t mark = text.find('=');
  if (mark == absl::string_view::npos) {
    return Fail(ExitCode::kUsage, absl::StrCat("'", text, "': not MODEL=N"));
  }
  Outcome<std::string> model = ParseModelName(text.substr(0, mark));
  if (!model.ok()) return model.exit();
  const Outcome<uint64_t> version = ParseVersion(text.substr(mark + 1));
  if (!version.ok()) return version.exit();
  Ref ref;
  ref.model = *std::move(model);
  ref.version = *version;
  return ref;
}

}  // namespace modelhost::modelctl
