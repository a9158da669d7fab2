// Bytes promised before they are used. One pool each for host memory and locked memory.
//
// A Reservation gives its bytes back when it dies. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace modelhost {

class BudgetPool;

class Reservation {
 public:
  Reservation() = default;
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;
  ~Reservation();
  uint64_t bytes() const { return bytes_; }
  // Gives back what turned out not to be needed.
  void Shrink(uint64_t new_bytes);
  // A part of it (at most all), to be held on its own.
  Reservation Split(uint64_t part_bytes);

 private:
  friend class BudgetPool;
  Reservation(BudgetPool* pool, uint64_t bytes) : pool_(pool), bytes_(bytes) {}
  BudgetPool* pool_ = nullptr;
  uint64_t bytes_ = 0;
};

class BudgetPool {
 public:
  // `name` is "host" or "memlock". `bytes` UINT64_MAX = no limit. Outlives its reservations.
  BudgetPool(std::string name, uint64_t bytes) : name_(std::move(name)), limit_(bytes) {}

  // RESOURCE_EXHAUSTED: the text has need, have and limit in IEC units, and BudgetRefusalOf tells
  // it from other shortages.
  absl::StatusOr<Reservation> Reserve(uint64_t bytes, const std::string& what);

  const std::string& name() const { return name_; }
  uint64_t limit() const { return limit_; }
  uint64_t reserved() const;

 private:
  friend class Reservation;
  void GiveBack(uint64_t bytes);

  const std::string name_;
  const uint64_t limit_;
  mutable absl::Mutex mutex_;
  uint64_t reserved_ ABSL_GUARDED_BY(mutex_) = 0;
};

// What a pool refused: giving bytes of that pool back may help, which it does not against any other
// shortage (descriptors, the kernel's memory).
struct BudgetRefusal {
  std::string pool;
  uint64_t need_bytes = 0;
  uint64_t have_bytes = 0;  // Free at that moment.
  uint64_t limit_bytes = 0;
  std::string holders;  // Of the rest, for people; empty when not known.
};
std::optional<BudgetRefusal> BudgetRefusalOf(const absl::Status& status);
// Makes `status`, which is not OK, such a refusal.
void SetBudgetRefusal(absl::Status& status, const BudgetRefusal& refusal);
// `status` with the refusal, if any, that `from` carries.
absl::Status WithBudgetRefusal(absl::Status status, const absl::Status& from);

// "3.7 GiB", "512 B"; "no limit" for UINT64_MAX.
std::string IecBytes(uint64_t bytes);

}  // namespace modelhost
