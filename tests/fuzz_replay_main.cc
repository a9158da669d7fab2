// A main for fuzzers under compilers without libFuzzer: runs every seed, then `--runs=N` mutations
// of them (bit flips, cuts, splices, interesting numbers). Deterministic: the same seeds give the
// same runs.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

Bytes Mutate(const std::vector<Bytes>& seeds, std::mt19937_64& random) {
  Bytes bytes = seeds[random() % seeds.size()];
  const uint64_t steps = 1 + random() % 4;
  for (uint64_t i = 0; i < steps; ++i) {
    if (bytes.empty()) bytes.push_back(0);
    const size_t at = random() % bytes.size();
    switch (random() % 6) {
      case 0:
        bytes[at] ^= static_cast<uint8_t>(1U << (random() % 8));
        break;
      case 1:
        bytes[at] = static_cast<uint8_t>(random());
        break;
      case 2:
        bytes.resize(at);
        break;
      case 3: {
        constexpr uint64_t kNumbers[] = {0,
                                         1,
                                         0x7f,
                                         0xff,
                                         0x7fffffff,
                                         0xffffffff,
                                         uint64_t{1} << 40,
                                         ~uint64_t{0},
                                         uint64_t{1} << 63};
        const uint64_t number = kNumbers[random() % std::size(kNumbers)];
        const size_t width = size_t{1} << (random() % 4);
        std::memcpy(bytes.data() + at, &number, std::min(width, bytes.size() - at));
        break;
      }
      case 4: {
        const Bytes& other = seeds[random() % seeds.size()];
        if (!other.empty()) {
          const size_t from = random() % other.size();
          const size_t count = std::min<size_t>(other.size() - from, 1 + random() % 32);
          bytes.insert(bytes.begin() + static_cast<ptrdiff_t>(at),
                       other.begin() + static_cast<ptrdiff_t>(from),
                       other.begin() + static_cast<ptrdiff_t>(from + count));
        }
        break;
      }
      default:
        bytes.erase(bytes.begin() + static_cast<ptrdiff_t>(at));
        break;
    }
  }
  return bytes;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t runs = 0;
  std::vector<Bytes> seeds;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--runs=", 0) == 0) {
      runs = std::strtoull(argument.c_str() + 7, nullptr, 10);
      continue;
    }
    std::vector<std::filesystem::path> paths;
    if (std::filesystem::is_directory(argument)) {
      for (const auto& entry : std::filesystem::recursive_directory_iterator(argument)) {
        if (entry.is_regular_file()) paths.push_back(entry.path());
      }
    } else {
      paths.emplace_back(argument);
    }
    std::sort(paths.begin(), paths.end());
    for (const auto& path : paths) {
      std::ifstream in(path, std::ios::binary);
      seeds.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
    }
  }
  if (seeds.empty()) seeds.emplace_back();
  for (const Bytes& seed : seeds) LLVMFuzzerTestOneInput(seed.data(), seed.size());
  std::mt19937_64 random(20260101);
  for (uint64_t i = 0; i < runs; ++i) {
    const Bytes bytes = Mutate(seeds, random);
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%zu seeds and %llu mutations without a finding\n", seeds.size(),
              static_cast<unsigned long long>(runs));
  return 0;
}
