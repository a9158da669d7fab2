// The index of a version, as the pages that Worker.GetIndex streams. Pure, one thread.
//
// A page is about kPageBytes, whatever is in it: a value of the metadata that is longer goes on in
// the next entry. DATA_LOSS where the index is broken; FAILED_PRECONDITION where a name is no UTF-8
// text, which protobuf cannot carry: such an index must be read itself.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/region/flat_index.h"
#include "modelhost/v1/worker.pb.h"

namespace modelhost {

class IndexPages {
 public:
  static constexpr size_t kPageBytes = size_t{256} << 10;

  // `most_tensors` in one page; 0: as many as fit. `index` outlives it.
  IndexPages(const FlatIndex& index, uint32_t most_tensors);

  // False: there are no more. The first page always is one.
  absl::StatusOr<bool> Next(v1::IndexPage* page);

 private:
  enum class Table { kHead, kRegions, kFiles, kComponents, kMetadata, kSegments, kTensors, kEnd };

  uint64_t CountOf(Table table) const;
  absl::Status Add(v1::IndexPage* page);
  // The text as it is, where it can be.
  absl::Status Set(std::string* field, std::string_view text, absl::string_view what) const;
  absl::Status AddMetadata(v1::IndexPage* page);
  absl::Status AddTensor(v1::IndexPage* page);
  // To the next entry, or the first of the next table.
  void Step();

  const FlatIndex& index_;
  const uint64_t most_tensors_;
  Table table_ = Table::kHead;
  uint64_t number_ = 0;    // In the table.
  size_t value_done_ = 0;  // Of the metadata value that is under way.
  size_t page_bytes_ = 0;
};

// A reader has this long for all pages: until then it has a thread of the daemon, and a place.
constexpr absl::Duration kLongestIndexRead = absl::Minutes(1);

// Gives every page to `send`, which may block; what it fails with ends it. DEADLINE_EXCEEDED after
// kLongestIndexRead.
absl::Status SendPages(const FlatIndex& index, uint32_t most_tensors, Clock& clock,
                       absl::FunctionRef<absl::Status(const v1::IndexPage&)> send);

}  // namespace modelhost
