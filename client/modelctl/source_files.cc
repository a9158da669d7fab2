#include "client/modelctl/source_files.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <span>
#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/modelctl/json.h"
#include "client/modelctl/render.h"
#include "client/modelctl/small_file.h"
#include "client/modelctl/source_reach.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/json_reader.h"

namespace modelhost::modelctl {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxDepth = 16;
constexpr size_t kMaxFiles = 100'000;
// The store writes this file itself.
constexpr char kManifestName[] = "manifest.json";
constexpr size_t kMaxManifestBytes = size_t{64} << 20;

Exit Refuse(const fs::path& path, absl::string_view why) {
  return Fail(ExitCode::kIntegrity, absl::StrCat(path.string(), ": ", why));
}

Exit Errno(const fs::path& path, int error) {
  return FromError(ErrnoError(error, path.string()), "");
}

absl::string_view KindOf(mode_t mode) {
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISBLK(mode) || S_ISCHR(mode)) return "a device";
  return "not a regular file";
}

// What the manifest.json of a store requires of the machine; nothing when it is not one of a store.
// With one the folder is a copy of a version.
std::optional<Requirements> StoreRequirements(const std::string& text) {
  ByteReader in(kManifestName, "", std::as_bytes(std::span<const char>(text)));
  JsonReader json(in);
  Requirements requirements;
  bool schema = false;
  bool digest = false;
  const bool read = json.Object("the manifest", [&](std::string_view key) {
    schema |= key == "schema";
    digest |= key == "digest";
    if (key != "requires") return json.Skip();
    return json.Object("requires", [&](std::string_view raw_name) {
      const std::string name(raw_name);
      std::string_view value;
      if (!json.String("a requirement", &value)) return false;
      requirements[name] = value;
      return true;
    });
  });
  if (!read || !json.End() || !schema || !digest) return std::nullopt;
  return requirements;
}

class Walk {
 public:
  // `root` is the folder that is published; empty for a single file.
  Walk(SourceSet& set, const std::string& root) : set_(set) {
    if (!root.empty()) reach_ = SourceReach(root);
  }

  Exit Folder(const fs::path& folder, const std::string& prefix, int depth) {
    if (depth > kMaxDepth) return Refuse(folder, "deeper than 16 folders (a loop of links?)");
    std::error_code error;
    fs::directory_iterator it(folder, error);
    if (error) return Errno(folder, error.value());
    for (; it != fs::directory_iterator(); it.increment(error)) {
      if (error) return Errno(folder, error.value());
      const std::string name = it->path().filename().string();
      if (Exit exit = Entry(it->path(), prefix, name, depth); !exit.ok()) return exit;
    }
    return error ? Errno(folder, error.value()) : Exit::Ok();
  }

  Exit File(const fs::path& path, const std::string& in_version) {
    struct stat info;
    if (::stat(path.c_str(), &info) != 0) return Errno(path, errno);
    if (!S_ISREG(info.st_mode)) {
      return Refuse(path,
                    absl::StrCat(KindOf(info.st_mode), " (a version holds regular files only)"));
    }
    if (!IsPlainRelativeName(in_version) || !IsValidUtf8(in_version)) {
      return Refuse(path, "a version cannot have a file of this name (plain UTF-8, no backslash)");
    }
    if (set_.files.size() >= kMaxFiles) return Refuse(path, "more than 100,000 files");
    set_.files.push_back({in_version, path.string(), static_cast<uint64_t>(info.st_size)});
    set_.bytes += static_cast<uint64_t>(info.st_size);
    return Exit::Ok();
  }

 private:
  Exit Entry(const fs::path& path, const std::string& prefix, const std::string& name, int depth) {
    const std::string in_version = absl::StrCat(prefix, name);
    if (name[0] == '.') {
      set_.skipped.push_back(absl::StrCat(in_version, ": hidden"));
      return Exit::Ok();
    }
    struct stat own, target;
    if (::lstat(path.c_str(), &own) != 0) return Errno(path, errno);
    if (S_ISDIR(own.st_mode)) return Folder(path, absl::StrCat(in_version, "/"), depth + 1);
    if (S_ISLNK(own.st_mode)) {
      if (::stat(path.c_str(), &target) != 0) {
        return Refuse(path, absl::StrCat("a link that leads nowhere: ", std::strerror(errno)));
      }
      if (S_ISDIR(target.st_mode)) {
        return Refuse(path, "a link to a folder (put the folder itself there)");
      }
      if (!Reaches(path)) {
        return Refuse(path, "a link that leads out of the folder (put the file itself there)");
      }
    }
    if (in_version == kManifestName) {
      if (Exit exit = Manifest(path); !exit.ok()) return exit;
      set_.skipped.push_back(absl::StrCat(in_version, ": the store writes its own"));
      return Exit::Ok();
    }
    return File(path, in_version);
  }

