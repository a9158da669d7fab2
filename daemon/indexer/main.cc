// modelhost-indexer: parses the files of one version on behalf of modelhostd, and ends.
//
//   modelhost-indexer FIRST
//
// Descriptor FIRST holds the request (index_codec.h), FIRST + 1 takes the answer, the files follow.
// Once they are mapped the process gives up everything that a parser does not need, so that a fault
// of a parser reaches neither the daemon's sockets nor its memory. 0: there is an answer, which may
// be a refusal. Anything else: there is none.
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/index_codec.h"
#include "daemon/indexer/sandbox.h"
#include "proto/handle/mapping.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {
namespace {

constexpr uint64_t kMaxRequestBytes = uint64_t{64} << 20;
// Memory is given by the size of the files, up to a point: a header of more than this is mostly
// bytes that are not copied (the data of an ONNX model, the strings of a vocabulary).
constexpr uint64_t kMostHeaderBytes = uint64_t{128} << 20;
constexpr uint64_t kLeastMemoryBytes = uint64_t{256} << 20;
constexpr uint64_t kMemoryPerHeaderByte = 16;

constexpr int kNotConfined = 77;  // As ProcessIndexer knows it.

int Fail(const std::string& why) {
  std::fprintf(stderr, "modelhost-indexer: %s\n", why.c_str());
  return 1;
}

class MappedSource final : public FileSource {
 public:
  absl::Status Add(const IndexRequest::File& file, const UniqueFd& fd) {
    Result<ReadOnlyMapping> mapping = ReadOnlyMapping::MapFile(fd, file.bytes);
    if (!mapping.ok())
      return absl::InternalError(absl::StrCat(file.name, ": ", mapping.error().text));
    files_.emplace(file.name, *std::move(mapping));
    return absl::OkStatus();
  }
  absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override {
    const auto found = files_.find(name);
    if (found == files_.end()) {
      return absl::NotFoundError(absl::StrCat(name, ": the version has no such file"));
    }
    return found->second.bytes();
  }

 private:
  std::unordered_map<std::string, ReadOnlyMapping> files_;
};

absl::StatusOr<std::string> ReadAll(const UniqueFd& fd) {
  std::string text;
  char buffer[65536];
  while (true) {
    const ssize_t got = ::read(fd.get(), buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::InternalError("cannot read the request");
    if (got == 0) return text;
    text.append(buffer, static_cast<size_t>(got));
    if (text.size() > kMaxRequestBytes) return absl::InternalError("the request is too large");
  }
}

bool WriteAll(const UniqueFd& fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t put = ::write(fd.get(), text.data(), text.size());
    if (put <= 0) return false;
    text.remove_prefix(static_cast<size_t>(put));
  }
  return true;
}

int Main(int argc, char** argv) {
  // Nobody waits for the answer of an orphan.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
  int first = 0;
  if (argc != 2 || !absl::SimpleAtoi(argv[1], &first) || first < 3) {
    return Fail("started by modelhostd, not by hand");
  }
  const UniqueFd request_fd(first);
  const UniqueFd answer_fd(first + 1);
  const auto text = ReadAll(request_fd);
  if (!text.ok()) return Fail(std::string(text.status().message()));
  const auto request = DecodeIndexRequest(std::as_bytes(std::span<const char>(*text)));
  if (!request.ok()) return Fail(std::string(request.status().message()));
  MappedSource source;
  uint64_t bytes = 0;
  for (size_t i = 0; i < request->files.size(); ++i) {
    const UniqueFd fd(first + 2 + static_cast<int>(i));
    if (auto status = source.Add(request->files[i], fd); !status.ok()) {
      return Fail(std::string(status.message()));
    }
    bytes += std::min(request->files[i].bytes, kMostHeaderBytes);
  }
  bytes = std::min(bytes, kMostHeaderBytes);
  SandboxLimits limits;
  limits.memory_bytes = kLeastMemoryBytes + kMemoryPerHeaderByte * bytes;
  limits.file_bytes = MaxAnswerBytes(bytes);
  limits.cpu_seconds = 60;
  const absl::Status confined = EnterSandbox(limits);
  if (absl::IsUnimplemented(confined)) {
    if (request->probe) return kNotConfined;
  } else if (!confined.ok()) {
    return Fail(std::string(confined.message()));
  }
  if (request->probe) {
    BreakOut();
    return 1;
  }
  std::vector<std::string> names;
  for (const IndexRequest::File& file : request->files) names.push_back(file.name);
  const auto put = [&](std::string_view piece) { return WriteAll(answer_fd, piece); };
  bool whole = false;
  try {
    whole = EncodeIndexes(IndexComponents(names, source), put);
  } catch (const std::bad_alloc&) {
    // Nothing was put yet, or the daemon finds an answer that breaks off; either way it is refused.
    whole = EncodeIndexes(
        absl::InvalidArgumentError(absl::StrCat(
            "indexing these files takes more than the ", limits.memory_bytes >> 20,
            " MiB that files of their size are given (are they made to do so? if not, report it)")),
        put);
  }
  ::_exit(whole ? 0 : 1);  // Destructors would unmap gigabytes for nothing.
}

}  // namespace
}  // namespace modelhost

int main(int argc, char** argv) { return modelhost::Main(argc, argv); }
