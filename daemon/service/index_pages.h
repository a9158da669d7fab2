// The index of a version, as the pages that Worker.GetIndex streams. Pure, one thread.
//
// A page is about kPageBytes, whatever is in it: a value of the metadata that is longer goes on in
// the next entry. DATA_LOSS where the index is broken.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
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

}  // namespace modelhost
