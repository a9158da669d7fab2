// The exit codes of modelctl, a promise to scripts. Apart from exit_code.h for what links no gRPC.
#pragma once

namespace modelhost::modelctl {

enum class ExitCode : int {
  kOk = 0,
  kOther = 1,
  kUsage = 2,
  kNotFound = 3,
  kConflict = 4,     // Not READY, --if-current, the version or the file exists.
  kResources = 5,    // Memory, disk, descriptors.
  kIntegrity = 6,    // Bytes that are wrong, or input that is malformed.
  kTimeout = 7,      // The wait timed out; the operation goes on.
  kUnreachable = 8,  // No daemon.
  kPermission = 9,
  kOldServes = 10,   // A swap failed and the old version still serves.
  kSuperseded = 11,  // Superseded or cancelled.
  kDegraded = 12,    // health, doctor.
  kInterrupted = 130,
};

}  // namespace modelhost::modelctl
