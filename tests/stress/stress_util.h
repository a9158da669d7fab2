// What the stress programs share beside tests/bench/bench_util.h: calls on control.sock.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "modelhost/v1/control.grpc.pb.h"
#include "tests/bench/bench_util.h"

namespace modelhost::bench {

inline std::unique_ptr<v1::Control::Stub> ControlStub(const std::string& runtime_dir) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // A connection of its own.
  return v1::Control::NewStub(grpc::CreateCustomChannel(
      "unix:" + runtime_dir + "/control.sock", grpc::InsecureChannelCredentials(), arguments));
}

inline void SetDeadline(grpc::ClientContext& context, int seconds) {
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(seconds));
}

// The last state of an operation whose events `stream` tells, and how the stream ended.
template <typename Stream>
grpc::Status LastOf(Stream& stream, v1::Operation* last) {
  v1::OperationEvent event;
  while (stream.Read(&event)) *last = event.operation();
  return stream.Finish();
}

}  // namespace modelhost::bench
