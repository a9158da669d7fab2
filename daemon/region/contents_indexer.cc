#include "daemon/region/contents_indexer.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/format_reader.h"
#include "daemon/platform/child_process.h"
#include "daemon/platform/errno_status.h"
#include "daemon/platform/sigbus_guard.h"
#include "daemon/region/chunk_pass.h"
#include "proto/handle/mapping.h"
#include "proto/handle/region.h"

namespace modelhost {
namespace {

constexpr char kIndexer[] = "modelhost-indexer";

class SpanSource final : public FileSource {
 public:
  explicit SpanSource(const std::vector<ContentsIndexer::File>& files) {
    for (const ContentsIndexer::File& file : files) files_.emplace(file.name, file.bytes);
  }
  absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override {
    const auto found = files_.find(name);
    if (found == files_.end()) {
      return absl::NotFoundError(absl::StrCat(name, ": the version has no such file"));
    }
    return found->second;
  }

 private:
  std::unordered_map<std::string, std::span<const std::byte>> files_;
};

// The disk's fault or a writer's, and gone when they are; the bytes may be good.
absl::Status FileFailed() {
  return ErrnoStatus(EIO, "a file failed, or was truncated, while it was indexed");
}

absl::Status OfSignal(int number) {
  switch (number) {
    case SIGBUS:
      return FileFailed();
    // What a process does to itself: it is the files that made it.
    case SIGSEGV:
    case SIGILL:
    case SIGFPE:
    case SIGABRT:
    case SIGTRAP:
    case SIGSYS:
    case SIGXCPU:
    case SIGXFSZ:
      return absl::InvalidArgumentError(absl::StrCat(
          "the parser was ended by signal ", number, " (", ::strsignal(number),
          ") while it read these files: they are not served (report this, with the files)"));
    case SIGKILL:
      return absl::ResourceExhaustedError(
          absl::StrCat(kIndexer, ": it was killed, perhaps for memory (try again)"));
    default:
      return absl::UnavailableError(absl::StrCat(
          kIndexer, ": it was ended from outside, by signal ", number, " (try again)"));
  }
}

// The request is small: what a version's manifest says of its files.
absl::StatusOr<SealedRegion> MakeRequest(const std::string& text) {
  auto region = WritableRegion::Create("modelhost:index-request", text.size(), HugePages::kOff);
  if (!region.ok()) return ToStatus(region.error());
  std::memcpy(region->bytes().data(), text.data(), text.size());
  return ToStatusOr(std::move(*region).Seal());
}

}  // namespace

absl::StatusOr<std::vector<ComponentIndex>> InProcessIndexer::Index(const std::vector<File>& files,
                                                                    const CancelToken&) {
  SpanSource source(files);
  std::vector<std::string> names;
  std::vector<std::span<const std::byte>> ranges;
  for (const File& file : files) {
    names.push_back(file.name);
    ranges.push_back(file.bytes);
  }
  const SigbusGuard guard(std::move(ranges));
  auto components = IndexComponents(names, source);
  // Zeros that stood in for lost bytes may have been parsed as anything.
  if (guard.hit()) return FileFailed();
  return components;
}

ProcessIndexer::ProcessIndexer(UniqueFd program, Os& os, Clock& clock, Options options)
    : program_(std::move(program)), os_(os), clock_(clock), options_(options) {}

absl::StatusOr<ChildEnd> ProcessIndexer::Run(const IndexRequest& asked,
                                             const std::vector<File>& files, const UniqueFd& answer,
                                             const CancelToken& cancel) {
  auto request = MakeRequest(EncodeIndexRequest(asked));
  if (!request.ok()) return AtPath(request.status(), kIndexer);
  std::vector<const UniqueFd*> descriptors = {&request->fd, &answer};
  for (const File& file : files) descriptors.push_back(file.fd);
  (void)late_.Reap();
  auto child = ChildProcess::Start(program_, {.name = kIndexer}, descriptors);
  if (!child.ok()) return child.status();
  const auto end = child->Wait(clock_, options_.most, [&] { return !cancel.cancelled(); });
  late_.Keep(*std::move(child));
  if (!end.ok()) return AtPath(end.status(), kIndexer);
  return *end;
}

absl::StatusOr<std::vector<ComponentIndex>> ProcessIndexer::Index(const std::vector<File>& files,
                                                                  const CancelToken& cancel) {
  IndexRequest asked;
  uint64_t bytes = 0;
  for (const File& file : files) {
    asked.files.push_back({file.name, file.bytes.size()});
    bytes += file.bytes.size();
  }
  // Empty: it grows as the answer is written.
  auto answer = WritableRegion::Create("modelhost:index-answer", 0, HugePages::kOff);
  if (!answer.ok()) return ToStatus(answer.error(), kIndexer);
  const auto end = Run(asked, files, answer->fd(), cancel);
  if (!end.ok()) return end.status();
  if (end->signalled) return OfSignal(end->code);
  if (end->code != 0) {
    return absl::InternalError(absl::StrCat(kIndexer, ": it ended with status ", end->code,
                                            ", without an answer (look at the daemon's stderr)"));
  }
  // The child is gone and nobody else has the descriptor: these bytes hold still.
  const auto sealed = std::move(*answer).Seal();
  if (!sealed.ok()) return ToStatus(sealed.error(), kIndexer);
  const auto info = os_.Stat(sealed->fd);
  if (!info.ok()) return AtPath(info.status(), kIndexer);
  if (info->bytes > MaxAnswerBytes(bytes)) {
    return absl::InternalError(absl::StrCat(kIndexer, ": an answer of ", info->bytes, " bytes"));
  }
  const auto mapping = ReadOnlyMapping::MapSealed(sealed->fd, info->bytes, Align::kPage);
  if (!mapping.ok()) return ToStatus(mapping.error(), kIndexer);
  Prefault(mapping->bytes());
  return DecodeIndexes(mapping->bytes(), asked);
}

absl::Status ProcessIndexer::CheckConfined() {
  constexpr int kNotConfined = 77;  // As the program knows it.
  const IndexRequest asked{.files = {}, .probe = true};
  auto answer = WritableRegion::Create("modelhost:index-answer", 0, HugePages::kOff);
  if (!answer.ok()) return ToStatus(answer.error(), kIndexer);
  const CancelToken never;
  const auto end = Run(asked, {}, answer->fd(), never);
  if (!end.ok()) return end.status();
  if (end->signalled && end->code == SIGSYS) return absl::OkStatus();
  if (!end->signalled && end->code == kNotConfined) {
    return absl::UnimplementedError("a build under a sanitizer has no system call filter");
  }
  return absl::FailedPreconditionError(absl::StrCat(
      kIndexer, ": it cannot be confined here: ended with ", end->signalled ? "signal " : "status ",
      end->code, " (look at stderr; does this kernel or container allow seccomp?)"));
}

}  // namespace modelhost
