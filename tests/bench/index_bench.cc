// What it costs to have a version's files parsed by a confined process instead of in the daemon.
//
//   index_bench --indexer=PROGRAM --tensors=N
//
// Prints one JSON object: median times of both, nanoseconds.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "daemon/format/model_builders.h"
#include "daemon/platform/linux_os.h"
#include "daemon/platform/sigbus_guard.h"
#include "daemon/region/contents_indexer.h"
#include "proto/handle/mapping.h"
#include "tests/bench/bench_util.h"

namespace modelhost::bench {
namespace {

std::string Model(uint64_t tensors) {
  std::string header = "{";
  for (uint64_t i = 0; i < tensors; ++i) {
    if (i > 0) header += ',';
    header += testing::TensorJson("model.layers." + std::to_string(i) + ".mlp.weight", "BF16",
                                  "[1,1]", 2 * i, 2 * i + 2);
  }
  return testing::Safetensors(header + "}", 2 * tensors);
}

double MedianNs(ContentsIndexer& indexer, const ContentsIndexer::File& file, uint64_t tensors) {
  const CancelToken cancel;
  std::vector<uint64_t> samples;
  for (int i = 0; i < 21; ++i) {
    const uint64_t start = NowNs();
    const auto found = indexer.Index({file}, cancel);
    samples.push_back(NowNs() - start);
    if (!found.ok()) Die("index", std::string(found.status().message()));
    if (found->size() != 1 || found->at(0).index.size() != tensors) Die("index", "wrong result");
  }
  return Percentile(samples, 0.5);
}

int Main(int argc, char** argv) {
  InstallSigbusHandler();
  const std::string program = Flag(argc, argv, "indexer", "");
  const uint64_t tensors = std::stoull(Flag(argc, argv, "tensors", "100"));
  std::string path = "/tmp/modelhost_index_bench_XXXXXX";
  const UniqueFd file(::mkstemp(path.data()));
  ::unlink(path.c_str());
  const std::string bytes = Model(tensors);
  if (!file.valid() ||
      ::write(file.get(), bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    Die(path, std::strerror(errno));
  }
  const auto mapping = ReadOnlyMapping::MapFile(file, bytes.size());
  if (!mapping.ok()) Die(path, mapping.error().text);
  const ContentsIndexer::File model{"model.safetensors", &file, mapping->bytes()};

  UniqueFd indexer(::open(program.c_str(), O_RDONLY | O_CLOEXEC));
  if (!indexer.valid()) Die(program, std::strerror(errno));
  LinuxOs os;
  SystemClock clock;
  InProcessIndexer here;
  ProcessIndexer apart(std::move(indexer), os, clock, {});
  std::printf("{\"in_process_ns\": %.0f, \"isolated_ns\": %.0f}\n", MedianNs(here, model, tensors),
              MedianNs(apart, model, tensors));
  return 0;
}

}  // namespace
}  // namespace modelhost::bench

int main(int argc, char** argv) { return modelhost::bench::Main(argc, argv); }
