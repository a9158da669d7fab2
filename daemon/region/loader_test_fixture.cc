#include "daemon/region/loader_test_fixture.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"

namespace modelhost {
namespace {

Digest HashOf(const std::string& text) { return Sha256(std::as_bytes(std::span(text))); }

void WriteFile(const std::string& path, const std::string& text, mode_t mode) {
  std::ofstream(path, std::ios::binary) << text;
  ASSERT_EQ(::chmod(path.c_str(), mode), 0);
}

}  // namespace

absl::StatusOr<SealedRegion> NameIndexBuilder::Build(const ResidentVersion& version,
                                                     const std::vector<ComponentIndex>& components,
                                                     const DevicePlan& /*plan*/) {
  ++builds;
  std::string text = version.manifest->model;
  for (const ComponentIndex& component : components) {
    for (size_t i = 0; i < component.index.size(); ++i) {
      absl::StrAppend(&text, " ", component.name, "/", std::string(component.index.at(i).name));
    }
  }
  auto region = WritableRegion::Create("index", text.size(), HugePages::kOff);
  if (!region.ok()) return ToStatus(region.error());
  std::memcpy(region->bytes().data(), text.data(), text.size());
  return ToStatusOr((std::move(*region)).Seal());
}

void LoaderTest::SetUp() {
  root_ = testing::TempDir() + "/loader_XXXXXX";
  ASSERT_NE(::mkdtemp(root_.data()), nullptr);
  auto store = Store::Open(os_, root_ + "/store", root_ + "/state", ::geteuid());
  ASSERT_TRUE(store.ok()) << store.status();
  store_ = *std::move(store);
  auto state = os_.OpenDir(root_ + "/state");
  ASSERT_TRUE(state.ok()) << state.status();
  state_dir_ = *std::move(state);
  verified_ = VerifiedFiles::Load(os_, state_dir_);
  host_ = std::make_unique<BudgetPool>("host", uint64_t{1} << 30);
  memlock_ = std::make_unique<BudgetPool>("memlock", uint64_t{1} << 30);
  pool_ = std::make_unique<ThreadPool>("loader-test", 2);
  loader_ = MakeLoader();
}

void LoaderTest::TearDown() {
  pool_.reset();
  EXPECT_EQ(host_->reserved(), 0U);
  EXPECT_EQ(memlock_->reserved(), 0U);
  auto parent = real_os_.OpenDir(testing::TempDir() + "/");
  ASSERT_TRUE(parent.ok());
  EXPECT_TRUE(real_os_.RemoveTreeAt(*parent, root_.substr(root_.rfind('/') + 1)).ok());
}

std::string LoaderTest::Weights(uint64_t bytes, int seed) {
  const std::string header = absl::StrCat("{\"t\":{\"dtype\":\"U8\",\"shape\":[", bytes,
                                          "],\"data_offsets\":[0,", bytes, "]}}");
  uint64_t length = (header.size() + 7) / 8 * 8;
  std::string text(sizeof(length), '\0');
  std::memcpy(text.data(), &length, sizeof(length));
  text += header;
  text.resize(sizeof(length) + length, ' ');
  auto state = static_cast<uint32_t>(seed) * 2654435761U + 1;
  for (uint64_t i = 0; i < bytes; ++i) {
    state = state * 1664525U + 1013904223U;
    text.push_back(static_cast<char>(state >> 24));
  }
  return text;
}

void LoaderTest::MakeVersion(uint64_t number, const std::map<std::string, std::string>& files,
                             const std::map<std::string, std::string>& requirements) {
  const std::string dir = absl::StrCat(root_, "/store/models/m/versions/", number);
  ASSERT_TRUE(real_os_.MakeDirs(dir, 0700).ok());
  Manifest manifest;
  manifest.model = "m";
  manifest.version = number;
  manifest.created = absl::FromUnixSeconds(1'700'000'000);
  for (const auto& [path, text] : files) {
    ManifestFile file;
    file.path = path;
    file.bytes = text.size();
    file.sha256 = HashOf(text);
    file.role = path.ends_with(".safetensors") ? "weights" : "sidecar";
    file.chunk_bytes = kChunk;
    for (uint64_t at = 0; at < text.size(); at += kChunk) {
      file.chunks.push_back(HashOf(text.substr(at, kChunk)));
    }
    manifest.files.push_back(std::move(file));
    const size_t slash = path.rfind('/');
    if (slash != std::string::npos) {
      ASSERT_TRUE(real_os_.MakeDirs(absl::StrCat(dir, "/", path.substr(0, slash)), 0700).ok());
    }
    WriteFile(absl::StrCat(dir, "/", path), text, 0444);
  }
  manifest.requires_map = requirements;
  manifest.digest = VersionDigest(manifest.files);
  WriteFile(dir + "/manifest.json", SerializeManifest(manifest), 0444);
  ASSERT_EQ(::chmod(dir.c_str(), 0555), 0);
}

std::string LoaderTest::PathOf(uint64_t number, const std::string& file) const {
  return absl::StrCat(root_, "/store/models/m/versions/", number, "/", file);
}

void LoaderTest::Overwrite(const std::string& path, uint64_t offset,
                           const std::string& with) const {
  ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(offset));
  file << with;
  file.close();
  ASSERT_TRUE(file.good());
  ASSERT_EQ(::chmod(path.c_str(), 0444), 0);
}

void LoaderTest::Truncate(const std::string& path, uint64_t bytes) const {
  ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
  ASSERT_EQ(::truncate(path.c_str(), static_cast<off_t>(bytes)), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0444), 0);
}

std::unique_ptr<Loader> LoaderTest::MakeLoader(LoaderOptions options) {
  return std::make_unique<Loader>(os_, clock_, *store_, *verified_, *pool_, regions_, *host_,
                                  *memlock_, indexer_, builder_, machine_, options);
}

LoadRequest LoaderTest::Request(uint64_t number, Residency residency) const {
  LoadRequest request;
  request.model = "m";
  request.version = number;
  request.policy.residency = residency;
  request.cancel = std::make_shared<CancelToken>();
  return request;
}

absl::StatusOr<std::shared_ptr<const ResidentVersion>> LoaderTest::Load(uint64_t number,
                                                                        Residency residency) {
  return loader_->Load(Request(number, residency));
}

}  // namespace modelhost
