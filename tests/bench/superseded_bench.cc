// The question that a control loop asks at every turn: has my label moved?
// MODELHOST_RUNTIME_DIR and MODELHOST_BENCH_REF say where and what.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <string>

#include "modelhost/modelhost.h"
#include "tests/bench/bench_util.h"

namespace modelhost::bench {
namespace {

void Superseded(benchmark::State& state) {
  const char* runtime_dir = std::getenv("MODELHOST_RUNTIME_DIR");
  const char* ref = std::getenv("MODELHOST_BENCH_REF");
  if (runtime_dir == nullptr || ref == nullptr)
    Die("superseded_bench", "the environment is not set");
  mh_client* client = Connect(runtime_dir);
  mh_handle* handle = Acquire(client, ref);
  for (auto _ : state) {
    benchmark::DoNotOptimize(mh_superseded(handle));
    benchmark::ClobberMemory();
  }
  mh_release(handle);
  mh_disconnect(client);
}
BENCHMARK(Superseded);

}  // namespace
}  // namespace modelhost::bench

BENCHMARK_MAIN();
