#include "client/modelctl/import.h"

#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "client/modelctl/import_metadata.h"
#include "client/modelctl/model_source.h"
#include "client/modelctl/recoder.h"
#include "daemon/format/model_builders.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fakes/temp_folder.h"

namespace modelhost::modelctl {
namespace {

using modelhost::testing::GgufBuilder;
using modelhost::testing::Le;
using modelhost::testing::Safetensors;
using modelhost::testing::SmallSafetensors;
using modelhost::testing::TensorJson;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

class ImportTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const { return (root_ / name).string(); }
  void Put(const std::string& name, const std::string& bytes) const {
    fs::create_directories((root_ / name).parent_path());
    std::ofstream(root_ / name, std::ios::binary) << bytes;
  }
  std::string Content(const std::string& name) const {
    std::ifstream in(root_ / name, std::ios::binary);
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
  }
  ExitCode Import(const std::string& source, const std::string& out) {
    options_.source = Path(source);
    options_.out = Path(out);
    ImportWatch watch;
    notes_.clear();
    calls_ = 0;
    watch.progress = [this](const char* phase, uint64_t done, uint64_t total) {
      EXPECT_LE(done, total);
      phase_ = phase;
      return ++calls_ < stop_at_;
    };
    watch.note = [this](const std::string& text) { notes_.push_back(text); };
    end_ = RunImport(options_, watch);
    EXPECT_EQ(end_.error.empty(), end_.code == ExitCode::kOk);
    EXPECT_EQ(end_.error.find('\n'), std::string::npos);
    return end_.code;
  }
  // The bytes of a tensor of a file that an import made.
  std::string Tensor(const std::string& file, const std::string& name, abi::DType dtype) {
    const auto source = OpenModelSource(Path(file));
    if (!source.ok()) return std::string(source.status().message());
    const TensorIndex& index = source->models[0].named.index;
    for (size_t i = 0; i < index.size(); ++i) {
      const TensorInfo info = index.at(i);
      if (info.name != name) continue;
      EXPECT_EQ(info.dtype, dtype) << name;
      return Content(file).substr(info.offset, info.nbytes);
    }
    return "no tensor " + name;
  }

