// A daemon for tests of the client library: real sockets, a real page, real sealed memory, and
// faults on demand. One thread serves all connections; every method may be called from the test's
// thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/src/testing/fake_version.h"
#include "proto/abi/catalogue_page.h"
#include "proto/abi/handle_frame.h"
#include "proto/handle/region.h"
#include "proto/handle/unique_fd.h"

namespace modelhost::testing {

// What the server does wrong, from the next frame on.
struct Faults {
  bool silent_hello = false;
  bool refuse_connections = false;  // Says PERMISSION_DENIED and hangs up.
  bool silent_acquire = false;
  bool unsealed_index = false;
  bool unsealed_region = false;
  bool other_index = false;          // Of a version that was not granted.
  bool broken_index = false;         // Sealed and announced right, but no index.
  int64_t index_bytes_extra = 0;     // Added to the announced size.
  int64_t region_bytes_extra = 0;    // Likewise.
  bool drop_region = false;          // The last region never comes; the counts agree.
  bool repeat_region = false;        // The first region comes in the place of the second.
  bool too_few_fds = false;          // The frame's counts do not agree with its descriptors.
  bool events_between = false;       // An event before every reply.
  bool wrong_model = false;          // Grants something that nobody asked for.
  bool garbage_reply = false;        // Half a frame in place of a reply.
  bool huge_count = false;           // Claims regions that do not come with it.
  bool hang_up_on_acquire = false;   // Ends the connection in place of an answer, once.
  bool hang_up_after_grant = false;  // Ends the connection right after its answer, once.
  bool redeclare_not_found = false;
  // Of DeviceFds frames.
  uint32_t device_mode = 0;            // Not 0: said in the place of the truth.
  int32_t device_total_extra = 0;      // Added to the total.
  int64_t device_bytes_extra = 0;      // Added to the size of the first segment.
  bool device_drop_fds = false;        // The descriptors do not come.
  bool device_drop_segment = false;    // The last one does not come; the counts agree.
  bool device_extra_segment = false;   // One more than the index has; the counts agree.
  bool device_wrong_order = false;     // The first is numbered as the second.
  bool device_short_tail = false;      // Half of the last DeviceRef.
  bool device_unasked = false;         // Announced to who did not ask.
  bool device_unannounced = false;     // Granted says none to who asked.
  bool device_before_regions = false;  // Too early.
  bool device_endless = false;         // A frame without segments where some are due.
  // A daemon of another version: what it speaks, and 0 or what it says instead of the truth.
  uint32_t abi_min = abi::kFrameAbiMin;
  uint32_t abi_max = abi::kFrameAbi;
  uint32_t answer_abi = 0;
  uint32_t page_abi = 0;   // From the next Start on.
  uint32_t index_abi = 0;  // Of what is granted.
};

// Device memory of one version, on one GPU.
struct FakeDevice {
  std::string gpu;
  abi::DeviceMode mode = abi::DeviceMode::kVmmFd;
  std::vector<UniqueFd> fds;         // kVmmFd, kHostRegistered
  std::vector<uint64_t> bytes;       // Of each segment.
  std::vector<std::string> handles;  // kCudaIpc
};

class FakeServer {
 public:
  explicit FakeServer(std::string runtime_dir);  // Must exist.
  ~FakeServer();

  void Add(const FakeVersion& version);
  // Moves or removes (0) labels in one page write and tells the subscribers.
  void SetLabels(const std::map<std::pair<std::string, std::string>, uint64_t>& labels);
  void SetLabel(const std::string& model, const std::string& label, uint64_t version) {
    SetLabels({{{model, label}, version}});
  }
  // Before Start: the page is full of other labels; ours have no slots.
  void FillPage() { page_is_full_ = true; }
  // What was labelled but not loaded yet: an Acquire with kAcquireWait waits for it.
  void SetReady(const std::string& model, uint64_t version, bool ready);

  // After Add. Others than `device.gpu` have no copy.
  void SetDevice(const std::string& model, uint64_t version, FakeDevice device);

  // Cuts the store file behind a kFile region, as a careless operator might.
  void TruncateFile(const std::string& model, uint64_t version, uint32_t file, uint64_t bytes);

