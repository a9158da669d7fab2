// The input is the pickle of a checkpoint. Whatever it is, it becomes values that can be walked, or
// one line that says why not.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "daemon/format/format_fuzz.h"
#include "daemon/format/pickle.h"
#include "daemon/format/torch_walk.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using modelhost::testing::Require;
  const auto stream = std::as_bytes(std::span(data, size));
  const auto pickle = modelhost::Pickle::Read("p", stream);
  absl::Status status = pickle.status();
  if (pickle.ok()) {
    for (const modelhost::PickleTensor& tensor : pickle->tensors()) {
      Require(tensor.storage < pickle->storages().size());
      Require(modelhost::abi::FindDType(tensor.dtype) != nullptr);
      Require(pickle->Tuple(tensor.size).size() <= size);
      Require(pickle->Tuple(tensor.stride).size() <= size);
    }
    size_t named = 0;
    status =
        modelhost::WalkTensors("p", *pickle, size, [&](std::string_view name, uint64_t tensor) {
          Require(tensor < pickle->tensors().size());
          Require(modelhost::IsUtf8(name) && name.find('\0') == std::string_view::npos);
          named += name.size();
          return absl::OkStatus();
        });
    Require(named <= 65'536 + 8 * size);
  }
  if (!status.ok()) {
    const std::string text(status.message());
    Require(!text.empty() && text.size() < 4096 && modelhost::testing::IsOneLine(text));
  }
  return 0;
}
