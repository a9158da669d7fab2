#include "daemon/region/load_job.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/platform/errno_status.h"
#include "proto/handle/fault_point.h"

namespace modelhost {
namespace {

// How long a wait goes on without a look at the token.
constexpr absl::Duration kLookInterval = absl::Milliseconds(20);
// One look into the page cache per this many bytes: the size of a large folio.
constexpr uint64_t kSampleBytes = uint64_t{2} << 20;

}  // namespace

LoadJob::LoadJob(Loader& loader, const LoadRequest& request)
    : loader_(loader),
      os_(loader.os_),
      request_(request),
      cancel_(request.cancel != nullptr ? request.cancel : std::make_shared<CancelToken>()),
      name_(absl::StrCat(request.model, "@", request.version)),
      started_(loader.clock_.Monotonic()),
      progress_(loader.clock_, request.progress) {}

LoadJob::~LoadJob() {
  for (Slot& slot : slots_) {
    if (!slot.mine) continue;
    if (slot.restored) {
      slot.mapping = ReadOnlyMapping();  // Unlocks it.
      loader_.restored_->GiveBack(slot.key.content,
                                  {std::move(opened_.files[slot.file]), FileOf(slot).bytes});
    }
    loader_.regions_.Abandon(slot.key);
  }
}

absl::StatusOr<std::shared_ptr<const ResidentVersion>> LoadJob::Run() {
  if (auto status = Open(); !status.ok()) return status;
  if (auto status = Plan(); !status.ok()) return status;
  if (auto status = MakeRegions(); !status.ok()) return status;
  return Complete();
}

absl::Status LoadJob::Open() {
  const PhaseTimer timer(*this, "open");
  progress_.Begin("open", 0);
  if (cancel_->cancelled()) return Cancelled();
  auto opened = loader_.OpenPaced(request_, *cancel_, progress_);
  if (cancel_->cancelled()) return Cancelled();
  if (!opened.ok()) return opened.status();
  opened_ = *std::move(opened);
  if (opened_.just_hashed) {  // To make its manifest: no byte need be hashed again.
    for (size_t i = 0; i < opened_.infos.size(); ++i) {
      loader_.verified_.Record(opened_.infos[i], opened_.manifest->files[i].sha256);
    }
  }
  dir_ = absl::StrCat(loader_.store_.root(), "/models/", request_.model, "/versions/",
                      request_.version);
  return absl::OkStatus();
}

absl::Status LoadJob::Plan() {
  FaultPoint("load.opened");
  const std::vector<ManifestFile>& files = opened_.manifest->files;
  absl::Status fit = CheckRequiredFiles(request_.policy, *opened_.manifest);
  if (fit.ok()) fit = CheckMachine();
  if (!fit.ok()) return AtPath(fit, name_);
  const Residency residency = request_.policy.residency;
  const bool lockable = residency == Residency::kPinned || residency == Residency::kSealed;
  std::map<Digest, uint32_t> by_content;
  for (uint32_t i = 0; i < files.size(); ++i) {
    const Digest content = ContentKey(files[i]);
    const auto [found, is_new] = by_content.emplace(content, static_cast<uint32_t>(slots_.size()));
    file_slots_.push_back(found->second);
    if (!is_new) continue;
    Slot& slot = slots_.emplace_back();
    slot.key = {content, residency};
    slot.file = i;
    slot.want_lock = lockable && loader_.options_.memlock != MemlockPolicy::kOff;
  }
  return absl::OkStatus();
}

absl::Status LoadJob::CheckMachine() {
  auto sources = ReadRequirements(os_, opened_, *cancel_);
  if (!sources.ok()) return sources.status();
  requirements_ = *std::move(sources);
  if (requirements_.empty()) return absl::OkStatus();
  auto facts =
      loader_.machine_.Facts(NeededFacts(requirements_), [this] { return cancel_->cancelled(); });
  if (!facts.ok()) return facts.status();
  return CheckRequires(name_, requirements_, *facts);
}

absl::Status LoadJob::MakeRegions() {
  while (true) {
    if (cancel_->cancelled()) return Cancelled();
    if (Claim()) {
      if (auto status = Book(); !status.ok()) return status;
      FaultPoint("load.booked");
      if (auto status = Map(); !status.ok()) return status;
      FaultPoint("load.mapped");
      if (auto status = RunPass(); !status.ok()) return status;
      FaultPoint("load.read");
      if (auto status = Pin(); !status.ok()) return status;
      FaultPoint("load.pinned");
      Finish();
    }
    const bool all = std::all_of(slots_.begin(), slots_.end(),
                                 [](const Slot& slot) { return slot.region != nullptr; });
    if (all) return absl::OkStatus();
    if (auto status = WaitForOthers(); !status.ok()) return status;
  }
}

bool LoadJob::Claim() {
  bool any = false;
  for (Slot& slot : slots_) {
    if (slot.region != nullptr) continue;
    switch (loader_.regions_.Claim(slot.key, &slot.region)) {
      case RegionCache::Claimed::kResident:
        report_.shared_bytes += slot.region->bytes();
        if (slot.want_lock && slot.region->tier() != HostTier::kPinned) {
          unlocked_bytes_ += slot.region->bytes();
          unlocked_why_ = "another version that shares the bytes was loaded without a lock";
        }
        break;
      case RegionCache::Claimed::kMine:
        slot.mine = true;
        any = true;
        break;
      case RegionCache::Claimed::kElsewhere:
        break;
    }
  }
  return any;
}

absl::Status LoadJob::WaitForOthers() {
  const PhaseTimer timer(*this, "wait");
  progress_.Begin("wait", 0);
  for (const Slot& slot : slots_) {
    if (slot.region != nullptr) continue;
    while (!loader_.regions_.Wait(slot.key, kLookInterval)) {
      if (cancel_->cancelled()) return Cancelled();
    }
  }
  return absl::OkStatus();
}

absl::Status LoadJob::Book() {
  uint64_t need_bytes = 0;
  for (const Slot& slot : slots_) {
    if (slot.mine) need_bytes += FileOf(slot).bytes;
  }
  auto host = loader_.host_.Reserve(need_bytes, absl::StrCat("load of ", name_));
  if (!host.ok()) {
    return AtPath(host.status(), "host memory");
  }
  for (Slot& slot : slots_) {
    if (slot.mine) slot.host = host->Split(FileOf(slot).bytes);
  }
  return BookMemlock();
}

absl::Status LoadJob::BookMemlock() {
  const auto wanted = [](const Slot& slot) { return slot.mine && slot.want_lock; };
  uint64_t need_bytes = 0;
  for (const Slot& slot : slots_) {
    if (wanted(slot)) need_bytes += FileOf(slot).bytes;
  }
  auto all = loader_.memlock_.Reserve(need_bytes, absl::StrCat("load of ", name_));
  if (all.ok()) {
    for (Slot& slot : slots_) {
      if (wanted(slot)) slot.memlock = all->Split(FileOf(slot).bytes);
    }
    return absl::OkStatus();
  }
  if (loader_.options_.memlock == MemlockPolicy::kRequired) return MemlockRefused(all.status());
  unlocked_why_ = std::string(all.status().message());
  for (Slot& slot : slots_) {
    if (!wanted(slot)) continue;
    auto part = loader_.memlock_.Reserve(FileOf(slot).bytes, PathOf(slot));
    if (part.ok()) {
      slot.memlock = *std::move(part);
    } else {
      slot.want_lock = false;
      unlocked_bytes_ += FileOf(slot).bytes;
    }
  }
  return absl::OkStatus();
}

absl::Status LoadJob::Map() {
  PhaseTimer timer(*this, "map");
  progress_.Begin("map", 0);
  for (Slot& slot : slots_) {
    if (!slot.mine) continue;
    const ManifestFile& file = FileOf(slot);
    const auto restored = MapRestored(slot);
    if (!restored.ok()) return restored.status();
    if (*restored) continue;
    if (auto status = MapFile(slot); !status.ok()) return status;
    slot.verify = loader_.options_.verify == VerifyPolicy::kFull && file.bytes > 0 &&
                  loader_.verified_.Find(opened_.infos[slot.file]) != file.sha256;
    timer.bytes += file.bytes;
    if (slot.key.residency != Residency::kSealed) continue;
    auto copy =
        WritableRegion::Create(absl::StrCat("modelhost:", file.path), file.bytes,
                               request_.policy.huge_pages_auto ? HugePages::kAuto : HugePages::kOff,
                               [this] { return !cancel_->cancelled(); });
    if (!copy.ok()) {
      return cancel_->cancelled() ? Cancelled() : ToStatus(copy.error(), PathOf(slot));
    }
    slot.copy.emplace(*std::move(copy));
  }
  return absl::OkStatus();
}

absl::Status LoadJob::MapFile(Slot& slot) {
  auto mapping = ReadOnlyMapping::MapFile(FdOf(slot), FileOf(slot).bytes);
  if (!mapping.ok()) return ToStatus(mapping.error(), PathOf(slot));
  slot.mapping = *std::move(mapping);
  return absl::OkStatus();
}

absl::StatusOr<bool> LoadJob::MapRestored(Slot& slot) {
  const uint64_t bytes = FileOf(slot).bytes;
  if (loader_.restored_ == nullptr || slot.key.residency != Residency::kSealed || bytes == 0) {
    return false;
  }
  auto memory = loader_.restored_->TakeRegion(slot.key.content, bytes);
  if (!memory.has_value()) return false;
  auto mapping = ReadOnlyMapping::MapSealed(memory->fd, bytes);
  if (!mapping.ok()) return ToStatus(mapping.error(), PathOf(slot));
  if (auto good = CheckRestored(slot, mapping->bytes()); !good.ok()) {
    distrusted_ = std::string(good.message());
    loader_.restored_->Distrust(distrusted_);
    return false;
  }
  slot.restored = true;
  opened_.files[slot.file] = std::move(memory->fd);
  slot.mapping = *std::move(mapping);
  os_.PreferLargePages(slot.mapping.bytes());
  report_.restored_bytes += bytes;
  return true;
}

// One chunk says whether these are the bytes at all; that they were good when they were sealed, and
// are as they were, the seals say. All of a small file is one chunk.
absl::Status LoadJob::CheckRestored(const Slot& slot, std::span<const std::byte> bytes) const {
  const ManifestFile& file = FileOf(slot);
  if (loader_.options_.verify != VerifyPolicy::kFull) return absl::OkStatus();
  const auto now = static_cast<uint64_t>(absl::ToInt64Nanoseconds(loader_.clock_.Monotonic()));
  const uint64_t number = now % file.chunks.size();  // Another one each time.
  const uint64_t at = number * file.chunk_bytes;
  const Digest found = Sha256(bytes.subspan(at, std::min(file.chunk_bytes, bytes.size() - at)));
  if (found == file.chunks[number]) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(
      PathOf(slot), ": chunk ", number, " of the memory that the fd store kept has SHA-256 ",
      found.Hex(), ", the manifest says ", file.chunks[number].Hex(), "; read from disk instead"));
}

