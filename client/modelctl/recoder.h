// Pieces of a tensor from the source's encoding to the target's, and how far apart the two are.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "client/modelctl/import_plan.h"

namespace modelhost::modelctl {

class Recoder {
 public:
  explicit Recoder(const PlannedTensor& tensor) : tensor_(tensor) {}

  // Of so many units of the source, bytes of the target.
  uint64_t TargetBytes(uint64_t units, size_t unit_bytes) const;
  // The target's bytes of a piece; for Q8_0 a piece is whole blocks. Lent until the next call.
  // False when Q8_0 cannot hold a value of it.
  bool Apply(std::span<const std::byte> source, std::span<const std::byte>* target);
  uint64_t overflowed() const { return overflowed_; }

  // Compares the piece that Apply took last with what it made of it.
  void Measure();
  double absolute_error() const { return absolute_error_; }
  double relative_error() const { return relative_error_; }

 private:
  void MeasureRange(size_t first, size_t count, double scale);

  const PlannedTensor& tensor_;
  std::vector<double> values_;
  std::vector<double> results_;
  std::vector<std::byte> target_;
  uint64_t overflowed_ = 0;
  double absolute_error_ = 0;
  double relative_error_ = 0;
};

}  // namespace modelhost::modelctl