  const modelhost::testing::TempFolder folder_;
  const fs::path& root_ = folder_.path();
  ImportOptions options_;
  ImportEnd end_;
  std::vector<std::string> notes_;
  std::string phase_;
  int calls_ = 0;
  int stop_at_ = INT_MAX;
};

std::string Floats(const std::vector<float>& values) {
  std::string out;
  for (const float value : values) out += Le(std::bit_cast<uint32_t>(value));
  return out;
}

std::string OneTensor(const std::string& name, const std::string& dtype, const std::string& shape,
                      const std::string& data) {
  return Safetensors("{" + TensorJson(name, dtype, shape, 0, data.size()) + "}", 0) + data;
}

TEST_F(ImportTest, KeepsEveryByteAndSaysSo) {
  Put("in.safetensors", "");
  const std::string header = "{\"__metadata__\":{\"k\":\"v\"}," +
                             TensorJson("b", "U8", "[3]", 0, 3) + "," +
                             TensorJson("a", "F32", "[2]", 3, 11) + "," +
                             TensorJson("empty", "I64", "[0,5]", 11, 11) + "}";
  const std::string data = std::string("\1\2\3") + Floats({1.5F, -0.0F});
  Put("in.safetensors", Safetensors(header, 0) + data);
  ASSERT_EQ(Import("in.safetensors", "out.safetensors"), ExitCode::kOk) << end_.error;
  EXPECT_TRUE(end_.report.verified);
  EXPECT_EQ(end_.report.absolute_error, 0);
  EXPECT_EQ(end_.report.tensors.size(), 3u);
  EXPECT_EQ(end_.report.bytes, fs::file_size(Path("out.safetensors")));
  EXPECT_EQ(Tensor("out.safetensors", "a", abi::DType::kF32), data.substr(3));
  EXPECT_EQ(Tensor("out.safetensors", "b", abi::DType::kU8), data.substr(0, 3));
  EXPECT_THAT(Content("out.safetensors"), HasSubstr("\"__metadata__\":{\"k\":\"v\"}"));
  EXPECT_EQ(phase_, "verify");
  // The way back is the same file: the order is the writer's own.
  ASSERT_EQ(Import("out.safetensors", "again.safetensors"), ExitCode::kOk);
  EXPECT_EQ(Content("again.safetensors"), Content("out.safetensors"));
}

TEST_F(ImportTest, ConvertsAndMeasures) {
  Put("in.safetensors", OneTensor("w", "F32", "[4]", Floats({1.0F, 1.0F / 3, 70000.0F, NAN})));
  options_.choices.dtype = abi::DType::kBF16;
  ASSERT_EQ(Import("in.safetensors", "bf16.safetensors"), ExitCode::kOk) << end_.error;
  // 70000 = 0x4788b800 rounds up to 0x4789, 1/3 = 0x3eaaaaab to 0x3eab.
  EXPECT_EQ(
      Tensor("bf16.safetensors", "w", abi::DType::kBF16),
      Le<uint16_t>(0x3f80) + Le<uint16_t>(0x3eab) + Le<uint16_t>(0x4789) + Le<uint16_t>(0x7fc0));
  EXPECT_EQ(end_.report.absolute_error, std::fabs(70000.0 - 70144.0));
  EXPECT_EQ(end_.report.worst_tensor, "w");
  EXPECT_NEAR(end_.report.relative_error, 144.0 / 70000, 1e-12);
  options_.choices.dtype = abi::DType::kF16;
  ASSERT_EQ(Import("in.safetensors", "f16.safetensors"), ExitCode::kOk) << end_.error;
  EXPECT_TRUE(std::isinf(end_.report.absolute_error));
  EXPECT_EQ(end_.report.errors[0].overflowed, 1u);
  EXPECT_THAT(notes_, ElementsAre(HasSubstr("tensor 'w': 1 value is beyond F16")));
  options_.verify = false;
  ASSERT_EQ(Import("in.safetensors", "f16-2.safetensors"), ExitCode::kOk);
  EXPECT_FALSE(end_.report.verified);
  EXPECT_EQ(Content("f16-2.safetensors"), Content("f16.safetensors"));
}

TEST_F(ImportTest, QuantisesToGgufAndKeepsTheRest) {
  std::vector<float> values(64);
  for (size_t i = 0; i < 64; ++i) values[i] = static_cast<float>(i) - 30.0F;
  const std::string rows = Floats(values);
  Put("in.safetensors", Safetensors("{" + TensorJson("b", "F32", "[3]", 256, 268) + "," +
                                        TensorJson("w", "F32", "[2,32]", 0, 256) + "}",
                                    0) +
                            rows + Floats({1, 2, 3}));
  options_.choices.quantize_q8 = true;
  options_.metadata = {{"general.architecture", "llama"}, {"llama.block_count", "2"}};
  ASSERT_EQ(Import("in.safetensors", "out.gguf"), ExitCode::kOk) << end_.error;
  EXPECT_THAT(notes_, IsEmpty());
  EXPECT_GT(end_.report.absolute_error, 0);
  EXPECT_LT(end_.report.relative_error, 0.5 / 127 * 1.1);
  const std::string blocks = Tensor("out.gguf", "w", abi::DType::kQ8_0);
  ASSERT_EQ(blocks.size(), 68u);
  // The second row goes from 2 to 33: d = 33 / 127, and its last value is 127 of it.
  EXPECT_EQ(blocks[67], 127);
  EXPECT_EQ(blocks[2], -127);
  EXPECT_EQ(Tensor("out.gguf", "b", abi::DType::kF32), Floats({1, 2, 3}));
  const auto source = OpenModelSource(Path("out.gguf"));
  ASSERT_TRUE(source.ok());
  std::string metadata;
  for (const MetadataItem& item : source->models[0].named.index.metadata()) {
    metadata += item.key + "=" + item.value + ";";
  }
  EXPECT_EQ(metadata,
            "general.quantization_version=2;general.file_type=7;"
            "general.architecture=llama;llama.block_count=2;");
  EXPECT_EQ(fs::file_size(Path("out.gguf")) % 32, 0u);
}

TEST_F(ImportTest, ValuesThatQ8CannotHoldAreRefusedByName) {
  std::vector<float> values(32, 1.0F);
  values[5] = INFINITY;
  Put("in.safetensors", OneTensor("w", "F32", "[1,32]", Floats(values)));
  options_.choices.quantize_q8 = true;
  EXPECT_EQ(Import("in.safetensors", "out.gguf"), ExitCode::kIntegrity);
  EXPECT_THAT(end_.error, HasSubstr("tensor 'w' has a value that Q8_0 cannot hold"));
  EXPECT_FALSE(fs::exists(Path("out.gguf")));
}

TEST_F(ImportTest, AGgufSourceKeepsItsKeys) {
  GgufBuilder source;
  std::string words;
  for (int i = 0; i < 100; ++i) words += GgufBuilder::Text("word" + std::to_string(i));
  source.KeyText("general.architecture", "bert");
  source.Key("tokens", 9, Le<uint32_t>(8) + Le<uint64_t>(100) + words);
  source.Tensor("q", {256}, 12, 144).Tensor("d", {4}, 0, 16);
  Put("in.gguf", source.Build());
  ASSERT_EQ(Import("in.gguf", "out.gguf"), ExitCode::kOk) << end_.error;
  EXPECT_THAT(notes_, IsEmpty());
  EXPECT_EQ(Tensor("out.gguf", "q", abi::DType::kQ4_K), std::string(144, '\x5a'));
  EXPECT_THAT(Content("out.gguf"), HasSubstr(words));
  // In safetensors there is no place for the words, and no type for the blocks.
  EXPECT_EQ(Import("in.gguf", "out.safetensors"), ExitCode::kIntegrity);
  EXPECT_THAT(end_.error, HasSubstr("tensor 'q': safetensors has no type Q4_K"));
  options_.choices.exclude = {"q"};
  EXPECT_EQ(Import("in.gguf", "out.safetensors"), ExitCode::kOk) << end_.error;
  EXPECT_THAT(notes_, ElementsAre(HasSubstr("1 long list of the metadata")));
  EXPECT_THAT(Content("out.safetensors"), HasSubstr("\"general.architecture\":\"bert\""));
}

TEST_F(ImportTest, ShardsBecomeOneFile) {
  Put("set/model.safetensors.index.json",
      "{\"weight_map\":{\"a\":\"1.safetensors\",\"b\":\"2.safetensors\"}}");
  Put("set/1.safetensors", SmallSafetensors({"a"}));
  Put("set/2.safetensors", SmallSafetensors({"b"}));
  ASSERT_EQ(Import("set", "out.safetensors"), ExitCode::kOk) << end_.error;
  EXPECT_EQ(Tensor("out.safetensors", "b", abi::DType::kU8), std::string(4, '\x5a'));
  // The target may not be one of the shards, under whatever name.
  options_.replace = true;
  fs::create_hard_link(Path("set/2.safetensors"), Path("hard.safetensors"));
  fs::create_symlink("set/1.safetensors", Path("soft.safetensors"));
  const std::string before = Content("set/2.safetensors");
  for (const char* out : {"set/2.safetensors", "hard.safetensors", "soft.safetensors"}) {
    EXPECT_EQ(Import("set/model.safetensors.index.json", out), ExitCode::kUsage) << out;
    EXPECT_THAT(end_.error, HasSubstr("is a file of the source"));
  }
  EXPECT_EQ(Content("set/2.safetensors"), before);
  // Nor lie in the folder that is the source; beside a file that is the source it may.
  EXPECT_EQ(Import("set", "set/new.safetensors"), ExitCode::kUsage);
  EXPECT_THAT(end_.error, HasSubstr("lies in the source"));
  fs::create_directory(Path("set/sub"));
  EXPECT_EQ(Import("set", "set/sub/new.safetensors"), ExitCode::kUsage);
  EXPECT_EQ(Import("set/1.safetensors", "set/new.safetensors"), ExitCode::kOk) << end_.error;
}

TEST_F(ImportTest, OnnxTypedFieldsBecomeBytes) {
  // TensorProto: dims 3, INT64, int64_data 1, -1, 300 as varints, name "v".
  const std::string minus_one = std::string(9, '\xff') + "\x01";
  const std::string values = "\x01" + minus_one + "\xac\x02";
  const std::string tensor = std::string("\x08\x03\x10\x07\x3a", 5) +
                             static_cast<char>(values.size()) + values + "\x42\x01v";
  const std::string graph = "\x2a" + std::string(1, static_cast<char>(tensor.size())) + tensor;
  Put("m.onnx", std::string("\x08\x08", 2) + "\x3a" +
                    std::string(1, static_cast<char>(graph.size())) + graph +
                    std::string("\x42\x02\x10\x0d", 4));
  ASSERT_EQ(Import("m.onnx", "out.safetensors"), ExitCode::kOk) << end_.error;
  EXPECT_EQ(Tensor("out.safetensors", "v", abi::DType::kI64),
            Le<uint64_t>(1) + Le<uint64_t>(~uint64_t{0}) + Le<uint64_t>(300));
}

TEST_F(ImportTest, ADownloadCacheStandsForItsSnapshot) {
  Put("hub/models--x/blobs/1", SmallSafetensors({"a"}));
  fs::create_directories(root_ / "hub/models--x/snapshots/0f1e");
  fs::create_symlink("../../blobs/1", root_ / "hub/models--x/snapshots/0f1e/model.safetensors");
  Put("hub/models--x/refs/main", "0f1e\n");
  EXPECT_EQ(Import("hub/models--x", "out.safetensors"), ExitCode::kOk) << end_.error;
  EXPECT_EQ(Import("hub/models--x/snapshots/0f1e", "out2.safetensors"), ExitCode::kOk);
  for (const char* out : {"hub/models--x/new.safetensors", "hub/models--x/blobs/new.safetensors",
                          "hub/models--x/snapshots/0f1e/new.safetensors"}) {
    EXPECT_EQ(Import("hub/models--x", out), ExitCode::kUsage) << out;
    EXPECT_FALSE(fs::exists(Path(out)));
  }
}

TEST_F(ImportTest, SeveralModelsAreNamed) {
  Put("v/a.safetensors", SmallSafetensors({"a"}));
  Put("v/b.gguf", GgufBuilder().Tensor("d", {4}, 0, 16).Build());
  EXPECT_EQ(Import("v", "out.safetensors"), ExitCode::kUsage);
  EXPECT_THAT(end_.error, HasSubstr("2 models, and one is imported at a time (name one of: "
                                    "a.safetensors, b.gguf)"));
}

TEST_F(ImportTest, TheNameDecidesAndIsChecked) {
  Put("in.safetensors", SmallSafetensors({"a"}));
  EXPECT_EQ(Import("in.safetensors", "out.bin"), ExitCode::kUsage);
  options_.choices.quantize_q8 = true;
  EXPECT_EQ(Import("in.safetensors", "out.safetensors"), ExitCode::kUsage);
  EXPECT_THAT(end_.error, HasSubstr(".gguf"));
  options_.choices.quantize_q8 = false;
  options_.metadata = {{"general.alignment", "64"}};
  EXPECT_EQ(Import("in.safetensors", "out.gguf"), ExitCode::kUsage);
  options_.metadata = {};
  options_.choices.only = {"x"};
  EXPECT_EQ(Import("in.safetensors", "out.safetensors"), ExitCode::kUsage);
  options_.choices.only = {};
  EXPECT_EQ(Import("none.safetensors", "out.safetensors"), ExitCode::kNotFound);
  EXPECT_EQ(Import("in.safetensors", "no/folder.safetensors"), ExitCode::kNotFound);
  Put("out.safetensors", "old");
  EXPECT_EQ(Import("in.safetensors", "out.safetensors"), ExitCode::kConflict);
  EXPECT_EQ(Content("out.safetensors"), "old");
  options_.replace = true;
  EXPECT_EQ(Import("in.safetensors", "out.safetensors"), ExitCode::kOk) << end_.error;
  EXPECT_NE(Content("out.safetensors"), "old");
}

TEST_F(ImportTest, StoppedAnywhereItLeavesNothing) {
  Put("in.safetensors", SmallSafetensors({"a", "b", "c"}));
  ASSERT_EQ(Import("in.safetensors", "all.safetensors"), ExitCode::kOk);
  const int all = calls_;
  ASSERT_GE(all, 7);  // Each tensor written, each compared, and once at the end.
  for (stop_at_ = 1; stop_at_ <= all; ++stop_at_) {
    EXPECT_EQ(Import("in.safetensors", "out.safetensors"), ExitCode::kInterrupted);
    EXPECT_THAT(end_.error, HasSubstr("interrupted; nothing was written"));
    EXPECT_FALSE(fs::exists(Path("out.safetensors"))) << stop_at_;
  }
}

TEST_F(ImportTest, ASourceThatChangesMeanwhileIsNoticed) {
  Put("in.safetensors", SmallSafetensors({"a", "b"}));
  ImportWatch watch;
  watch.note = [](const std::string&) {};
  watch.progress = [this](const char* phase, uint64_t, uint64_t) {
    if (std::string(phase) == "write") {
      std::fstream file(Path("in.safetensors"), std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(-1, std::ios::end);
      file << 'x';
    }
    return true;
  };
  options_.source = Path("in.safetensors");
  options_.out = Path("out.safetensors");
  // With and without a comparison that would see the other bytes.
  for (const bool verify : {true, false}) {
    options_.verify = verify;
    // The clock of files is coarse; from an hour ago a change shows.
    fs::last_write_time(Path("in.safetensors"),
                        fs::file_time_type::clock::now() - std::chrono::hours(1));
    const ImportEnd end = RunImport(options_, watch);
    EXPECT_EQ(end.code, ExitCode::kConflict);
    EXPECT_THAT(end.error, HasSubstr("changed while it was imported"));
    EXPECT_FALSE(fs::exists(Path("out.safetensors")));
  }
}

// The file has no name yet, so that the disk's faults are played through its descriptor.
void SpoilLastByte(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const std::string target = fs::read_symlink(entry.path(), error).string();
    if (target.find(folder.string() + "/#") != 0) continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file << 'x';
  }
}

TEST_F(ImportTest, WhatTheDiskGivesBackWrongIsNotKept) {
  Put("in.safetensors", SmallSafetensors({"a", "b"}));
  fs::create_directory(Path("out"));
  options_.source = Path("in.safetensors");
  options_.out = Path("out/o.safetensors");
  for (const bool spoil : {true, false}) {
    ImportWatch watch;
    watch.note = [](const std::string&) {};
    watch.progress = [&](const char* phase, uint64_t, uint64_t) {
      if (spoil && std::string(phase) == "verify") SpoilLastByte(Path("out"));
      return true;
    };
    const ImportEnd end = RunImport(options_, watch);
    EXPECT_EQ(end.code, spoil ? ExitCode::kIntegrity : ExitCode::kOk) << end.error;
    EXPECT_EQ(fs::exists(Path("out/o.safetensors")), !spoil);
    if (spoil) {
      EXPECT_THAT(end.error, HasSubstr("does not verify: tensor 'b' differs from byte 3 on"));
      EXPECT_TRUE(fs::is_empty(Path("out")));
    }
  }
}

TEST(ImportMetadataTest, PyTorchIsNamedAndAdditionsComeFirst) {
  TensorIndex index("torch");
  index.AddFile("m.pt");
  index.AddMetadata("version", "3");
  modelhost::testing::MemoryFiles files;
  const std::vector<AddedKey> added = {{"a", "b"}};
  const std::function<void(const std::string&)> note = [](const std::string&) {};
  const auto items = SafetensorsMetadata({index, files, added, note});
  ASSERT_EQ(items.size(), 3u);
  EXPECT_EQ(items[0].key + items[1].key + items[1].value + items[2].value, "aformatpt3");
}

TEST(RecoderTest, ErrorsOfInfinitiesAndNotANumbers) {
  PlannedTensor tensor;
  tensor.from = abi::DType::kF32;
  tensor.to = abi::DType::kF16;
  tensor.recode = Recode::kConvert;
  Recoder recoder(tensor);
  const std::string in = Floats({INFINITY, NAN, 0.0F, -1.0F});
  std::span<const std::byte> out;
  ASSERT_TRUE(recoder.Apply(std::as_bytes(std::span<const char>(in)), &out));
  EXPECT_EQ(out.size(), 8u);
  recoder.Measure();
  EXPECT_EQ(recoder.absolute_error(), 0);
  EXPECT_EQ(recoder.overflowed(), 0u);
  const std::string tiny = Floats({1e-20F});
  ASSERT_TRUE(recoder.Apply(std::as_bytes(std::span<const char>(tiny)), &out));
  recoder.Measure();
  EXPECT_EQ(recoder.relative_error(), 1);
}

}  // namespace
}  // namespace modelhost::modelctl