absl::Status LoadJob::RunPass() {
  std::vector<ChunkJob> jobs;
  uint64_t total_bytes = 0;
  for (Slot& slot : slots_) {
    const ManifestFile& file = FileOf(slot);
    // Lazy means lazy: what is known to be good is not read at all.
    const bool lazy = slot.key.residency == Residency::kMapped && !slot.verify;
    if (!slot.mine || file.bytes == 0 || lazy || slot.restored) continue;
    ChunkJob& job = jobs.emplace_back();
    job.path = PathOf(slot);
    job.mapped = slot.mapping.bytes();
    job.chunk_bytes = file.chunk_bytes;
    job.fd = &FdOf(slot);
    if (slot.verify) job.chunks = file.chunks;
    if (slot.copy.has_value()) job.copy_to = &slot.copy->fd();
    total_bytes += file.bytes;
    all_in_page_cache_ = all_in_page_cache_ && InPageCache(job.mapped);
    os_.PreferLargePages(job.mapped);
  }
  if (jobs.empty() && report_.restored_bytes > 0) return absl::OkStatus();
  progress_.Begin("prewarm", total_bytes);
  const absl::Duration started = loader_.clock_.Monotonic();
  const auto totals =
      RunChunkPass(os_, loader_.clock_, loader_.executor_,
                   {loader_.options_.threads, loader_.options_.io_priority, &loader_.pacer_}, jobs,
                   *cancel_, progress_);
  const absl::Duration passed = loader_.clock_.Monotonic() - started;
  if (cancel_->cancelled()) return Cancelled();
  if (!totals.ok()) return totals.status();
  // Both went on at once, on all workers: the time that passed is divided as theirs was.
  const absl::Duration worked = totals->reading + totals->verifying;
  const double share =
      worked > absl::ZeroDuration() ? absl::FDivDuration(totals->verifying, worked) : 0;
  AddPhase("prewarm", passed * (1 - share), totals->read_bytes);
  if (totals->verified_bytes > 0) AddPhase("verify", passed * share, totals->verified_bytes);
  report_.disk_bytes += totals->read_bytes;

  for (Slot& slot : slots_) {
    if (!slot.mine || slot.restored) continue;
    const auto now = os_.Stat(FdOf(slot));
    if (!now.ok()) return AtPath(now.status(), PathOf(slot));
    const FileInfo& then = opened_.infos[slot.file];
    if (now->bytes != then.bytes || now->mtime_ns != then.mtime_ns) {
      return absl::DataLossError(
          absl::StrCat(PathOf(slot), ": it was changed in place while it was loaded"));
    }
    if (!slot.verify) continue;
    loader_.verified_.Record(*now, FileOf(slot).sha256);
    if (slot.key.residency == Residency::kMapped) {
      // A fresh mapping holds none of the pages that were read.
      if (auto status = MapFile(slot); !status.ok()) return status;
    }
  }
  return absl::OkStatus();
}

