// What `modelctl exec --keep-names` preloads into a program: realpath() of a file in exec's folder
// is that file's name there, and not where its descriptor came from.
//
// The files of the folder are links to /proc/self/fd/N. To the kernel these are the files
// themselves; realpath() reads their text, which is a path in the daemon's store, where nobody else
// may look, or
// "/memfd:NAME (deleted)". Engines that compare real paths before they open anything (ONNX Runtime
// does for external data) would end there.
//
// Three functions of libc are replaced, none is changed for any other path. Needs libc alone, has
// no state, and any thread may call it, as libc's own.
#include <dlfcn.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace {

using RealPath = char* (*)(const char*, char*);

// As client/modelctl/exec_plan.cc makes them.
constexpr char kFolderMark[] = "/modelctl-exec-";
constexpr char kLinkMark[] = "/proc/self/fd/";

char* LibcRealPath(const char* path, char* resolved) {
  // The one that makes room itself: before glibc 2.36 dlsym gives the older one on some machines.
  void* symbol = ::dlvsym(RTLD_NEXT, "realpath", "GLIBC_2.3");
  if (symbol == nullptr) symbol = ::dlsym(RTLD_NEXT, "realpath");
  const auto next = reinterpret_cast<RealPath>(symbol);
  if (next != nullptr) return next(path, resolved);
  errno = ENOSYS;
  return nullptr;
}

// Writes FOLDER/NAME for a `path` that names a file of exec's folder; whether it does.
bool NameInFolder(const char* path, char (&name)[PATH_MAX]) {
  if (path == nullptr) return false;
  const char* slash = std::strrchr(path, '/');
  const char* last = slash == nullptr ? path : slash + 1;
  char folder[PATH_MAX] = ".";
  if (slash != nullptr) {
    const size_t bytes = slash == path ? 1 : static_cast<size_t>(slash - path);
    if (bytes >= sizeof folder) return false;
    std::memcpy(folder, path, bytes);
    folder[bytes] = '\0';
  }
  if (LibcRealPath(folder, name) == nullptr || std::strstr(name, kFolderMark) == nullptr) {
    return false;
  }
  const size_t at = std::strlen(name), bytes = std::strlen(last) + 1;
  if (at + 1 + bytes > sizeof name) return false;
  name[at] = '/';
  std::memcpy(name + at + 1, last, bytes);
  char text[sizeof kLinkMark];
  const ssize_t read = ::readlink(name, text, sizeof text);
  // Longer than the mark: there is a number, too.
  if (read != static_cast<ssize_t>(sizeof text) ||
      std::memcmp(text, kLinkMark, sizeof kLinkMark - 1) != 0)
    return false;
  return ::access(name, F_OK) == 0;
}

char* Resolve(const char* path, char* resolved) {
  const int before = errno;
  char name[PATH_MAX];
  if (!NameInFolder(path, name)) {
    errno = before;
    return LibcRealPath(path, resolved);
  }
  errno = before;
  if (resolved == nullptr) return ::strdup(name);
  std::memcpy(resolved, name, std::strlen(name) + 1);
  return resolved;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) char* realpath(const char* path, char* resolved) noexcept {
  return Resolve(path, resolved);
}

__attribute__((visibility("default"))) char* canonicalize_file_name(const char* path) noexcept {
  return Resolve(path, nullptr);
}

// What realpath is in a program that was compiled with _FORTIFY_SOURCE.
__attribute__((visibility("default"))) char* __realpath_chk(const char* path, char* resolved,
                                                            size_t room) noexcept {
  if (resolved != nullptr && room < PATH_MAX) std::abort();
  return Resolve(path, resolved);
}

}  // extern "C"
