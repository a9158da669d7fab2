// What exec gives to the command: a private folder of links to inherited descriptors, and arguments
// in which {} and {file} are replaced.
#pragma once

#include <string>
#include <vector>

#include "client/modelctl/exit_code.h"
#include "client/modelctl/worker_lease.h"

namespace modelhost::modelctl {

// A folder of mode 0700 below $XDG_RUNTIME_DIR or /tmp; removed with the object. Every file of the
// version stands in it under its own path, as a link to /proc/self/fd/N, which the process that
// opens it resolves to its own descriptor N.
class LinkFolder {
 public:
  static Outcome<LinkFolder> Make(const std::vector<LeasedFile>& files);
  LinkFolder(LinkFolder&& other) noexcept : path_(std::exchange(other.path_, {})) {}
  LinkFolder& operator=(LinkFolder&&) = delete;
  ~LinkFolder();
  const std::string& path() const { return path_; }

 private:
  explicit LinkFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;  // Empty after a move.
};

std::string FdPath(int fd);

// Whether any argument needs the folder: {} does, {file} does unless `fd_paths`.
bool NeedsFolder(const std::vector<std::string>& arguments, const std::vector<LeasedFile>& files,
                 bool fd_paths);

// The environment of this process, with libmodelhost-exec.so in front of what is preloaded: the
// command's realpath() then gives the folder's names. kResources where the library is not beside
// this program or cannot be named in LD_PRELOAD.
Outcome<std::vector<std::string>> KeepingNames();

// Replaces {} by `folder` and {file} by that file's path in it (or its /proc/self/fd path). Braces
// around anything that is no file's name stay as they are; around what looks like a file's name and
// is none they are kNotFound.
Outcome<std::vector<std::string>> Substitute(const std::vector<std::string>& arguments,
                                             const std::vector<LeasedFile>& files,
                                             const std::string& folder, bool fd_paths);

}  // namespace modelhost::modelctl