absl::Status LoadJob::Pin() {
  uint64_t total_bytes = 0;
  for (const Slot& slot : slots_) {
    if (slot.mine && slot.want_lock) total_bytes += FileOf(slot).bytes;
  }
  const bool any = total_bytes > 0;
  if (any) progress_.Begin("pin", total_bytes);
  const absl::Duration started = loader_.clock_.Monotonic();
  uint64_t done_bytes = 0;
  for (Slot& slot : slots_) {
    if (!slot.mine) continue;
    if (slot.copy.has_value()) {
      // From here on the copy is the region, and the file is not needed.
      auto sealed = (std::move(*slot.copy)).Seal();
      slot.copy.reset();
      if (!sealed.ok()) return ToStatus(sealed.error(), PathOf(slot));
      auto mapping = ReadOnlyMapping::MapSealed(sealed->fd, sealed->bytes);
      if (!mapping.ok()) return ToStatus(mapping.error(), PathOf(slot));
      slot.mapping = *std::move(mapping);
      opened_.files[slot.file] = std::move(sealed->fd);
      os_.PreferLargePages(slot.mapping.bytes());
    }
    slot.tier = slot.key.residency == Residency::kMapped ? HostTier::kMapped : HostTier::kWarm;
    if (!slot.want_lock) continue;
    const auto status = LockSlot(slot, slot.mapping.bytes(), done_bytes);
    if (!status.ok()) return status;
    done_bytes += FileOf(slot).bytes;
  }
  if (any) AddPhase("pin", loader_.clock_.Monotonic() - started, done_bytes);
  return absl::OkStatus();
}

