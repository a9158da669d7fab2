// Reads of mapped files that outlive the file: a page that is gone reads as zeros, and is noticed.
//
// A store file that is truncated, or fails, under its mapping raises SIGBUS in whoever reads it.
// While a SigbusGuard lives, such a fault of its thread inside its ranges puts a page of zeros
// there and the reader goes on; hit() then says that what was read is worthless. Nothing is unwound
// and nothing leaks. The zeros stay until the range is unmapped, so a range that was hit must not
// be used. Faults outside every guard get what they would have got without us.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace modelhost {

// Once, at start-up, before the first guard. Process-wide.
void InstallSigbusHandler();

// On the stack of the thread that reads. Guards nest; the innermost one with the address takes it.
class SigbusGuard {
 public:
  explicit SigbusGuard(std::span<const std::byte> range);
  explicit SigbusGuard(std::vector<std::span<const std::byte>> ranges);
  ~SigbusGuard();
  SigbusGuard(const SigbusGuard&) = delete;

  // True once a page was missing.
  bool hit() const;

 private:
  friend struct SigbusHandler;
  const std::vector<std::span<const std::byte>> ranges_;
  SigbusGuard* const outer_;
  volatile bool hit_ = false;
};

}  // namespace modelhost
