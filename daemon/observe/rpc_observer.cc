#include "daemon/observe/rpc_observer.h"

#include <grpcpp/support/status.h>

#include <string>

#include "absl/strings/string_view.h"

namespace modelhost {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::InterceptorBatchMethods;
using grpc::experimental::ServerRpcInfo;

// gRPC's numbers are absl's.
std::string CodeName(grpc::StatusCode code) {
  return absl::StatusCodeToString(static_cast<absl::StatusCode>(code));
}

class Interceptor final : public grpc::experimental::Interceptor {
 public:
  Interceptor(Metrics& metrics, Clock& clock, ServerRpcInfo* info)
      : metrics_(metrics),
        clock_(clock),
        method_(MethodOf(info)),
        streams_(info->type() == ServerRpcInfo::Type::SERVER_STREAMING ||
                 info->type() == ServerRpcInfo::Type::BIDI_STREAMING),
        started_(clock.Monotonic()) {
    metrics_.RpcStarted(method_);
  }

  // gRPC destroys it with the call, also when the peer has gone.
  ~Interceptor() override {
    Answered("CANCELLED");
    metrics_.RpcEnded(method_);
  }

  void Intercept(InterceptorBatchMethods* methods) override {
    if (streams_ && methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_MESSAGE)) {
      Answered("OK");
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      Answered(CodeName(methods->GetSendStatus().error_code()));
    }
    methods->Proceed();
  }

 private:
  static std::string MethodOf(ServerRpcInfo* info) {
    absl::string_view method = info->method() == nullptr ? "" : info->method();
    if (!method.empty() && method[0] == '/') method.remove_prefix(1);
    return method.empty() ? "other" : std::string(method);
  }

  void Answered(const std::string& code) {
    if (answered_) return;
    answered_ = true;
    metrics_.RpcAnswered(method_, code, clock_.Monotonic() - started_);
  }

  Metrics& metrics_;
  Clock& clock_;
  const std::string method_;
  const bool streams_;
  const absl::Duration started_;
  bool answered_ = false;
};

class Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  Factory(Metrics& metrics, Clock& clock) : metrics_(metrics), clock_(clock) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(ServerRpcInfo* info) override {
    return std::make_unique<Interceptor>(metrics_, clock_, info).release();  // gRPC owns it.
  }

 private:
  Metrics& metrics_;
  Clock& clock_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeRpcObserver(
    Metrics& metrics, Clock& clock) {
  return std::make_unique<Factory>(metrics, clock);
}

}  // namespace modelhost
