#include "daemon/format/name_table.h"

#include <algorithm>

#include "absl/hash/hash.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

uint64_t Hash(std::string_view name) { return absl::Hash<absl::string_view>()(AsAbsl(name)); }

}  // namespace

NameTable::NameTable(std::vector<std::string_view> names) : names_(std::move(names)) {
  slots_.reserve(names_.size());
  for (size_t i = 0; i < names_.size(); ++i) slots_.push_back({Hash(names_[i]), i});
  std::sort(slots_.begin(), slots_.end(), [this](const Slot& a, const Slot& b) {
    if (a.hash != b.hash) return a.hash < b.hash;
    const int order = names_[a.number].compare(names_[b.number]);
    return order != 0 ? order < 0 : a.number < b.number;
  });
}

std::optional<std::pair<size_t, size_t>> NameTable::Duplicate() const {
  for (size_t i = 1; i < slots_.size(); ++i) {
    const Slot& a = slots_[i - 1];
    const Slot& b = slots_[i];
    if (a.hash == b.hash && names_[a.number] == names_[b.number]) {
      return std::pair(a.number, b.number);
    }
  }
  return std::nullopt;
}

std::optional<size_t> NameTable::Find(std::string_view name) const {
  const uint64_t hash = Hash(name);
  const auto at = std::partition_point(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    if (slot.hash != hash) return slot.hash < hash;
    return names_[slot.number] < name;
  });
  if (at == slots_.end() || at->hash != hash || names_[at->number] != name) return std::nullopt;
  return at->number;
}

}  // namespace modelhost
