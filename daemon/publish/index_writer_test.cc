// The index is read back through the ABI alone, as a client does.
#include "daemon/publish/index_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <time.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/platform/linux_os.h"
#include "proto/abi/version_index.h"
#include "proto/handle/mapping.h"

namespace modelhost {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A client's view: the sealed memfd, the header, the tables.
class IndexView {
 public:
  explicit IndexView(const SealedRegion& sealed) {
    auto mapped = ReadOnlyMapping::MapSealed(sealed.fd, sealed.bytes);
    EXPECT_TRUE(mapped.ok());
    mapping_ = *std::move(mapped);
    EXPECT_TRUE(abi::IndexFits(header(), sealed.bytes));
  }

  const abi::IndexHeader& header() const {
    return *reinterpret_cast<const abi::IndexHeader*>(mapping_.bytes().data());
  }
  template <typename T>
  std::span<const T> Table(const abi::TableRef& ref) const {
    return {reinterpret_cast<const T*>(mapping_.bytes().data() + ref.offset), ref.count};
  }
  std::string_view Text(const abi::StringRef& ref) const {
    const auto strings = Table<char>(header().strings);
    EXPECT_LT(uint64_t{ref.offset} + ref.length, strings.size());
    EXPECT_EQ(strings[ref.offset + ref.length], '\0');
    return {strings.data() + ref.offset, ref.length};
  }
  std::span<const abi::TensorEntry> tensors() const {
    return Table<abi::TensorEntry>(header().tensors);
  }
  std::string_view Component(const abi::TensorEntry& tensor) const {
    return Text(Table<abi::ComponentEntry>(header().components)[tensor.component].name);
  }
  // All tensors of a bare name, by the hash table, as version_index.h says how.
  std::vector<const abi::TensorEntry*> Find(std::string_view name) const {
    const auto buckets = Table<abi::Bucket>(header().buckets);
    std::vector<const abi::TensorEntry*> found;
    for (size_t at = abi::HashName(header().hash_key, name) & (buckets.size() - 1);
         buckets[at].number != 0; at = (at + 1) & (buckets.size() - 1)) {
      const abi::TensorEntry& tensor = tensors()[buckets[at].number - 1];
      if (buckets[at].hash != abi::HashName(header().hash_key, name)) continue;
      if (Text(tensor.name) == name) found.push_back(&tensor);
    }
    return found;
  }

 private:
  ReadOnlyMapping mapping_;
};

// Processor time of this thread: other tests on the machine do not count.
double ThreadCpuMs() {
  timespec now{};
  EXPECT_EQ(::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now), 0);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

class IndexWriterTest : public ::testing::Test {
 protected:
  IndexWriterTest() {
    manifest_->model = "planner";
    manifest_->version = 8;
    manifest_->digest = Digest{{1, 2, 3}};
  }

  // A file of the version with a region of its own. Files are added in the order of their paths.
  uint32_t AddFile(const std::string& path, uint64_t bytes, bool eager = true) {
    auto memory = WritableRegion::Create("weights", bytes, HugePages::kOff);
    auto sealed = std::move(*memory).Seal();
    HostRegion::Parts parts;
    parts.digest = Sha256(std::as_bytes(std::span(path)));
    parts.kind = abi::RegionKind::kSealed;
    parts.fd = std::move(sealed->fd);
    parts.bytes = bytes;
    const auto region = static_cast<uint32_t>(version_.regions.size());
    version_.regions.push_back(std::make_shared<const HostRegion>(os_, std::move(parts)));
    AddFileIn(path, bytes, region);
    if (eager) version_.eager.push_back(region);
    return region;
  }
  void AddFileIn(const std::string& path, uint64_t bytes, uint32_t region) {
    ManifestFile file;
    file.path = path;
    file.bytes = bytes;
    file.sha256 = version_.regions[region]->digest();
    file.role = path.ends_with(".json") ? "sidecar" : "weights";
    manifest_->files.push_back(file);
    version_.file_regions.push_back(region);
  }

  ComponentIndex& AddComponent(const std::string& name, const std::string& format,
                               const std::vector<std::string>& files) {
    components_.push_back({name, TensorIndex(format)});
    for (const std::string& file : files) components_.back().index.AddFile(file);
    return components_.back();
  }

