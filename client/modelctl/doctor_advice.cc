#include "client/modelctl/doctor_advice.h"

#include <array>
#include <utility>

namespace modelhost::modelctl {
namespace {

constexpr char kAllowSeals[] =
    "sealed regions and the catalogue need memfd seals: allow memfd_create";

// In the order of Trouble.
constexpr std::array<TroubleText, static_cast<size_t>(Trouble::kCount)> kTroubles = {{
    {"kernel", Verdict::kFail, "Linux 4.14 is the oldest that has what is needed"},
    {"kernel", Verdict::kWarn, "from Linux 5.14 on loads prefault in one call"},
    {"prefault", Verdict::kFail, "free some memory"},
    {"prefault", Verdict::kWarn, "loads fall back to touching pages; Linux 5.14 has the call"},
    {"sealing", Verdict::kFail, kAllowSeals},
    {"memlock", Verdict::kWarn,
     "pinned models beyond it stay unlocked: LimitMEMLOCK=infinity in the unit, or ulimit -l"},
    {"descriptors", Verdict::kWarn,
     "a client needs one for each file of a model that it maps: ulimit -n 4096"},
    {"huge pages", Verdict::kWarn,
     "residency sealed works with small pages: more page faults in every client"},
    {"huge pages", Verdict::kWarn,
     "for residency sealed: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"},
    {"large folios", Verdict::kWarn, "name a store that this user may look at"},
    {"large folios", Verdict::kWarn,
     "the first pass over mapped weights faults every 4 KiB; residency sealed with huge pages does "
     "not"},
    {"control.sock", Verdict::kWarn, "start modelhostd, or give --runtime-dir"},
    {"control.sock", Verdict::kFail, "join the group that the socket belongs to, and log in anew"},
    {"control.sock", Verdict::kFail, "join one of the daemon's read_groups, and log in anew"},
    {"control.sock", Verdict::kFail, "see the daemon's log"},
    {"handles.sock", Verdict::kFail, "give --runtime-dir"},
    {"handles.sock", Verdict::kWarn, "start modelhostd"},
    {"handles.sock", Verdict::kFail, "clients cannot attach: see the daemon's log"},
    {"daemon", Verdict::kFail, "make the store readable again: what is loaded goes on serving"},
    {"daemon", Verdict::kWarn, "see `modelctl ls -o wide`"},
    {"daemon", Verdict::kWarn, "report it with the daemon's log"},
    {"disk", Verdict::kWarn, "free some memory for a buffer"},
    {"disk", Verdict::kWarn, "the file system does not read past its cache; measure it with fio"},
    {"disk", Verdict::kWarn,
     "nothing could be read past the page cache there; measure the store with fio"},
    {"disk", Verdict::kWarn, "cold loads cannot be faster than this disk"},
    {"gpu", Verdict::kFail,
     "nvidia-smi and the kernel's log say why; the daemon looks again by itself"},
    {"gpu", Verdict::kWarn,
     "models stay in host memory there; docs/device.md has what each mode needs"},
    {"gpu", Verdict::kWarn, "unprotected"},  // The daemon's words for the mode follow.
}};

}  // namespace

const TroubleText& TextOf(Trouble trouble) { return kTroubles[static_cast<size_t>(trouble)]; }

Check Found(Trouble trouble, std::string finding) {
  const TroubleText& text = TextOf(trouble);
  return {text.check, text.verdict, std::move(finding), text.advice};
}

Check Fine(const char* check, std::string finding) {
  return {check, Verdict::kOk, std::move(finding), ""};
}

}  // namespace modelhost::modelctl
