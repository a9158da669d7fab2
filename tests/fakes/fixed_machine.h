// A machine that is what a test says. Set `facts` while nothing asks; then any thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "daemon/platform/machine_facts.h"

namespace modelhost {

class FixedMachine final : public Machine {
 public:
  absl::StatusOr<MachineFacts> Facts(const FactsNeeded& /*needed*/,
                                     const std::function<bool()>& cancelled) override {
    ++looks;
    if (cancelled()) return absl::CancelledError("cancelled");
    return facts;
  }
  std::shared_ptr<const MachineFacts> Known() override {
    return std::make_shared<const MachineFacts>(facts);
  }

  MachineFacts facts;
  std::atomic<int> looks = 0;
};

}  // namespace modelhost
