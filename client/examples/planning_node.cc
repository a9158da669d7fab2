// A planning node: models that belong together, adopted together, and an executor that sleeps.
//
// What it shows: a set from one snapshot (a planner never meets a detector of another release), the
// event descriptor in a poll loop beside the node's own work, and sidecar files of the very version
// that the tensors are from.
#include <poll.h>

#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "client/examples/arguments.h"
#include "modelhost/modelhost.hpp"

namespace {

constexpr char kUsage[] =
    "modelhost-planning [--runtime-dir DIR] [--model REF]... [--loops N] [--print]";
constexpr int kPeriodMs = 30;

std::string Names(const modelhost::LiveSet& models) {
  std::string names;
  for (size_t i = 0; i < models.size(); ++i) names += (i == 0 ? "" : " ") + models[i].name();
  return names;
}

double Plan(const modelhost::LiveSet& models) {
  double sum = 0;
  for (size_t i = 0; i < models.size(); ++i) {
    const auto tensor = models[i].TensorAt(0);
    if (!tensor.ok()) continue;
    for (const std::byte byte : tensor->bytes()) sum += static_cast<double>(byte);
  }
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments(argc, argv);
  modelhost::Client::Options options;
  options.runtime_dir = arguments.Value("--runtime-dir", "");
  options.deadline = std::chrono::seconds(30);
  std::vector<std::string> refs = arguments.Values("--model");
  if (refs.empty()) refs = {"planner"};
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
  auto models = client->FollowSet(refs, wait);
  if (!models.ok()) {
    std::fprintf(stderr, "error: %s\n", models.error().message.c_str());
    return 1;
  }
  std::printf("attached %s\n", Names(*models).c_str());
  for (size_t i = 0; i < models->size(); ++i) {
    const modelhost::ModelHandle model = (*models)[i];
    for (size_t k = 0; k < model.file_count(); ++k) {
      const auto listed = model.FileAt(k);
      if (!listed.ok() || listed->role() != "sidecar") continue;
      const auto file = model.File(std::string(listed->path()));
      if (file.ok()) {
        std::printf("%s has %s, %llu bytes\n", model.name().c_str(),
                    std::string(file->path()).c_str(),
                    static_cast<unsigned long long>(file->nbytes()));
      }
    }
  }
  std::fflush(stdout);

  pollfd events{client->event_fd(), POLLIN, 0};
  for (long loop = 0; loop < loops; ++loop) {
    // Sleeps until the period is over or something changed. A descriptor of -1 is skipped by poll.
    if (::poll(&events, 1, kPeriodMs) > 0) {
      client->ClearEvents();
      if (models->Adopt()) {
        std::printf("adopted %s, loop %ld\n", Names(*models).c_str(), loop);
        std::fflush(stdout);
      }
    }
    const double sum = Plan(*models);
    if (print) std::printf("loop %ld %s sum %.0f\n", loop, Names(*models).c_str(), sum);
  }
  std::printf("done after %ld loops on %s\n", loops, Names(*models).c_str());
  return 0;
}
