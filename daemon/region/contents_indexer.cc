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

absl::StatusOr<std::vector<ComponentIndex>> ProcessIndexer::Index(const std::vector<File>& files,
                                                                  const CancelToken& cancel) {
  constexpr char kName[] = "modelhost-indexer";
  IndexRequest asked;
  for (const File& file : files) asked.files.push_back({file.name, file.bytes.size()});
  auto request = MakeRequest(EncodeIndexRequest(asked));
  if (!request.ok()) return AtPath(request.status(), kName);
  // Empty: it grows as the answer is written.
  auto answer = WritableRegion::Create("modelhost:index-answer", 0, HugePages::kOff);
  if (!answer.ok()) return ToStatus(answer.error(), kName);
  std::vector<const UniqueFd*> descriptors = {&request->fd, &answer->fd()};
  for (const File& file : files) descriptors.push_back(file.fd);
  auto child = ChildProcess::Start(program_, kName, descriptors);
  if (!child.ok()) return child.status();
  const auto end = child->Wait(clock_, options_.most, [&] { return !cancel.cancelled(); });
  if (!end.ok()) return AtPath(end.status(), kName);
  if (end->signalled && end->code == SIGBUS) return FileFailed();
  if (end->signalled && end->code == SIGKILL) {
    return absl::ResourceExhaustedError(
        absl::StrCat(kName, ": it was killed, perhaps for memory (try again)"));
  }
  if (end->signalled) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the parser was ended by signal ", end->code, " (", ::strsignal(end->code),
        ") while it read these files: they are not served (report this, with the files)"));
  }
  if (end->code != 0) {
    return absl::InternalError(absl::StrCat(kName, ": it ended with status ", end->code,
                                            ", without an answer (look at the daemon's stderr)"));
  }
  const auto sealed = std::move(*answer).Seal();
  if (!sealed.ok()) return ToStatus(sealed.error(), kName);
  const auto info = os_.Stat(sealed->fd);
  if (!info.ok()) return AtPath(info.status(), kName);
  const auto mapping = ReadOnlyMapping::MapSealed(sealed->fd, info->bytes, Align::kPage);
  if (!mapping.ok()) return ToStatus(mapping.error(), kName);
  Prefault(mapping->bytes());
  return DecodeIndexes(mapping->bytes(), asked);
}

}  // namespace modelhost
