// A perception node: one model, a loop of 30 ms, and new versions at a moment of its own choosing.
//
// What it shows: attach at start (waiting for the daemon and for the model), read weights as a
// plain pointer, and adopt a newer version between two frames, never within one. In a ROS 2 node
// Step() would be the callback of a timer.
#include <chrono>
#include <cstdio>
#include <thread>

#include "client/examples/arguments.h"
#include "modelhost/modelhost.hpp"

namespace {

constexpr char kUsage[] =
    "modelhost-perception [--runtime-dir DIR] [--model REF] [--loops N] [--print]";
constexpr std::chrono::milliseconds kPeriod{30};

// Stands for inference: reads some bytes of every tensor.
double Step(const modelhost::ModelHandle& model) {
  double sum = 0;
  for (size_t i = 0; i < model.tensor_count(); ++i) {
    const auto tensor = model.TensorAt(i);
    if (!tensor.ok()) continue;
    const auto bytes = tensor->bytes();
    for (size_t at = 0; at < bytes.size(); at += 4096) sum += static_cast<double>(bytes[at]);
  }
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments(argc, argv);
  modelhost::Client::Options options;
  options.runtime_dir = arguments.Value("--runtime-dir", "");
  options.deadline = std::chrono::seconds(30);  // The daemon may start after us.
  const std::string ref = arguments.Value("--model", "planner");
  const long loops = arguments.Number("--loops", 100);
  const bool print = arguments.Switch("--print");
  arguments.Done(kUsage);

  auto client = modelhost::Client::Connect(options);
  if (!client.ok()) {
    std::fprintf(stderr, "error: %s\n", client.error().message.c_str());
    return 1;
  }
  modelhost::AcquireOptions wait;
  wait.wait = true;
  auto live = client->Follow(ref, wait);
  if (!live.ok()) {
    std::fprintf(stderr, "error: %s\n", live.error().message.c_str());
    return 1;
  }
  modelhost::ModelHandle model = live->current();
  std::printf("attached %s, %zu tensors\n", model.name().c_str(), model.tensor_count());
  std::fflush(stdout);

  auto next = std::chrono::steady_clock::now();
  for (long loop = 0; loop < loops; ++loop) {
    // The safe point: no pointer into the old version is in use here. One atomic load says whether
    // there is anything to do at all.
    if (model.superseded()) {
      const modelhost::ModelHandle newest = live->Adopt();
      if (newest != model) {
        std::printf("adopted %s after %s, generation %llu, loop %ld\n", newest.name().c_str(),
                    model.name().c_str(), static_cast<unsigned long long>(newest.generation()),
                    loop);
        std::fflush(stdout);
        model = newest;
      }
    }
    const double sum = Step(model);
    if (print) std::printf("loop %ld %s sum %.0f\n", loop, model.name().c_str(), sum);
    next += kPeriod;
    std::this_thread::sleep_until(next);
  }
  std::printf("done after %ld loops on %s\n", loops, model.name().c_str());
  return 0;
}
