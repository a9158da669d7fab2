// One Session stream of a worker: what it asked for, what it holds, and what it is still to be
// told.
//
//   requests -> manager -> answers, in the order they come; an acquire that waits is answered when
//   its version is there. While kMostAnswers wait for the worker to read, its requests are not
//   read. Events never queue: of what one lease or label is about, the last is told, once there is
//   room.
//
// The leases end when the session does: at the worker's end of the stream, its cancellation, or the
// daemon's stop. Control thread only; nothing blocks. The stream below it is gRPC's, or a test's.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "daemon/platform/clock.h"
#include "daemon/platform/peer.h"
#include "daemon/registry/model_manager.h"
#include "modelhost/v1/worker.pb.h"

namespace modelhost {

// What carries the messages. Each call is the only one of its kind under way; what comes of it is
// told later, never from inside the call. After Finish nothing may be called.
class SessionStream {
 public:
  virtual ~SessionStream() = default;
  virtual void Read() = 0;
  virtual void Write(v1::SessionEvent event) = 0;
  virtual void Finish(const absl::Status& status) = 0;
};

class WorkerSession : public std::enable_shared_from_this<WorkerSession> {
 public:
  static constexpr size_t kMostAnswers = 16;
  static constexpr int kMostRefs = 32;
  static constexpr size_t kMostRequestBytes = size_t{16} << 10;  // 32 references are 6 KiB.

  struct Deps {
    ModelManager& manager;
    Clock& clock;
  };
  // `stream` lives until it is finished.
  WorkerSession(Deps deps, const Peer& peer, SessionStream& stream)
      : deps_(deps), peer_(peer), stream_(stream) {}
  WorkerSession(const WorkerSession&) = delete;

  // Begins the session with the manager, and to read.
  void Start(uint64_t epoch, const std::string& handles_socket);
  // What was read; null: nothing more comes, and the session ends.
  void OnRead(const v1::SessionRequest* request);
  // What was read is no request. Ends the stream, which says why.
  void OnBadRequest(const absl::Status& status);
  void OnWritten();
  // The caller has gone, or was too slow.
  void OnCancel();
  // The daemon stops: says so, and ends.
  void Stop();

  // From inside the manager.
  void OnLabelMoved(const LabelChange& change);
  void OnDraining(const VersionKey& key);
  void OnLeaseEnded(LeaseId lease, LeaseChange change);

  SessionId id() const { return id_; }
  bool finished() const { return finished_; }

 private:
  struct Held {
    VersionKey key;
    std::string label;
  };

  // What is remembered of an acquire that waits: not what else was in the message.
  struct Asked {
    uint64_t request_id = 0;
    std::vector<std::pair<std::string, std::string>> refs;  // Model and label, checked.
    std::string gpu;
    bool redeclare = false;
    absl::Duration received;
  };

  void Handle(const v1::SessionRequest& request);
  void Acquire(uint64_t request_id, const v1::AcquireRequest& request);
  void FinishAcquire(const Asked& asked, const absl::StatusOr<std::vector<Grant>>& grants);
  // A worker that was away did not hear where its label went meanwhile.
  void TellWhatWasMissed(const Held& held);
  absl::Status ToProto(const Grant& grant, const Asked& asked, v1::Grant* out);
  void Release(uint64_t request_id, LeaseId lease);
  void Answer(v1::SessionEvent event);
  void AnswerError(uint64_t request_id, const absl::Status& status);
  // Ends the session with the manager now, and the stream once what waits is written.
  void End(const absl::Status& status, const std::string& why);
  std::optional<v1::SessionEvent> NextEvent();
  // Reads, writes or finishes, whichever is due.
  void Go();

  const Deps deps_;
  const Peer peer_;
  SessionStream& stream_;
  SessionId id_ = 0;  // 0: not begun, or over.
  std::map<LeaseId, Held> leases_;
  std::deque<v1::SessionEvent> answers_;
  // What is to be told, by what it is about.
  std::map<std::pair<std::string, std::string>, LabelChange> moved_;
  std::set<LeaseId> draining_;
  std::set<LeaseId> evicted_;
  bool tell_closing_ = false;
  bool reading_ = false;
  bool writing_ = false;
  bool finished_ = false;
  std::optional<absl::Status> end_;
};

// References of a request, checked. INVALID_ARGUMENT says which one is wrong and why.
absl::StatusOr<AcquireRef> ToRef(const v1::WorkerRef& ref, bool redeclare);

}  // namespace modelhost
