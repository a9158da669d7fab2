#include "client/src/reference.h"

#include <algorithm>
#include <charconv>
#include <cstring>

namespace modelhost {
namespace {

Error Bad(std::string_view text, const std::string& why) {
  return Error{Code::kInvalidArgument,
               "reference '" + std::string(text.substr(0, 160)) + "': " + why +
                   " (write model, model:label or model@version)",
               0};
}

constexpr const char* kNameRule =
    " must be 1 to 64 of a-z, 0-9, '.', '_', '-', and begin with a letter or digit";

}  // namespace

void CopyName(std::string_view name, char (&field)[abi::kNameBytes]) {
  std::memset(field, 0, sizeof(field));
  std::memcpy(field, name.data(), std::min(name.size(), sizeof(field) - 1));
}

std::string_view NameIn(const char (&field)[abi::kNameBytes]) {
  return {field, ::strnlen(field, sizeof(field) - 1)};
}

Result<abi::Ref> ParseReference(std::string_view text) {
  abi::Ref ref{};
  const size_t cut = text.find_first_of(":@");
  const std::string_view model = text.substr(0, cut);
  if (!abi::IsValidName(model.data(), model.size())) {
    return Bad(text, std::string("the model's name") + kNameRule);
  }
  CopyName(model, ref.model);
  if (cut == std::string_view::npos) {
    CopyName(kDefaultLabel, ref.label);
    return ref;
  }
  const std::string_view rest = text.substr(cut + 1);
  if (text[cut] == ':') {
    if (!abi::IsValidName(rest.data(), rest.size())) {
      return Bad(text, std::string("the label") + kNameRule);
    }
    CopyName(rest, ref.label);
    return ref;
  }
  const char* end = rest.data() + rest.size();
  const auto [stop, failure] = std::from_chars(rest.data(), end, ref.version);
  if (failure != std::errc() || stop != end || ref.version == 0 || rest.front() == '0') {
    return Bad(text, "the version must be a decimal number from 1, without leading zeros");
  }
  return ref;
}

std::string ReferenceName(const abi::Ref& ref) {
  std::string name(NameIn(ref.model));
  if (ref.version != 0) return name + "@" + std::to_string(ref.version);
  const std::string_view label = NameIn(ref.label);
  if (label == kDefaultLabel) return name;
  return name + ":" + std::string(label);
}

}  // namespace modelhost
