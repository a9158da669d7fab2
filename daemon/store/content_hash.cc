#include "daemon/store/content_hash.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/store/atomic_file.h"

namespace modelhost {
namespace {

// Both hashes go over a piece this small before the next one, so that it comes from the cache the
// second time.
constexpr uint64_t kHotBytes = uint64_t{128} << 10;

}  // namespace

void ContentHash::Update(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const uint64_t left_in_chunk = kChunkBytes - bytes_ % kChunkBytes;
    const auto piece = bytes.first(std::min<uint64_t>({bytes.size(), kHotBytes, left_in_chunk}));
    if (!chunk_.has_value()) chunk_.emplace();
    whole_.Update(piece);
    chunk_->Update(piece);
    bytes_ += piece.size();
    if (bytes_ % kChunkBytes == 0) {
      chunks_.push_back(chunk_->Finish());
      chunk_.reset();
    }
    bytes = bytes.subspan(piece.size());
  }
}

void ContentHash::Finish(ManifestFile& file) {
  if (chunk_.has_value()) chunks_.push_back(chunk_->Finish());
  chunk_.reset();
  file.bytes = bytes_;
  file.sha256 = whole_.Finish();
  file.chunk_bytes = kChunkBytes;
  file.chunks = std::move(chunks_);
}

absl::Status ReadInOrder(
    Os& os, const UniqueFd& file, absl::string_view what, uint64_t bytes,
    std::vector<std::byte>& buffer,
    const std::function<absl::Status(uint64_t offset, std::span<const std::byte> piece)>& take) {
  buffer.resize(std::max<size_t>(buffer.size(), std::min(bytes, kReadBytes)));
  for (uint64_t offset = 0; offset < bytes;) {
    const uint64_t want = std::min<uint64_t>(buffer.size(), bytes - offset);
    auto got = os.ReadAt(file, offset, std::span(buffer).first(want));
    if (!got.ok()) return Prefix(what, got.status());
    if (*got < want) {
      return absl::DataLossError(absl::StrCat(what, ": ended at byte ", offset + *got, " of ",
                                              bytes, ": it was cut while it was read"));
    }
    if (absl::Status taken = take(offset, std::span(buffer).first(want)); !taken.ok()) return taken;
    offset += want;
  }
  return absl::OkStatus();
}

absl::Status CheckUnchanged(absl::string_view what, const FileInfo& before, const FileInfo& after) {
  if (before.bytes == after.bytes && before.mtime_ns == after.mtime_ns &&
      before.ctime_ns == after.ctime_ns) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat(what, ": changed while it was read (", before.bytes,
                                          " bytes before, ", after.bytes,
                                          " after; publish it when nothing writes to it)"));
}

}  // namespace modelhost
