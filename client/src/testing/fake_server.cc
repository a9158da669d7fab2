#include "client/src/testing/fake_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <utility>

#include "client/src/reference.h"
#include "client/src/testing/fake_memory.h"
#include "proto/handle/fd_channel.h"
#include "proto/handle/seqlock.h"

namespace modelhost::testing {

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
  serving_ = false;
  listener_.Reset();
  peers_.clear();
  waiting_.clear();
  page_.reset();  // Clients keep their mapping of it.
}

std::unique_lock<std::mutex> FakeServer::Still() {
  std::unique_lock lock(mutex_);
  while (thread_.joinable() && !serving_) {
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
  return lock;
}

void FakeServer::Serve() {
  std::vector<pollfd> polls;  // What it allocates and frees, it does under the lock (Still).
  while (!stop_) {
    {
      const std::lock_guard lock(mutex_);
      serving_ = true;
      polls.clear();
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
