#include "daemon/region/memory_budget.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace modelhost {
namespace {

// Payload: "POOL NEED HAVE LIMIT", and the holders on a line of their own.
constexpr char kRefusalUrl[] = "modelhost/budget";

}  // namespace

Reservation::Reservation(Reservation&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    Shrink(0);
    pool_ = std::exchange(other.pool_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Reservation::~Reservation() { Shrink(0); }

void Reservation::Shrink(uint64_t new_bytes) {
  if (new_bytes >= bytes_) return;
  pool_->GiveBack(bytes_ - new_bytes);
  bytes_ = new_bytes;
}

Reservation Reservation::Split(uint64_t part_bytes) {
  const uint64_t part = std::min(part_bytes, bytes_);
  bytes_ -= part;
  return Reservation(pool_, part);
}

absl::StatusOr<Reservation> BudgetPool::Reserve(uint64_t bytes, const std::string& what) {
  uint64_t free_bytes = 0;
  {
    absl::MutexLock lock(&mutex_);
    free_bytes = limit_ - reserved_;
    if (bytes <= free_bytes) {
      reserved_ += bytes;
      return Reservation(this, bytes);
    }
  }
  absl::Status refused = absl::ResourceExhaustedError(
      absl::StrCat(what, ": needs ", IecBytes(bytes), " of the ", name_, " budget, which has ",
                   IecBytes(free_bytes), " of ", IecBytes(limit_), " left"));
  SetBudgetRefusal(refused, {name_, bytes, free_bytes, limit_, ""});
  return refused;
}

void SetBudgetRefusal(absl::Status& status, const BudgetRefusal& refusal) {
  status.SetPayload(kRefusalUrl, absl::Cord(absl::StrCat(
                                     refusal.pool, " ", refusal.need_bytes, " ", refusal.have_bytes,
                                     " ", refusal.limit_bytes, "\n", refusal.holders)));
}

std::optional<BudgetRefusal> BudgetRefusalOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kRefusalUrl);
  if (!payload.has_value()) return std::nullopt;
  const std::string text(*payload);
  const std::pair<std::string, std::string> lines = absl::StrSplit(text, absl::MaxSplits('\n', 1));
  const std::vector<std::string> words = absl::StrSplit(lines.first, ' ');
  BudgetRefusal refusal;
  if (words.size() != 4 || !absl::SimpleAtoi(words[1], &refusal.need_bytes) ||
      !absl::SimpleAtoi(words[2], &refusal.have_bytes) ||
      !absl::SimpleAtoi(words[3], &refusal.limit_bytes)) {
    return std::nullopt;
  }
  refusal.pool = words[0];
  refusal.holders = lines.second;
  return refusal;
}

absl::Status WithBudgetRefusal(absl::Status status, const absl::Status& from) {
  if (const auto payload = from.GetPayload(kRefusalUrl); payload.has_value()) {
    status.SetPayload(kRefusalUrl, *payload);
  }
  return status;
}

uint64_t BudgetPool::reserved() const {
  absl::MutexLock lock(&mutex_);
  return reserved_;
}

void BudgetPool::GiveBack(uint64_t bytes) {
  absl::MutexLock lock(&mutex_);
  reserved_ -= bytes;
}

std::string IecBytes(uint64_t bytes) {
  if (bytes == std::numeric_limits<uint64_t>::max()) return "no limit";
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1023.95 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

}  // namespace modelhost