  static TensorInfo Tensor(std::string_view name, uint64_t offset, uint64_t nbytes,
                           uint32_t file = 0) {
    TensorInfo info;
    info.name = name;
    info.dtype = abi::DType::kF32;
    info.offset = offset;
    info.nbytes = nbytes;
    info.file = file;
    return info;
  }

  absl::StatusOr<SealedRegion> Build() {
    version_.manifest = manifest_;
    return IndexWriter().Build(version_, components_, plan_);
  }
  SealedRegion MustBuild() {
    auto built = Build();
    EXPECT_TRUE(built.ok()) << built.status();
    return *std::move(built);
  }

  LinuxOs os_;
  std::shared_ptr<Manifest> manifest_ = std::make_shared<Manifest>();
  ResidentVersion version_;
  std::vector<ComponentIndex> components_;
  DevicePlan plan_;
};

TEST_F(IndexWriterTest, EveryNumberOfATensorComesBack) {
  AddFile("model.safetensors", 8192);
  ComponentIndex& component = AddComponent("model", "safetensors", {"model.safetensors"});
  const std::vector<int64_t> shape = {2, 3};
  const std::vector<int64_t> strides = {1, 2};
  TensorInfo plain = Tensor("a.weight", 4096, 24);
  plain.shape = shape;
  component.index.Add(plain);
  TensorInfo strided = plain;
  strided.name = "b.weight";
  strided.offset = 4120;
  strided.strides = strides;
  component.index.Add(strided);
  TensorInfo quantised = Tensor("c.weight", 0, 144);
  quantised.dtype = abi::DType::kQ4_K;
  component.index.Add(quantised);

  const SealedRegion sealed = MustBuild();
  const IndexView view(sealed);
  EXPECT_STREQ(view.header().model, "planner");
  EXPECT_EQ(view.header().version, 8U);
  EXPECT_EQ(view.header().digest[2], 3);
  EXPECT_EQ(view.Text(view.header().format), "safetensors");
  ASSERT_EQ(view.tensors().size(), 3U);
  const auto dims = view.Table<int64_t>(view.header().dims);

  const abi::TensorEntry& a = *view.Find("a.weight").at(0);
  EXPECT_EQ(a.region_offset, 4096U);
  EXPECT_EQ(a.nbytes, 24U);
  EXPECT_EQ(a.flags, abi::kTensorMappable);
  EXPECT_EQ(a.alignment_log2, 12);
  EXPECT_EQ(a.device_segment, abi::kNone);
  EXPECT_EQ(a.strides, abi::kNone);
  EXPECT_EQ(a.reason.length, 0U);
  EXPECT_THAT(dims.subspan(a.shape, a.rank), ElementsAre(2, 3));
  EXPECT_EQ(a.block_elements, 1);

  const abi::TensorEntry& b = *view.Find("b.weight").at(0);
  EXPECT_EQ(b.flags, abi::kTensorMappable | abi::kTensorStrided);
  EXPECT_EQ(b.alignment_log2, 3);
  EXPECT_THAT(dims.subspan(b.shape, b.rank), ElementsAre(2, 3));
  EXPECT_THAT(dims.subspan(b.strides, b.rank), ElementsAre(1, 2));

  const abi::TensorEntry& c = *view.Find("c.weight").at(0);
  EXPECT_EQ(c.dtype, static_cast<uint16_t>(abi::DType::kQ4_K));
  EXPECT_EQ(c.block_elements, 256);
  EXPECT_EQ(c.block_bytes, 144U);
  EXPECT_EQ(c.rank, 0);
  EXPECT_EQ(c.alignment_log2, 21);
  EXPECT_TRUE(view.Find("d.weight").empty());
}

TEST_F(IndexWriterTest, OneNameInTwoComponentsIsTwoTensors) {
  AddFile("decoder.gguf", 4096);
  AddFile("encoder.safetensors", 4096);
  // In the order that is not the index's.
  ComponentIndex encoder{"encoder", TensorIndex("safetensors")};
  encoder.index.AddFile("encoder.safetensors");
  encoder.index.Add(Tensor("weight", 64, 8));
  encoder.index.Add(Tensor("bias", 32, 8));
  encoder.index.AddMetadata("author", "me");
  ComponentIndex decoder{"decoder", TensorIndex("gguf")};
  decoder.index.AddFile("decoder.gguf");
  decoder.index.Add(Tensor("weight", 128, 8));
  decoder.index.AddMetadata("author", "you");
  components_.push_back(std::move(encoder));
  components_.push_back(std::move(decoder));

  const SealedRegion sealed = MustBuild();
  const IndexView view(sealed);
  EXPECT_EQ(view.Text(view.header().format), "mixed");
  ASSERT_EQ(view.tensors().size(), 3U);
  EXPECT_EQ(view.Text(view.tensors()[0].name), "bias");
  EXPECT_EQ(view.Component(view.tensors()[1]), "decoder");
  EXPECT_EQ(view.Component(view.tensors()[2]), "encoder");
  std::map<std::string_view, uint64_t> offsets;
  for (const auto* tensor : view.Find("weight")) {
    offsets[view.Component(*tensor)] = tensor->region_offset;
    EXPECT_EQ(
        view.Text(view.Table<abi::FileEntry>(view.header().files)[tensor->file].path).substr(0, 7),
        view.Component(*tensor));
  }
  EXPECT_EQ(offsets, (std::map<std::string_view, uint64_t>{{"decoder", 128}, {"encoder", 64}}));
  const auto metadata = view.Table<abi::MetadataEntry>(view.header().metadata);
  ASSERT_EQ(metadata.size(), 2U);
  EXPECT_EQ(view.Text(metadata[0].key), "decoder/author");
  EXPECT_EQ(view.Text(metadata[0].value), "you");
  EXPECT_EQ(view.Text(metadata[1].key), "encoder/author");
}

TEST_F(IndexWriterTest, MetadataOfOneComponentKeepsItsPlainKeysSorted) {
  AddFile("model.gguf", 4096);
  ComponentIndex& component = AddComponent("model", "gguf", {"model.gguf"});
  component.index.AddMetadata("z", std::string("with\0nul", 8));
  component.index.AddMetadata("a", "");
  const SealedRegion sealed = MustBuild();
  const IndexView view(sealed);
  const auto metadata = view.Table<abi::MetadataEntry>(view.header().metadata);
  ASSERT_EQ(metadata.size(), 2U);
  EXPECT_EQ(view.Text(metadata[0].key), "a");
  EXPECT_EQ(view.Text(metadata[0].value), "");
  EXPECT_EQ(view.Text(metadata[1].value), std::string_view("with\0nul", 8));
}

TEST_F(IndexWriterTest, FilesNameTheirRegionsAndShareThem) {
  AddFile("a.safetensors", 4096);
  AddFileIn("b.safetensors", 4096, 0);  // The same bytes.
  AddFile("config.json", 17, /*eager=*/false);
  ComponentIndex& component = AddComponent("a", "safetensors", {"b.safetensors"});
  component.index.Add(Tensor("w", 0, 4096));
  const SealedRegion sealed = MustBuild();
  const IndexView view(sealed);
  const auto files = view.Table<abi::FileEntry>(view.header().files);
  ASSERT_EQ(files.size(), 3U);
  EXPECT_EQ(view.Text(files[1].path), "b.safetensors");
  EXPECT_EQ(files[1].region, 0U);
  EXPECT_EQ(view.Text(files[2].role), "sidecar");
  EXPECT_EQ(files[2].bytes, 17U);
  const auto regions = view.Table<abi::RegionEntry>(view.header().regions);
  ASSERT_EQ(regions.size(), 2U);
  EXPECT_EQ(regions[0].eager, 1U);
  EXPECT_EQ(regions[1].eager, 0U);
  EXPECT_EQ(regions[0].kind, static_cast<uint32_t>(abi::RegionKind::kSealed));
  EXPECT_EQ(std::memcmp(regions[0].digest, files[1].digest, abi::kDigestBytes), 0);
  EXPECT_EQ(view.Find("w").at(0)->file, 1U);
  EXPECT_EQ(view.Find("w").at(0)->region, 0U);
}

TEST_F(IndexWriterTest, ATensorThatCannotBeMappedSaysWhy) {
  AddFile("model.onnx", 64);
  ComponentIndex& component = AddComponent("model", "onnx", {"model.onnx"});
  TensorInfo info = Tensor("packed", 1000, 1000);  // Of the decoded values: outside the file.
  info.mappable = false;
  info.reason = "values are packed";
  component.index.Add(info);
  info.name = "packed too";
  component.index.Add(info);
  const SealedRegion sealed = MustBuild();
  const IndexView view(sealed);
  EXPECT_EQ(view.Find("packed").at(0)->flags, 0);
  EXPECT_EQ(view.Text(view.Find("packed").at(0)->reason), "values are packed");
  EXPECT_EQ(view.Text(view.Find("packed too").at(0)->reason), "values are packed");
}

TEST_F(IndexWriterTest, AVersionWithoutTensorsHasAnIndexToo) {
  AddFile("engine.plan", 64, /*eager=*/false);
  const SealedRegion sealed = MustBuild();
  const IndexView view(sealed);
  EXPECT_EQ(view.tensors().size(), 0U);
  EXPECT_EQ(view.header().buckets.count, 0U);
  EXPECT_EQ(view.Table<abi::FileEntry>(view.header().files).size(), 1U);
}

TEST_F(IndexWriterTest, ATensorOutsideItsFileIsRefusedByName) {
  AddFile("model.safetensors", 4096);
  ComponentIndex& component = AddComponent("model", "safetensors", {"model.safetensors"});
  component.index.Add(Tensor("outside", 4000, 100));
  EXPECT_TRUE(absl::IsInvalidArgument(Build().status()));
  EXPECT_THAT(std::string(Build().status().message()),
              testing::AllOf(HasSubstr("planner@8"), HasSubstr("outside"), HasSubstr("4096")));
  components_.clear();
  AddComponent("model", "safetensors", {"model.safetensors"})
      .index.Add(Tensor("wraps", ~uint64_t{0} - 3, 8));
  EXPECT_TRUE(absl::IsInvalidArgument(Build().status()));
}

TEST_F(IndexWriterTest, ATensorInAFileThatTheVersionDoesNotHaveIsRefused) {
  AddFile("model.safetensors", 4096);
  AddComponent("model", "safetensors", {"other.safetensors"}).index.Add(Tensor("w", 0, 4));
  EXPECT_THAT(std::string(Build().status().message()), HasSubstr("other.safetensors"));
  components_.clear();
  AddComponent("model", "safetensors", {"model.safetensors"}).index.Add(Tensor("w", 0, 4, 5));
  EXPECT_TRUE(absl::IsInvalidArgument(Build().status()));
}

TEST_F(IndexWriterTest, ATensorTwiceInOneComponentIsRefused) {
  AddFile("model.safetensors", 4096);
  ComponentIndex& component = AddComponent("model", "safetensors", {"model.safetensors"});
  component.index.Add(Tensor("w", 0, 4));
  component.index.Add(Tensor("v", 0, 4));
  component.index.Add(Tensor("w", 8, 4));
  EXPECT_THAT(std::string(Build().status().message()), HasSubstr("twice"));
}

TEST_F(IndexWriterTest, PartsThatDoNotFitTogetherAreTheLoadersMistake) {
  AddFile("model.safetensors", 4096, /*eager=*/false);
  AddComponent("model", "safetensors", {"model.safetensors"}).index.Add(Tensor("w", 0, 4));
  EXPECT_EQ(Build().status().code(), absl::StatusCode::kInternal);
  version_.eager = {7};
  EXPECT_EQ(Build().status().code(), absl::StatusCode::kInternal);
  version_.eager = {0};
  version_.file_regions.clear();
  EXPECT_EQ(Build().status().code(), absl::StatusCode::kInternal);
}

// Two files of two tensors each; of the second one, one goes to the device.
class DeviceIndexTest : public IndexWriterTest {
 protected:
  DeviceIndexTest() {
    AddFile("a.safetensors", 8192);
    AddFile("b.safetensors", 8192);
    ComponentIndex& a = AddComponent("a", "safetensors", {"a.safetensors"});
    a.index.Add(Tensor("a0", 64, 1000));
    a.index.Add(Tensor("a1", 4096, 4096));
    a.index.Add(Tensor("a1.tied", 4096, 4096));
    ComponentIndex& b = AddComponent("b", "safetensors", {"b.safetensors"});
    b.index.Add(Tensor("b0", 0, 8));
    b.index.Add(Tensor("b1", 8, 16));
    plan_.segments = true;
    plan_.parts.push_back({0, {{64, 1000}, {4096, 4096}}, {{0, 512}, {1, 0}}, {4096, 8192}, 0});
    plan_.parts.push_back({1, {{8, 16}}, {{0, 1024}}, {2048}, 2});
  }

