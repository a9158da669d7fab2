// A file that is there under its name whole or not at all.
//
// It is written without a name where the file system can (O_TMPFILE), else as .NAME.partial-PID in
// the same folder (with another end where such a name is taken), and gets its name when it is
// complete and on the disk. A process that is killed leaves nothing under the target's name, and
// nothing at all in the first case. Not thread-safe.
//
//   ALREADY_EXISTS       the target is there and may not be replaced; it is left as it is
//   RESOURCE_EXHAUSTED   no space, quota, file size limit;  others as the system says
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/handle/mapping.h"
#include "proto/handle/unique_fd.h"

namespace modelhost::modelctl {

class OutputFile {
 public:
  // kNamed is for file systems without O_TMPFILE, and taken there by itself.
  enum class Temporary { kUnnamed, kNamed };

  // With `replace` a regular file or a link of that name gives way; what a link leads to stays.
  static absl::StatusOr<OutputFile> Create(const std::string& target, bool replace,
                                           Temporary how = Temporary::kUnnamed);
  OutputFile(OutputFile&& other) noexcept = default;
  OutputFile& operator=(OutputFile&&) = delete;
  ~OutputFile();  // Not committed: gone.

  // RESOURCE_EXHAUSTED, with both numbers, when the file system has no room for so many bytes. Ask
  // before the first of them: what is found out half way has filled the disk for everybody.
  absl::Status CheckSpace(uint64_t bytes) const;
  absl::Status Append(std::span<const std::byte> bytes);
  absl::Status AppendZeros(uint64_t count);
  uint64_t size() const { return size_; }

  // All that was appended is on the disk when this returns, and is read from there again.
  absl::Status Sync();
  absl::StatusOr<ReadOnlyMapping> Map() const;
  absl::Status ReadAt(uint64_t offset, std::span<std::byte> to) const;
  // After Sync. The name is on the disk when this returns.
  absl::Status Commit();

 private:
  OutputFile(std::string target, bool replace);
  absl::Status OpenTemporary(Temporary how);
  std::string TemporaryPath(int attempt) const;
  absl::Status Write(std::span<const std::byte> bytes);
  absl::Status Failed(const std::string& what) const;
  absl::Status Link();
  absl::Status Rename();

  std::string target_;
  std::string folder_;
  std::string named_;  // The temporary's path while it has one.
  bool replace_;
  UniqueFd fd_;
  std::string buffer_;
  uint64_t size_ = 0;
};

}  // namespace modelhost::modelctl
