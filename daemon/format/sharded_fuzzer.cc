// The input is several files, one after the other: a byte with the length of the name, the name,
// two bytes with the size (little-endian), the bytes. The first is the main file. Sets of both
// formats and the search for components are reached from here.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "daemon/format/format_fuzz.h"
#include "daemon/format/model_builders.h"

namespace {

std::string_view Take(std::string_view& rest, size_t size) {
  const std::string_view taken = rest.substr(0, size);
  rest.remove_prefix(taken.size());
  return taken;
}

size_t TakeNumber(std::string_view& rest, size_t bytes) {
  size_t value = 0;
  const std::string_view raw = Take(rest, bytes);
  for (size_t i = 0; i < raw.size(); ++i) value |= size_t{static_cast<uint8_t>(raw[i])} << (8 * i);
  return value;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr size_t kMaxFiles = 8;
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  modelhost::testing::MemoryFiles files;
  std::string main;
  for (size_t i = 0; i < kMaxFiles && !rest.empty(); ++i) {
    const std::string name(Take(rest, TakeNumber(rest, 1)));
    const size_t bytes = TakeNumber(rest, 2);
    files.Put(name, std::string(Take(rest, bytes)));
    if (i == 0) main = name;
  }
  modelhost::testing::CheckRead(main, files);
  const auto components = modelhost::FindComponents(files.Names(), files);
  modelhost::testing::Require(components.ok());
  for (const modelhost::Component& component : *components) {
    modelhost::testing::CheckRead(component.main_file, files);
  }
  return 0;
}
