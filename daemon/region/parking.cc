#include "daemon/region/parking.h"

#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "daemon/platform/errno_status.h"
#include "daemon/region/chunk_pass.h"
#include "proto/handle/fault_point.h"
#include "proto/handle/mapping.h"

namespace modelhost {
namespace {

// Nobody needs it after a crash of the machine, which empties the store too: no fsync.
absl::Status ReplaceUnsynced(Os& os, const UniqueFd& dir, const std::string& name,
                             const std::string& text) {
  const std::string fresh = absl::StrCat(name, ".tmp");
  if (auto gone = os.RemoveFileAt(dir, fresh); !gone.ok() && !absl::IsNotFound(gone)) return gone;
  auto file = os.CreateFileAt(dir, fresh, 0600);
  if (!file.ok()) return file.status();
  auto written = os.WriteAt(*file, 0, std::as_bytes(std::span(text.data(), text.size())));
  if (written.ok()) {
    FaultPoint("park.written");
    written = os.Rename(dir, fresh, dir, name);
  }
  if (!written.ok()) (void)os.RemoveFileAt(dir, fresh);
  return written;
}

}  // namespace

struct Parking::Batch {
  std::vector<std::string> gone;
  std::vector<NamedFd> come;
};

class Parking::Token {
 public:
  Token(Parking& parking, uint64_t entry) : parking_(parking), entry_(entry) {}
  ~Token() { parking_.Unpark(entry_); }
  Token(const Token&) = delete;

