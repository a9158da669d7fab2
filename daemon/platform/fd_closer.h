// Closes descriptors that strangers can make slow to close, on threads of its own.
//
// close() of the last descriptor of a TCP socket waits for its linger time, and of a file on FUSE
// for whoever serves it; closing a Unix socket closes what lies unread in it. So what came from a
// peer, and every socket that a peer could send descriptors to, is closed here and nowhere else.
//
// Every uid has a lane, worked off in order by one thread at a time: who sends descriptors that
// hang holds up his own lane alone. At most kMostThreads lanes run at once, so that many users
// together, or more of them, can hold up all. A waiting descriptor is still open: RLIMIT_NOFILE
// bounds the lanes, and callers look at waiting() and take no more from peers while it is high.
//
// Nothing here blocks the caller. Any thread. Destruction waits kPatience for what is being closed;
// what hangs for longer is left to the end of the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/time/time.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

class FdCloser {
 public:
  static constexpr size_t kMostThreads = 8;
  static constexpr absl::Duration kPatience = absl::Seconds(1);
  // The lane of descriptors whose sender is not known.
  static constexpr uint32_t kNobody = 0xffffffffU;

  FdCloser();
  ~FdCloser();
  FdCloser(const FdCloser&) = delete;

  // `uid`: of the peer that the descriptors came from.
  void Close(uint32_t uid, UniqueFd fd);
  void Close(uint32_t uid, std::vector<UniqueFd> fds);

  // Descriptors that are not closed yet, of all peers and of one.
  size_t waiting() const;
  size_t waiting(uint32_t uid) const;

 private:
  struct State;  // Shared with the threads, which may outlive this object.
  const std::shared_ptr<State> state_;
};

}  // namespace modelhost