  std::string Refusal() {
    const auto built = Build();
    EXPECT_EQ(built.status().code(), absl::StatusCode::kInternal) << built.status();
    return std::string(built.status().message());
  }
};

TEST_F(DeviceIndexTest, TensorsSayWhereTheyLieInWhichSegment) {
  const SealedRegion sealed = MustBuild();
  const IndexView view(sealed);
  const auto segments = view.Table<abi::DeviceSegmentEntry>(view.header().device_segments);
  ASSERT_EQ(segments.size(), 3U);
  EXPECT_EQ(segments[0].bytes, 4096U);
  EXPECT_EQ(segments[1].bytes, 8192U);
  EXPECT_EQ(segments[1].region, 0U);
  EXPECT_EQ(segments[2].bytes, 2048U);
  EXPECT_EQ(segments[2].region, 1U);
  const auto place = [&](const char* name) {
    const abi::TensorEntry& tensor = *view.Find(name).at(0);
    EXPECT_EQ(tensor.flags, abi::kTensorMappable | abi::kTensorOnDevice) << name;
    return std::pair(tensor.device_segment, tensor.device_offset);
  };
  EXPECT_EQ(place("a0"), std::pair(0U, uint64_t{512}));
  EXPECT_EQ(place("a1"), std::pair(1U, uint64_t{0}));
  EXPECT_EQ(place("a1.tied"), place("a1"));
  EXPECT_EQ(place("b1"), std::pair(2U, uint64_t{1024}));
  EXPECT_EQ(view.Find("b0").at(0)->flags, abi::kTensorMappable);
  EXPECT_EQ(view.Find("b0").at(0)->device_segment, abi::kNone);
}

TEST_F(DeviceIndexTest, WithoutSegmentsTheTensorsAreMarkedAlone) {
  plan_.segments = false;
  for (DevicePlan::Part& part : plan_.parts) {
    part.places.clear();
    part.segment_bytes.clear();
  }
  const SealedRegion sealed = MustBuild();
  const IndexView view(sealed);
  EXPECT_EQ(view.header().device_segments.count, 0U);
  EXPECT_EQ(view.Find("a0").at(0)->flags, abi::kTensorMappable | abi::kTensorOnDevice);
  EXPECT_EQ(view.Find("a0").at(0)->device_segment, abi::kNone);
  EXPECT_EQ(view.Find("b0").at(0)->flags, abi::kTensorMappable);
  plan_.parts[0].segment_bytes = {4096};
  EXPECT_THAT(Refusal(), HasSubstr("without them"));
}

TEST_F(DeviceIndexTest, APlanThatNamesWhatIsNotThereIsTheLoadersMistake) {
  const DevicePlan good = plan_;
  const auto refusal_with = [&](auto change) {
    plan_ = good;
    change(plan_.parts);
    return Refusal();
  };
  using Parts = std::vector<DevicePlan::Part>;
  EXPECT_THAT(refusal_with([](Parts& p) { p[1].region = 2; }), HasSubstr("region 2 of 2"));
  EXPECT_THAT(refusal_with([](Parts& p) { p[1].region = 0; }), HasSubstr("twice"));
  EXPECT_THAT(refusal_with([](Parts& p) { p[1].first_segment = 1; }), HasSubstr("first segment"));
  EXPECT_THAT(refusal_with([](Parts& p) { p[0].places.pop_back(); }), HasSubstr("places"));
  EXPECT_THAT(refusal_with([](Parts& p) { p[0].ranges[1].bytes = 4097; }), HasSubstr("8192"));
  EXPECT_THAT(refusal_with([](Parts& p) { p[0].ranges[1].offset = ~uint64_t{0}; }),
              HasSubstr("8192"));
  EXPECT_THAT(refusal_with([](Parts& p) { p[0].places[0].segment = 2; }), HasSubstr("not that"));
  EXPECT_THAT(refusal_with([](Parts& p) { p[0].places[0].offset = 3097; }), HasSubstr("not that"));
  EXPECT_THAT(refusal_with([](Parts& p) { p[0].places[0].offset = ~uint64_t{0}; }),
              HasSubstr("not that"));
  EXPECT_THAT(refusal_with([](Parts& p) { std::swap(p[0].ranges[0], p[0].ranges[1]); }),
              HasSubstr("not sorted"));
  EXPECT_THAT(refusal_with([](Parts& p) { p[1].ranges[0].bytes = 15; }), HasSubstr("no tensor's"));
  plan_ = good;
  EXPECT_TRUE(Build().ok());
}

TEST_F(IndexWriterTest, NamesThatShareABucketOfOneIndexDoNotInTheNext) {
  AddFile("model.safetensors", 8);
  ComponentIndex& component = AddComponent("model", "safetensors", {"model.safetensors"});
  component.index.Add(Tensor("w", 0, 8));
  const SealedRegion first = MustBuild();
  const SealedRegion second = MustBuild();
  const abi::HashKey key = IndexView(first).header().hash_key;
  const abi::HashKey other = IndexView(second).header().hash_key;
  // What somebody would choose who knew the key.
  std::vector<std::string> chosen;
  for (int i = 0; chosen.size() < 100; ++i) {
    std::string name = absl::StrCat("layer.", i, ".weight");
    if ((abi::HashName(key, name) & 0xff) == 0) chosen.push_back(std::move(name));
  }
  const auto together = std::ranges::count_if(
      chosen, [&](const std::string& name) { return (abi::HashName(other, name) & 0xff) == 0; });
  EXPECT_LT(together, 10);
}

TEST_F(IndexWriterTest, OneNameInVeryManyComponentsTakesNoLongerThanManyNames) {
  constexpr int kComponents = 50000;
  AddFile("model.safetensors", 8);
  // Their addresses must stay.
  for (int i = 0; i < kComponents; ++i) {
    AddComponent(absl::StrCat("c", i), "safetensors", {"model.safetensors"})
        .index.Add(Tensor("w", 0, 8));
  }
  const double start = ThreadCpuMs();
  const SealedRegion sealed = MustBuild();
  const double one_name = ThreadCpuMs() - start;
  EXPECT_EQ(IndexView(sealed).Find("w").size(), size_t{kComponents});

  ComponentIndex& last = AddComponent("many", "safetensors", {"model.safetensors"});
  for (int i = 0; i < kComponents; ++i) last.index.Add(Tensor(absl::StrCat("n", i), 0, 8));
  const double again = ThreadCpuMs();
  MustBuild();
  // Looking at all before each would take 1.25e9 steps, a thousand times as long.
  EXPECT_LT(one_name, 20 * (ThreadCpuMs() - again));
}

TEST_F(IndexWriterTest, EveryOneOfAHundredThousandTensorsIsFound) {
  constexpr int kTensors = 100000;
  AddFile("model.safetensors", 8 * kTensors);
  ComponentIndex& component = AddComponent("model", "safetensors", {"model.safetensors"});
  const std::vector<int64_t> shape = {2, 1};
  // Not in the order of the index.
  for (int i = kTensors - 1; i >= 0; --i) {
    const std::string name = absl::StrCat("model.layers.", i, ".self_attn.q_proj.weight");
    TensorInfo info = Tensor(name, static_cast<uint64_t>(i) * 8, 8);
    info.shape = shape;
    component.index.Add(info);
  }
  const double start = ThreadCpuMs();
  const SealedRegion sealed = MustBuild();
  RecordProperty("build_cpu_ms", absl::StrCat(ThreadCpuMs() - start));
  const IndexView view(sealed);
  EXPECT_LE(view.tensors().size() * 2, view.header().buckets.count);
  for (size_t i = 1; i < view.tensors().size(); ++i) {
    ASSERT_LT(view.Text(view.tensors()[i - 1].name), view.Text(view.tensors()[i].name));
  }
  for (int i = 0; i < kTensors; ++i) {
    const auto found = view.Find(absl::StrCat("model.layers.", i, ".self_attn.q_proj.weight"));
    ASSERT_EQ(found.size(), 1U) << i;
    ASSERT_EQ(found[0]->region_offset, static_cast<uint64_t>(i) * 8);
  }
}

}  // namespace
}  // namespace modelhost
