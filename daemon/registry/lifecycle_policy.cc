#include "daemon/registry/lifecycle_policy.h"

namespace modelhost {

bool AtRest(Phase phase) {
  return phase == Phase::kStaged || phase == Phase::kFailed || phase == Phase::kQuarantined;
}

Verdict MayGrant(const VersionFacts& version) {
  const bool comes_back = version.phase == Phase::kDraining && !version.unload_asked;
  if (!version.resident || (version.phase != Phase::kReady && !comes_back)) {
    return Verdict::kNotReady;
  }
  return version.health == Health::kSuspect ? Verdict::kSuspect : Verdict::kYes;
}

Verdict MayLabel(const VersionFacts& version) {
  if (version.health == Health::kSuspect) return Verdict::kSuspect;
  if (version.phase != Phase::kReady || !version.resident) return Verdict::kNotReady;
  return Verdict::kYes;
}

bool MayAnnounce(const VersionFacts& version) {
  return version.phase == Phase::kReady && version.resident;
}

Verdict MayUnload(const VersionFacts& version) {
  if (version.labels > 0) return Verdict::kLabelled;
  if (version.holds > 0) return Verdict::kHeld;
  return Verdict::kYes;
}

bool MayLapse(const VersionFacts& version) {
  return version.phase == Phase::kReady && MayUnload(version) == Verdict::kYes;
}

bool MayEvict(const VersionFacts& version) {
  return MayLapse(version) && version.resident && version.leases == 0 && !version.reloading &&
         !version.awaits_clients;
}

bool MayFree(const VersionFacts& version, bool released) {
  return version.phase == Phase::kDraining && (version.leases == 0 || released);
}

Verdict MayDelete(const VersionFacts& version) {
  if (version.labels > 0 || version.maybe_labelled) return Verdict::kLabelled;
  if (version.leases > 0) return Verdict::kLeased;
  if (version.holds > 0) return Verdict::kHeld;
  if (version.awaited || version.reloading || version.awaits_clients) return Verdict::kBusy;
  return AtRest(version.phase) ? Verdict::kYes : Verdict::kNotReady;
}

bool MayForget(const VersionFacts& version) {
  return !version.on_disk && MayDelete(version) == Verdict::kYes;
}

}  // namespace modelhost
