#include "daemon/format/sharded.h"

#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/json_reader.h"
#include "daemon/format/name_table.h"
#include "daemon/format/safetensors.h"
#include "daemon/format/sniff.h"
#include "daemon/format/text.h"
#include "daemon/format/torch_zip.h"

namespace modelhost {
namespace {

constexpr std::string_view kShardsHint =
    "the index is damaged or not of these files: get the set again";
constexpr std::string_view kWeightMap = "weight_map";
constexpr size_t kShownWarnings = 100;
constexpr size_t kShownFiles = 8;

class IndexParser {
 public:
  IndexParser(std::string_view name, std::span<const std::byte> bytes)
      : in_(name, kShardsHint, bytes), json_(in_) {}

  absl::StatusOr<ShardIndex> Run() {
    json_.Object("a JSON object", [this](std::string_view key) {
      if (key == kWeightMap) return WeightMap();
      if (key == "metadata" && json_.PeekValue() == '{') return Metadata();
      return json_.Skip();
    });
    json_.End();
    if (!in_.ok()) return in_.status();
    if (!seen_map_) {
      in_.Fail("the index has no weight_map");
      return in_.status();
    }
    std::vector<std::string_view> names;
    names.reserve(result_.entries.size());
    for (const ShardIndex::Entry& entry : result_.entries) names.push_back(result_.Name(entry));
    if (const auto pair = NameTable(names).Duplicate()) {
      in_.Fail(absl::StrCat("duplicate key: tensor ", Quoted(names[pair->first]),
                            " occurs twice in weight_map"));
      return in_.status();
    }
    return std::move(result_);
  }

 private:
  bool WeightMap() {
    if (std::exchange(seen_map_, true)) return in_.Fail("weight_map occurs twice");
    return json_.Object("weight_map as an object", [this](std::string_view key) {
      ShardIndex::Entry entry{result_.names.size(), static_cast<uint32_t>(key.size()), 0};
      result_.names.append(key);
      std::string_view shard;
      if (!json_.String("a file name as value in weight_map", &shard)) return false;
      if (const auto known = shards_.find(AsAbsl(shard)); known != shards_.end()) {
        entry.shard = known->second;
      } else {
        if (!IsPlainRelativeName(AsAbsl(shard))) {
          return in_.Fail(absl::StrCat("weight_map puts a tensor into ", Quoted(shard),
                                       ", which is no plain name of a file in this folder"),
                          "a model may not name files outside its folder");
        }
        entry.shard = static_cast<uint32_t>(result_.shards.size());
        shards_.emplace(shard, entry.shard);
        result_.shards.emplace_back(shard);
      }
      result_.entries.push_back(entry);
      return true;
    });
  }

  bool Metadata() {
    if (std::exchange(seen_metadata_, true)) return in_.Fail("metadata occurs twice");
    const bool good = json_.Object("metadata", [this](std::string_view key) {
      MetadataItem item{std::string(key), {}};
      if (json_.PeekValue() == '"') {
        std::string_view value;
        if (!json_.String("a string", &value)) return false;
        item.value = value;
      } else {
        const uint64_t from = in_.offset();
        if (!json_.Skip()) return false;
        item.value = in_.Since(from);
      }
      if (item.key == "total_size") result_.total_size = item.value;
      result_.metadata.push_back(std::move(item));
      return true;
    });
    if (!good) return false;
    std::vector<std::string_view> keys;
    for (const MetadataItem& item : result_.metadata) keys.push_back(item.key);
    if (const auto pair = NameTable(keys).Duplicate()) {
      return in_.Fail(absl::StrCat("duplicate key in metadata: ", Quoted(keys[pair->first])));
    }
    return true;
  }

