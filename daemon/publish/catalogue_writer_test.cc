// What a reader of the page may rely on, seen through a reader's own mapping.
#include "daemon/publish/catalogue_writer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/handle/mapping.h"
#include "proto/handle/seqlock.h"

namespace modelhost {
namespace {

// As a client sees the page: a mapping of the descriptor, and the ABI.
class PageReader {
 public:
  explicit PageReader(const CatalogueWriter& writer) {
    auto mapped = ReadOnlyMapping::MapOneWriter(writer.fd(), writer.page_bytes());
    EXPECT_TRUE(mapped.ok());
    mapping_ = *std::move(mapped);
  }
  const abi::CatalogueHeader& header() const {
    return *reinterpret_cast<const abi::CatalogueHeader*>(mapping_.bytes().data());
  }
  const abi::CatalogueSlot& slot(uint32_t number) const {
    return reinterpret_cast<const abi::CatalogueSlot*>(mapping_.bytes().data() +
                                                       header().header_bytes)[number];
  }

 private:
  ReadOnlyMapping mapping_;
};

LabelFile Labels(const std::vector<std::tuple<std::string, std::string, uint64_t, uint64_t>>& all) {
  LabelFile labels;
  for (const auto& [model, label, version, generation] : all) {
    LabelRecord record;
    record.version = version;
    record.generation = generation;
    labels.labels[{model, label}] = record;
  }
  return labels;
}

std::unique_ptr<CatalogueWriter> Make(const LabelFile& labels) {
  auto writer = CatalogueWriter::Create(42, labels);
  EXPECT_TRUE(writer.ok()) << writer.status();
  return *std::move(writer);
}

TEST(CatalogueWriter, AFreshPageSaysWhatItIs) {
  const auto writer = Make({});
  const PageReader page(*writer);
  EXPECT_EQ(page.header().magic.load(), abi::kCatalogueMagic);
  EXPECT_EQ(page.header().abi_version, abi::kCatalogueAbi);
  EXPECT_EQ(page.header().header_bytes, sizeof(abi::CatalogueHeader));
  EXPECT_EQ(page.header().slot_bytes, sizeof(abi::CatalogueSlot));
  EXPECT_EQ(page.header().capacity, abi::kCatalogueCapacity);
  EXPECT_EQ(page.header().page_bytes, writer->page_bytes());
  EXPECT_EQ(page.header().epoch, 42U);
  EXPECT_EQ(page.header().state.load(), static_cast<uint32_t>(abi::CatalogueState::kOpen));
  EXPECT_EQ(page.header().slot_count.load(), 0U);
  EXPECT_EQ(page.header().sequence.load() % 2, 0U);
}

TEST(CatalogueWriter, KnownLabelsKeepTheirGenerationAndAnnounceNothingYet) {
  const auto writer = Make(Labels({{"planner", "stable", 8, 12}, {"old", "stable", 0, 3}}));
  const PageReader page(*writer);
  ASSERT_EQ(page.header().slot_count.load(), 2U);
  const uint32_t slot = writer->SlotOf("planner", "stable");
  ASSERT_LT(slot, 2U);
  EXPECT_STREQ(page.slot(slot).model, "planner");
  EXPECT_STREQ(page.slot(slot).label, "stable");
  EXPECT_EQ(page.slot(slot).generation.load(), 12U);
  EXPECT_EQ(page.slot(slot).version.load(), 0U);
  EXPECT_EQ(page.slot(writer->SlotOf("old", "stable")).generation.load(), 3U);
}

TEST(CatalogueWriter, AnnouncingAReadyVersionAgainMovesNothing) {
  const auto writer = Make(Labels({{"planner", "stable", 8, 12}}));
  const PageReader page(*writer);
  const LabelChange change{"planner", "stable", 0, 8, 12};
  writer->Publish({&change, 1});
  EXPECT_EQ(page.slot(0).generation.load(), 12U);
  EXPECT_EQ(page.slot(0).version.load(), 8U);
}

TEST(CatalogueWriter, ANewLabelGetsASlotOfItsOwnThatItKeeps) {
  const auto writer = Make(Labels({{"planner", "stable", 8, 12}}));
  const PageReader page(*writer);
  EXPECT_EQ(writer->SlotOf("planner", "canary"), abi::kNoSlot);
  const LabelChange set{"planner", "canary", 0, 9, 1};
  writer->Publish({&set, 1});
  const uint32_t slot = writer->SlotOf("planner", "canary");
  ASSERT_EQ(slot, 1U);
  const LabelChange removed{"planner", "canary", 9, 0, 2};
  writer->Publish({&removed, 1});
  EXPECT_EQ(writer->SlotOf("planner", "canary"), slot);
  EXPECT_EQ(page.slot(slot).version.load(), 0U);
  EXPECT_EQ(page.slot(slot).generation.load(), 2U);
  EXPECT_EQ(page.header().slot_count.load(), 2U);
}

TEST(CatalogueWriter, AFullPageLeavesOutAndOverwritesNothing) {
  LabelFile labels;
  for (uint32_t i = 0; i < abi::kCatalogueCapacity; ++i) {
    labels.labels[{absl::StrCat("m", i), "stable"}].generation = i + 1;
    // One is in use: it has a slot whatever else there is.
    labels.labels[{absl::StrCat("m", i), "stable"}].version = i == 4000 ? 1 : 0;
  }
  labels.labels[{"a-removed-one", "stable"}].generation = 5;
  const auto writer = Make(labels);
  const PageReader page(*writer);
  EXPECT_EQ(writer->left_out(), 1U);
  EXPECT_NE(writer->SlotOf("m4000", "stable"), abi::kNoSlot);
  std::vector<std::string> told;
  writer->OnFull([&](const std::string& model, const std::string& label) {
    told.push_back(model + ":" + label);
    EXPECT_EQ(page.header().sequence.load() % 2, 0U);  // No reader waits for whoever is told.
  });
  const std::vector<LabelChange> changes = {{"new", "stable", 0, 1, 1},
                                            {"m4000", "stable", 1, 2, 99999}};
  writer->Publish(changes);
  EXPECT_EQ(told, std::vector<std::string>{"new:stable"});
  EXPECT_EQ(writer->SlotOf("new", "stable"), abi::kNoSlot);
  EXPECT_EQ(writer->left_out(), 2U);
  EXPECT_EQ(page.header().slot_count.load(), abi::kCatalogueCapacity);
  EXPECT_EQ(page.slot(writer->SlotOf("m4000", "stable")).generation.load(), 99999U);
}

TEST(CatalogueWriter, ACleanStopClosesThePage) {
  const auto writer = Make({});
  const PageReader page(*writer);
  writer->Close();
  EXPECT_EQ(page.header().state.load(), static_cast<uint32_t>(abi::CatalogueState::kClosed));
}

TEST(CatalogueWriter, ReadersNeverSeeHalfAMove) {
  const auto writer = Make(Labels({{"a", "stable", 1, 1}, {"b", "stable", 1, 1}}));
  const PageReader page(*writer);
  const uint32_t a = writer->SlotOf("a", "stable");
  const uint32_t b = writer->SlotOf("b", "stable");
  const auto publish = [&](uint64_t i) {
    const std::vector<LabelChange> changes = {{"a", "stable", i, i, i}, {"b", "stable", i, i, i}};
    writer->Publish(changes);
  };
  publish(1);
  const std::jthread mover([&](const std::stop_token& stop) {
    // New labels come too, while readers look.
    for (uint64_t i = 2; !stop.stop_requested(); ++i) {
      publish(i);
      if (i % 64 == 0 && i / 64 < 1000) {
        const LabelChange added{absl::StrCat("n", i / 64), "stable", 0, i, i};
        writer->Publish({&added, 1});
      }
    }
  });
  uint64_t good = 0;
  uint64_t last = 0;
  for (int i = 0; i < 100000; ++i) {
    uint64_t version_a = 0, version_b = 0, generation_a = 0, generation_b = 0;
    uint32_t count = 0;
    if (!SeqlockRead(page.header().sequence, 1000, [&] {
          version_a = page.slot(a).version.load(std::memory_order_relaxed);
          version_b = page.slot(b).version.load(std::memory_order_relaxed);
          generation_a = page.slot(a).generation.load(std::memory_order_relaxed);
          generation_b = page.slot(b).generation.load(std::memory_order_relaxed);
          count = page.header().slot_count.load(std::memory_order_acquire);
        })) {
      continue;
    }
    ++good;
    ASSERT_EQ(version_a, version_b);
    ASSERT_EQ(generation_a, generation_b);
    ASSERT_EQ(version_a, generation_a);
    ASSERT_GE(version_a, last);
    last = version_a;
    // A slot that is counted has its names.
    ASSERT_NE(page.slot(count - 1).model[0], '\0');
  }
  EXPECT_GT(good, 0U);
}

}  // namespace
}  // namespace modelhost
