// FindComponents: which files of a version directory are weight sets.
#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/gguf.h"
#include "daemon/format/onnx.h"
#include "daemon/format/sharded.h"
#include "daemon/format/sniff.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

// The best that a version has are its components; the rest are sidecars (an export, an engine, the
// state of an optimizer).
enum class Standing {
  kNotServed,   // A good file of a kind that ReadModel refuses by name.
  kCheckpoint,  // PyTorch: a folder with better weights often keeps its training state beside them.
  kServed,
};

struct Candidate {
  std::string name;
  FileFormat format = FileFormat::kUnknown;
  Standing standing = Standing::kServed;
  std::span<const std::byte> bytes;
};

bool IsNamedLikeCheckpoint(std::string_view name) {
  for (const std::string_view ending : {".pt", ".pth", ".bin", ".ckpt", ".bin.index.json"}) {
    if (absl::EndsWithIgnoreCase(AsAbsl(name), AsAbsl(ending))) return true;
  }
  return false;
}

Standing StandingOf(const Candidate& candidate) {
  if (candidate.format == FileFormat::kTorchZip) return Standing::kCheckpoint;
  if (IsServed(candidate.format)) return Standing::kServed;
  // Served in the sense that loading it says what to do.
  const bool reported = candidate.format == FileFormat::kUnknown ||
                        candidate.format == FileFormat::kGitLfsPointer ||
                        candidate.format == FileFormat::kLegacyGgml;
  if (!reported) return Standing::kNotServed;
  return IsNamedLikeCheckpoint(candidate.name) ? Standing::kCheckpoint : Standing::kServed;
}

std::string_view Folder(std::string_view name) {
  const size_t slash = name.rfind('/');
  return slash == std::string_view::npos ? std::string_view() : name.substr(0, slash + 1);
}

// "dir/model-00001-of-00002.safetensors" is "model", "dir/model.safetensors.index.json" too.
std::string ComponentName(std::string_view path) {
  std::string_view name = path.substr(Folder(path).size());
  constexpr std::string_view kIndexJson = ".index.json";
  if (absl::EndsWithIgnoreCase(AsAbsl(name), AsAbsl(kIndexJson)) &&
      name.size() > kIndexJson.size()) {
    name.remove_suffix(kIndexJson.size());
  }
  if (const size_t dot = name.rfind('.'); dot != std::string_view::npos && dot > 0) {
    name = name.substr(0, dot);
  }
  // "-00001-of-00002" is a tail of 15 characters: borrow the rule of GGUF sets.
  if (const auto set = ParseGgufSetName(std::string(name) + ".gguf")) return set->prefix;
  return std::string(name);
}

// Opens what looks like weights. An unreadable file that claims to be weights stays a candidate, so
// that ReadModel says what is wrong with it.
std::vector<Candidate> FindCandidates(const std::vector<std::string>& names, FileSource& source) {
  std::vector<Candidate> candidates;
  for (const std::string& name : names) {
    if (!IsPlainRelativeName(name)) continue;
    absl::StatusOr<std::span<const std::byte>> bytes = source.Open(name);
    Candidate candidate{name, FileFormat::kUnknown, Standing::kServed, {}};
    if (bytes.ok()) {
      candidate.bytes = *bytes;
      candidate.format = SniffFormat(*bytes, name);
      // Not weights, or a pointer to something that is not.
      if (candidate.format == FileFormat::kUnknown) continue;
      const bool weights = HasWeightsExtension(name);
      if (candidate.format == FileFormat::kGitLfsPointer && !weights) continue;
      if (candidate.format == FileFormat::kSevenZip && !weights) continue;
      if (candidate.format == FileFormat::kTorchZip && !MayBeCheckpoint(name, *bytes)) continue;
    } else if (!HasWeightsExtension(name)) {
      continue;
    }
    candidate.standing = StandingOf(candidate);
    candidates.push_back(std::move(candidate));
  }
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.name < b.name; });
  return candidates;
}

class Finder {
 public:
  explicit Finder(std::vector<Candidate> candidates) : candidates_(std::move(candidates)) {}

