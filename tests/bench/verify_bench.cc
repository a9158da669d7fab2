// The two plain ways to do what a verified cold load does, as limits to compare it with:
//   sha256     hashing memory that is there, on every core
//   populate   MADV_POPULATE_READ of the file by as many threads, in chunks, with nothing hashed
//
//   verify_bench --sha256=MIB --threads=N
//   verify_bench --populate=FILE --threads=N
//
// Prints one JSON object.
#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tests/bench/bench_util.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace modelhost::bench {
namespace {

constexpr size_t kChunkBytes = size_t{4} << 20;

template <typename Work>
uint64_t OnThreads(unsigned threads, Work work) {
  const uint64_t start = NowNs();
  std::vector<std::thread> pool;
  for (unsigned i = 0; i < threads; ++i) pool.emplace_back(work);
  for (std::thread& thread : pool) thread.join();
  return NowNs() - start;
}

int Sha256(uint64_t mib, unsigned threads) {
  std::vector<unsigned char> chunk(kChunkBytes, 0x5a);
  const uint64_t chunks = mib * (uint64_t{1} << 20) / kChunkBytes;
  std::atomic<uint64_t> next = 0;
  const uint64_t ns = OnThreads(threads, [&] {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int length = 0;
    while (next.fetch_add(1) < chunks) {
      if (EVP_Digest(chunk.data(), chunk.size(), digest, &length, EVP_sha256(), nullptr) != 1) {
        Die("EVP_Digest", "failed");
      }
    }
  });
  std::printf("{\"bytes\": %llu, \"ns\": %llu}\n",
              static_cast<unsigned long long>(chunks * kChunkBytes),
              static_cast<unsigned long long>(ns));
  return 0;
}

int Populate(const std::string& path, unsigned threads) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat stat = {};
  if (fd < 0 || ::fstat(fd, &stat) != 0) Die(path, std::strerror(errno));
  const auto size = static_cast<size_t>(stat.st_size);
  void* data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) Die(path, std::strerror(errno));
  std::atomic<size_t> next = 0;
  const uint64_t ns = OnThreads(threads, [&] {
    while (true) {
      const size_t at = next.fetch_add(kChunkBytes);
      if (at >= size) return;
      if (::madvise(static_cast<char*>(data) + at, std::min(kChunkBytes, size - at),
                    MADV_POPULATE_READ) != 0) {
        Die("MADV_POPULATE_READ", std::strerror(errno));
      }
    }
  });
  std::printf("{\"bytes\": %zu, \"ns\": %llu}\n", size, static_cast<unsigned long long>(ns));
  ::munmap(data, size);
  ::close(fd);
  return 0;
}

int Main(int argc, char** argv) {
  const auto threads = static_cast<unsigned>(std::stoul(Flag(argc, argv, "threads", "2")));
  const std::string path = Flag(argc, argv, "populate", "");
  if (!path.empty()) return Populate(path, threads);
  return Sha256(std::stoull(Flag(argc, argv, "sha256", "512")), threads);
}

}  // namespace
}  // namespace modelhost::bench

int main(int argc, char** argv) { return modelhost::bench::Main(argc, argv); }
