// A lease of modelctl's own, through the client library: for exec, and for looking into the files
// of a version that this user could not open itself.
//
// The lease ends with the object. One thread.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "client/include/modelhost/modelhost.h"
#include "client/modelctl/context.h"
#include "client/modelctl/exit_code.h"
#include "client/modelctl/ref.h"

namespace modelhost::modelctl {

struct LeasedFile {
  std::string path;  // In the version.
  int fd = -1;       // Lent by the lease; read-only and close-on-exec.
  std::span<const std::byte> bytes;
};

class WorkerLease {
 public:
  // With --timeout it waits that long for the daemon and for the version to be READY; without, what
  // is not there now is an error. `interrupted` is asked a few times a second while the daemon is
  // waited for, also by Files: true ends the wait with kInterrupted.
  static Outcome<WorkerLease> Take(Context& context, const Ref& ref,
                                   std::function<bool()> interrupted);

  uint64_t version() const { return mh_handle_version(handle_.get()); }
  // All files of the version, sorted by path, each fetched. kResources when this process may not
  // have that many descriptors.
  Outcome<std::vector<LeasedFile>> Files() const;

 private:
  struct Disconnect {
    void operator()(mh_client* client) const { mh_disconnect(client); }
  };
  struct Release {
    void operator()(mh_handle* handle) const { mh_release(handle); }
  };
  std::unique_ptr<std::function<bool()>> interrupted_;  // Of the client, which goes before it.
  std::unique_ptr<mh_client, Disconnect> client_;
  std::unique_ptr<mh_handle, Release> handle_;  // Before the client goes.
};

}  // namespace modelhost::modelctl