  // What its version requires still holds for these bytes, a plan's above all.
  Exit Manifest(const fs::path& path) {
    struct stat info;
    if (::stat(path.c_str(), &info) != 0) return Errno(path, errno);
    const std::optional<std::string> text = ReadSmallFile(path.string(), kMaxManifestBytes);
    const std::optional<Requirements> requirements =
        text.has_value() ? StoreRequirements(*text) : std::nullopt;
    if (!requirements.has_value()) {
      return Refuse(
          path, absl::StrCat(S_ISREG(info.st_mode) ? "" : absl::StrCat(KindOf(info.st_mode), "; "),
                             "the store writes a file of this name itself (rename yours)"));
    }
    for (const auto& [key, value] : *requirements) {
      if (const absl::Status good = CheckRequirement(key, value); !good.ok()) {
        return Refuse(path, absl::StrCat("requires ", good.message()));
      }
    }
    set_.manifest_requires = *requirements;
    return Exit::Ok();
  }

  bool Reaches(const fs::path& link) const {
    std::error_code error;
    const std::string target = fs::canonical(link, error).string();
    return !error && reach_.Holds(target);
  }

  SourceSet& set_;
  SourceReach reach_;
};

}  // namespace

Outcome<SourceSet> CollectSource(const std::string& given) {
  const absl::StatusOr<std::string> resolved = ResolveSnapshot(given);
  if (!resolved.ok()) return Fail(ExitCode::kIntegrity, resolved.status().message());
  const std::string& path = *resolved;
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) return Errno(path, errno);
  SourceSet set;
  Walk walk(set, S_ISDIR(info.st_mode) ? path : "");
  const Exit exit = S_ISDIR(info.st_mode) ? walk.Folder(path, "", 0)
                                          : walk.File(path, fs::path(path).filename().string());
  if (!exit.ok()) return exit;
  if (set.files.empty()) return Refuse(path, "has no file to publish");
  std::sort(set.files.begin(), set.files.end(),
            [](const SourceFile& a, const SourceFile& b) { return a.path < b.path; });
  return set;
}

Outcome<UniqueFd> OpenSource(const SourceFile& file) {
  UniqueFd fd(::open(file.source.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!fd.valid()) return Errno(file.source, errno);
  struct stat info;
  if (::fstat(fd.get(), &info) != 0) return Errno(file.source, errno);
  if (!S_ISREG(info.st_mode) || static_cast<uint64_t>(info.st_size) != file.bytes) {
    return Fail(ExitCode::kConflict,
                absl::StrCat(file.source, ": changed while it was published (was ",
                             FormatBytes(file.bytes), "; publish again when it is complete)"));
  }
  return fd;
}

absl::StatusOr<std::span<const std::byte>> SourceFileSource::Open(const std::string& name) {
  if (const auto known = mapped_.find(name); known != mapped_.end()) return known->second.bytes();
  const auto found = std::find_if(set_.files.begin(), set_.files.end(),
                                  [&](const SourceFile& file) { return file.path == name; });
  if (found == set_.files.end()) {
    return absl::NotFoundError(absl::StrCat(name, ": no such file beside the others"));
  }
  const Outcome<UniqueFd> fd = OpenSource(*found);
  if (!fd.ok()) return absl::FailedPreconditionError(fd.exit().error);
  Result<ReadOnlyMapping> mapping = ReadOnlyMapping::MapFile(*fd, found->bytes);
  if (!mapping.ok()) return absl::FailedPreconditionError(mapping.error().text);
  return mapped_.emplace(name, *std::move(mapping)).first->second.bytes();
}

}  // namespace modelhost::modelctl
