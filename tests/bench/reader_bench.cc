// A process that uses a model: reads every byte twice, says how long each pass took, and waits.
//
//   reader_bench --runtime-dir=D --ref=R          on the daemon's copy
//   reader_bench --private=FILE                   on a copy of its own, as programs do today
//   reader_bench --runtime-dir=D                  connected, with no model: what the process costs
//
// Prints one JSON line when it has read everything; ends when stdin does. Meanwhile its memory can
// be measured from outside.
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "modelhost/modelhost.h"
#include "tests/bench/bench_util.h"

namespace modelhost::bench {
namespace {

struct Range {
  const void* data;
  uint64_t nbytes;
};

uint64_t Pass(const std::vector<Range>& ranges, uint64_t* sum) {
  const uint64_t start = NowNs();
  for (const Range& range : ranges) *sum += SumWords(range.data, range.nbytes);
  return NowNs() - start;
}

int Main(int argc, char** argv) {
  const std::string runtime_dir = Flag(argc, argv, "runtime-dir", "");
  const std::string ref = Flag(argc, argv, "ref", "");
  const std::string path = Flag(argc, argv, "private", "");
  std::vector<Range> ranges;
  std::unique_ptr<char[]> copy;
  mh_client* client = nullptr;
  mh_handle* handle = nullptr;

  const uint64_t start = NowNs();
  if (!path.empty()) {
    struct stat stat = {};
    std::ifstream in(path, std::ios::binary);
    if (!in || ::stat(path.c_str(), &stat) != 0) Die(path, "cannot be read");
    const auto size = static_cast<size_t>(stat.st_size);
    copy = std::make_unique_for_overwrite<char[]>(size);
    if (!in.read(copy.get(), static_cast<std::streamsize>(size))) Die(path, "is too short");
    ranges.push_back({copy.get(), size});
  } else {
    client = Connect(runtime_dir);
    if (!ref.empty()) handle = Acquire(client, ref);
    for (size_t i = 0; handle != nullptr && i < mh_tensor_count(handle); ++i) {
      mh_tensor_view view = MH_TENSOR_VIEW_INIT;
      if (mh_tensor_at(handle, i, &view) != MH_OK) Die(ref, "has a broken index");
      ranges.push_back({view.data, view.nbytes});
    }
  }
  const uint64_t attached = NowNs() - start;
  uint64_t sum = 0, nbytes = 0;
  for (const Range& range : ranges) nbytes += range.nbytes;
  const uint64_t first = Pass(ranges, &sum);
  uint64_t second = UINT64_MAX;
  for (int i = 0; i < 3; ++i) second = std::min(second, Pass(ranges, &sum));
  std::printf(
      "{\"attach_ns\": %llu, \"first_ns\": %llu, \"second_ns\": %llu, \"bytes\": %llu, "
      "\"sum\": %llu}\n",
      static_cast<unsigned long long>(attached), static_cast<unsigned long long>(first),
      static_cast<unsigned long long>(second), static_cast<unsigned long long>(nbytes),
      static_cast<unsigned long long>(sum));
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  mh_release(handle);
  mh_disconnect(client);
  return 0;
}

}  // namespace
}  // namespace modelhost::bench

int main(int argc, char** argv) { return modelhost::bench::Main(argc, argv); }
