#include "tests/fakes/fake_device.h"

#include <dirent.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

uint64_t InodeOf(int fd) {
  struct stat info {};
  return ::fstat(fd, &info) == 0 ? info.st_ino : 0;
}

// Of everything that this process has open.
std::set<uint64_t> OpenInodes() {
  std::set<uint64_t> inodes;
  DIR* const dir = ::opendir("/proc/self/fd");
  if (dir == nullptr) return inodes;
  while (const dirent* entry = ::readdir(dir)) {
    if (entry->d_name[0] == '.') continue;
    // By its path: a descriptor may be another thread's, and be closed now.
    struct stat info {};
    if (::stat(absl::StrCat("/proc/self/fd/", entry->d_name).c_str(), &info) == 0) {
      inodes.insert(info.st_ino);
    }
  }
  ::closedir(dir);
  return inodes;
}

}  // namespace

class FakeGpus::Service final : public DeviceMemoryService {
 public:
  Service(FakeGpus& gpus, std::string uuid) : gpus_(gpus), uuid_(std::move(uuid)) {}

  absl::StatusOr<DeviceReport> Report() override {
    absl::MutexLock turn(&one_at_a_time_);
    if (auto failed = gpus_.Enter("Report"); !failed.ok()) return failed;
    absl::MutexLock lock(&gpus_.mutex_);
    return gpus_.gpus_.at(uuid_).report;
  }

