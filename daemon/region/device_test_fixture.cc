#include "daemon/region/device_test_fixture.h"

#include <fcntl.h>
#include <stdlib.h>

#include <algorithm>
#include <fstream>
#include <thread>

#include "absl/strings/str_cat.h"
#include "proto/handle/mapping.h"

namespace modelhost {
namespace {

std::string Bytes(char seed, uint64_t bytes) {
  std::string text(bytes, '\0');
  for (uint64_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(seed + i * 7 + i / 4096);
  return text;
}

Digest HashText(const std::string& text) { return Sha256(std::as_bytes(std::span(text))); }

}  // namespace

void DeviceTest::SetUp() {
  root_ = testing::TempDir() + "/device_XXXXXX";
  ASSERT_NE(::mkdtemp(root_.data()), nullptr);
}

void DeviceTest::TearDown() {
  regions_.clear();
  tier_.reset();
  EXPECT_EQ(host_.reserved(), 0U);
  auto parent = os_.OpenDir(testing::TempDir() + "/");
  ASSERT_TRUE(parent.ok());
  EXPECT_TRUE(os_.RemoveTreeAt(*parent, root_.substr(root_.rfind('/') + 1)).ok());
}

void DeviceTest::StartTier(DeviceTierOptions options) {
  if (options.ring_bytes == DeviceTierOptions{}.ring_bytes) options.ring_bytes = kMiB;
  tier_ = std::make_unique<DeviceTier>(gpus_, clock_, host_, options);
  tier_->Discover();
}

std::shared_ptr<const HostRegion> DeviceTest::Sealed(char seed, uint64_t bytes) {
  const std::string text = Bytes(seed, bytes);
  auto memory = WritableRegion::Create("region", bytes, HugePages::kOff);
  EXPECT_TRUE(memory.ok());
  std::ranges::copy(std::as_bytes(std::span(text)), memory->bytes().begin());
  auto sealed = std::move(*memory).Seal();
  EXPECT_TRUE(sealed.ok());
  HostRegion::Parts parts;
  parts.digest = parts.content = HashText(text);
  parts.kind = abi::RegionKind::kSealed;
  parts.residency = Residency::kSealed;
  parts.bytes = bytes;
  parts.mapping = *ReadOnlyMapping::MapSealed(sealed->fd, bytes);
  parts.fd = std::move(sealed->fd);
  return std::make_shared<const HostRegion>(os_, std::move(parts));
}

std::shared_ptr<const HostRegion> DeviceTest::File(char seed, uint64_t bytes, Residency residency) {
  const std::string path = absl::StrCat(root_, "/", std::string(1, seed));
  const std::string text = Bytes(seed, bytes);
  std::ofstream(path, std::ios::binary) << text;
  HostRegion::Parts parts;
  parts.digest = parts.content = HashText(text);
  parts.residency = residency;
  parts.bytes = bytes;
  parts.fd = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  parts.mapping = *ReadOnlyMapping::MapFile(parts.fd, bytes);
  parts.source = *os_.Stat(parts.fd);
  parts.source_path = path;
  return std::make_shared<const HostRegion>(os_, std::move(parts));
}

DevicePlan DeviceTest::PlanOf(size_t regions, uint64_t max_segment) const {
  DevicePlan plan;
  plan.segments = true;
  uint32_t next = 0;
  for (uint32_t r = 0; r < regions; ++r) {
    DevicePlan::Part part;
    part.region = r;
    part.ranges = {{8, 1000}, {4096, 700'000}, {800'000, 700'000}};
    const auto layout = PackForDevice(part.ranges, {kMiB, max_segment});
    part.places = layout->places;
    part.segment_bytes = layout->segment_bytes;
    part.first_segment = next;
    next += static_cast<uint32_t>(part.segment_bytes.size());
    plan.parts.push_back(std::move(part));
  }
  return plan;
}

std::string DeviceTest::Expected(const HostRegion& region, const DevicePlan::Part& part,
                                 uint32_t segment) {
  std::string bytes(part.segment_bytes[segment], '\0');
  const auto* from = reinterpret_cast<const char*>(region.data().data());
  for (size_t i = 0; i < part.ranges.size(); ++i) {
    if (part.places[i].segment != segment) continue;
    bytes.replace(part.places[i].offset, part.ranges[i].bytes, from + part.ranges[i].offset,
                  part.ranges[i].bytes);
  }
  return bytes;
}

absl::StatusOr<std::vector<DeviceImage>> DeviceTest::Make() {
  phases_.clear();
  const DeviceTier::Work work{
      .name = name_,
      .policy = policy_,
      .plan = plan_,
      .gpus = on_,
      .regions = regions_,
      .cancel = cancel_,
      .progress = [this](uint64_t done) { progressed_ = std::max(progressed_, done); },
      .phase = [this](const std::string& phase, absl::Duration /*took*/,
                      uint64_t bytes) { phases_.push_back(absl::StrCat(phase, " ", bytes)); },
      .warn = [this](std::string text) { warnings_.push_back(std::move(text)); }};
  return tier_->Make(work);
}

std::vector<DeviceImage> DeviceTest::MustMake() {
  auto made = Make();
  EXPECT_TRUE(made.ok()) << made.status();
  return made.ok() ? *std::move(made) : std::vector<DeviceImage>();
}

void DeviceTest::ExpectNothingLeft() {
  EXPECT_EQ(host_.reserved(), 0U);
  const absl::Duration give_up = clock_.Monotonic() + absl::Seconds(60);
  for (BudgetPool* pool : tier_->Pools()) {
    // What an agent holds is released by a thread of the GPU's.
    while (pool->reserved() > 0 && clock_.Monotonic() < give_up) std::this_thread::yield();
    EXPECT_EQ(pool->reserved(), 0U) << pool->name();
    EXPECT_EQ(gpus_.used(pool->name()), 0U);
  }
}

}  // namespace modelhost
