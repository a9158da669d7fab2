#include "daemon/platform/probed_machine.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "daemon/platform/machine_probe.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {
namespace {

constexpr absl::Duration kLook = absl::Milliseconds(20);  // Between two looks at `cancelled`.
constexpr size_t kMaxProbeOutput = size_t{64} << 10;
constexpr char kProbe[] = "probe-machine";

// Of the facts that are needed, is there one for which `is` holds?
bool AnyNeeded(const FactsNeeded& needed, const MachineFacts& facts,
               bool (*is)(const MachineFact&)) {
  return (needed.tensorrt && is(facts.tensorrt)) ||
         (needed.compute_capability && is(facts.compute_capability)) ||
         (needed.cuda_driver && is(facts.cuda_driver));
}

bool IsUnknown(const MachineFact& fact) { return !fact.known(); }
bool IsNotLookedFor(const MachineFact& fact) { return !fact.known() && fact.unknown.empty(); }

// What there is to read now, without waiting.
void Drain(const UniqueFd& in, std::string* text) {
  std::array<char, 4096> part;
  while (text->size() <= kMaxProbeOutput) {
    const ssize_t got = ::read(in.get(), part.data(), part.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return;
    text->append(part.data(), static_cast<size_t>(got));
  }
}

}  // namespace

std::vector<std::string> ProbedMachine::DefaultCommand() { return {"/proc/self/exe", kProbe}; }

ProbedMachine::ProbedMachine(Clock& clock, std::vector<std::string> command,
                             absl::Duration deadline)
    : clock_(clock), command_(std::move(command)), deadline_(deadline) {
  UpdateKnown();
}

ProbedMachine::~ProbedMachine() = default;

void ProbedMachine::SetOverrides(MachineFacts overrides) {
  const absl::MutexLock lock(&mutex_);
  overrides_ = std::move(overrides);
  UpdateKnown();
}

void ProbedMachine::Forget() {
  (void)late_.Reap();
  const absl::MutexLock lock(&mutex_);
  stale_ = true;
  ++forgotten_;
}

std::shared_ptr<const MachineFacts> ProbedMachine::Known() {
  const absl::MutexLock lock(&mutex_);
  return known_;
}

void ProbedMachine::UpdateKnown() {
  known_ = std::make_shared<const MachineFacts>(WithOverrides(found_));
}

MachineFacts ProbedMachine::WithOverrides(MachineFacts facts) const {
  if (!facts.platform.known()) facts.platform = ProbePlatform();
  for (MachineFact MachineFacts::*member :
       {&MachineFacts::platform, &MachineFacts::tensorrt, &MachineFacts::compute_capability,
        &MachineFacts::cuda_driver}) {
    if ((overrides_.*member).known()) facts.*member = overrides_.*member;
  }
  return facts;
}

FactsNeeded ProbedMachine::ToFind(FactsNeeded needed) const {
  needed.tensorrt = needed.tensorrt && !overrides_.tensorrt.known();
  needed.compute_capability = needed.compute_capability && !overrides_.compute_capability.known();
  needed.cuda_driver = needed.cuda_driver && !overrides_.cuda_driver.known();
  return needed;
}

absl::StatusOr<MachineFacts> ProbedMachine::Facts(const FactsNeeded& needed,
                                                  const std::function<bool()>& cancelled) {
  (void)late_.Reap();
  FactsNeeded wanted;
  uint64_t forgotten = 0;
  {
    const absl::MutexLock lock(&mutex_);
    while (true) {
      wanted = ToFind(needed);
      if (!stale_ && !AnyNeeded(wanted, found_, IsNotLookedFor)) {
        const bool fresh = clock_.Monotonic() - looked_at_ < kRetry;
        if (fresh || !AnyNeeded(wanted, found_, IsUnknown)) return WithOverrides(found_);
      }
      if (!wanted.any()) return WithOverrides(found_);
      if (!looking_) break;
      mutex_.AwaitWithTimeout(absl::Condition(
                                  +[](bool* looking) { return !*looking; }, &looking_),
                              kLook);
      if (cancelled()) return absl::CancelledError(absl::StrCat(kProbe, ": cancelled"));
    }
    looking_ = true;
    forgotten = forgotten_;
  }
  auto facts = Look(wanted, cancelled);
  const absl::MutexLock lock(&mutex_);
  looking_ = false;
  if (!facts.ok()) return facts.status();
  // What this look had no aim at, or failed to find, is still what an earlier one found.
  if (stale_) found_ = {};
  const auto take = [](const MachineFact& fact, MachineFact& found) {
    if (fact.known() || (!found.known() && !IsNotLookedFor(fact))) found = fact;
  };
  take(facts->tensorrt, found_.tensorrt);
  take(facts->compute_capability, found_.compute_capability);
  take(facts->cuda_driver, found_.cuda_driver);
  looked_at_ = clock_.Monotonic();
  // A reload that came meanwhile wants a look that began after it.
  stale_ = forgotten != forgotten_;
  UpdateKnown();
  return WithOverrides(found_);
}

absl::StatusOr<MachineFacts> ProbedMachine::Look(const FactsNeeded& needed,
                                                 const std::function<bool()>& cancelled) {
  std::string text;
  const bool hangs = needed.driver() && late_.Reap() > 0;
  absl::Status ended;
  const bool looks = !hangs || needed.tensorrt;
  if (looks) {  // What needs no driver is found all the same.
    ended = RunChild(needed.driver() && !hangs, cancelled, &text);
    if (absl::IsCancelled(ended)) return ended;
  }
  // What it said before a driver made it crash or hang is good; a half line is none.
  text.resize(text.find_last_of('\n') + 1);
  std::string strange;
  MachineFacts facts = ParseFacts(text, &strange);
  std::string why =
      ended.ok() ? absl::StrCat(kProbe, ": does not say") : std::string(ended.message());
  if (!strange.empty()) absl::StrAppend(&why, " (among what it says: ", strange, ")");
  const auto explain = [&](bool looked_for, MachineFact& fact) {
    if (looked_for && IsNotLookedFor(fact)) fact.unknown = why;
  };
  explain(looks, facts.tensorrt);
  if (hangs) {
    why = absl::StrCat(kProbe,
                       ": an earlier one still hangs in the CUDA driver, so no other one is "
                       "started (does nvidia-smi answer? a hung driver needs a restart)");
  }
  explain(needed.driver(), facts.compute_capability);
  explain(needed.driver(), facts.cuda_driver);
  return facts;
}

absl::Status ProbedMachine::RunChild(bool with_driver, const std::function<bool()>& cancelled,
                                     std::string* text) {
  const UniqueFd file(::open(command_[0].c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return ErrnoStatus(errno, absl::StrCat("starting ", command_[0]));
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus(errno, absl::StrCat(kProbe, ": a pipe"));
  const UniqueFd in(ends[0]);
  UniqueFd out(ends[1]);
  // Only this end: the child's writes may wait.
  if (::fcntl(in.get(), F_SETFL, O_NONBLOCK) != 0) {
    return ErrnoStatus(errno, absl::StrCat(kProbe, ": a pipe"));
  }
  ChildProgram program{.name = command_[0], .keep_environment = true, .quiet = true};
  program.arguments.assign(command_.begin() + 1, command_.end());
  if (!with_driver) program.arguments.push_back("--no-driver");
  program.arguments.push_back("--answer");
  auto child = ChildProcess::Start(file, program, {&out});
  out.Reset();
  if (!child.ok()) return child.status();
  const auto end = child->Wait(clock_, deadline_, [&] {
    Drain(in, text);
    return !cancelled() && text->size() <= kMaxProbeOutput;
  });
  late_.Keep(*std::move(child));
  Drain(in, text);
  if (text->size() > kMaxProbeOutput) {
    return absl::InvalidArgumentError(absl::StrCat(kProbe, ": says more than there is to say"));
  }
  if (absl::IsDeadlineExceeded(end.status())) {
    return absl::DeadlineExceededError(absl::StrCat(kProbe, ": no answer within ",
                                                    absl::FormatDuration(deadline_),
                                                    " (does the CUDA driver hang?)"));
  }
  if (!end.ok()) return end.status();
  if (end->signalled) {
    return absl::UnavailableError(absl::StrCat(kProbe, ": ended by signal ", end->code));
  }
  if (end->code != 0) {
    return absl::UnavailableError(absl::StrCat(kProbe, ": ended with ", end->code));
  }
  return absl::OkStatus();
}

}  // namespace modelhost
