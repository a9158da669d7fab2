#include "client/src/testing/fake_server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "client/src/reference.h"
#include "proto/handle/fd_channel.h"
#include "proto/handle/seqlock.h"

namespace modelhost::testing {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::perror(what);
  std::abort();
}

SealedRegion Sealed(const std::string& bytes) {
  auto region = WritableRegion::Create("fake", bytes.size(), HugePages::kOff);
  Require(region.ok(), "make a region");
  std::memcpy(region->bytes().data(), bytes.data(), bytes.size());
  auto sealed = std::move(*region).Seal();
  Require(sealed.ok(), "seal a region");
  return *std::move(sealed);
}

UniqueFd Unsealed(const std::string& bytes) {
  UniqueFd fd(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  Require(::write(fd.get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
          "write");
  return fd;
}

// A file that has no name any more. Returns it for reading; `writable` is the owner's.
UniqueFd PlainFile(const std::string& bytes, UniqueFd* writable) {
  std::string name = "/tmp/modelhost-fake-XXXXXX";
  *writable = UniqueFd(::mkostemp(name.data(), O_CLOEXEC));
  Require(
      ::write(writable->get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
      "write");
  UniqueFd readable(::open(name.c_str(), O_RDONLY | O_CLOEXEC));
  ::unlink(name.c_str());
  return readable;
}

}  // namespace

FakeServer::FakeServer(std::string runtime_dir)
    : socket_path_(std::move(runtime_dir) + "/handles.sock"),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

FakeServer::~FakeServer() { Stop(); }

void FakeServer::Add(const FakeVersion& version) {
  auto resident = std::make_unique<Resident>();
  resident->version = version;
  resident->index = Sealed(BuildIndex(version));
  for (const FakeFile& file : version.files) {
    UniqueFd writable;
    resident->fds.push_back(file.kind == abi::RegionKind::kSealed
                                ? Sealed(file.bytes).fd
                                : PlainFile(file.bytes, &writable));
    resident->writable.push_back(std::move(writable));
  }
  const std::lock_guard lock(mutex_);
  residents_[{version.model, version.version}] = std::move(resident);
}

void FakeServer::SetDevice(const std::string& model, uint64_t version, FakeDevice device) {
  const std::lock_guard lock(mutex_);
  residents_.at({model, version})->device = std::move(device);
}

abi::CatalogueHeader& FakeServer::header() {
  return *reinterpret_cast<abi::CatalogueHeader*>(page_->bytes().data());
}

abi::CatalogueSlot& FakeServer::slot(uint32_t number) {
  return reinterpret_cast<abi::CatalogueSlot*>(page_->bytes().data() +
                                               sizeof(abi::CatalogueHeader))[number];
}

void FakeServer::MakePage() {
  auto page = OneWriterRegion::Create("fake catalogue", abi::kCatalogueBytes);
  Require(page.ok(), "make the page");
  page_.emplace(*std::move(page));
  abi::CatalogueHeader& head = header();
  head.abi_version = faults_.page_abi != 0 ? faults_.page_abi : abi::kCatalogueAbi;
  head.header_bytes = sizeof(abi::CatalogueHeader);
  head.slot_bytes = sizeof(abi::CatalogueSlot);
  head.capacity = abi::kCatalogueCapacity;
  head.page_bytes = abi::kCatalogueBytes;
  head.epoch = epoch_;
  head.state.store(static_cast<uint32_t>(abi::CatalogueState::kOpen));
  if (page_is_full_) {
    head.slot_count.store(head.capacity);
    for (auto& [key, label] : labels_) label.slot = abi::kNoSlot;
  }
  // In another order than before, so that a slot of the last epoch is no slot of this one.
  uint32_t next = 0;
  for (auto it = labels_.rbegin(); it != labels_.rend() && !page_is_full_; ++it) {
    it->second.slot = next++;
    WriteSlot(it->first, it->second);
  }
  head.magic.store(abi::kCatalogueMagic, std::memory_order_release);
}

void FakeServer::WriteSlot(const std::pair<std::string, std::string>& key, const Label& label) {
  if (label.slot == abi::kNoSlot) return;
  abi::CatalogueSlot& to = slot(label.slot);
  if (label.slot >= header().slot_count.load()) {
    CopyName(key.first, to.model);
    CopyName(key.second, to.label);
  }
  to.generation.store(label.generation, std::memory_order_relaxed);
  to.version.store(label.version, std::memory_order_relaxed);
  if (label.slot >= header().slot_count.load()) {
    header().slot_count.store(label.slot + 1, std::memory_order_release);
  }
}

void FakeServer::SetLabels(const std::map<std::pair<std::string, std::string>, uint64_t>& labels) {
  const std::lock_guard lock(mutex_);
  for (const auto& [key, version] : labels) {
    auto [it, fresh] = labels_.try_emplace(key);
    if (fresh) {
      it->second.slot = page_is_full_ ? abi::kNoSlot : static_cast<uint32_t>(labels_.size() - 1);
    }
    it->second.version = version;
    ++it->second.generation;
  }
  if (!page_.has_value()) return;
  {
    const SeqlockWrite write(header().sequence);
    for (const auto& [key, version] : labels) WriteSlot(key, labels_[key]);
  }
  for (const auto& peer : peers_) {
    if (!peer->subscribed) continue;
    for (const auto& [key, version] : labels) {
      SendEventTo(*peer, abi::EventKind::kLabelMoved, labels_[key].slot, labels_[key], 0);
    }
  }
}

void FakeServer::SetReady(const std::string& model, uint64_t version, bool ready) {
  {
    const std::lock_guard lock(mutex_);
    residents_[{model, version}]->ready = ready;
  }
  Wake();
}

void FakeServer::TruncateFile(const std::string& model, uint64_t version, uint32_t file,
                              uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const UniqueFd& fd = residents_[{model, version}]->writable[file];
  Require(::ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0, "truncate");
}

void FakeServer::SetFaults(const Faults& faults) {
  const std::lock_guard lock(mutex_);
  faults_ = faults;
}

void FakeServer::SendEvent(abi::EventKind kind, uint64_t lease_id) {
  const std::lock_guard lock(mutex_);
  for (const auto& peer : peers_) {
    if (peer->subscribed) SendEventTo(*peer, kind, abi::kNoSlot, {}, lease_id);
  }
}

void FakeServer::Wake() {
  const uint64_t one = 1;
  Require(::write(wake_.get(), &one, sizeof(one)) > 0, "wake");
}

void FakeServer::Start() {
  {
    const std::lock_guard lock(mutex_);
    ++epoch_;
    next_lease_ = 1;
    MakePage();
  }
  ::unlink(socket_path_.c_str());
  listener_ = UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  Require(socket_path_.size() < sizeof(address.sun_path), "socket path");
  std::memcpy(address.sun_path, socket_path_.data(), socket_path_.size());
  Require(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0,
          "bind");
  Require(::listen(listener_.get(), 64) == 0, "listen");
  stop_ = false;
  thread_ = std::thread([this] { Serve(); });
}

void FakeServer::Stop() {
  if (!thread_.joinable()) return;
  stop_ = true;
  Wake();
  thread_.join();
  const std::lock_guard lock(mutex_);
  listener_.Reset();
  peers_.clear();
  waiting_.clear();
  page_.reset();  // Clients keep their mapping of it.
}

void FakeServer::Serve() {
  while (!stop_) {
    std::vector<pollfd> polls;
    {
      const std::lock_guard lock(mutex_);
      polls.push_back({listener_.get(), POLLIN, 0});
      polls.push_back({wake_.get(), POLLIN, 0});
      for (const auto& peer : peers_) polls.push_back({peer->socket.get(), POLLIN, 0});
    }
    (void)::poll(polls.data(), polls.size(), 10'000);
    const std::lock_guard lock(mutex_);
    uint64_t ignored = 0;
    (void)!::read(wake_.get(), &ignored, sizeof(ignored));
    for (size_t i = polls.size(); i-- > 2;) {
      if (polls[i].revents != 0 && !ServePeer(*peers_[i - 2])) {
        std::erase_if(waiting_,
                      [&](const Waiting& each) { return each.peer == peers_[i - 2].get(); });
        peers_.erase(peers_.begin() + static_cast<ptrdiff_t>(i - 2));
      }
    }
    if (polls[0].revents != 0) {
      UniqueFd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket.valid() && faults_.refuse_connections) {
        Peer refused;
        refused.socket = std::move(socket);
        (void)SendError(refused, 0, static_cast<uint32_t>(Code::kPermissionDenied),
                        "uid 5 is in no group that may read models");
      } else if (socket.valid()) {
        peers_.push_back(std::make_unique<Peer>());
        peers_.back()->socket = std::move(socket);
      }
    }
    std::vector<Waiting> waiting = std::move(waiting_);
    waiting_.clear();
    for (const Waiting& each : waiting)
      (void)OnAcquire(*each.peer, each.acquire, each.refs, each.gpu);
  }
}

bool FakeServer::ServePeer(Peer& peer) {
  std::array<std::byte, abi::kMaxFrameBytes> buffer;
  while (true) {
    auto frame = ReceiveFrame(peer.socket, buffer, ReceiveWait::kNo, {});
    if (!frame.ok()) return frame.error().code == Code::kDeadlineExceeded;
    const uint32_t request = frame->header.request_id;
    if (faults_.events_between && peer.subscribed) {
      SendEventTo(peer, abi::EventKind::kLookAtPage, abi::kNoSlot, {}, 0);
    }
    switch (static_cast<abi::FrameType>(frame->header.type)) {
      case abi::FrameType::kHello: {
        abi::Hello hello{};
        std::memcpy(&hello, buffer.data(), sizeof(hello));
        if (!OnHello(peer, hello)) return false;
        break;
      }
      case abi::FrameType::kAcquire: {
        abi::Acquire acquire{};
        std::memcpy(&acquire, buffer.data(), sizeof(acquire));
        std::vector<abi::Ref> refs(acquire.count);
        const size_t refs_end = sizeof(acquire) + refs.size() * sizeof(abi::Ref);
        const bool device = (acquire.flags & (abi::kAcquireDevice | abi::kAcquireDeviceIfAny)) != 0;
        abi::DeviceWant want{};
        Require(frame->bytes == refs_end + (device ? sizeof(want) : 0), "acquire frame");
        Require(!device || peer.abi >= abi::kFrameAbiDevice, "a wish that this daemon knows");
        std::memcpy(refs.data(), buffer.data() + sizeof(acquire), refs.size() * sizeof(abi::Ref));
        if (device) std::memcpy(&want, buffer.data() + refs_end, sizeof(want));
        if (faults_.hang_up_on_acquire) {
          faults_.hang_up_on_acquire = false;
          return false;
        }
        if (faults_.silent_acquire) break;
        if (!OnAcquire(peer, acquire, refs, want.gpu)) return false;
        break;
      }
      case abi::FrameType::kFetch: {
        abi::Fetch fetch{};
        std::memcpy(&fetch, buffer.data(), sizeof(fetch));
        if (!OnFetch(peer, fetch)) return false;
        break;
      }
      case abi::FrameType::kRelease: {
        abi::Release release{};
        std::memcpy(&release, buffer.data(), sizeof(release));
        peer.leases.erase(release.lease_id);
        break;
      }
      case abi::FrameType::kSubscribe: {
        peer.subscribed = true;
        abi::Ack ack{};
        ack.header = MakeHeader(abi::FrameType::kAck, sizeof(ack), request, 0);
        if (!Send(peer, &ack, sizeof(ack), nullptr, 0, {})) return false;
        break;
      }
      default:
        return false;
    }
  }
}

bool FakeServer::OnHello(Peer& peer, const abi::Hello& hello) {
  const uint32_t request = hello.header.request_id;
  if (faults_.silent_hello) return true;
  const uint32_t newest = std::min(hello.abi_max, faults_.abi_max);
  if (newest < hello.abi_min || newest < faults_.abi_min) {
    const auto range = [](uint32_t from, uint32_t to) {
      return std::to_string(from) + " to " + std::to_string(to);
    };
    SendError(peer, request, static_cast<uint32_t>(Code::kUnimplemented),
              "handle protocol: this client speaks " + range(hello.abi_min, hello.abi_max) +
                  ", this daemon speaks " + range(faults_.abi_min, faults_.abi_max) + " (update " +
                  (hello.abi_max < faults_.abi_min ? "libmodelhost" : "modelhostd") + ")");
    return false;
  }
  peer.greeted = true;
  peer.abi = newest;
  abi::HelloReply reply{};
  reply.header = MakeHeader(abi::FrameType::kHelloReply, sizeof(reply), request, 1);
  reply.abi = faults_.answer_abi != 0 ? faults_.answer_abi : newest;
  reply.epoch = epoch_;
  reply.page_bytes = abi::kCatalogueBytes;
  return Send(peer, &reply, sizeof(reply), nullptr, 0, {&page_->fd()});
}

FakeServer::Resident* FakeServer::Find(const abi::Ref& ref) {
  uint64_t version = ref.version;
  if (version == 0) {
    const auto label =
        labels_.find({std::string(NameIn(ref.model)), std::string(NameIn(ref.label))});
    if (label == labels_.end()) return nullptr;
    version = label->second.version;
  }
  const auto it = residents_.find({std::string(NameIn(ref.model)), version});
  return it == residents_.end() ? nullptr : it->second.get();
}

bool FakeServer::OnAcquire(Peer& peer, const abi::Acquire& acquire,
                           const std::vector<abi::Ref>& refs, const std::string& gpu) {
  const uint32_t request = acquire.header.request_id;
  const bool redeclare = (acquire.flags & abi::kAcquireRedeclare) != 0;
  if (redeclare && faults_.redeclare_not_found) {
    return SendError(peer, request, static_cast<uint32_t>(Code::kNotFound), "not here any more");
  }
  for (const abi::Ref& ref : refs) {
    const Resident* resident = Find(ref);
    const bool wait = (acquire.flags & abi::kAcquireWait) != 0;
    if (resident == nullptr && wait && !redeclare) {
      waiting_.push_back({&peer, acquire, refs, gpu});
      return true;
    }
    if (resident == nullptr) {
      return SendError(peer, request, static_cast<uint32_t>(Code::kNotFound),
                       ReferenceName(ref) + ": no such model, label or version");
    }
    if (resident->ready) continue;
    if (!wait) {
      return SendError(peer, request, static_cast<uint32_t>(Code::kFailedPrecondition),
                       ReferenceName(ref) + ": LOADING, not READY (wait for it)");
    }
    waiting_.push_back({&peer, acquire, refs, gpu});
    return true;
  }
  for (const abi::Ref& ref : refs) {
    if ((acquire.flags & abi::kAcquireDevice) == 0 || Find(ref)->device.gpu == gpu) continue;
    return SendError(peer, request, static_cast<uint32_t>(Code::kFailedPrecondition),
                     ReferenceName(ref) + ": no copy on " + gpu);
  }
  (redeclare ? redeclares_ : acquires_) += 1;
  for (const abi::Ref& ref : refs) {
    if (!redeclare) continue;
    declared_labels_.emplace_back(NameIn(ref.label));
    declared_gpus_.push_back(gpu);
  }
  for (uint32_t i = 0; i < refs.size(); ++i) {
    if (!Grant(peer, acquire, i, refs[i], gpu, *Find(refs[i]))) return false;
  }
  return !std::exchange(faults_.hang_up_after_grant, false);
}

bool FakeServer::Grant(Peer& peer, const abi::Acquire& acquire, uint32_t number,
                       const abi::Ref& ref, const std::string& gpu, Resident& resident) {
  const uint32_t request = acquire.header.request_id;
  const bool redeclare = (acquire.flags & abi::kAcquireRedeclare) != 0;
  const uint64_t lease = next_lease_++;
  peer.leases[lease] = &resident;
  abi::Granted granted{};
  granted.number = number;
  granted.count = acquire.count;
  granted.lease_id = lease;
  granted.version = resident.version.version;
  granted.slot = abi::kNoSlot;
  if (ref.version == 0) {
    const Label& label = labels_[{std::string(NameIn(ref.model)), std::string(NameIn(ref.label))}];
    granted.generation = label.generation;
    granted.slot = label.slot;
  }
  std::memset(granted.digest, resident.version.digest_byte, sizeof(granted.digest));
  std::memcpy(granted.model, ref.model, sizeof(granted.model));
  std::memcpy(granted.label, ref.label, sizeof(granted.label));
  if (faults_.wrong_model) CopyName("surprise", granted.model);
  if (redeclare) {
    granted.header = MakeHeader(abi::FrameType::kGranted, sizeof(granted), request, 0);
    return Send(peer, &granted, sizeof(granted), nullptr, 0, {});
  }
  if (faults_.garbage_reply) {
    return Send(peer, "half a frame", 12, nullptr, 0, {});
  }

  const SealedRegion* index = &resident.index;
  SealedRegion replacement;
  if (faults_.other_index) {
    FakeVersion other = resident.version;
    other.version += 1;
    replacement = Sealed(BuildIndex(other));
    index = &replacement;
  }
  if (faults_.broken_index) {
    replacement = Sealed(std::string(resident.index.bytes, 'x'));
    index = &replacement;
  }
  if (faults_.index_abi != 0) {
    std::string bytes = BuildIndex(resident.version);
    std::memcpy(bytes.data() + offsetof(abi::IndexHeader, abi_version), &faults_.index_abi,
                sizeof(faults_.index_abi));
    replacement = Sealed(bytes);
    index = &replacement;
  }
  if (faults_.unsealed_index) {
    replacement = {Unsealed(BuildIndex(resident.version)), resident.index.bytes};
    index = &replacement;
  }
  granted.index_bytes = index->bytes + static_cast<uint64_t>(faults_.index_bytes_extra);

  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < resident.version.files.size(); ++i) {
    if (resident.version.files[i].eager) order.push_back(i);
  }
  if (faults_.drop_region) order.pop_back();
  if (faults_.repeat_region) order.at(1) = order.at(0);
  granted.regions = static_cast<uint32_t>(order.size()) + (faults_.huge_count ? 1'000'000 : 0);
  const size_t here = std::min<size_t>(order.size(), abi::kMaxFdsPerFrame - 1);
  granted.ref_count = static_cast<uint32_t>(here) + (faults_.too_few_fds ? 1 : 0);
  std::vector<abi::RegionRef> refs;
  std::vector<const UniqueFd*> fds = {&index->fd};
  UniqueFd unsealed;
  for (size_t i = 0; i < here; ++i) {
    const FakeFile& file = resident.version.files[order[i]];
    refs.push_back({order[i], static_cast<uint32_t>(file.kind),
                    file.bytes.size() + static_cast<uint64_t>(faults_.region_bytes_extra)});
    fds.push_back(&resident.fds[order[i]]);
    if (faults_.unsealed_region && i == 0) {
      unsealed = Unsealed(file.bytes);
      fds.back() = &unsealed;
    }
  }
  granted.device = (gpu.empty() ? faults_.device_unasked : !faults_.device_unannounced) ? 1 : 0;
  if (faults_.device_before_regions && !SendDevice(peer, request, lease, gpu, resident)) {
    return false;
  }
  granted.header =
      MakeHeader(abi::FrameType::kGranted, sizeof(granted) + refs.size() * sizeof(abi::RegionRef),
                 request, fds.size());
  return Send(peer, &granted, sizeof(granted), refs.data(), refs.size() * sizeof(abi::RegionRef),
              fds) &&
         SendRegions(peer, request, lease, order, resident, here) &&
         (granted.device == 0 || SendDevice(peer, request, lease, gpu, resident));
}

bool FakeServer::SendDevice(Peer& peer, uint32_t request, uint64_t lease, const std::string& gpu,
                            const Resident& resident) {
  const FakeDevice none;
  const FakeDevice& device = resident.device.gpu == gpu ? resident.device : none;
  std::vector<abi::DeviceRef> refs;
  for (size_t i = 0; i < device.bytes.size(); ++i) {
    abi::DeviceRef ref{};
    ref.segment = static_cast<uint32_t>(i);
    ref.bytes = device.bytes[i];
    if (i < device.handles.size()) device.handles[i].copy(reinterpret_cast<char*>(ref.ipc), 64);
    refs.push_back(ref);
  }
  std::vector<const UniqueFd*> fds;
  for (const UniqueFd& fd : device.fds) fds.push_back(&fd);
  if (faults_.device_bytes_extra != 0 && !refs.empty()) {
    refs[0].bytes += static_cast<uint64_t>(faults_.device_bytes_extra);
  }
  if (faults_.device_drop_segment) {
    refs.pop_back();
    if (!fds.empty()) fds.pop_back();
  }
  if (faults_.device_extra_segment) {
    refs.push_back(refs.at(0));
    refs.back().segment = static_cast<uint32_t>(refs.size()) - 1;
    if (!fds.empty()) fds.push_back(fds[0]);
  }
  if (faults_.device_wrong_order) refs.at(0).segment = 1;
  if (faults_.device_drop_fds) fds.clear();
  const bool with_fds = !fds.empty();
  size_t from = 0;
  do {
    const size_t count =
        faults_.device_endless ? 0 : std::min<size_t>(refs.size() - from, abi::kMaxFdsPerFrame);
    const size_t tail = count * sizeof(abi::DeviceRef) - (faults_.device_short_tail ? 40 : 0);
    const std::vector<const UniqueFd*> here(
        fds.begin() + static_cast<ptrdiff_t>(with_fds ? from : 0),
        fds.begin() + static_cast<ptrdiff_t>(with_fds ? from + count : 0));
    abi::DeviceFds head{};
    head.header = MakeHeader(abi::FrameType::kDeviceFds, sizeof(head) + tail, request, here.size());
    head.lease_id = lease;
    head.mode = faults_.device_mode != 0 ? faults_.device_mode : static_cast<uint32_t>(device.mode);
    if (device.gpu.empty() && faults_.device_mode == 0) head.mode = 0;
    head.total =
        static_cast<uint32_t>(refs.size()) + static_cast<uint32_t>(faults_.device_total_extra);
    head.count = static_cast<uint32_t>(count);
    if (!Send(peer, &head, sizeof(head), refs.data() + from, tail, here)) return false;
    from += count;
  } while (from < refs.size() && !faults_.device_endless);
  return true;
}

bool FakeServer::SendRegions(Peer& peer, uint32_t request, uint64_t lease,
                             const std::vector<uint32_t>& order, const Resident& resident,
                             size_t from) {
  while (from < order.size()) {
    const size_t count = std::min<size_t>(order.size() - from, abi::kMaxFdsPerFrame);
    std::vector<abi::RegionRef> refs;
    std::vector<const UniqueFd*> fds;
    for (size_t i = from; i < from + count; ++i) {
      const FakeFile& file = resident.version.files[order[i]];
      refs.push_back({order[i], static_cast<uint32_t>(file.kind), file.bytes.size()});
      fds.push_back(&resident.fds[order[i]]);
    }
    abi::RegionFds head{};
    head.header = MakeHeader(abi::FrameType::kRegionFds,
                             sizeof(head) + count * sizeof(abi::RegionRef), request, count);
    head.lease_id = lease;
    head.count = static_cast<uint32_t>(count);
    if (!Send(peer, &head, sizeof(head), refs.data(), count * sizeof(abi::RegionRef), fds)) {
      return false;
    }
    from += count;
  }
  return true;
}

bool FakeServer::OnFetch(Peer& peer, const abi::Fetch& fetch) {
  const auto it = peer.leases.find(fetch.lease_id);
  if (it == peer.leases.end()) {
    return SendError(peer, fetch.header.request_id, static_cast<uint32_t>(Code::kNotFound),
                     "no such lease");
  }
  ++fetches_;
  return SendRegions(peer, fetch.header.request_id, fetch.lease_id, {fetch.region}, *it->second, 0);
}

bool FakeServer::SendError(Peer& peer, uint32_t request, uint32_t code, const std::string& text) {
  abi::Error error{};
  error.header = MakeHeader(abi::FrameType::kError, sizeof(error) + text.size(), request, 0);
  error.code = code;
  error.length = static_cast<uint32_t>(text.size());
  return Send(peer, &error, sizeof(error), text.data(), text.size(), {});
}

bool FakeServer::Send(Peer& peer, const void* head, size_t head_bytes, const void* tail,
                      size_t tail_bytes, const std::vector<const UniqueFd*>& fds) {
  return SendFrame(peer.socket, {static_cast<const std::byte*>(head), head_bytes},
                   {static_cast<const std::byte*>(tail), tail_bytes}, fds)
      .ok();
}

void FakeServer::SendEventTo(Peer& peer, abi::EventKind kind, uint32_t slot_number,
                             const Label& label, uint64_t lease) {
  abi::Event event{};
  event.header = MakeHeader(abi::FrameType::kEvent, sizeof(event), 0, 0);
  event.kind = static_cast<uint32_t>(kind);
  event.slot = slot_number;
  event.generation = label.generation;
  event.version = label.version;
  event.lease_id = lease;
  (void)Send(peer, &event, sizeof(event), nullptr, 0, {});
}

size_t FakeServer::leases() const {
  const std::lock_guard lock(mutex_);
  size_t count = 0;
  for (const auto& peer : peers_) count += peer->leases.size();
  return count;
}

size_t FakeServer::connections() const {
  const std::lock_guard lock(mutex_);
  return peers_.size();
}

uint64_t FakeServer::acquires() const {
  const std::lock_guard lock(mutex_);
  return acquires_;
}

uint64_t FakeServer::redeclares() const {
  const std::lock_guard lock(mutex_);
  return redeclares_;
}

std::vector<std::string> FakeServer::declared_labels() const {
  const std::lock_guard lock(mutex_);
  return declared_labels_;
}

std::vector<std::string> FakeServer::declared_gpus() const {
  const std::lock_guard lock(mutex_);
  return declared_gpus_;
}

uint64_t FakeServer::fetches() const {
  const std::lock_guard lock(mutex_);
  return fetches_;
}

uint64_t FakeServer::epoch() const {
  const std::lock_guard lock(mutex_);
  return epoch_;
}

bool FakeServer::Eventually(const std::function<bool()>& met) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!met()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    // lint: allow(sleep) the pause of a poll with a deadline.
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace modelhost::testing
