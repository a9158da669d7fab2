#include "daemon/store/incoming.h"

#include <openssl/rand.h>

#include <array>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "daemon/store/manifest.h"

namespace modelhost {
namespace {

constexpr size_t kIdDigits = 32;
constexpr int kAttempts = 8;

std::string LockName(const std::string& id) { return absl::StrCat(id, ".lock"); }

// The file is locked; is it still the one that the name stands for? A sweep may have removed it
// between our open and our lock.
absl::Status StillThere(Os& os, const UniqueFd& incoming, const std::string& name,
                        const UniqueFd& file) {
  auto ours = os.Stat(file);
  if (!ours.ok()) return ours.status();
  auto named = os.StatAt(incoming, name);
  if (absl::IsNotFound(named.status()) || (named.ok() && named->inode != ours->inode)) {
    return absl::UnavailableError(absl::StrCat(name, ": was removed meanwhile"));
  }
  return named.status();
}

// The version that a crashed repair had moved aside: back to its place, if that is empty.
absl::Status Restore(Os& os, const UniqueFd& root_dir, const UniqueFd& incoming,
                     const std::string& id, const std::string& name) {
  absl::string_view ref = name;
  if (!absl::ConsumePrefix(&ref, absl::StrCat(id, ".")) ||
      !absl::ConsumeSuffix(&ref, ".replaced")) {
    return os.RemoveTreeAt(incoming, name);
  }
  const size_t at = ref.rfind('@');
  const std::string model(ref.substr(0, at));
  const std::string version(at == absl::string_view::npos ? "" : ref.substr(at + 1));
  if (!CheckModelName(model).ok() || !ParseVersionNumber(version).ok()) {
    return os.RemoveTreeAt(incoming, name);
  }
  auto versions = os.OpenDirAt(root_dir, absl::StrCat("models/", model, "/versions"));
  if (!versions.ok()) return versions.status();
  auto there = os.StatAt(*versions, version);
  if (there.ok()) return os.RemoveTreeAt(incoming, name);
  if (!absl::IsNotFound(there.status())) return there.status();
  absl::Status moved = os.RenameNoReplace(incoming, name, *versions, version);
  if (moved.ok()) moved = os.Sync(*versions);
  if (!moved.ok()) return moved;
  auto dir = os.OpenDirAt(*versions, version);
  return dir.ok() ? os.SetMode(*dir, kVersionDirMode) : dir.status();
}

absl::Status SweepEntry(Os& os, const UniqueFd& root_dir, const UniqueFd& incoming,
                        const std::string& id, const DirEntry& entry) {
  if (absl::EndsWith(entry.name, ".replaced")) {
    return Restore(os, root_dir, incoming, id, entry.name);
  }
  return entry.kind == FileKind::kDirectory ? os.RemoveTreeAt(incoming, entry.name)
                                            : os.RemoveFileAt(incoming, entry.name);
}

}  // namespace

absl::StatusOr<IncomingLock> IncomingLock::Make(Os& os, const UniqueFd& incoming) {
  absl::Status last;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    std::array<unsigned char, kIdDigits / 2> random{};
    if (RAND_bytes(random.data(), static_cast<int>(random.size())) != 1) {
      return absl::InternalError("incoming: no random bytes for a name");
    }
    std::string id = absl::BytesToHexString(
        absl::string_view(reinterpret_cast<const char*>(random.data()), random.size()));
    auto file = os.CreateFileAt(incoming, LockName(id), 0600);
    if (!file.ok()) return file.status();
    last = os.TryLock(*file);
    if (last.ok()) last = StillThere(os, incoming, LockName(id), *file);
    if (last.ok()) return IncomingLock(os, incoming, std::move(id), *std::move(file));
    (void)os.RemoveFileAt(incoming, LockName(id));
    if (!absl::IsUnavailable(last)) return last;  // A sweep came between: another name.
  }
  return last;
}

absl::StatusOr<IncomingLock> IncomingLock::Take(Os& os, const UniqueFd& incoming, std::string id) {
  auto file = os.OpenFileAt(incoming, LockName(id));
  if (absl::IsNotFound(file.status())) {
    // The rest of an id without its lock: nobody works on it. Made, so that nobody begins to.
    file = os.CreateFileAt(incoming, LockName(id), 0600);
  }
  if (!file.ok()) return file.status();
  absl::Status locked = os.TryLock(*file);
  if (locked.ok()) locked = StillThere(os, incoming, LockName(id), *file);
  if (!locked.ok()) return locked;
  return IncomingLock(os, incoming, std::move(id), *std::move(file));
}

IncomingLock::~IncomingLock() {
  if (file_.valid()) (void)os_->RemoveFileAt(*incoming_, LockName(id_));
}

std::string IncomingId(absl::string_view name) {
  if (name.size() <= kIdDigits || name[kIdDigits] != '.') return "";
  const absl::string_view id = name.substr(0, kIdDigits);
  for (const char c : id) {
    if (!absl::ascii_isxdigit(c) || absl::ascii_isupper(c)) return "";
  }
  return std::string(id);
}

absl::Status SweepIncoming(Os& os, const UniqueFd& root_dir) {
  auto incoming = os.OpenDirAt(root_dir, "incoming");
  if (absl::IsNotFound(incoming.status())) return absl::OkStatus();  // A store to read only.
  if (!incoming.ok()) return incoming.status();
  auto entries = os.ListDir(*incoming);
  if (!entries.ok()) return entries.status();
  std::set<std::string> ids;
  for (const DirEntry& entry : *entries) {
    // What has another name is somebody's own, such as an operator's rsync.
    if (std::string id = IncomingId(entry.name); !id.empty()) ids.insert(std::move(id));
  }
  absl::Status first;
  for (const std::string& id : ids) {
    auto lock = IncomingLock::Take(os, *incoming, id);
    if (absl::IsUnavailable(lock.status())) continue;  // Alive.
    if (!lock.ok()) {
      first.Update(lock.status());
      continue;
    }
    for (const DirEntry& entry : *entries) {
      if (IncomingId(entry.name) != id || entry.name == LockName(id)) continue;
      const absl::Status swept = SweepEntry(os, root_dir, *incoming, id, entry);
      // Its owner may have finished between the listing and the lock.
      if (!absl::IsNotFound(swept)) first.Update(swept);
    }
  }
  return first;
}

}  // namespace modelhost
