// SHA-256 of a file as a whole and of each of its chunks, in one pass over the bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/platform/os.h"
#include "daemon/store/manifest.h"

namespace modelhost {

// Incremental. Not thread-safe.
class ContentHash {
 public:
  void Update(std::span<const std::byte> bytes);
  uint64_t bytes() const { return bytes_; }
  // Fills bytes, sha256, chunk_bytes and chunks of `file`. Once.
  void Finish(ManifestFile& file);

 private:
  Sha256Stream whole_;
  std::optional<Sha256Stream> chunk_;  // Begun and not full.
  std::vector<Digest> chunks_;
  uint64_t bytes_ = 0;
};

// How much is read at a time: between two, the work can be cancelled.
inline constexpr uint64_t kReadBytes = uint64_t{4} << 20;

// Reads `bytes` bytes of an open file in order. `take` gets each piece and its offset; an error
// from it ends the reading. A file that ends early is DATA_LOSS naming `what`. `buffer` is scratch.
absl::Status ReadInOrder(
    Os& os, const UniqueFd& file, absl::string_view what, uint64_t bytes,
    std::vector<std::byte>& buffer,
    const std::function<absl::Status(uint64_t offset, std::span<const std::byte> piece)>& take);

// DATA_LOSS naming `what` unless size and times are as they were: somebody wrote to it.
absl::Status CheckUnchanged(absl::string_view what, const FileInfo& before, const FileInfo& after);

}  // namespace modelhost
