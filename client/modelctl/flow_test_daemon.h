// A daemon of the test's own: real gRPC on a real control.sock, real frames on a real handles.sock,
// and a book of models that the test fills. What Swap does is the test's to say.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "modelhost/v1/control.grpc.pb.h"
#include "proto/handle/unique_fd.h"

namespace modelhost::modelctl::testing {

using OperationWriter = grpc::ServerWriter<v1::OperationEvent>;

v1::Version MakeVersion(const std::string& model, uint64_t version, v1::VersionPhase phase);
v1::Operation MakeOperation(const std::string& id, v1::OperationKind kind,
                            v1::OperationState state);

class FakeDaemon final : public v1::Control::Service {
 public:
  FakeDaemon();
  ~FakeDaemon() override;

  const std::filesystem::path& runtime_dir() const { return runtime_dir_; }
  void StartHandles();  // Without it there is no handles.sock.
  void StopControl();

  // Before the call that they are about.
  v1::GetStatusResponse status;
  std::map<std::string, v1::Model> models;
  v1::ListLeasesResponse leases;
  std::function<grpc::Status(grpc::ServerContext&, const v1::SwapRequest&, OperationWriter&)> swap;
  std::function<grpc::Status(grpc::ServerContext&, const v1::UnloadRequest&, OperationWriter&)>
      unload;
  v1::OperationResult publish_result;

  // After it.
  v1::PublishBegin publish_begin;
  std::map<uint32_t, std::string> uploaded;  // By file number.
  uint32_t largest_frame = 0;
  v1::EvictLeaseRequest evicted;
  v1::SetLabelRequest set_label;

  // Until CancelOperation was called for `id`. False: the caller went away.
  bool WaitForCancel(grpc::ServerContext& context);
  bool cancel_called();

 private:
  grpc::Status GetStatus(grpc::ServerContext*, const v1::GetStatusRequest*,
                         v1::GetStatusResponse* response) override;
  grpc::Status ListModels(grpc::ServerContext*, const v1::ListModelsRequest*,
                          v1::ListModelsResponse* response) override;
  grpc::Status GetModel(grpc::ServerContext*, const v1::GetModelRequest* request,
                        v1::Model* response) override;
  grpc::Status ListVersions(grpc::ServerContext*, const v1::ListVersionsRequest* request,
                            v1::ListVersionsResponse* response) override;
  grpc::Status GetVersion(grpc::ServerContext*, const v1::GetVersionRequest* request,
                          v1::Version* response) override;
  grpc::Status WatchModels(grpc::ServerContext* context, const v1::WatchModelsRequest*,
                           grpc::ServerWriter<v1::Model>* writer) override;
  grpc::Status ListLeases(grpc::ServerContext*, const v1::ListLeasesRequest*,
                          v1::ListLeasesResponse* response) override;
  grpc::Status EvictLease(grpc::ServerContext*, const v1::EvictLeaseRequest* request,
                          v1::Lease* response) override;
  grpc::Status SetLabel(grpc::ServerContext*, const v1::SetLabelRequest* request,
                        v1::LabelChange* response) override;
  grpc::Status Swap(grpc::ServerContext* context, const v1::SwapRequest* request,
                    OperationWriter* writer) override;
  grpc::Status Unload(grpc::ServerContext* context, const v1::UnloadRequest* request,
                      OperationWriter* writer) override;
  grpc::Status PlanSwap(grpc::ServerContext*, const v1::SwapRequest* request,
                        v1::SwapPlan* response) override;
  grpc::Status Publish(grpc::ServerContext*, grpc::ServerReader<v1::PublishRequest>* reader,
                       v1::PublishResponse* response) override;
  grpc::Status WatchOperation(grpc::ServerContext* context, const v1::GetOperationRequest* request,
                              OperationWriter* writer) override;
  grpc::Status CancelOperation(grpc::ServerContext*, const v1::GetOperationRequest* request,
                               v1::Operation* response) override;

  void ServeHandles();
  void ServeOne(const UniqueFd& connection);
  grpc::Status Find(const std::string& model, v1::Model* found);

  std::filesystem::path runtime_dir_;
  std::unique_ptr<grpc::Server> server_;
  UniqueFd listener_;
  std::thread handles_;
  std::atomic<bool> stop_{false};
  std::mutex lock_;
  std::condition_variable changed_;
  bool cancelled_ = false;  // Under lock_.
  bool complete_ = false;   // Under lock_: the last upload frame has come.
};

}  // namespace modelhost::modelctl::testing