  absl::StatusOr<DeviceSegment> Create(uint64_t bytes, const Progress& progress) override {
    absl::MutexLock turn(&one_at_a_time_);
    if (auto failed = gpus_.Enter("Create"); !failed.ok()) return failed;
    if (progress && !progress(0)) return absl::CancelledError("cancelled");
    absl::MutexLock lock(&gpus_.mutex_);
    Gpu& gpu = gpus_.gpus_.at(uuid_);
    if (bytes == 0 || (gpu.report.granularity > 0 && bytes % gpu.report.granularity != 0)) {
      return absl::InvalidArgumentError(absl::StrCat("a segment of ", bytes, " bytes"));
    }
    if (gpus_.UsedLocked(uuid_) + bytes > gpu.report.info.total_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(uuid_, ": the device is full"));
    }
    UniqueFd fd(::memfd_create("device", MFD_CLOEXEC));
    if (!fd.valid() || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
      return absl::InternalError("memfd");
    }
    gpus_.memory_.push_back({uuid_, InodeOf(fd.get()), bytes, false});
    DeviceSegment segment;
    segment.bytes = bytes;
    if (gpu.report.mode == "vmm_fd") {
      segment.fd = std::move(fd);
    } else {
      segment.id = gpus_.next_++;
      segment.incarnation = gpu.incarnation;
      gpu.held.emplace(segment.id, std::move(fd));
    }
    return segment;
  }

  absl::StatusOr<uint64_t> Upload(const DeviceSegment& segment,
                                  const std::vector<DeviceCopy>& copies,
                                  const std::vector<const UniqueFd*>& sources, bool direct,
                                  const Progress& progress) override {
    absl::MutexLock turn(&one_at_a_time_);
    if (auto failed = gpus_.Enter("Upload"); !failed.ok()) return failed;
    absl::MutexLock lock(&gpus_.mutex_);
    gpus_.last_direct_ = direct;
    const auto fd = Reach(segment);
    if (!fd.ok()) return fd.status();
    std::string bytes(segment.bytes, '\0');
    uint64_t end = 0;
    for (const DeviceCopy& copy : copies) {
      if (copy.device_offset < end || copy.bytes == 0 ||
          copy.device_offset + copy.bytes > segment.bytes || copy.source >= sources.size()) {
        return absl::InvalidArgumentError("the copies do not fit the segment");
      }
      end = copy.device_offset + copy.bytes;
      const ssize_t got = ::pread(sources[copy.source]->get(), bytes.data() + copy.device_offset,
                                  copy.bytes, static_cast<off_t>(copy.source_offset));
      if (got != static_cast<ssize_t>(copy.bytes)) {
        return absl::DataLossError("the source is too short");
      }
      if (!progress(end)) return absl::CancelledError("the upload was cancelled");
    }
    if (::pwrite(*fd, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
      return absl::InternalError("pwrite");
    }
    if (!progress(2 * segment.bytes)) return absl::CancelledError("the upload was cancelled");
    return Sum(bytes);
  }

  absl::Status Verify(const DeviceSegment& segment, uint64_t checksum,
                      const Progress& progress) override {
    absl::MutexLock turn(&one_at_a_time_);
    if (auto failed = gpus_.Enter("Verify"); !failed.ok()) return failed;
    absl::MutexLock lock(&gpus_.mutex_);
    const auto fd = Reach(segment);
    if (!fd.ok()) return fd.status();
    if (!progress(segment.bytes)) return absl::CancelledError("cancelled");
    if (Sum(ReadAll(*fd, segment.bytes)) == checksum) return absl::OkStatus();
    return absl::DataLossError("the device memory does not hold what was uploaded");
  }

  absl::Status Check(const DeviceSegment& segment) override {
    absl::MutexLock turn(&one_at_a_time_);
    if (auto failed = gpus_.Enter("Check"); !failed.ok()) return failed;
    absl::MutexLock lock(&gpus_.mutex_);
    return Reach(segment).status();
  }

  absl::Status Release(const DeviceSegment& segment) override {
    absl::MutexLock turn(&one_at_a_time_);
    if (auto failed = gpus_.Enter("Release"); !failed.ok()) return failed;
    absl::MutexLock lock(&gpus_.mutex_);
    gpus_.gpus_.at(uuid_).held.erase(segment.id);
    return absl::OkStatus();
  }

  absl::StatusOr<DeviceMemoryUse> Memory() override {
    absl::MutexLock turn(&one_at_a_time_);
    if (auto failed = gpus_.Enter("Memory"); !failed.ok()) return failed;
    absl::MutexLock lock(&gpus_.mutex_);
    const uint64_t total = gpus_.gpus_.at(uuid_).report.info.total_bytes;
    return DeviceMemoryUse{total - gpus_.UsedLocked(uuid_), total};
  }

 private:
  absl::StatusOr<int> Reach(const DeviceSegment& segment)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(gpus_.mutex_) {
    int fd = segment.fd.get();
    if (!segment.fd.valid()) {
      const Gpu& gpu = gpus_.gpus_.at(uuid_);
      const auto held = gpu.held.find(segment.id);
      if (held == gpu.held.end() || segment.incarnation != gpu.incarnation) {
        return absl::NotFoundError("the segment was lost with the agent that held it");
      }
      fd = held->second.get();
    }
    const uint64_t inode = InodeOf(fd);
    for (const FakeGpus::Memory& memory : gpus_.memory_) {
      if (memory.inode != inode) continue;
      if (memory.gpu != uuid_) return absl::InvalidArgumentError("memory of another GPU");
      if (memory.gone) return absl::DataLossError("the segment is not there any more");
      return fd;
    }
    return absl::InvalidArgumentError("no device memory");
  }

  static std::string ReadAll(int fd, uint64_t size) {
    std::string bytes(size, '\0');
    const ssize_t got = ::pread(fd, bytes.data(), size, 0);
    bytes.resize(got < 0 ? 0 : static_cast<size_t>(got));
    return bytes;
  }

  FakeGpus& gpus_;
  const std::string uuid_;
  absl::Mutex one_at_a_time_;
};

FakeGpus::FakeGpus() = default;
FakeGpus::~FakeGpus() = default;

void FakeGpus::Add(const std::string& uuid, const std::string& mode, uint64_t total_bytes,
                   uint64_t granularity) {
  absl::MutexLock lock(&mutex_);
  order_.push_back(uuid);
  DeviceReport& report = gpus_[uuid].report;
  report.info = {uuid, "Fake GPU", 12040, total_bytes};
  report.mode = mode;
  report.reason = "the test says so";
  report.granularity = mode == "vmm_fd" ? granularity : 0;
}

