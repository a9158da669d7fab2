// The input is one file called m.gguf.
#include <cstddef>
#include <cstdint>
#include <string>

#include "daemon/format/format_fuzz.h"
#include "daemon/format/model_builders.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  modelhost::testing::MemoryFiles files;
  files.Put("m.gguf", std::string(reinterpret_cast<const char*>(data), size));
  modelhost::testing::CheckRead("m.gguf", files);
  return 0;
}
