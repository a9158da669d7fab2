#include "client/modelctl/source_reach.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/modelctl/small_file.h"

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

// Not a link to one: whoever made the tree chose where its links lead.
bool IsRealFolder(const fs::path& path) {
  std::error_code error;
  return fs::symlink_status(path, error).type() == fs::file_type::directory;
}

// The blobs/ of the cache that the real folder `real` is, or lies in, a snapshot of; or "".
std::string BlobsOf(const fs::path& real) {
  for (fs::path at = real; at.has_relative_path(); at = at.parent_path()) {
    if (at.parent_path().filename() != "snapshots") continue;
    // No part of `at` is a link, so that without one here this is where the blobs really lie.
    const fs::path blobs = at.parent_path().parent_path() / "blobs";
    return IsRealFolder(blobs) ? SlashEnded(blobs) : "";
  }
  return "";
}

// The snapshot that a file of refs/ names; "" when it names none that is there.
std::string SnapshotOf(const fs::path& cache, const char* ref) {
  std::error_code error;
  const fs::path file = cache / "refs" / ref;
  if (fs::symlink_status(file, error).type() != fs::file_type::regular) return "";
  std::string name = ReadSmallFile(file.string(), kMaxRefBytes).value_or("");
  absl::StripAsciiWhitespace(&name);
  const bool plain = !name.empty() && name[0] != '.' && !absl::StrContains(name, '/') &&
                     name.find('\0') == std::string::npos;
  return plain && IsRealFolder(cache / "snapshots" / name) ? name : "";
}

// Whether the user named a snapshot of a cache that is nothing but a link: what it leads to is not
// the cache's. A folder called snapshots without blobs beside it is no cache.
bool IsLinkedSnapshot(fs::path path) {
  if (!path.has_filename()) path = path.parent_path();
  if (path.parent_path().filename() != "snapshots") return false;
  std::error_code error;
  const fs::path blobs = path.parent_path().parent_path() / "blobs";
  return fs::is_symlink(path, error) && fs::is_directory(path, error) &&
         fs::exists(fs::symlink_status(blobs, error));
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
  if (IsLinkedSnapshot(cache)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": a snapshot of a download cache that is a link (name the folder that ",
                     "is meant, or download the model again)"));
  }
  if (!IsRealFolder(cache / "snapshots") || !IsRealFolder(cache / "blobs")) return path;
  if (const std::string name = SnapshotOf(cache, "main"); !name.empty()) {
    return (cache / "snapshots" / name).string();
  }
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator at(cache / "snapshots", error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) {
    if (IsRealFolder(at->path())) names.push_back(at->path().filename().string());
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
