// Small things that the benchmark programs share. Not for the product.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "modelhost/modelhost.h"

namespace modelhost::bench {

inline uint64_t NowNs() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

// For programs that are a load of a certain size: nothing is waited for like this.
inline void Pause(uint64_t ns) {
  const timespec pause{static_cast<time_t>(ns / 1'000'000'000),
                       static_cast<long>(ns % 1'000'000'000)};
  (void)::clock_nanosleep(CLOCK_MONOTONIC, 0, &pause, nullptr);
}

// The value below which `share` (0..1) of the samples lie.
inline double Percentile(std::vector<uint64_t> samples, double share) {
  if (samples.empty()) return 0;
  std::sort(samples.begin(), samples.end());
  const auto at = static_cast<size_t>(share * static_cast<double>(samples.size() - 1) + 0.5);
  return static_cast<double>(samples[at]);
}

[[noreturn]] inline void Die(const std::string& what, const std::string& why) {
  std::fprintf(stderr, "error: %s: %s\n", what.c_str(), why.c_str());
  std::exit(1);
}

// The value of `--name=value` among the arguments.
inline std::string Flag(int argc, char** argv, const std::string& name,
                        const std::string& otherwise) {
  const std::string start = "--" + name + "=";
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.compare(0, start.size(), start) == 0) return argument.substr(start.size());
  }
  return otherwise;
}

inline mh_client* Connect(const std::string& runtime_dir) {
  mh_error error = {};
  mh_options options = MH_OPTIONS_INIT;
  options.runtime_dir = runtime_dir.c_str();
  options.deadline_ms = 10000;
  mh_client* client = mh_connect(&options, &error);
  if (client == nullptr) Die("mh_connect", error.message);
  return client;
}

inline mh_handle* Acquire(mh_client* client, const std::string& ref) {
  mh_error error = {};
  mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
  options.wait = 1;
  options.deadline_ms = 10000;
  mh_handle* handle = nullptr;
  if (mh_acquire(client, ref.c_str(), &options, &handle, &error) != MH_OK) {
    Die("mh_acquire " + ref, error.message);
  }
  return handle;
}

// Reads every 8-byte word. The sum is returned so that no compiler can leave the reading out.
inline uint64_t SumWords(const void* data, uint64_t nbytes) {
  const auto* words = static_cast<const uint64_t*>(data);
  const uint64_t count = nbytes / sizeof(uint64_t);
  uint64_t a = 0, b = 0, c = 0, d = 0;
  uint64_t i = 0;
  for (; i + 4 <= count; i += 4) {
    a += words[i];
    b += words[i + 1];
    c += words[i + 2];
    d += words[i + 3];
  }
  for (; i < count; ++i) a += words[i];
  return a + b + c + d;
}

}  // namespace modelhost::bench
