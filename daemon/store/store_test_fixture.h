// For the tests of this folder: a scratch directory, files made in a line, and a plain user.
#pragma once

#include <grp.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/platform/linux_os.h"
#include "daemon/store/publish.h"
#include "daemon/store/store.h"
#include "tests/fakes/fault_os.h"

namespace modelhost {

inline constexpr uint32_t kPlainUid = 65534;

// Removed at the end, write-protected or not.
class ScratchDir {
 public:
  ScratchDir() {
    std::string name = (std::filesystem::temp_directory_path() / "mh_store_XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~ScratchDir() {
    LinuxOs os;
    auto parent = os.OpenDir(path_.parent_path().string());
    if (parent.ok()) (void)os.RemoveTreeAt(*parent, path_.filename().string());
  }
  std::string path() const { return path_.string(); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

// Parent directories too. Independent of the umask.
inline void WriteFile(const std::string& path, const std::string& text, mode_t mode = 0644) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << text;
  ASSERT_EQ(::chmod(path.c_str(), mode), 0) << path;
}

inline std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

inline std::vector<std::string> Names(const std::string& dir) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

inline mode_t ModeOf(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
}

// Runs `body` in a child that is no root, as the daemon of a plain user is; its failures become one
// here. `dir`, empty so far, is made the child's.
inline void AsPlainUser(const std::string& dir, const std::function<void()>& body) {
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(dir.c_str(), kPlainUid, kPlainUid), 0);
  }
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    if (::geteuid() == 0 &&
        (::setgroups(0, nullptr) != 0 || ::setgid(kPlainUid) != 0 || ::setuid(kPlainUid) != 0)) {
      ::_exit(2);
    }
    body();
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "see the failures above";
}

// A store in a scratch directory, behind an Os that can fail.
class TestStore {
 public:
  using Files = std::vector<std::pair<std::string, std::string>>;  // (path, bytes)

  explicit TestStore(const std::string& dir) : dir_(dir) { Reopen(); }

  void Reopen() {
    auto opened = Store::Open(os_, root(), state(), ::geteuid());
    ASSERT_TRUE(opened.ok()) << opened.status();
    store_ = *std::move(opened);
    publisher_ = std::make_unique<Publisher>(*store_);
  }
  std::string root() const { return dir_ + "/store"; }
  std::string state() const { return dir_ + "/state"; }
  std::string version_path(const std::string& model, uint64_t version) const {
    return root() + "/models/" + model + "/versions/" + std::to_string(version);
  }
  Store& store() { return *store_; }
  Publisher& publisher() { return *publisher_; }
  FaultOs& os() { return os_; }

  // From files of its own, as descriptors.
  absl::StatusOr<PublishResult> Publish(const std::string& model, uint64_t version,
                                        const Files& files, bool replace_bad = false,
                                        const Requirements& requirements = {}) {
    const std::string from = dir_ + "/source_" + std::to_string(++sources_);
    std::vector<PublishFile> announced;
    for (const auto& [path, bytes] : files) {
      WriteFile(from + "/" + path, bytes);
      announced.push_back({path, bytes.size()});
    }
    auto staged = publisher_->Stage(model, version, announced, requirements);
    if (!staged.ok()) return staged.status();
    auto source_dir = real_.OpenDir(from);
    if (!source_dir.ok()) return source_dir.status();
    for (const PublishFile& file : announced) {
      auto source = real_.OpenFileAt(*source_dir, file.path);
      if (!source.ok()) return source.status();
      if (auto added = (*staged)->AddFile(file, *source, nullptr); !added.ok()) return added;
    }
    return (*staged)->Commit([](const std::string& path) { return path.ends_with(".gguf"); },
                             replace_bad);
  }

 private:
  const std::string dir_;
  LinuxOs real_;
  FaultOs os_{real_};
  std::unique_ptr<Store> store_;
  std::unique_ptr<Publisher> publisher_;
  int sources_ = 0;
};

}  // namespace modelhost
