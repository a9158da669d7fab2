#include "client/modelctl/recoder.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "client/modelctl/q8_0.h"
#include "client/modelctl/tensor_convert.h"
#include "proto/abi/dtype.h"

namespace modelhost::modelctl {

uint64_t Recoder::TargetBytes(uint64_t units, size_t unit_bytes) const {
  switch (tensor_.recode) {
    case Recode::kCopy:
      return units * unit_bytes;
    case Recode::kConvert:
      return units * (abi::FindDType(tensor_.to)->bits / 8);
    case Recode::kQ8:
      return units / kQ8BlockValues * kQ8BlockBytes;
  }
  return 0;
}

bool Recoder::Apply(std::span<const std::byte> source, std::span<const std::byte>* target) {
  if (tensor_.recode == Recode::kCopy) {
    *target = source;
    return true;
  }
  const size_t from_bytes = abi::FindDType(tensor_.from)->bits / 8;
  values_.resize(source.size() / from_bytes);
  DecodeFloats(tensor_.from, source, values_);
  target_.resize(TargetBytes(values_.size(), from_bytes));
  *target = target_;
  if (tensor_.recode == Recode::kQ8) return QuantizeQ8(values_, target_);
  overflowed_ += EncodeFloats(tensor_.to, values_, target_);
  return true;
}

void Recoder::Measure() {
  if (tensor_.recode == Recode::kCopy) return;
  results_.resize(values_.size());
  if (tensor_.recode == Recode::kConvert) {
    DecodeFloats(tensor_.to, target_, results_);
    MeasureRange(0, values_.size(), 0);
    return;
  }
  DequantizeQ8(target_, results_);
  for (size_t at = 0; at < values_.size(); at += kQ8BlockValues) {
    double scale = 0;
    for (size_t i = at; i < at + kQ8BlockValues; ++i)
      scale = std::max(scale, std::fabs(values_[i]));
    MeasureRange(at, kQ8BlockValues, scale);
  }
}

// `scale` is what an error is relative to; 0 = the value.
void Recoder::MeasureRange(size_t first, size_t count, double scale) {
  for (size_t i = first; i < first + count; ++i) {
    const double value = values_[i];
    const double result = results_[i];
    if (value == result || (std::isnan(value) && std::isnan(result))) continue;
    double error = std::fabs(value - result);
    if (!std::isfinite(error)) error = std::numeric_limits<double>::infinity();
    absolute_error_ = std::max(absolute_error_, error);
    const double reference = scale > 0 ? scale : std::fabs(value);
    relative_error_ = std::max(relative_error_, error / reference);
  }
}

}  // namespace modelhost::modelctl
