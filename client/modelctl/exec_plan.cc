#include "client/modelctl/exec_plan.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace modelhost::modelctl {
namespace {

namespace fs = std::filesystem;

constexpr char kNamesLibrary[] = "libmodelhost-exec.so";

const LeasedFile* Find(const std::vector<LeasedFile>& files, absl::string_view path) {
  const auto it = std::find_if(files.begin(), files.end(),
                               [&](const LeasedFile& file) { return file.path == path; });
  return it == files.end() ? nullptr : &*it;
}

// "model.gguf" and "sub/model.gguf" do; "", "a", "\"x\": 1" do not.
bool LooksLikeFile(absl::string_view text) {
  const auto good = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-' ||
           c == '/';
  };
  return text.find('.') != absl::string_view::npos && std::all_of(text.begin(), text.end(), good);
}

// Calls `brace(content)` for each {...}; it returns the replacement, or nullopt to leave it. What
// would be looked up is left as it is in doubled braces, which become single ones.
template <typename OnBrace>
std::string Replace(absl::string_view text, OnBrace brace) {
  std::string out;
  while (true) {
    const size_t open = text.find('{');
    const size_t close = open == absl::string_view::npos ? open : text.find('}', open);
    if (close == absl::string_view::npos) return absl::StrCat(out, text);
    const absl::string_view inner = text.substr(open + 2, close - std::min(close, open + 2));
    if (text[open + 1] == '{' && text.substr(close, 2) == "}}" &&
        (inner.empty() || LooksLikeFile(inner))) {
      absl::StrAppend(&out, text.substr(0, open), "{", inner, "}");
      text.remove_prefix(close + 2);
      continue;
    }
    const std::optional<std::string> with = brace(text.substr(open + 1, close - open - 1));
    // Left braces may hold others: go on behind the opening one.
    const size_t next = with.has_value() ? close + 1 : open + 1;
    absl::StrAppend(&out, text.substr(0, open), with.has_value() ? *with : "{");
    text.remove_prefix(next);
  }
}

}  // namespace

Outcome<std::vector<std::string>> KeepingNames() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  std::string library;
  for (const char* place : {"../lib", MODELHOST_EXEC_LIBRARY}) {
    const fs::path path = program.parent_path() / place / kNamesLibrary;
    if (library.empty() && fs::exists(path, error)) library = fs::canonical(path, error).string();
  }
  if (library.empty()) {
    return Fail(ExitCode::kResources,
                absl::StrCat("--keep-names: ", kNamesLibrary, " is not where ", program.string(),
                             " looks for it (", MODELHOST_EXEC_LIBRARY,
                             " beside it; install modelctl with its libraries)"));
  }
  if (library.find_first_of(" :") != std::string::npos) {
    return Fail(ExitCode::kResources,
                absl::StrCat("--keep-names: ", library,
                             ": a path with blanks or colons cannot be preloaded (install modelctl "
                             "elsewhere)"));
  }
  std::vector<std::string> out;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    absl::string_view text = *entry;
    if (absl::ConsumePrefix(&text, "LD_PRELOAD=")) {
      // Last: a sanitizer's run-time insists on being the first.
      if (!text.empty()) library = absl::StrCat(text, ":", library);
    } else {
      out.emplace_back(text);
    }
  }
  out.push_back(absl::StrCat("LD_PRELOAD=", library));
  return out;
}

std::string FdPath(int fd) { return absl::StrCat("/proc/self/fd/", fd); }

Outcome<LinkFolder> LinkFolder::Make(const std::vector<LeasedFile>& files) {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  struct stat info;
  const bool usable = runtime != nullptr && *runtime == '/' && ::stat(runtime, &info) == 0 &&
                      S_ISDIR(info.st_mode) && ::access(runtime, W_OK) == 0;
  std::string path = absl::StrCat(usable ? runtime : "/tmp", "/modelctl-exec-XXXXXX");
  if (::mkdtemp(path.data()) == nullptr) return FromError(ErrnoError(errno, path), "");
  LinkFolder folder(path);
  for (const LeasedFile& file : files) {
    const fs::path link = fs::path(path) / file.path;
    std::error_code error;
    fs::create_directories(link.parent_path(), error);
    if (!error) fs::create_symlink(FdPath(file.fd), link, error);
    if (error) return FromError(ErrnoError(error.value(), link.string()), "");
  }
  return folder;
}

LinkFolder::~LinkFolder() {
  std::error_code ignored;  // Nobody is left to be told.
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

bool NeedsFolder(const std::vector<std::string>& arguments, const std::vector<LeasedFile>& files,
                 bool fd_paths) {
  bool needs = false;
  for (const std::string& argument : arguments) {
    Replace(argument, [&](absl::string_view content) -> std::optional<std::string> {
      if (content.empty() || (!fd_paths && Find(files, content) != nullptr)) needs = true;
      return std::nullopt;
    });
  }
  return needs;
}

Outcome<std::vector<std::string>> Substitute(const std::vector<std::string>& arguments,
                                             const std::vector<LeasedFile>& files,
                                             const std::string& folder, bool fd_paths) {
  std::vector<std::string> out;
  std::string missing;
  for (const std::string& argument : arguments) {
    out.push_back(Replace(argument, [&](absl::string_view content) -> std::optional<std::string> {
      if (content.empty()) return folder;
      const LeasedFile* file = Find(files, content);
      if (file != nullptr) {
        return fd_paths ? FdPath(file->fd) : absl::StrCat(folder, "/", file->path);
      }
      if (LooksLikeFile(content) && missing.empty()) missing = std::string(content);
      return std::nullopt;
    }));
  }
  if (missing.empty()) return out;
  std::string have;
  for (size_t i = 0; i < files.size() && i < 8; ++i) {
    absl::StrAppend(&have, i == 0 ? "" : ", ", files[i].path);
  }
  if (files.size() > 8) absl::StrAppend(&have, ", ...");
  return Fail(ExitCode::kNotFound,
              absl::StrCat("{", missing, "}: the version has no such file (it has ", have, ")"));
}

}  // namespace modelhost::modelctl
