// Following one operation of the daemon from its start to its end.
//
//   started --events--> finished       the caller looks at `last`
//      | --timeout                     kTimeout; the operation goes on
//      | Ctrl-C                        detached: its id is printed, 130; a second one within 2 s
//      |                               cancels it and waits for its end
//      | the daemon goes away          kUnreachable
//
// One thread; an operation needs an Interrupts made before the first call.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/support/async_stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "client/modelctl/context.h"
#include "client/modelctl/exit_code.h"
#include "client/modelctl/interrupts.h"
#include "modelhost/v1/control.grpc.pb.h"

namespace modelhost::modelctl {

using OperationStream = std::unique_ptr<grpc::ClientAsyncReaderInterface<v1::OperationEvent>>;
// Starts the call on a completion queue with this tag.
using OperationStarter = std::function<OperationStream(
    v1::Control::StubInterface&, grpc::ClientContext*, grpc::CompletionQueue*, void* tag)>;

struct OperationEnd {
  // Not ok: the operation was refused, or following it ended early. When ok, `last` is there.
  Exit exit;
  std::optional<v1::Operation> last;
};

struct FollowOptions {
  bool wait = true;  // False: done as soon as the operation has an id.
  std::string known_id;
};

// `what` names the operation for people: "swap planner@8".
OperationEnd FollowOperation(Context& context, Interrupts& interrupts, const std::string& what,
                             const OperationStarter& start, const FollowOptions& options = {});

// Follows an operation that exists already.
OperationEnd WatchOperation(Context& context, Interrupts& interrupts, const std::string& what,
                            const std::string& id);

// How a finished operation that did not succeed ends the program.
Exit FailureOf(const v1::Operation& operation, const std::string& what);

}  // namespace modelhost::modelctl
