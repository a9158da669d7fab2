#include "daemon/service/index_pages.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/fakes/hand_index.h"
#include "tests/fakes/manual_clock.h"

namespace modelhost {
namespace {

HandIndex SmallModel(int tensors) {
  HandIndex index;
  std::string("planner").copy(index.header.model, 8);
  index.header.version = 7;
  index.header.format = index.Text("safetensors");
  index.regions.push_back({1 << 20, {1}, static_cast<uint32_t>(abi::RegionKind::kFile), 1});
  index.files.push_back({index.Text("m.safetensors"), index.Text("weights"), 1 << 20, {1}, 0, 0});
  index.components.push_back({index.Text("main"), index.Text("safetensors")});
  for (int i = 0; i < tensors; ++i) index.Add(absl::StrCat("t", i), i, 1);
  return index;
}

std::vector<v1::IndexPage> PagesOf(HandIndex index, uint32_t most_tensors = 0) {
  const std::vector<std::byte> bytes = index.Bytes();
  const auto tables = FlatIndex::Read(bytes);
  EXPECT_TRUE(tables.ok()) << tables.status();
  std::vector<v1::IndexPage> all;
  if (!tables.ok()) return all;
  IndexPages pages(*tables, most_tensors);
  while (true) {
    v1::IndexPage page;
    const auto more = pages.Next(&page);
    EXPECT_TRUE(more.ok()) << more.status();
    if (!more.ok() || !*more) return all;
    all.push_back(page);
  }
}

TEST(IndexPages, ASmallIndexIsOnePage) {
  const auto pages = PagesOf(SmallModel(2));
  ASSERT_EQ(pages.size(), 1U);
  const v1::IndexPage& page = pages[0];
  EXPECT_EQ(page.head().model(), "planner");
  EXPECT_EQ(page.head().tensor_count(), 2U);
  EXPECT_EQ(page.head().format(), "safetensors");
  EXPECT_EQ(page.regions(0).bytes(), 1U << 20);
  EXPECT_EQ(page.regions(0).kind(), "file");
  EXPECT_TRUE(page.regions(0).with_grant());
  EXPECT_EQ(page.files(0).path(), "m.safetensors");
  EXPECT_EQ(page.components(0).name(), "main");
  ASSERT_EQ(page.tensors_size(), 2);
  EXPECT_EQ(page.tensors(1).name(), "t1");
  EXPECT_EQ(page.tensors(1).offset(), 1U);
  EXPECT_EQ(page.tensors(1).shape(0), 1);
  EXPECT_EQ(page.tensors(1).dtype(), "U8");
}

TEST(IndexPages, ManyTensorsComeOnceEachAndInPagesThatFit) {
  constexpr int kTensors = 100'000;
  uint64_t next = 0;
  bool first = true;
  const auto pages = PagesOf(SmallModel(kTensors));
  EXPECT_GT(pages.size(), 5U);
  for (const v1::IndexPage& page : pages) {
    EXPECT_EQ(page.has_head(), first);
    first = false;
    EXPECT_LT(page.ByteSizeLong(), IndexPages::kPageBytes + 4096);
    EXPECT_EQ(page.first_tensor(), next);
    next += page.tensors_size();
  }
  EXPECT_EQ(next, uint64_t{kTensors});
}

TEST(IndexPages, ACallerMayHaveSmallPages) {
  const auto pages = PagesOf(SmallModel(10), 3);
  ASSERT_EQ(pages.size(), 4U);
  EXPECT_EQ(pages[3].first_tensor(), 9U);
  EXPECT_EQ(pages[3].tensors_size(), 1);
}

TEST(IndexPages, ALongValueGoesOnInTheNextEntries) {
  HandIndex index = SmallModel(1);
  std::string value;
  for (int i = 0; value.size() < 3 * IndexPages::kPageBytes; ++i) absl::StrAppend(&value, i, ",");
  index.AddMetadata("tokens", value);
  index.AddMetadata("z", "end");
  std::string joined;
  size_t entries = 0;
  for (const v1::IndexPage& page : PagesOf(std::move(index))) {
    EXPECT_LT(page.ByteSizeLong(), IndexPages::kPageBytes + 4096);
    for (const v1::IndexMetadata& entry : page.metadata()) {
      if (entry.key() != "tokens") continue;
      joined += entry.value();
      ++entries;
      EXPECT_EQ(entry.more(), joined.size() < value.size());
    }
  }
  EXPECT_EQ(joined, value);
  EXPECT_GT(entries, 2U);
}

TEST(IndexPages, ANameIsAsItIsAndOneThatIsNoTextIsAnError) {
  HandIndex index = SmallModel(0);
  index.Add("a\nb", 0, 1);
  EXPECT_EQ(PagesOf(index)[0].tensors(0).name(), "a\nb");
  index.Add("c\xff", 1, 1);
  const std::vector<std::byte> bytes = index.Bytes();
  const auto tables = FlatIndex::Read(bytes);
  ASSERT_TRUE(tables.ok());
  v1::IndexPage page;
  const absl::Status status = IndexPages(*tables, 0).Next(&page).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("tensor 1 has a name"));
}

TEST(IndexPages, AReaderHasAMinuteForAllOfThem) {
  const std::vector<std::byte> bytes = SmallModel(200).Bytes();
  const auto tables = FlatIndex::Read(bytes);
  ASSERT_TRUE(tables.ok());
  ManualClock clock;
  int sent = 0;
  const auto slow = [&](const v1::IndexPage&) {
    ++sent;
    clock.Advance(absl::Seconds(7));
    return absl::OkStatus();
  };
  const absl::Status status = SendPages(*tables, 1, clock, slow);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_EQ(sent, 9);
  EXPECT_TRUE(SendPages(*tables, 100, clock, slow).ok());
  EXPECT_TRUE(absl::IsCancelled(SendPages(
      *tables, 1, clock, [](const v1::IndexPage&) { return absl::CancelledError("gone"); })));
}

TEST(IndexPages, ABrokenIndexEndsWithAnError) {
  HandIndex index = SmallModel(3);
  index.tensors[2].name.length = 1 << 20;
  const std::vector<std::byte> bytes = index.Bytes();
  const auto tables = FlatIndex::Read(bytes);
  ASSERT_TRUE(tables.ok());
  IndexPages pages(*tables, 0);
  v1::IndexPage page;
  EXPECT_TRUE(absl::IsDataLoss(pages.Next(&page).status()));
}

}  // namespace
}  // namespace modelhost
