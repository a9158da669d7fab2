#include "client/src/socket_path.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

namespace modelhost {
namespace {

constexpr const char* kSocket = "/handles.sock";
constexpr const char* kSystemDir = "/run/modelhost";

// Not in a set-uid program, where the environment is its caller's.
std::string Environment(const char* name) {
  const char* value = ::secure_getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

bool IsOursOrAbsent(const std::string& dir) {
  struct stat info {};
  if (::lstat(dir.c_str(), &info) != 0) return true;
  return S_ISDIR(info.st_mode) && (info.st_uid == ::geteuid() || info.st_uid == 0);
}

}  // namespace

std::vector<std::string> SocketCandidates(const std::string& runtime_dir) {
  if (!runtime_dir.empty()) return {runtime_dir + kSocket};
  if (const std::string dir = Environment("MODELHOST_RUNTIME_DIR"); !dir.empty()) {
    return {dir + kSocket};
  }
  std::vector<std::string> paths;
  if (const std::string dir = Environment("XDG_RUNTIME_DIR"); !dir.empty()) {
    paths.push_back(dir + "/modelhost" + kSocket);
  } else {
    const std::string own = "/tmp/modelhost-" + std::to_string(::getuid());
    if (IsOursOrAbsent(own)) paths.push_back(own + "/modelhost" + kSocket);
  }
  paths.push_back(std::string(kSystemDir) + kSocket);
  return paths;
}

}  // namespace modelhost
