// Who parses the files of a version: this process, or one that can do nothing else.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/format/index_codec.h"
#include "daemon/platform/child_process.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/os.h"
#include "daemon/region/cancel_token.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

// Any thread; concurrent calls.
class ContentsIndexer {
 public:
  struct File {
    std::string name;                  // Relative to the folder of the version.
    const UniqueFd* fd = nullptr;      // Lent, as are the bytes.
    std::span<const std::byte> bytes;  // The same file, mapped.
  };
  virtual ~ContentsIndexer() = default;
  // The weight sets among the files. Errors of format_reader.h; also EIO (errno_status.h) when a
  // file failed or was truncated meanwhile, CANCELLED, and as the implementation says.
  virtual absl::StatusOr<std::vector<ComponentIndex>> Index(const std::vector<File>& files,
                                                            const CancelToken& cancel) = 0;
};

// Parses in this process, under a SigbusGuard.
class InProcessIndexer final : public ContentsIndexer {
 public:
  absl::StatusOr<std::vector<ComponentIndex>> Index(const std::vector<File>& files,
                                                    const CancelToken& cancel) override;
};

// Runs `program` (modelhost-indexer) for each call: a parser that is led astray by a hostile file
// has no socket, no other memory and no file to reach.
//   INVALID_ARGUMENT    these files end their parser: nothing can be said of them but that
//   INTERNAL            the program gave no answer, or one that makes no sense
//   UNAVAILABLE         it was ended from outside
//   RESOURCE_EXHAUSTED  no process, memory or descriptor for it
//   DEADLINE_EXCEEDED   no answer within `most`
class ProcessIndexer final : public ContentsIndexer {
 public:
  struct Options {
    absl::Duration most = absl::Seconds(90);
  };
  // `os` and `clock` outlive it.
  ProcessIndexer(UniqueFd program, Os& os, Clock& clock, Options options);
  absl::StatusOr<std::vector<ComponentIndex>> Index(const std::vector<File>& files,
                                                    const CancelToken& cancel) override;

  // OK when the program, run once, cannot do what it must not. FAILED_PRECONDITION says why it is
  // not confined here; UNIMPLEMENTED in builds under a sanitizer, which never are.
  absl::Status CheckConfined();

 private:
  absl::StatusOr<ChildEnd> Run(const IndexRequest& asked, const std::vector<File>& files,
                               const UniqueFd& answer, const CancelToken& cancel);

  const UniqueFd program_;
  Os& os_;
  Clock& clock_;
  const Options options_;
  LateChildren late_;
};

}  // namespace modelhost
