#include "client/modelctl/source_reach.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace modelhost::modelctl {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxRefBytes = 256;
constexpr size_t kShownSnapshots = 8;

std::string SlashEnded(const fs::path& path) {
  std::string text = path.string();
  if (text.empty() || text.back() != '/') text += '/';
  return text;
}

bool IsFolder(const fs::path& path) {
  std::error_code error;
  return fs::is_directory(path, error);
}

// The blobs/ of the cache that the real folder `real` is, or lies in, a snapshot of; or "".
std::string BlobsOf(const fs::path& real) {
  for (fs::path at = real; at.has_relative_path(); at = at.parent_path()) {
    if (at.parent_path().filename() != "snapshots") continue;
    std::error_code error;
    const fs::path blobs = fs::canonical(at.parent_path().parent_path() / "blobs", error);
    return error ? "" : SlashEnded(blobs);
  }
  return "";
}

// The snapshot that a file of refs/ names; "" when it names none that is there.
std::string SnapshotOf(const fs::path& cache, const char* ref) {
  std::ifstream in(cache / "refs" / ref, std::ios::binary);
  std::string name(kMaxRefBytes, '\0');
  in.read(name.data(), static_cast<std::streamsize>(name.size()));
  name.resize(static_cast<size_t>(std::max<std::streamsize>(in.gcount(), 0)));
  absl::StripAsciiWhitespace(&name);
  const bool plain = !name.empty() && name[0] != '.' && !absl::StrContains(name, '/') &&
                     name.find('\0') == std::string::npos;
  return plain && IsFolder(cache / "snapshots" / name) ? name : "";
}

}  // namespace

SourceReach::SourceReach(const std::string& folder) {
  std::error_code error;
  fs::path real = fs::canonical(folder.empty() ? "." : folder, error);
  if (error) return;
  Add(real.string());
  if (const std::string blobs = BlobsOf(real); !blobs.empty()) folders_.push_back(blobs);
}

bool SourceReach::Holds(const std::string& real_path) const {
  return std::any_of(folders_.begin(), folders_.end(), [&](const std::string& folder) {
    return absl::StartsWith(real_path, folder);
  });
}

void SourceReach::Add(const std::string& real_folder) {
  folders_.push_back(SlashEnded(real_folder));
}

absl::StatusOr<std::string> ResolveSnapshot(const std::string& path) {
  const fs::path cache(path);
  if (!IsFolder(cache / "snapshots") || !IsFolder(cache / "blobs")) return path;
  if (const std::string name = SnapshotOf(cache, "main"); !name.empty()) {
    return (cache / "snapshots" / name).string();
  }
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator at(cache / "snapshots", error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) {
    if (IsFolder(at->path())) names.push_back(at->path().filename().string());
  }
  if (names.size() == 1) return (cache / "snapshots" / names[0]).string();
  if (names.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": a download cache without a snapshot (download the model again)"));
  }
  std::sort(names.begin(), names.end());
  const size_t count = names.size();
  if (count > kShownSnapshots) names.resize(kShownSnapshots);
  return absl::FailedPreconditionError(absl::StrCat(
      path, ": a download cache of ", count, " snapshots, and refs/main names none of them (name ",
      "one: snapshots/", absl::StrJoin(names, ", snapshots/"),
      count > kShownSnapshots ? ", ..." : "", ")"));
}

}  // namespace modelhost::modelctl