absl::Status LoadJob::LockSlot(Slot& slot, std::span<const std::byte> bytes, uint64_t done_before) {
  constexpr uint64_t kPieceBytes = uint64_t{16} << 20;
  for (uint64_t at = 0; at < bytes.size(); at += kPieceBytes) {
    if (cancel_->cancelled()) return Cancelled();
    const uint64_t piece_bytes = std::min<uint64_t>(kPieceBytes, bytes.size() - at);
    const absl::Status locked = os_.Lock(bytes.subspan(at, piece_bytes));
    if (locked.ok()) {
      progress_.SetDone(done_before + at + piece_bytes);
      continue;
    }
    if (slot.key.residency != Residency::kSealed) {
      // mlock answers ENOMEM for a page past the end of a truncated file, too.
      const auto now = os_.Stat(FdOf(slot));
      if (now.ok() && now->bytes < FileOf(slot).bytes) {
        return absl::DataLossError(
            absl::StrCat(PathOf(slot), ": it was truncated while it was locked"));
      }
    }
    if (loader_.options_.memlock == MemlockPolicy::kRequired) {
      return MemlockRefused(AtPath(locked, PathOf(slot)));
    }
    os_.Unlock(bytes.subspan(0, at));
    slot.memlock = Reservation();
    slot.want_lock = false;
    unlocked_bytes_ += bytes.size();
    unlocked_why_ = std::string(locked.message());
    return absl::OkStatus();
  }
  slot.tier = HostTier::kPinned;
  return absl::OkStatus();
}

