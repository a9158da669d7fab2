// Indexes as bytes, between the process that parses and the daemon that asked it to.
//
// The parsing process is not trusted: whatever stands in an answer is checked as if a file held it.
// Only for two programs of one build; never stored. Thread-safe: no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/format/format_reader.h"

namespace modelhost {

// What is asked: the files of a version, whose descriptors go along in this order.
struct IndexRequest {
  struct File {
    std::string name;  // Relative to the folder of the version.
    uint64_t bytes = 0;
  };
  std::vector<File> files;
  // Instead of parsing, do what the sandbox forbids: who is confined dies of SIGSYS.
  bool probe = false;
};

std::string EncodeIndexRequest(const IndexRequest& request);
// INVALID_ARGUMENT unless it is one, of this build.
absl::StatusOr<IndexRequest> DecodeIndexRequest(std::span<const std::byte> bytes);

// The most bytes that an answer about so many bytes of files can need.
uint64_t MaxAnswerBytes(uint64_t file_bytes);

// The answer: the weight sets that were found, or why the files are refused.
// In pieces, so that a large one needs no memory of its own; false when `put` said false.
bool EncodeIndexes(const absl::StatusOr<std::vector<ComponentIndex>>& answer,
                   absl::FunctionRef<bool(std::string_view piece)> put);
std::string EncodeIndexes(const absl::StatusOr<std::vector<ComponentIndex>>& answer);
// `answer` is what came, `asked` what was asked. The files' refusal as it was given; INTERNAL for
// an answer that no indexer of this build gives: a range that leaves its file, a file that was not
// asked about, a type or a format that is not known, shapes that do not fit their bytes, names that
// are not UTF-8, a refusal of a kind that no reader gives.
absl::StatusOr<std::vector<ComponentIndex>> DecodeIndexes(std::span<const std::byte> answer,
                                                          const IndexRequest& asked);

}  // namespace modelhost
