// <store>/incoming/: where versions are put together before they are one.
//
//   <id>.lock                        held (flock) by who works on <id>; made first, removed last
//   <id>.partial/                    the version so far
//   <id>.link                        a hard link on its way into it
//   <id>.<model>@<N>.replaced/       a bad version that a repair has moved aside
//
// `id` is 32 hexadecimal digits. Whoever gets the lock of an id owns all its entries; so what
// nobody has locked is the remains of a crash. Blocking.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/platform/os.h"

namespace modelhost {

// Nobody writes to a version that is there.
inline constexpr uint32_t kVersionFileMode = 0444;
inline constexpr uint32_t kVersionDirMode = 0555;

// A fresh id, locked. Removes the lock file on destruction.
class IncomingLock {
 public:
  // `incoming` is lent and outlives the lock.
  static absl::StatusOr<IncomingLock> Make(Os& os, const UniqueFd& incoming);
  // Of an id that is there: UNAVAILABLE if somebody has it.
  static absl::StatusOr<IncomingLock> Take(Os& os, const UniqueFd& incoming, std::string id);
  IncomingLock(IncomingLock&& other) noexcept = default;
  IncomingLock& operator=(IncomingLock&&) = delete;
  ~IncomingLock();

  const std::string& id() const { return id_; }
  std::string partial() const { return id_ + ".partial"; }
  std::string link() const { return id_ + ".link"; }
  std::string replaced(const std::string& model, const std::string& version) const {
    return id_ + "." + model + "@" + version + ".replaced";
  }

 private:
  IncomingLock(Os& os, const UniqueFd& incoming, std::string id, UniqueFd file)
      : os_(&os), incoming_(&incoming), id_(std::move(id)), file_(std::move(file)) {}

  Os* os_;
  const UniqueFd* incoming_;
  std::string id_;
  UniqueFd file_;  // Not valid after a move.
};

// The id that an entry's name begins with; empty if it is not one of ours.
std::string IncomingId(absl::string_view name);

// As Publisher::SweepIncoming.
absl::Status SweepIncoming(Os& os, const UniqueFd& root_dir);

}  // namespace modelhost
