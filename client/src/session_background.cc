// What a session does that no call waits for: the page, coming back, declaring leases again,
// following labels.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "client/src/process.h"
#include "client/src/reference.h"
#include "client/src/session.h"

namespace modelhost {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr milliseconds kLongestBackoff{5000};
// For the answer to Hello. All sessions of the process wait for it, so it is a small part of the
// time between two tries.
constexpr milliseconds kShortestHello{100};
constexpr milliseconds kLongestHello{1000};
constexpr int kHelloShare = 5;
// For a version to be loaded again after a restart of the daemon.
constexpr seconds kDeclarePatience{120};
constexpr milliseconds kFirstRetry{500};
constexpr milliseconds kLongestRetry{60'000};
constexpr seconds kFollowPatience{60};
constexpr milliseconds kSendRetry{50};

milliseconds Longer(milliseconds patience) {
  return std::clamp(patience * 2, kFirstRetry, kLongestRetry);
}

}  // namespace

milliseconds Session::Jittered(milliseconds pause) {
  // Three quarters to five quarters: many clients of one daemon do not come back as one.
  return pause * 3 / 4 + milliseconds(random_() % (static_cast<uint64_t>(pause.count()) / 2 + 1));
}

void Session::Install(std::unique_ptr<Connection> connection) {
  connection_ = std::move(connection);
  dead_ = false;
  page_ = connection_->page();
  backoff_ = milliseconds(50);
  if (housekeeper_ != nullptr) {
    housekeeper_->Watch(connection_->socket(), id_, /*armed=*/calls_ == 0);
  }
  if (++connections_ == 1) return;
  for (const auto& lease : leases_) {
    if (!lease->label.empty()) PointAtSlot(*lease, abi::kNoSlot);
  }
  LookWithoutSlots();
  DeclareAgain(steady_clock::now());
  if (connected() && listening_) Subscribe();
  SignalLocked();
  if (housekeeper_ != nullptr) housekeeper_->Wake();
}

Result<void> Session::AttachHousekeeper() {
  if (housekeeper_ != nullptr) return {};
  auto housekeeper = Process::Get().EnsureHousekeeper();
  if (!housekeeper.ok()) return ExplainLimit(std::move(housekeeper).error());
  housekeeper_ = *std::move(housekeeper);
  if (connected()) housekeeper_->Watch(connection_->socket(), id_, /*armed=*/calls_ == 0);
  return {};
}

// Without a slot in the new page (the page is full, or the label is not there yet) the lease goes
// on looking at the old one, and LookWithoutSlots sees to it.
void Session::PointAtSlot(Lease& lease, uint32_t hint) {
  const abi::CatalogueSlot* slot = page_->SlotOf(hint, lease.model, lease.label);
  if (slot == nullptr) slot = page_->Find(lease.model, lease.label);
  if (slot == nullptr) return;
  CatalogueReader::Label label;
  if (page_->Read(*slot, &label) && label.generation < lease.generation) {
    // A daemon that lost its state counts from the start again.
    const bool same = label.version == lease.fixed.version;
    lease.seen.store(same || label.generation == 0 ? label.generation : label.generation - 1,
                     std::memory_order_relaxed);
  }
  lease.pages.push_back(page_);
  lease.word.store(&slot->generation, std::memory_order_release);
}

void Session::PointAtMissingSlots() {
  for (const auto& lease : leases_) {
    if (!lease->label.empty() && (lease->pages.empty() || lease->pages.back() != page_)) {
      PointAtSlot(*lease, abi::kNoSlot);
    }
  }
}

void Session::LookWithoutSlots() {
  for (const auto& lease : leases_) {
    const bool here = !lease->pages.empty() && lease->pages.back() == page_;
    if (!lease->label.empty() && !here) lease->look = true;
  }
}

Result<CatalogueReader::Label> Session::Resolve(const abi::Ref& ref) {
  if (forked()) return Gone();
  std::shared_ptr<const CatalogueReader> page;
  {
    const MutexLock lock(mutex_);
    page = page_;
  }
  if (ref.version != 0) return CatalogueReader::Label{ref.version, 0};
  CatalogueReader::Label label;
  const abi::CatalogueSlot* slot = page->Find(NameIn(ref.model), NameIn(ref.label));
  if (slot != nullptr && !page->Read(*slot, &label)) {
    return Error{Code::kUnavailable, ReferenceName(ref) + ": modelhostd died while it wrote", 0};
  }
  if (slot == nullptr && page->full()) {
    return Error{Code::kNotFound,
                 ReferenceName(ref) +
                     ": not in the shared page, which is full (acquire it: that asks modelhostd)",
                 0};
  }
  if (slot == nullptr || label.version == 0) {
    return Error{Code::kNotFound,
                 ReferenceName(ref) + ": this label names no READY version (modelctl versions)", 0};
  }
  return label;
}

Result<int> Session::EventFd() {
  if (forked()) return Gone();
  const MutexLock lock(mutex_);
  if (closed_) return Gone();
  if (!event_fd_.valid()) {
    // Readable: what came before somebody asked for it was told to nobody.
    UniqueFd fd(::eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!fd.valid()) return ErrnoError(errno, "make an event descriptor");
    event_fd_ = std::move(fd);
  }
  if (auto attached = AttachHousekeeper(); !attached.ok()) return std::move(attached).error();
  if (!listening_) {
    listening_ = true;
    if (connected()) Subscribe();
  }
  return event_fd_.get();
}

void Session::ClearEvents() {
  if (forked()) return;
  const MutexLock lock(mutex_);
  uint64_t ignored = 0;
  if (event_fd_.valid()) (void)!::read(event_fd_.get(), &ignored, sizeof(ignored));
}

void Session::SignalEvents() {
  if (forked()) return;
  const MutexLock lock(mutex_);
  SignalLocked();
}

void Session::Subscribe() {
  auto request = std::make_unique<Request>();
  request->kind = Request::Kind::kSubscribe;
  request->id = NextId();
  request->expires = SteadyTime::max();
  abi::Subscribe frame{};
  frame.header = MakeHeader(abi::FrameType::kSubscribe, sizeof(frame), request->id, 0);
  if (!Send(AsBytes(frame), {}).ok()) return;  // Tick tries again.
  subscribed_ = connections_;
  request->connection = connections_;
  background_.push_back(std::move(request));
  pending_.push_back(background_.back().get());
}

bool Session::NeedsConnection() const {
  return !closed_ && (listening_ || !followers_.empty() || !leases_.empty());
}

void Session::TryReconnect(SteadyTime now) {
  milliseconds patience{};
  {
    const MutexLock lock(mutex_);
    if (connected() || connecting_ || connection_ != nullptr || !NeedsConnection() ||
        now < reconnect_at_) {
      return;
    }
    connecting_ = true;
    patience = std::clamp(backoff_ / kHelloShare, kShortestHello, kLongestHello);
  }
  auto opened = OpenConnection(steady_clock::now() + patience, /*for_call=*/false);
  const MutexLock lock(mutex_);
  connecting_ = false;
  if (sleepers_ != 0) changed_.NotifyAll();
  if (opened.ok() && !closed_) {
    Install(*std::move(opened));
    return;
  }
  reconnect_at_ = steady_clock::now() + Jittered(backoff_);
  backoff_ = std::min(backoff_ * 2, kLongestBackoff);
}

void Session::DeclareAgain(SteadyTime now) {
  for (const auto& lease : leases_) {
    if (!connected()) return;
    if (lease->state != Lease::State::kDue || now < lease->declare_at) continue;
    auto request = std::make_unique<Request>();
    request->kind = Request::Kind::kRedeclare;
    request->id = NextId();
    request->grants.emplace(GrantBuilder::Kind::kRedeclare, 1U);
    request->lease = lease;
    request->expires = now + kDeclarePatience + seconds(5);
    abi::Ref declared = lease->fixed;
    if (connection_->abi() >= abi::kFrameAbiDeclaredLabel) CopyName(lease->label, declared.label);
    // What is mapped of a GPU stays mapped whatever the daemon says: it need not have it any more.
    auto frame = MakeAcquire(std::span(&declared, 1), lease->gpu, /*required=*/false);
    if (!frame.ok()) return;
    frame->head.header.request_id = request->id;
    frame->head.flags |= abi::kAcquireRedeclare | abi::kAcquireWait;
    frame->head.deadline_ms = static_cast<uint64_t>(milliseconds(kDeclarePatience).count());
    if (!Send(AsBytes(frame->head), frame->tail).ok()) {
      lease->declare_at = now + kSendRetry;
      return;
    }
    lease->state = Lease::State::kAsked;
    request->connection = connections_;
    background_.push_back(std::move(request));
    pending_.push_back(background_.back().get());
  }
}

void Session::OnDeclared(Request& request) {
  Lease& lease = *request.lease;
  if (!request.error.has_value()) {
    const abi::Granted& head = request.grants->grants()[0].head;
    if (lease.state != Lease::State::kAsked || head.version != lease.fixed.version) {
      SendRelease(head.lease_id);  // Released meanwhile.
      return;
    }
    lease.id = head.lease_id;
    lease.state = Lease::State::kHeld;
    lease.patience = {};
    return;
  }
  if (lease.state != Lease::State::kAsked || request.lost) return;
  switch (request.error->code) {
    case Code::kNotFound:
    case Code::kPermissionDenied:
    case Code::kDataLoss:
    case Code::kInvalidArgument:
      lease.state = Lease::State::kLost;
      return;
    default:
      lease.state = Lease::State::kDue;
      lease.patience = Longer(lease.patience);
      lease.declare_at = steady_clock::now() + Jittered(lease.patience);
  }
}

void Session::ExpireBackground(SteadyTime now) {
  for (const auto& request : background_) {
    if (request->done || now < request->expires) continue;
    request->error = Error{Code::kDeadlineExceeded, "modelhostd did not answer in time", 0};
    ReleaseAll(*request);
    Finish(*request);
  }
  std::erase_if(background_, [](const auto& request) {
    return request->done && request->kind != Request::Kind::kFollow;
  });
}

// --- Following
// -------------------------------------------------------------------------------------------------

Result<std::shared_ptr<Housekeeper>> Session::AddFollower(std::shared_ptr<Follower> follower) {
  if (forked()) return Gone();
  const MutexLock lock(mutex_);
  if (closed_) return Gone();
  if (auto attached = AttachHousekeeper(); !attached.ok()) return std::move(attached).error();
  Following following;
  following.follower = std::move(follower);
  followers_.push_back(std::move(following));
  if (!listening_) {
    listening_ = true;
    if (connected()) Subscribe();
  }
  housekeeper_->Wake();
  return housekeeper_;
}

void Session::RemoveFollower(const Follower* follower) {
  if (forked()) return;
  std::vector<Following> dropped;  // Without the lock: it may unmap gigabytes.
  const MutexLock lock(mutex_);
  for (auto it = followers_.begin(); it != followers_.end();) {
    if (it->follower.get() == follower) {
      dropped.push_back(std::move(*it));
      it = followers_.erase(it);
    } else {
      ++it;
    }
  }
}

bool Session::NamesNothing(std::span<const abi::Ref> refs) const {
  const CatalogueReader& page = *page_;
  return std::any_of(refs.begin(), refs.end(), [&page](const abi::Ref& ref) {
    if (ref.version != 0) return false;
    const abi::CatalogueSlot* slot = page.Find(NameIn(ref.model), NameIn(ref.label));
    CatalogueReader::Label label;
    return slot != nullptr && page.Read(*slot, &label) && label.version == 0;
  });
}

void Session::StartFollows(SteadyTime now) {
  // Told without the lock.
  std::vector<std::pair<std::shared_ptr<Follower>, Error>> failed;
  SendFollows(now, failed);
  for (auto& [follower, error] : failed) (void)follower->OnAcquired(std::move(error));
}

void Session::SendFollows(SteadyTime now,
                          std::vector<std::pair<std::shared_ptr<Follower>, Error>>& failed) {
  const MutexLock lock(mutex_);
  for (Following& following : followers_) {
    if (!connected()) return;
    if (following.asked || now < following.retry_at) continue;
    following.retry_at = {};
    if (!following.follower->Behind()) continue;
    const auto refs = following.follower->refs();
    const DeviceRequest& device = following.follower->device();
    const std::string gpu = device.asks() ? device.device->uuid() : "";
    // A daemon that is too old for a live model on a GPU: another may come.
    auto frame = MakeAcquire(refs, gpu, device.want == DeviceRequest::Want::kDevice);
    if (!frame.ok()) {
      following.patience = Longer(following.patience);
      following.retry_at = now + Jittered(following.patience);
      failed.emplace_back(following.follower, std::move(frame).error());
      continue;
    }
    auto request = std::make_unique<Request>();
    request->kind = Request::Kind::kFollow;
    request->id = NextId();
    request->grants.emplace(GrantBuilder::Kind::kAcquire, frame->head.count, frame->device);
    if (frame->device) request->gpu = gpu;
    request->follower = following.follower;
    request->expires = now + kFollowPatience + seconds(5);
    frame->head.header.request_id = request->id;
    // A label that names nothing may do so for ever: its follower is told why, not kept waiting.
    if (!NamesNothing(refs)) frame->head.flags |= abi::kAcquireWait;
    frame->head.deadline_ms = static_cast<uint64_t>(milliseconds(kFollowPatience).count());
    if (!Send(AsBytes(frame->head), frame->tail).ok()) {
      following.retry_at = now + kSendRetry;
      return;
    }
    following.asked = true;
    following.follower->OnAsked();
    request->connection = connections_;
    background_.push_back(std::move(request));
    pending_.push_back(background_.back().get());
  }
}

void Session::FinishFollows() {
  std::vector<std::pair<std::shared_ptr<Follower>, Result<std::vector<Held>>>> results;
  // Dropped without the lock: a follower that was removed meanwhile may end here.
  std::vector<std::unique_ptr<Request>> finished;
  {
    const MutexLock lock(mutex_);
    for (const auto& request : background_) {
      if (request->kind != Request::Kind::kFollow || !request->done) continue;
      const auto it = std::find_if(followers_.begin(), followers_.end(), [&](const auto& each) {
        return each.follower == request->follower;
      });
      if (it == followers_.end()) {
        if (!request->error.has_value()) ReleaseAll(*request);
        continue;
      }
      it->asked = false;
      auto held = request->error.has_value() ? Result<std::vector<Held>>(*request->error)
                                             : TakeGrants(it->follower->refs(), *request);
      if (!held.ok() && !request->lost) {
        it->patience = Longer(it->patience);
        it->retry_at = steady_clock::now() + Jittered(it->patience);
      }
      results.emplace_back(it->follower, std::move(held));
    }
    for (auto& request : background_) {
      if (request->done) finished.push_back(std::move(request));
    }
    std::erase(background_, nullptr);
  }
  for (auto& [follower, held] : results) {
    const bool came = held.ok();
    const bool used = follower->OnAcquired(std::move(held));
    if (!came) continue;
    const MutexLock lock(mutex_);
    for (Following& following : followers_) {
      if (following.follower != follower) continue;
      following.patience = used ? milliseconds(0) : Longer(following.patience);
      if (!used) following.retry_at = steady_clock::now() + Jittered(following.patience);
    }
  }
}

// --- The background thread
// -------------------------------------------------------------------------------------------------

void Session::OnReadable() {
  if (forked()) return;
  const MutexLock lock(mutex_);
  // A waiting call reads for itself, and its end arms the socket again.
  while (connected() && !reading_ && calls_ == 0) {
    if (!ReadOne(ReceiveWait::kNo, {})) break;
  }
  if (connected() && calls_ == 0) housekeeper_->Arm(connection_->socket(), id_, /*armed=*/true);
}

SteadyTime Session::NextTick() const {
  SteadyTime next = SteadyTime::max();
  if (closed_) return next;
  const SteadyTime soon = steady_clock::now() + kSendRetry;
  if (!connected()) {
    // A call is connecting, or the reader has yet to leave.
    if (connecting_ || connection_ != nullptr) return soon;
    return NeedsConnection() ? reconnect_at_ : next;
  }
  for (const auto& lease : leases_) {
    if (lease->state == Lease::State::kDue) next = std::min(next, lease->declare_at);
  }
  for (const auto& request : background_) next = std::min(next, request->expires);
  for (const Following& following : followers_) {
    if (!following.asked && following.retry_at != SteadyTime{}) {
      next = std::min(next, following.retry_at);
    }
  }
  if (!unsent_releases_.empty()) next = std::min(next, soon);
  if (listening_ && subscribed_ != connections_) next = std::min(next, soon);
  return next;
}

SteadyTime Session::Tick(SteadyTime now) {
  if (forked()) return SteadyTime::max();
  TryReconnect(now);
  {
    const MutexLock lock(mutex_);
    look_ = false;
    ExpireBackground(now);
    FlushReleases();
    if (connected()) DeclareAgain(now);
    if (connected() && listening_ && subscribed_ != connections_) Subscribe();
  }
  FinishFollows();
  StartFollows(now);
  std::vector<std::shared_ptr<Follower>> followers;
  {
    const MutexLock lock(mutex_);
    for (const Following& following : followers_) followers.push_back(following.follower);
  }
  for (const auto& follower : followers) follower->CollectGarbage();
  const MutexLock lock(mutex_);
  return NextTick();
}

}  // namespace modelhost
