// The input is one file, read as m.engine; and, as a list of requirements, m.engine.requires.json.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "daemon/format/format_fuzz.h"
#include "daemon/format/model_builders.h"
#include "daemon/format/requires.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using modelhost::testing::Require;
  modelhost::testing::MemoryFiles files;
  files.Put("m.engine", std::string(reinterpret_cast<const char*>(data), size));
  modelhost::testing::CheckRead("m.engine", files);

  const auto read =
      modelhost::ParseRequires("m.engine.requires.json", std::as_bytes(std::span(data, size)));
  if (!read.ok()) {
    Require(modelhost::testing::IsOneLine(std::string(read.status().message())));
    return 0;
  }
  for (const auto& [key, value] : *read) {
    Require(modelhost::CheckRequirement(key, value).ok());
    Require(modelhost::testing::IsOneLine(key) && modelhost::testing::IsOneLine(value));
    (void)modelhost::Fulfils(key, value, "10.3.0");
  }
  return 0;
}
