// A machine that is what a test says. Set `facts` before loads begin; then any thread.
#pragma once

#include <atomic>
#include <functional>

#include "absl/status/statusor.h"
#include "daemon/platform/machine_facts.h"

namespace modelhost {

class FixedMachine final : public Machine {
 public:
  absl::StatusOr<MachineFacts> Facts(bool /*only_platform*/,
                                     const std::function<bool()>& cancelled) override {
    ++looks;
    if (cancelled()) return absl::CancelledError("cancelled");
    return facts;
  }

  MachineFacts facts;
  std::atomic<int> looks = 0;
};

}  // namespace modelhost
