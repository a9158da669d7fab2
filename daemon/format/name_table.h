// Looks names up, and finds a name that occurs twice, among 100,000 of them in milliseconds.
//
// Sorts (hash, name), so the cost is n log n whatever names an attacker picks. The names are lent.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace modelhost {

class NameTable {
 public:
  explicit NameTable(std::vector<std::string_view> names);

  // Numbers of two equal names, the smaller first.
  std::optional<std::pair<size_t, size_t>> Duplicate() const;
  std::optional<size_t> Find(std::string_view name) const;

 private:
  struct Slot {
    uint64_t hash;
    size_t number;
  };

  std::vector<std::string_view> names_;
  std::vector<Slot> slots_;
};

}  // namespace modelhost