void FakeGpus::ChangeMode(const std::string& uuid, const std::string& mode) {
  absl::MutexLock lock(&mutex_);
  gpus_.at(uuid).report.mode = mode;
}

void FakeGpus::End() {
  absl::MutexLock lock(&mutex_);
  ended_ = true;
}

void FakeGpus::FailCall(const std::string& call, int nth, absl::Status with) {
  absl::MutexLock lock(&mutex_);
  faults_[call].push_back({calls_[call] + nth, true, std::move(with)});
}

void FakeGpus::FailFrom(const std::string& call, int nth, absl::Status with) {
  absl::MutexLock lock(&mutex_);
  faults_[call].push_back({calls_[call] + nth, false, std::move(with)});
}

void FakeGpus::Before(const std::string& call, std::function<void()> hook) {
  absl::MutexLock lock(&mutex_);
  hooks_[call] = std::move(hook);
}

void FakeGpus::Heal() {
  absl::MutexLock lock(&mutex_);
  faults_.clear();
  hooks_.clear();
}

int FakeGpus::calls(const std::string& call) const {
  absl::MutexLock lock(&mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? 0 : found->second;
}

void FakeGpus::Reset(const std::string& uuid) {
  absl::MutexLock lock(&mutex_);
  for (Memory& memory : memory_) memory.gone = memory.gone || memory.gpu == uuid;
}

void FakeGpus::KillAgent(const std::string& uuid) {
  absl::MutexLock lock(&mutex_);
  Gpu& gpu = gpus_.at(uuid);
  ++gpu.incarnation;
  gpu.held.clear();
}

uint64_t FakeGpus::UsedLocked(const std::string& uuid) const {
  const std::set<uint64_t> open = OpenInodes();
  uint64_t bytes = 0;
  for (const Memory& memory : memory_) {
    if (memory.gpu == uuid && !memory.gone && open.contains(memory.inode)) bytes += memory.bytes;
  }
  return bytes;
}

uint64_t FakeGpus::used(const std::string& uuid) const {
  absl::MutexLock lock(&mutex_);
  return UsedLocked(uuid);
}

bool FakeGpus::last_direct() const {
  absl::MutexLock lock(&mutex_);
  return last_direct_;
}

std::string FakeGpus::Read(const DeviceSegment& segment) {
  std::string bytes(segment.bytes, '\0');
  const ssize_t got = ::pread(segment.fd.get(), bytes.data(), bytes.size(), 0);
  bytes.resize(got < 0 ? 0 : static_cast<size_t>(got));
  return bytes;
}

uint64_t FakeGpus::Sum(const std::string& bytes) {
  uint64_t sum = 14695981039346656037U;
  for (const char c : bytes) sum = (sum ^ static_cast<uint8_t>(c)) * 1099511628211U;
  return sum;
}

absl::Status FakeGpus::Enter(const std::string& call) {
  std::function<void()> hook;
  absl::Status failed;
  {
    absl::MutexLock lock(&mutex_);
    const int number = ++calls_[call];
    for (const Fault& fault : faults_[call]) {
      if (fault.once ? number == fault.from : number >= fault.from) failed = fault.with;
    }
    if (const auto found = hooks_.find(call); found != hooks_.end()) hook = found->second;
  }
  if (hook) hook();
  absl::MutexLock lock(&mutex_);
  return ended_ ? absl::CancelledError("the daemon ends") : failed;
}

absl::StatusOr<std::vector<DeviceInfo>> FakeGpus::List() {
  if (auto failed = Enter("List"); !failed.ok()) return failed;
  absl::MutexLock lock(&mutex_);
  std::vector<DeviceInfo> infos;
  for (const std::string& uuid : order_) infos.push_back(gpus_.at(uuid).report.info);
  return infos;
}

std::unique_ptr<DeviceMemoryService> FakeGpus::Open(const std::string& uuid) {
  return std::make_unique<Service>(*this, uuid);
}

}  // namespace modelhost
