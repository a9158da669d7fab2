// Reads the bytes of an upload from files or memfds, past the page cache where asked.
//
// SourceFile: thread-safe. SourceReader: one for each thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "proto/handle/error.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

struct SourceFile {
  UniqueFd fd;
  UniqueFd direct;  // The same file with O_DIRECT; not valid where the file system has none.
  uint64_t bytes = 0;
  int64_t written_ns = 0;  // When it was last written to.
};
// FAILED_PRECONDITION: not a regular file.
Result<SourceFile> OpenSource(UniqueFd fd, bool direct);
// DATA_LOSS: the file was written to, or has another size, since it was opened.
Result<void> CheckUnchanged(const SourceFile& source);

class SourceReader {
 public:
  // `most`: the largest piece that will be read.
  explicit SourceReader(uint64_t most);
  // Exactly `into`, at most `most` bytes. `ahead`: how far past `offset` the next pieces may lie;
  // what one direct read fetches serves them, too. DATA_LOSS: the file ends before, or fails.
  Result<void> Read(const SourceFile& source, uint64_t offset, std::span<std::byte> into,
                    uint64_t ahead);

 private:
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  Result<void> FillWindow(const SourceFile& source, uint64_t offset, uint64_t bytes);

  const uint64_t room_;
  std::unique_ptr<std::byte, Free> window_;  // O_DIRECT needs whole blocks: they are read here.
  const SourceFile* of_ = nullptr;
  uint64_t first_ = 0;
  uint64_t filled_ = 0;
};

}  // namespace modelhost
