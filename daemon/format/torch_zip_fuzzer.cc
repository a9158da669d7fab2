// The input is an archive, or the parts of one: checksums and a directory that fit would otherwise
// stop every input that was changed. The first byte says which:
//
//   0          the rest is the archive
//   otherwise  two bytes with the size of the pickle (little-endian), the pickle; a byte with the
//              number of storages (0 to 3), a byte with the size of each; a byte of options; then
//              changes to the archive that is built of it, of three bytes each: two with the
//              distance from the end, one to combine with what is there
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/format/format_fuzz.h"
#include "daemon/format/torch_builder.h"

namespace {

using modelhost::testing::Require;

class Input {
 public:
  explicit Input(std::string_view rest) : rest_(rest) {}
  std::string_view Take(size_t size) {
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(taken.size());
    return taken;
  }
  size_t Number(size_t bytes) {
    size_t value = 0;
    const std::string_view raw = Take(bytes);
    for (size_t i = 0; i < raw.size(); ++i) {
      value |= size_t{static_cast<uint8_t>(raw[i])} << (8 * i);
    }
    return value;
  }
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

std::string ArchiveOf(Input input) {
  const std::string pickle(input.Take(input.Number(2)));
  std::vector<std::pair<std::string, std::string>> storages(input.Number(1) & 3);
  for (size_t i = 0; i < storages.size(); ++i) {
    storages[i] = {std::to_string(i), std::string(input.Number(1), 'd')};
  }
  modelhost::testing::ZipBuilder zip = modelhost::testing::Checkpoint(pickle, storages);
  const size_t options = input.Number(1);
  zip.zip64_end = (options & 1) == 0;
  if ((options & 2) != 0) zip.alignment = 1;
  if ((options & 4) != 0) std::reverse(zip.entries().begin(), zip.entries().end());
  std::string archive = zip.Build();
  while (!input.empty()) {
    const size_t distance = input.Number(2) % archive.size();
    char& c = archive[archive.size() - 1 - distance];
    c = static_cast<char>(c ^ static_cast<char>(input.Number(1)));
  }
  return archive;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(std::string_view(reinterpret_cast<const char*>(data), size));
  const bool whole = input.Number(1) == 0;
  modelhost::testing::MemoryFiles files;
  files.Put("m.pt", whole ? std::string(input.Take(size)) : ArchiveOf(input));
  modelhost::testing::CheckRead("m.pt", files);
  const auto index = modelhost::ReadModel("m.pt", files);
  if (!index.ok()) return 0;
  for (size_t i = 0; i < index->size(); ++i) {
    const modelhost::TensorInfo tensor = index->at(i);
    if (!tensor.mappable) continue;
    // The range is what the elements reach, and not a byte more.
    uint64_t last = 0;
    uint64_t elements = 1;
    for (size_t d = tensor.shape.size(); d > 0; --d) {
      const auto dim = static_cast<uint64_t>(tensor.shape[d - 1]);
      const uint64_t stride =
          tensor.strides.empty() ? elements : static_cast<uint64_t>(tensor.strides[d - 1]);
      if (dim > 0) last += (dim - 1) * stride;
      elements *= dim;
    }
    const uint64_t bytes = modelhost::abi::FindDType(tensor.dtype)->bits / 8;
    Require(tensor.nbytes == (elements == 0 ? 0 : (last + 1) * bytes));
  }
  return 0;
}
