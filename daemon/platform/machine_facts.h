// What this machine is, as far as versions may be bound to it: platform, TensorRT, GPUs, driver.
//
// Each fact is a list of values (two GPUs, two installations of a library), or the reason why it is
// not known. Values that the operator gives (SetOverrides) are taken as they are and not looked
// for. Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace modelhost {

struct MachineFact {
  std::vector<std::string> values;
  std::string source;   // Where they come from, for messages.
  std::string unknown;  // Why there are none.
  bool known() const { return !values.empty(); }
};

struct MachineFacts {
  MachineFact platform;            // "linux-x86_64"
  MachineFact tensorrt;            // "10.3.0"
  MachineFact compute_capability;  // "8.7", of each GPU
  MachineFact cuda_driver;         // "12.4", the CUDA version that the driver knows
};

// Which facts somebody wants; the platform is always among them.
struct FactsNeeded {
  bool tensorrt = false;
  bool compute_capability = false;
  bool cuda_driver = false;
  bool driver() const { return compute_capability || cuda_driver; }
  bool any() const { return tensorrt || driver(); }
};

class Machine {
 public:
  virtual ~Machine() = default;
  // Blocking, bounded; pool threads only. What is not needed may be missing. CANCELLED soon after
  // `cancelled` is true.
  virtual absl::StatusOr<MachineFacts> Facts(const FactsNeeded& needed,
                                             const std::function<bool()>& cancelled) = 0;
  // As far as it was found out; never looks, never blocks. Another object whenever it is another
  // answer.
  virtual std::shared_ptr<const MachineFacts> Known() = 0;
};

}  // namespace modelhost