void LoadJob::Finish() {
  for (Slot& slot : slots_) {
    if (!slot.mine) continue;
    const ManifestFile& file = FileOf(slot);
    const bool sealed = slot.key.residency == Residency::kSealed;
    HostRegion::Parts parts;
    parts.digest = file.sha256;
    parts.content = slot.key.content;
    parts.kind = sealed ? abi::RegionKind::kSealed : abi::RegionKind::kFile;
    parts.residency = slot.key.residency;
    parts.tier = slot.tier;
    parts.fd = std::move(opened_.files[slot.file]);
    parts.bytes = file.bytes;
    parts.mapping = std::move(slot.mapping);
    parts.host = std::move(slot.host);
    parts.memlock = std::move(slot.memlock);
    parts.source = opened_.infos[slot.file];
    parts.source_path = PathOf(slot);
    host_booked_bytes_ += parts.host.bytes();
    slot.region = std::make_shared<const HostRegion>(os_, std::move(parts));
    loader_.regions_.Insert(slot.region);
    slot.mine = false;
  }
}

const ManifestFile& LoadJob::FileOf(const Slot& slot) const {
  return opened_.manifest->files[slot.file];
}

std::string LoadJob::PathOf(const Slot& slot) const {
  return absl::StrCat(dir_, "/", FileOf(slot).path);
}

bool LoadJob::InPageCache(std::span<const std::byte> bytes) {
  for (uint64_t at = 0; at < bytes.size(); at += kSampleBytes) {
    const auto resident = os_.ResidentBytes(bytes.subspan(at, 1));
    if (!resident.ok() || *resident == 0) return false;
  }
  return true;
}

absl::Status LoadJob::MemlockRefused(const absl::Status& why) const {
  const uint64_t limit_bytes = os_.Limits().memlock_bytes;
  return WithBudgetRefusal(
      absl::ResourceExhaustedError(absl::StrCat(
          "locked memory: ", why.message(), "; RLIMIT_MEMLOCK is ", IecBytes(limit_bytes),
          " (raise LimitMEMLOCK= of the unit or `ulimit -l`, or set memory.memlock = "
          "\"best_effort\")")),
      why);
}

absl::Status LoadJob::Cancelled() const {
  return absl::CancelledError(absl::StrCat("load of ", name_, ": it was cancelled"));
}

void LoadJob::AddPhase(const std::string& name, absl::Duration duration, uint64_t bytes) {
  const auto found = std::find_if(report_.phases.begin(), report_.phases.end(),
                                  [&](const LoadPhase& phase) { return phase.name == name; });
  if (found == report_.phases.end()) {
    report_.phases.push_back({name, duration, bytes});
  } else {
    found->duration += duration;
    found->bytes += bytes;
  }
}

}  // namespace modelhost
