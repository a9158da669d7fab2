// A folder for the files of one test, gone with the object.
#pragma once

#include <stdlib.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace modelhost::testing {

class TempFolder {
 public:
  TempFolder() {
    std::string path = std::filesystem::temp_directory_path() / "modelhost-test-XXXXXX";
    if (::mkdtemp(path.data()) == nullptr) {
      std::perror(path.c_str());
      std::abort();  // No test means anything without it.
    }
    path_ = path;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace modelhost::testing