  // Serves with a new page and epoch, and numbers leases from 1 again, as a daemon does that was
  // started anew. Stop ends all connections at once, as a kill would.
  void Start();
  void Stop();

  void SetFaults(const Faults& faults);
  // Sends an event frame to all subscribers.
  void SendEvent(abi::EventKind kind, uint64_t lease_id);

  // While it is held, the server's thread waits or sleeps: for a fork, in whose child nobody gives
  // back what other threads have locked (of an allocator's, say).
  std::unique_lock<std::mutex> Still();

  size_t leases() const;
  size_t connections() const;
  uint64_t acquires() const;  // Answered so far, redeclarations left out.
  uint64_t redeclares() const;
  // GPUs that redeclared leases named; "" for none.
  std::vector<std::string> declared_gpus() const;
  std::vector<std::string> declared_labels() const;  // Of each of those.
  uint64_t fetches() const;
  uint64_t epoch() const;
  // Waits until `met`, which may call the methods above. False after ten seconds.
  static bool Eventually(const std::function<bool()>& met);

 private:
  struct Resident {
    FakeVersion version;
    SealedRegion index;
    std::vector<UniqueFd> fds;       // Of its files.
    std::vector<UniqueFd> writable;  // Likewise; empty ones for sealed regions.
    FakeDevice device;
    bool ready = true;
  };
  struct Peer {
    UniqueFd socket;
    bool greeted = false;
    uint32_t abi = 0;
    bool subscribed = false;
    std::map<uint64_t, Resident*> leases;
  };
  struct Label {
    uint32_t slot = 0;
    uint64_t version = 0;
    uint64_t generation = 0;
  };
  // An Acquire that waits for a version to be ready.
  struct Waiting {
    Peer* peer = nullptr;
    abi::Acquire acquire{};
    std::vector<abi::Ref> refs;
    std::string gpu;
  };

  void Serve();
  bool ServePeer(Peer& peer);
  bool OnHello(Peer& peer, const abi::Hello& hello);
  bool OnAcquire(Peer& peer, const abi::Acquire& acquire, const std::vector<abi::Ref>& refs,
                 const std::string& gpu);
  bool OnFetch(Peer& peer, const abi::Fetch& fetch);
  bool Grant(Peer& peer, const abi::Acquire& acquire, uint32_t number, const abi::Ref& ref,
             const std::string& gpu, Resident& resident);
  bool SendDevice(Peer& peer, uint32_t request, uint64_t lease, const std::string& gpu,
                  const Resident& resident);
  bool SendRegions(Peer& peer, uint32_t request, uint64_t lease, const std::vector<uint32_t>& order,
                   const Resident& resident, size_t from);
  bool SendError(Peer& peer, uint32_t request, uint32_t code, const std::string& text);
  bool Send(Peer& peer, const void* head, size_t head_bytes, const void* tail, size_t tail_bytes,
            const std::vector<const UniqueFd*>& fds);
  void SendEventTo(Peer& peer, abi::EventKind kind, uint32_t slot, const Label& label,
                   uint64_t lease);
  Resident* Find(const abi::Ref& ref);
  void MakePage();
  void WriteSlot(const std::pair<std::string, std::string>& key, const Label& label);
  abi::CatalogueHeader& header();
  abi::CatalogueSlot& slot(uint32_t number);
  void Wake();

  const std::string socket_path_;
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, uint64_t>, std::unique_ptr<Resident>> residents_;
  std::map<std::pair<std::string, std::string>, Label> labels_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::vector<Waiting> waiting_;
  std::optional<OneWriterRegion> page_;
  Faults faults_;
  bool page_is_full_ = false;
  uint64_t epoch_ = 0;
  uint64_t next_lease_ = 1;
  uint64_t acquires_ = 0;
  uint64_t redeclares_ = 0;
  std::vector<std::string> declared_labels_;
  std::vector<std::string> declared_gpus_;
  uint64_t fetches_ = 0;
  UniqueFd listener_;
  UniqueFd wake_;
  std::atomic<bool> stop_{false};
  bool serving_ = false;  // The thread has come to its loop.
  std::thread thread_;
};

}  // namespace modelhost::testing
