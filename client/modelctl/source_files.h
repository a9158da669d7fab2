// The files that a publish takes from a folder or a single file, as the version will have them.
//
// Links are followed when they lead to regular files that source_reach.h has in reach, and are
// refused otherwise. A download cache's folder stands for its snapshot. Nothing is left out
// without a word: what is skipped is listed, what cannot be published is an error that names it.
// One thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "client/modelctl/exit_code.h"
#include "daemon/format/format_reader.h"
#include "daemon/format/requires.h"
#include "proto/handle/mapping.h"
#include "proto/handle/unique_fd.h"

namespace modelhost::modelctl {

struct SourceFile {
  std::string path;    // In the version: plain relative, '/' between parts.
  std::string source;  // On this machine.
  uint64_t bytes = 0;
};

struct SourceSet {
  std::vector<SourceFile> files;     // Sorted by path; at least one.
  std::vector<std::string> skipped;  // "NAME: WHY"
  uint64_t bytes = 0;
  // Of a copy of a version: what the manifest.json that was skipped requires.
  Requirements manifest_requires;
};

//   kNotFound   `path` is not there
//   kIntegrity  a socket, a dangling link, a name that no version may have, ...
Outcome<SourceSet> CollectSource(const std::string& path);

// Opens one file for reading and checks that it is still the regular file of the size announced.
// kConflict when it changed in between.
Outcome<UniqueFd> OpenSource(const SourceFile& file);

// The files of a set as the format readers want them. Mapped at the first use.
class SourceFileSource : public FileSource {
 public:
  explicit SourceFileSource(const SourceSet& set) : set_(set) {}
  absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override;

 private:
  const SourceSet& set_;
  std::map<std::string, ReadOnlyMapping> mapped_;
};

}  // namespace modelhost::modelctl