 private:
  Parking& parking_;
  const uint64_t entry_;
};

Parking::Parking(Os& os, FdStore& store, const UniqueFd& state_dir, Options options)
    : os_(os),
      store_(store),
      state_dir_(state_dir),
      options_(std::move(options)),
      thread_("mh-park", 1) {}

Parking::~Parking() = default;

std::shared_ptr<const void> Parking::Park(const ResidentVersion& version,
                                          const std::vector<std::string>& warnings,
                                          const std::string& gpu_layout, std::string& warning) {
  if (options_.most == 0) return nullptr;
  const auto index =
      ReadOnlyMapping::MapSealed(version.index.fd, version.index.bytes, Align::kPage);
  ParkedIndex facts;
  if (index.ok()) facts.sha256 = Sha256(index->bytes());
  facts.builder = options_.builder;
  facts.format = version.format;
  facts.tensor_count = version.tensor_count;
  facts.tensor_bytes = version.tensor_bytes;
  facts.eager = version.eager;
  facts.warnings = warnings;
  facts.gpu_layout = gpu_layout;

  struct Told {
    absl::Notification done;
    absl::Status status;
  };
  const auto told = std::make_shared<Told>();
  uint64_t number = 0;
  absl::Duration patience = options_.patience;
  absl::Status left_out = index.ok() ? absl::OkStatus() : ToStatus(index.error(), "the index");
  {
    absl::MutexLock lock(&mutex_);
    Entry entry;
    entry.record.model = version.manifest->model;
    entry.record.version = version.manifest->version;
    entry.record.digest = version.manifest->digest;
    entry.record.residency =
        version.regions.empty() ? Residency::kMapped : version.regions.front()->residency();
    for (const auto& region : version.regions) {
      entry.record.contents.push_back(region->key().content);
    }
    Batch batch;
    const auto keep = [&left_out](absl::Status status) {
      if (left_out.ok()) left_out = std::move(status);
    };
    std::vector<bool> eager(version.regions.size());
    for (const uint32_t region : version.eager) {
      eager[region] = true;
      keep(AddRegion(*version.regions[region], entry, batch));
    }
    if (index.ok()) keep(AddIndex(version, std::move(facts), entry, batch));
    for (const DeviceImage& image : version.devices) {
      for (const auto& copy : image.regions) keep(AddDevice(*copy, entry, batch));
    }
    for (size_t i = 0; i < eager.size(); ++i) {
      if (!eager[i]) keep(AddRegion(*version.regions[i], entry, batch));
    }
    if (!entry.regions.empty() || !entry.devices.empty() || entry.record.index.has_value()) {
      number = next_entry_++;
      entries_.emplace(number, std::move(entry));
      ++changes_;
      ++waiting_;
      if (hangs_) patience = absl::ZeroDuration();
      thread_.Post([this, told, batch = std::move(batch)] {
        told->status = Tell(batch);
        told->done.Notify();
        absl::MutexLock told_all(&mutex_);
        if (--waiting_ == 0) hangs_ = false;
      });
    }
  }
  if (number != 0) {
    if (!told->done.WaitForNotificationWithTimeout(patience)) {
      absl::MutexLock lock(&mutex_);
      hangs_ = waiting_ > 0;
      left_out = absl::DeadlineExceededError(absl::StrCat("systemd took no descriptors within ",
                                                          absl::FormatDuration(options_.patience)));
    } else if (left_out.ok()) {
      left_out = told->status;
    }
  }
  if (!left_out.ok()) {
    warning =
        absl::StrCat("a restart of the daemon will have to read from disk: ", left_out.message());
  }
  return number == 0 ? nullptr : std::make_shared<const Token>(*this, number);
}

absl::Status Parking::AddRegion(const HostRegion& region, Entry& entry, Batch& batch) {
  // Files are in the page cache, and empty ones cost nothing to make.
  if (region.kind() != abi::RegionKind::kSealed || region.bytes() == 0) return absl::OkStatus();
  const auto info = os_.Stat(region.fd());
  if (!info.ok()) return AtPath(info.status(), region.source_path());
  const InodeKey key{info->device, info->inode};
  auto found = regions_.find(key);
  if (found == regions_.end()) {
    SharedRegion shared;
    shared.record.content = region.key().content;
    shared.record.memory = {"", info->device, info->inode, region.bytes()};
    if (auto put = Put(region.fd(), shared.record.memory.name, batch); !put.ok()) return put;
    found = regions_.emplace(key, std::move(shared)).first;
  }
  ++found->second.users;
  entry.regions.push_back(key);
  entry.record.regions.push_back(found->second.record.memory.name);
  return absl::OkStatus();
}

absl::Status Parking::AddIndex(const ResidentVersion& version, ParkedIndex facts, Entry& entry,
                               Batch& batch) {
  const auto info = os_.Stat(version.index.fd);
  if (!info.ok()) return AtPath(info.status(), "the index");
  facts.memory = {"", info->device, info->inode, version.index.bytes};
  if (auto put = Put(version.index.fd, facts.memory.name, batch); !put.ok()) return put;
  entry.record.index = std::move(facts);
  return absl::OkStatus();
}

absl::Status Parking::AddDevice(const DeviceRegion& copy, Entry& entry, Batch& batch) {
  if (copy.mode() != abi::DeviceMode::kVmmFd || copy.lost()) return absl::OkStatus();
  auto found = devices_.find(&copy);
  if (found == devices_.end()) {
    // All of it or nothing: a part is of no use.
    const std::vector<DeviceSegment>& segments = copy.segments();
    if (parked_ + segments.size() > options_.most) return StoreIsFull();
    SharedDevice shared;
    shared.record = {copy.key().gpu, copy.key().content, copy.key().part, copy.planned(), {}};
    for (size_t i = 0; i < segments.size(); ++i) {
      shared.record.segments.push_back({"", segments[i].bytes, copy.checksums().at(i)});
      auto put = Put(segments[i].fd, shared.record.segments.back().name, batch);
      if (put.ok()) continue;
      for (size_t taken = 0; taken < i; ++taken) batch.come.pop_back();
      parked_ -= i;
      return put;
    }
    found = devices_.emplace(&copy, std::move(shared)).first;
  }
  ++found->second.users;
  entry.devices.push_back(&copy);
  return absl::OkStatus();
}

absl::Status Parking::StoreIsFull() const {
  return absl::ResourceExhaustedError(
      absl::StrCat("the fd store has room for ", options_.most,
                   " descriptors (raise FileDescriptorStoreMax= of the unit)"));
}

absl::Status Parking::Put(const UniqueFd& fd, std::string& name, Batch& batch) {
  if (parked_ >= options_.most) return StoreIsFull();
  // Of its own: what is told later may be freed by then.
  auto copy = fd.Duplicate();
  if (!copy.ok()) return ToStatus(copy.error(), "a descriptor for the fd store");
  name = absl::StrCat("mh-", options_.epoch, "-", next_name_++);
  batch.come.push_back({name, *std::move(copy)});
  ++parked_;
  return absl::OkStatus();
}

void Parking::Unpark(uint64_t number) {
  absl::MutexLock lock(&mutex_);
  if (left_) return;
  const Entry entry = std::move(entries_.extract(number).mapped());
  Batch batch;
  for (const InodeKey& key : entry.regions) {
    const auto region = regions_.find(key);
    if (--region->second.users > 0) continue;
    batch.gone.push_back(region->second.record.memory.name);
    regions_.erase(region);
  }
  for (const DeviceRegion* copy : entry.devices) {
    const auto device = devices_.find(copy);
    if (--device->second.users > 0) continue;
    for (const ParkedSegment& segment : device->second.record.segments) {
      batch.gone.push_back(segment.name);
    }
    devices_.erase(device);
  }
  if (entry.record.index.has_value()) batch.gone.push_back(entry.record.index->memory.name);
  parked_ -= batch.gone.size();
  ++changes_;
  thread_.Post([this, batch = std::move(batch)] { Tell(batch).IgnoreError(); });
}

void Parking::Forget(const DeviceRegion& copy) {
  absl::MutexLock lock(&mutex_);
  const auto device = devices_.find(&copy);
  if (left_ || device == devices_.end()) return;
  Batch batch;
  for (const ParkedSegment& segment : device->second.record.segments) {
    batch.gone.push_back(segment.name);
  }
  devices_.erase(device);
  for (auto& [number, entry] : entries_) std::erase(entry.devices, &copy);
  parked_ -= batch.gone.size();
  ++changes_;
  thread_.Post([this, batch = std::move(batch)] { Tell(batch).IgnoreError(); });
}

absl::Status Parking::Tell(const Batch& batch) {
  absl::Status result;
  const auto keep = [&result](absl::Status status) {
    if (result.ok()) result = std::move(status);
  };
  for (const std::string& name : batch.gone) {
    keep(store_.Remove(name));
    FaultPoint("park.gone");
  }
  for (const NamedFd& each : batch.come) {
    keep(store_.Store(each.name, each.fd));
    FaultPoint("park.stored");
  }
  keep(WriteRecord());
  return result;
}

absl::Status Parking::WriteRecord() {
  ParkedRecord record;
  uint64_t changes = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (changes_ == written_changes_) return absl::OkStatus();
    changes = changes_;
    for (const auto& [key, region] : regions_) record.regions.push_back(region.record);
    for (const auto& [number, entry] : entries_) record.versions.push_back(entry.record);
    for (const auto& [copy, device] : devices_) record.devices.push_back(device.record);
  }
  auto written = ReplaceUnsynced(os_, state_dir_, kParkedName, SerializeParkedRecord(record));
  if (written.ok()) written_changes_ = changes;
  FaultPoint("park.recorded");
  return written;
}

bool Parking::Settle(absl::Duration patience) {
  const auto done = std::make_shared<absl::Notification>();
  thread_.Post([done] { done->Notify(); });
  return done->WaitForNotificationWithTimeout(patience);
}

void Parking::Leave() {
  {
    absl::MutexLock lock(&mutex_);
    left_ = true;
  }
  FaultPoint("park.left");
}

uint64_t Parking::parked() const {
  absl::MutexLock lock(&mutex_);
  return parked_;
}

}  // namespace modelhost
