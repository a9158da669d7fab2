// Reading tensors in pieces, contiguous and strided.
#include "client/modelctl/tensor_reader.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "client/modelctl/strided_gather.h"
#include "gtest/gtest.h"

namespace modelhost::modelctl {
namespace {

using abi::DType;

// One file, whatever its name.
class MemoryRanges : public RangeSource {
 public:
  absl::StatusOr<uint64_t> SizeOf(const std::string&) override { return bytes.size(); }
  absl::Status ReadAt(const std::string&, uint64_t offset, std::span<std::byte> to) override {
    ++reads;
    if (offset > bytes.size() || to.size() > bytes.size() - offset) {
      return absl::AbortedError("ended before");
    }
    std::memcpy(to.data(), bytes.data() + offset, to.size());
    return absl::OkStatus();
  }

  std::string bytes;
  int reads = 0;
};

TEST(TensorReaderTest, StridedViewsComeOutRowMajorInAnyPieces) {
  std::string bytes;
  for (int i = 0; i < 64; ++i) bytes += static_cast<char>(i);
  struct Case {
    DType dtype;
    std::vector<int64_t> shape, strides;
  };
  for (const Case& each : std::vector<Case>{{DType::kU8, {4, 3, 2}, {1, 8, 4}},
                                            {DType::kU16, {2, 3, 4}, {12, 1, 3}},
                                            {DType::kU32, {5}, {3}},
                                            {DType::kU8, {3, 4}, {0, 1}},
                                            {DType::kU64, {2, 2, 1}, {1, 2, 77}},
                                            {DType::kC128, {2, 2}, {1, 2}}}) {
    TensorIndex index("torch");
    index.AddFile("m");
    TensorInfo info;
    info.name = "t";
    info.dtype = each.dtype;
    info.shape = each.shape;
    info.strides = each.strides;
    const size_t unit = abi::FindDType(each.dtype)->bits / 8;
    uint64_t last = 0;
    for (size_t i = 0; i < each.shape.size(); ++i) {
      last += static_cast<uint64_t>((each.shape[i] - 1) * each.strides[i]);
    }
    info.nbytes = (last + 1) * unit;
    index.Add(info);
    MemoryRanges files;
    files.bytes = bytes;
    // By three loops, with missing dimensions as 1.
    std::vector<int64_t> shape = each.shape;
    std::vector<int64_t> strides = each.strides;
    while (shape.size() < 3) {
      shape.insert(shape.begin(), 1);
      strides.insert(strides.begin(), 0);
    }
    std::string expected;
    for (int64_t i = 0; i < shape[0]; ++i) {
      for (int64_t j = 0; j < shape[1]; ++j) {
        for (int64_t k = 0; k < shape[2]; ++k) {
          const auto at = static_cast<size_t>(i * strides[0] + j * strides[1] + k * strides[2]);
          expected += bytes.substr(at * unit, unit);
        }
      }
    }
    for (const uint64_t piece : {1, 2, 3, 5, 100}) {
      // A tile of one piece, of a part of the pieces, and of all.
      for (const uint64_t tile : {uint64_t{1}, 7 * unit, TensorReader::kTileBytes}) {
        auto reader = TensorReader::Open(index, 0, files, tile);
        ASSERT_TRUE(reader.ok()) << reader.status();
        std::string got;
        for (uint64_t at = 0; at < reader->units(); at += piece) {
          const auto part = reader->Read(at, std::min(piece, reader->units() - at));
          ASSERT_TRUE(part.ok()) << part.status();
          got.append(reinterpret_cast<const char*>(part->data()), part->size());
        }
        EXPECT_EQ(got, expected) << piece << " " << tile;
      }
    }
    info.nbytes -= 1;
    TensorIndex wrong("torch");
    wrong.AddFile("m");
    wrong.Add(info);
    EXPECT_FALSE(TensorReader::Open(wrong, 0, files).ok());
  }
}

// Both ways of a view, which have no code in common, and the reads that the fast one takes.
struct BothWays {
  std::string boxes, indexes;
  int reads = 0;
};
BothWays Gather(MemoryRanges& files, size_t unit, const std::vector<int64_t>& shape,
                const std::vector<int64_t>& strides, uint64_t first, uint64_t count) {
  const std::string name = "m";
  const StridedView view = {name, 0, unit, shape, strides};
  BothWays both;
  both.boxes.resize(count * unit);
  both.indexes.resize(count * unit);
  files.reads = 0;
  EXPECT_TRUE(
      GatherStrided(files, view, first, std::as_writable_bytes(std::span(both.boxes))).ok());
  both.reads = files.reads;
  EXPECT_TRUE(
      CollectByIndex(files, view, first, std::as_writable_bytes(std::span(both.indexes))).ok());
  return both;
}

TEST(StridedGatherTest, LargeViewsAreReadInFewPiecesOrLongRuns) {
  MemoryRanges files;
  files.bytes.resize(12'000'000);
  for (size_t i = 0; i < files.bytes.size(); ++i) {
    files.bytes[i] = static_cast<char>(i * 2654435761U >> 13);
  }
  struct Case {
    size_t unit;
    std::vector<int64_t> shape, strides;
    int most_reads;
  };
  for (const Case& each :
       std::vector<Case>{{4, {1000, 3000}, {1, 1000}, 30},        // Transposed, of short rows.
                         {2, {3000, 2000}, {1, 3000}, 30},        // Rows that gaps may be read of.
                         {1, {4, 8, 1000}, {1, 4, 11000}, 1000},  // Far apart: a read for each.
                         {4, {64, 32, 3, 3}, {288, 1, 96, 32}, 2},  // channels_last.
                         {4, {5, 100000, 2}, {0, 1, 0}, 2},         // Repeated.
                         {8, {100, 3, 7}, {1, 3, 2}, 1},            // Overlapping.
                         {4, {3, 230000}, {700000, 3}, 40}}) {      // Every third.
    int64_t units = 1;
    for (const int64_t dim : each.shape) units *= dim;
    uint64_t reach = 1;
    for (size_t i = 0; i < each.shape.size(); ++i) {
      reach += static_cast<uint64_t>((each.shape[i] - 1) * each.strides[i]);
    }
    ASSERT_LE(reach * each.unit, files.bytes.size());
    const auto count = static_cast<uint64_t>(units);
    const BothWays all = Gather(files, each.unit, each.shape, each.strides, 0, count);
    EXPECT_TRUE(all.boxes == all.indexes) << each.shape[0];
    EXPECT_LE(all.reads, each.most_reads) << each.shape[0];
    for (const uint64_t first : {uint64_t{1}, count / 3, count - 1}) {
      const BothWays part =
          Gather(files, each.unit, each.shape, each.strides, first, (count - first + 1) / 2);
      EXPECT_TRUE(part.boxes == part.indexes) << each.shape[0] << " from " << first;
      EXPECT_TRUE(part.boxes == all.boxes.substr(first * each.unit, part.boxes.size()));
    }
  }
}

TEST(StridedGatherTest, AFileThatEndsBeforeIsAnError) {
  MemoryRanges files;
  files.bytes = "12345678";
  const std::string name = "m";
  const std::vector<int64_t> shape = {3, 3};
  const std::vector<int64_t> strides = {1, 3};
  std::vector<std::byte> out(9);
  for (const auto way : {GatherStrided, CollectByIndex}) {
    EXPECT_EQ(way(files, {name, 0, 1, shape, strides}, 0, out).code(), absl::StatusCode::kAborted);
  }
}

TEST(TensorReaderTest, WhatDoesNotFitItsFileIsAnError) {
  MemoryRanges files;
  files.bytes = std::string(8, 'x');
  const auto open = [&files](DType dtype, std::vector<int64_t> shape, uint64_t offset,
                             uint64_t nbytes) {
    TensorIndex index("torch");
    index.AddFile("m");
    TensorInfo info;
    info.name = "t";
    info.dtype = dtype;
    info.shape = shape;
    info.offset = offset;
    info.nbytes = nbytes;
    index.Add(info);
    return TensorReader::Open(index, 0, files).status();
  };
  EXPECT_TRUE(open(DType::kU8, {8}, 0, 8).ok());
  EXPECT_TRUE(open(DType::kU8, {0, INT64_MAX}, 8, 0).ok());
  EXPECT_FALSE(open(DType::kU8, {8}, 1, 8).ok());
  EXPECT_FALSE(open(DType::kU8, {8}, UINT64_MAX, 8).ok());
  EXPECT_FALSE(open(DType::kU16, {8}, 0, 8).ok());
  EXPECT_FALSE(open(DType::kU16, {INT64_MAX, INT64_MAX}, 0, 8).ok());
  EXPECT_FALSE(open(DType::kString, {1}, 0, 8).ok());
}

}  // namespace
}  // namespace modelhost::modelctl
