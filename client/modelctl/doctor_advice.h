// All that doctor may find wrong, and its words on what to do: a check that is not well is made
// from this table alone. docs/troubleshooting.md has every one of them in these words
// (doctor_test).
#pragma once

#include <cstddef>
#include <string>

#include "client/modelctl/doctor.h"

namespace modelhost::modelctl {

enum class Trouble : size_t {
  kKernelTooOld,
  kKernelOld,
  kNoMemoryToTry,
  kNoPrefault,
  kNoSealing,
  kLittleMemlock,
  kFewDescriptors,
  kNoHugePages,
  kHugePagesOff,
  kStoreNotSeen,
  kSmallFolios,
  kNoDaemon,
  kNoRightToCommand,
  kNoRightToRead,
  kNoAnswer,
  kNoHandlesPath,
  kHandlesDown,
  kHandlesBroken,
  kStoreBroken,
  kNotReady,
  kInvalidTransitions,
  kNoBuffer,
  kDiskNotRead,
  kDiskNoOwnFile,
  kDiskSlow,
  kGpuDead,
  kGpuHostOnly,
  kGpuUnprotected,
  kCount,
};

struct TroubleText {
  const char* check;   // The check's name, as doctor prints it.
  Verdict verdict;     // Never kOk.
  const char* advice;  // What to do.
};
const TroubleText& TextOf(Trouble trouble);

// A check that found `trouble`, in the words of the table.
Check Found(Trouble trouble, std::string finding);
// One that is well.
Check Fine(const char* check, std::string finding);

}  // namespace modelhost::modelctl
