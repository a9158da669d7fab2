#include "client/src/testing/fake_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace modelhost::testing {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::perror(what);
  std::abort();
}

SealedRegion Sealed(const std::string& bytes) {
  auto region = WritableRegion::Create("fake", bytes.size(), HugePages::kOff);
  Require(region.ok(), "make a region");
  std::memcpy(region->bytes().data(), bytes.data(), bytes.size());
  auto sealed = std::move(*region).Seal();
  Require(sealed.ok(), "seal a region");
  return *std::move(sealed);
}

UniqueFd Unsealed(const std::string& bytes) {
  UniqueFd fd(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  Require(::write(fd.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
          "write");
  return fd;
}

UniqueFd PlainFile(const std::string& bytes, UniqueFd* writable) {
  std::string name = "/tmp/modelhost-fake-XXXXXX";
  *writable = UniqueFd(::mkostemp(name.data(), O_CLOEXEC));
  Require(
      ::write(writable->get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
      "write");
  UniqueFd readable(::open(name.c_str(), O_RDONLY | O_CLOEXEC));
  ::unlink(name.c_str());
  return readable;
}

}  // namespace modelhost::testing
