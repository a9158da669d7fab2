#include "daemon/registry/gc_policy.h"

#include <algorithm>
#include <utility>

namespace modelhost {

std::vector<VersionKey> ChooseGarbage(std::span<const GarbageCandidate> candidates,
                                      const std::map<std::string, int64_t>& keep) {
  std::map<std::string, std::vector<GarbageCandidate>> models;
  for (const GarbageCandidate& candidate : candidates) {
    models[candidate.key.model].push_back(candidate);
  }
  std::vector<VersionKey> garbage;
  for (auto& [model, versions] : models) {
    const auto limit = keep.find(model);
    if (limit == keep.end()) continue;
    std::ranges::sort(versions, [](const GarbageCandidate& a, const GarbageCandidate& b) {
      return std::pair(a.created, a.key.version) < std::pair(b.created, b.key.version);
    });
    const auto keep_newest = static_cast<size_t>(std::max<int64_t>(limit->second, 0));
    const size_t old = versions.size() - std::min(versions.size(), keep_newest);
    for (const GarbageCandidate& version : std::span(versions).first(old)) {
      if (!version.needed) garbage.push_back(version.key);
    }
  }
  return garbage;
}

uint64_t FreedBytes(std::span<const DiskUse> removed) {
  std::map<std::pair<uint64_t, uint64_t>, std::pair<uint64_t, DiskUse::File>> names;
  for (const DiskUse& use : removed) {
    for (const DiskUse::File& file : use.files) {
      auto& [count, seen] = names[{file.device, file.inode}];
      ++count;
      seen = file;
    }
  }
  uint64_t bytes = 0;
  for (const auto& [id, name] : names) {
    if (name.first >= name.second.links) bytes += name.second.bytes;
  }
  return bytes;
}

}  // namespace modelhost
