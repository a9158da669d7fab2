// Counts and times every RPC for the metrics, as a gRPC server interceptor.
#pragma once

#include <grpcpp/support/server_interceptor.h>

#include <memory>

#include "daemon/observe/metrics.h"
#include "daemon/platform/clock.h"

namespace modelhost {

// For ServerBuilder::experimental().SetInterceptorCreators. `metrics` and `clock` outlive the
// server.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeRpcObserver(
    Metrics& metrics, Clock& clock);

}  // namespace modelhost