  std::vector<Component> Run() {
    for (const Candidate& candidate : candidates_) formats_[candidate.name] = candidate.format;
    for (Candidate& candidate : candidates_) {
      if (candidate.format == FileFormat::kSafetensorsIndex) ClaimShards(candidate);
    }
    for (const Candidate& candidate : candidates_) {
      if (candidate.format == FileFormat::kGguf) ClaimParts(candidate);
      if (candidate.format == FileFormat::kOnnx) ClaimData(candidate);
    }
    Standing best = Standing::kNotServed;
    for (const Candidate& candidate : candidates_) {
      if (IsOwn(candidate)) best = std::max(best, candidate.standing);
    }
    std::vector<Component> components;
    for (const Candidate& candidate : candidates_) {
      // Files of other kinds beside weights that are served are sidecars (an engine, an export).
      if (!IsOwn(candidate) || candidate.standing != best) continue;
      // A plan has no tensors to be named by, and must not take the name of a set that has.
      components.push_back({candidate.format == FileFormat::kTensorRt
                                ? candidate.name.substr(Folder(candidate.name).size())
                                : ComponentName(candidate.name),
                            candidate.name});
    }
    MakeNamesUnique(components);
    return components;
  }

 private:
  bool IsOwn(const Candidate& candidate) const {
    if (claimed_.contains(candidate.name)) return false;
    const bool safetensors = candidate.format == FileFormat::kSafetensors ||
                             absl::EndsWithIgnoreCase(candidate.name, ".safetensors");
    return !safetensors || !indexed_folders_.contains(std::string(Folder(candidate.name)));
  }

  void ClaimShards(Candidate& index) {
    absl::StatusOr<ShardIndex> shards = ParseShardIndex(index.name, index.bytes);
    // The shards of an index over PyTorch files need not be there to look at: hubs leave them out
    // where safetensors are. A damaged index goes by its name, and loading it reports the damage.
    index.standing = absl::EndsWithIgnoreCase(index.name, ".safetensors.index.json")
                         ? Standing::kServed
                         : Standing::kCheckpoint;
    if (shards.ok()) {
      for (const std::string& shard : shards->shards) {
        const std::string path = SiblingName(index.name, shard);
        if (path == index.name) continue;
        claimed_.insert(path);
        const auto known = formats_.find(path);
        if (absl::EndsWithIgnoreCase(path, ".safetensors") ||
            (known != formats_.end() && known->second == FileFormat::kSafetensors)) {
          index.standing = Standing::kServed;
        }
      }
    }
    if (index.standing == Standing::kServed) {
      indexed_folders_.insert(std::string(Folder(index.name)));
    }
  }

  void ClaimParts(const Candidate& candidate) {
    const std::optional<GgufSetName> set = ParseGgufSetName(candidate.name);
    if (!set.has_value() || set->count < 2) return;
    absl::StatusOr<GgufSplit> split = ReadGgufSplit(candidate.name, candidate.bytes);
    if (!split.ok() || !IsPartOfSet(candidate.name, *split)) return;
    // Candidates are sorted: the lowest part that is there speaks for the set.
    if (!sets_.insert({set->prefix, set->count}).second) claimed_.insert(candidate.name);
  }

  // Raw data is of no format, but its name or its first bytes may claim one.
  void ClaimData(const Candidate& model) {
    const bool others = std::any_of(
        candidates_.begin(), candidates_.end(),
        [](const Candidate& candidate) { return candidate.format != FileFormat::kOnnx; });
    if (!others) return;
    for (std::string& path : OnnxDataFilesOf(model.name, model.bytes)) {
      const auto known = formats_.find(path);
      if (known != formats_.end() && known->second != FileFormat::kOnnx) {
        claimed_.insert(std::move(path));
      }
    }
  }

  static void MakeNamesUnique(std::vector<Component>& components) {
    std::map<std::string, int> uses;
    for (const Component& component : components) ++uses[component.name];
    for (Component& component : components) {
      if (uses[component.name] > 1) component.name = component.main_file;
    }
  }

  std::vector<Candidate> candidates_;
  absl::flat_hash_map<std::string, FileFormat> formats_;
  absl::flat_hash_set<std::string> claimed_;
  absl::flat_hash_set<std::string> indexed_folders_;
  std::set<std::pair<std::string, uint64_t>> sets_;
};

}  // namespace

absl::StatusOr<std::vector<Component>> FindComponents(const std::vector<std::string>& names,
                                                      FileSource& source) {
  return Finder(FindCandidates(names, source)).Run();
}

absl::StatusOr<std::vector<ComponentIndex>> IndexComponents(const std::vector<std::string>& names,
                                                            FileSource& source) {
  auto components = FindComponents(names, source);
  if (!components.ok()) return components.status();
  std::vector<ComponentIndex> indexes;
  for (Component& component : *components) {
    auto index = ReadModel(component.main_file, source);
    if (!index.ok()) return index.status();
    indexes.push_back({std::move(component.name), *std::move(index)});
  }
  return indexes;
}

}  // namespace modelhost