  ByteReader in_;
  JsonReader json_;
  ShardIndex result_;
  absl::flat_hash_map<std::string, uint32_t> shards_;
  bool seen_map_ = false;
  bool seen_metadata_ = false;
};

// Reads one shard; the first says what all of them are.
absl::Status ReadShard(const std::string& path, std::span<const std::byte> bytes, bool first,
                       TensorIndex& index, std::vector<MetadataItem>& metadata) {
  const FileFormat format = SniffFormat(bytes, path);
  if (format != FileFormat::kSafetensors && format != FileFormat::kTorchZip) {
    return RefuseFormat(path, format, bytes);
  }
  const std::string word = format == FileFormat::kSafetensors ? "safetensors" : "torch";
  if (first) index.SetFormat(word);
  if (index.format() != word) {
    return ModelError(
        path, absl::StrCat("a shard of the kind ", word, ", where the first is ", index.format()),
        kShardsHint);
  }
  const uint32_t file = index.AddFile(path);
  if (format == FileFormat::kTorchZip) return ReadTorchZip(path, bytes, file, index);
  return ReadSafetensors(path, bytes, file, index, metadata);
}

// Opens and reads all shards into `index`; shard i becomes file 1 + i.
absl::Status ReadShards(const std::string& name, const ShardIndex& shards, FileSource& source,
                        TensorIndex& index) {
  std::vector<std::span<const std::byte>> opened;
  std::vector<std::string> missing;
  for (const std::string& shard : shards.shards) {
    const std::string path = SiblingName(name, shard);
    absl::StatusOr<std::span<const std::byte>> bytes = source.Open(path);
    if (absl::IsNotFound(bytes.status())) {
      missing.push_back(Quoted(path));
      continue;
    }
    if (!bytes.ok()) {
      return SourceError(name, absl::StrCat("weight_map names ", Quoted(path)), bytes.status(),
                         "it has to be a file that can be read");
    }
    opened.push_back(*bytes);
  }
  if (!missing.empty()) {
    const size_t more = missing.size() > kShownFiles ? missing.size() - kShownFiles : 0;
    missing.resize(missing.size() - more);
    return ModelError(name,
                      absl::StrCat("files of the set are missing: ", absl::StrJoin(missing, ", "),
                                   more == 0 ? "" : absl::StrCat(" and ", more, " more")),
                      "get the missing files, or an index that fits");
  }
  std::vector<MetadataItem> all_metadata;
  for (size_t i = 0; i < opened.size(); ++i) {
    const std::string path = SiblingName(name, shards.shards[i]);
    std::vector<MetadataItem> metadata;
    absl::Status status = ReadShard(path, opened[i], i == 0, index, metadata);
    if (!status.ok()) return status;
    for (MetadataItem& item : metadata) all_metadata.push_back(std::move(item));
  }
  // Shards repeat each other's metadata ("format": "pt"); the first word counts.
  absl::flat_hash_map<std::string, std::string> known;
  for (const MetadataItem& item : shards.metadata) known.emplace(item.key, item.value);
  for (MetadataItem& item : all_metadata) {
    const auto [at, added] = known.try_emplace(item.key, item.value);
    if (added) {
      index.AddMetadata(std::move(item.key), std::move(item.value));
    } else if (at->second != item.value && index.warnings().size() < kShownWarnings) {
      index.AddWarning(absl::StrCat(Printable(name), ": the shards disagree about the metadata ",
                                    Quoted(item.key), "; the first value is kept"));
    }
  }
  return absl::OkStatus();
}

void CheckTotalSize(const std::string& name, const ShardIndex& shards, TensorIndex& index) {
  if (shards.total_size.empty()) return;
  uint64_t sum = 0;
  for (size_t i = 0; i < index.size(); ++i) sum += index.at(i).nbytes;
  uint64_t whole = 0;
  double number = 0;
  const bool same =
      absl::SimpleAtoi(shards.total_size, &whole)
          ? whole == sum
          : absl::SimpleAtod(shards.total_size, &number) && number == static_cast<double>(sum);
  if (!same) {
    index.AddWarning(absl::StrCat(Printable(name), ": total_size is ", Quoted(shards.total_size),
                                  ", but the tensors have ", sum, " bytes"));
  }
}

}  // namespace

std::string SiblingName(std::string_view main, std::string_view name) {
  const size_t slash = main.rfind('/');
  if (slash == std::string_view::npos) return std::string(name);
  return absl::StrCat(AsAbsl(main.substr(0, slash + 1)), AsAbsl(name));
}

bool HasWeightMap(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.find("\"weight_map\"") == std::string_view::npos) return false;
  ByteReader in("", "", bytes);
  JsonReader json(in);
  bool found = false;
  json.Object("", [&](std::string_view key) {
    found = found || key == kWeightMap;
    return !found && json.Skip();
  });
  return found;
}

absl::StatusOr<ShardIndex> ParseShardIndex(std::string_view name,
                                           std::span<const std::byte> bytes) {
  return IndexParser(name, bytes).Run();
}

absl::Status ReadSharded(const std::string& name, std::span<const std::byte> bytes,
                         FileSource& source, TensorIndex& index) {
  absl::StatusOr<ShardIndex> shards = ParseShardIndex(name, bytes);
  if (!shards.ok()) return shards.status();
  for (const MetadataItem& item : shards->metadata) index.AddMetadata(item.key, item.value);
  if (absl::Status status = ReadShards(name, *shards, source, index); !status.ok()) return status;

  std::vector<std::string_view> names;
  names.reserve(index.size());
  for (size_t i = 0; i < index.size(); ++i) names.push_back(index.at(i).name);
  const NameTable table(std::move(names));
  if (const auto pair = table.Duplicate()) {
    const TensorInfo a = index.at(pair->first);
    const TensorInfo b = index.at(pair->second);
    return ModelError(
        name,
        absl::StrCat("tensor ", Quoted(a.name), " occurs twice: in ", Quoted(index.files()[a.file]),
                     " and in ", Quoted(index.files()[b.file])),
        kShardsHint);
  }
  std::vector<bool> mapped(index.size());
  for (const ShardIndex::Entry& entry : shards->entries) {
    const std::optional<size_t> found = table.Find(shards->Name(entry));
    const std::string& shard = index.files()[1 + entry.shard];
    if (!found.has_value()) {
      return ModelError(name,
                        absl::StrCat("weight_map puts tensor ", Quoted(shards->Name(entry)),
                                     " into ", Quoted(shard), ", which does not have it"),
                        kShardsHint);
    }
    if (index.at(*found).file != 1 + entry.shard) {
      return ModelError(name,
                        absl::StrCat("weight_map puts tensor ", Quoted(shards->Name(entry)),
                                     " into ", Quoted(shard), ", but it is in ",
                                     Quoted(index.files()[index.at(*found).file])),
                        kShardsHint);
    }
    mapped[*found] = true;
  }
  size_t unmapped = 0;
  for (size_t i = 0; i < index.size(); ++i) {
    if (mapped[i] || ++unmapped > kShownWarnings) continue;
    index.AddWarning(absl::StrCat(Printable(index.files()[index.at(i).file]), ": tensor ",
                                  Quoted(index.at(i).name), " is not in the weight_map"));
  }
  if (unmapped > kShownWarnings) {
    index.AddWarning(absl::StrCat(Printable(name), ": ", unmapped - kShownWarnings,
                                  " more tensors are not in the weight_map"));
  }
  CheckTotalSize(name, *shards, index);
  return absl::OkStatus();
}

}  // namespace modelhost
