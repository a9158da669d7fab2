// <state>/labels.json: every label of every model. The durable half of a swap: one rename moves any
// number of labels. Written only here; blocking, pool threads only (Save), start-up (Load).
//
//   {"schema": 1, "epoch": 12, "labels": [{"model": "planner", "label": "stable", "version": 8,
//     "digest": "<hex>", "generation": 12, "previous": 7, "changed": "2026-..Z"}]}
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/platform/os.h"
#include "daemon/store/digest.h"

namespace modelhost {

struct LabelRecord {
  uint64_t version = 0;  // 0: removed; kept so that the generation goes on.
  Digest digest;
  uint64_t generation = 0;
  uint64_t previous = 0;  // The version before this one; 0 = none.
  absl::Time changed;
};

struct LabelFile {
  uint64_t epoch = 0;
  std::map<std::pair<std::string, std::string>, LabelRecord> labels;  // (model, label)
};

// A missing file is an empty LabelFile. A broken one is DATA_LOSS with the path: never guessed
// around.
absl::StatusOr<LabelFile> LoadLabels(Os& os, const UniqueFd& state_dir);
// labels.json.tmp, fsync, rename, fsync of the directory.
absl::Status SaveLabels(Os& os, const UniqueFd& state_dir, const LabelFile& labels);

}  // namespace modelhost
