// The RPCs that take versions out of the store, and those that say what would go.
#include "absl/strings/str_cat.h"
#include "daemon/service/control_service.h"
#include "daemon/service/control_service_await.h"
#include "daemon/service/proto_convert.h"

namespace modelhost {
namespace {

absl::Status CheckRemoval(const v1::DeleteVersionRequest& request) {
  if (!IsValidModelName(request.model())) {
    return absl::InvalidArgumentError(absl::StrCat("model \"", SafeText(request.model(), 64),
                                                   "\": not a name ([a-z0-9][a-z0-9._-]{0,63})"));
  }
  if (request.version() != 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(request.model(), ": no version given (numbers from 1)"));
}

absl::Status CheckCollection(const v1::CollectGarbageRequest& request) {
  if (request.model().empty() || IsValidModelName(request.model())) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("model \"", SafeText(request.model(), 64),
                                                 "\": not a name ([a-z0-9][a-z0-9._-]{0,63})"));
}

ErrorMetadata AboutRemoval(const v1::DeleteVersionRequest& request) {
  return {{"model", request.model()}, {"version", absl::StrCat(request.version())}};
}

}  // namespace

grpc::Status ControlService::DeleteVersion(grpc::ServerContext* context,
                                           const v1::DeleteVersionRequest* request,
                                           grpc::ServerWriter<v1::OperationEvent>* writer) {
  return RunOperation(
      *context, "DeleteVersion", AboutRemoval(*request),
      [&](ModelManager& manager, uint32_t uid) -> absl::StatusOr<OperationId> {
        if (auto status = CheckRemoval(*request); !status.ok()) return status;
        return manager.Delete({request->model(), request->version()}, uid);
      },
      *writer);
}

grpc::Status ControlService::PlanDelete(grpc::ServerContext* context,
                                        const v1::DeleteVersionRequest* request,
                                        v1::DeletePlan* response) {
  ErrorMetadata about = AboutRemoval(*request);
  about["verb"] = "PlanDelete";
  const auto peer = Admit(*context, Right::kRead, "PlanDelete");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);
  if (auto status = CheckRemoval(*request); !status.ok()) return ToGrpcStatus(status, about);
  const absl::Status readable =
      RunAndWait(deps_.loop, [&] { return CheckMayRead(*peer, request->model()); });
  if (!readable.ok()) return ToGrpcStatus(readable, about);
  const auto plan = Await<DeletePlan>(
      *context, [&manager = deps_.manager, key = VersionKey{request->model(), request->version()}](
                    auto done) { manager.PlanDelete(key, std::move(done)); });
  if (!plan.ok()) return ToGrpcStatus(plan.status(), about);
  *response = ToProto(*plan);
  return grpc::Status::OK;
}

grpc::Status ControlService::CollectGarbage(grpc::ServerContext* context,
                                            const v1::CollectGarbageRequest* request,
                                            grpc::ServerWriter<v1::OperationEvent>* writer) {
  return RunOperation(
      *context, "CollectGarbage", {{"model", request->model()}},
      [&](ModelManager& manager, uint32_t uid) -> absl::StatusOr<OperationId> {
        if (auto status = CheckCollection(*request); !status.ok()) return status;
        return manager.CollectGarbage(request->model(), uid);
      },
      *writer);
}

grpc::Status ControlService::PlanGarbage(grpc::ServerContext* context,
                                         const v1::CollectGarbageRequest* request,
                                         v1::GarbagePlan* response) {
  const ErrorMetadata about = {{"verb", "PlanGarbage"}, {"model", request->model()}};
  const auto peer = Admit(*context, Right::kRead, "PlanGarbage");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);
  if (auto status = CheckCollection(*request); !status.ok()) return ToGrpcStatus(status, about);
  if (!request->model().empty()) {
    const absl::Status readable =
        RunAndWait(deps_.loop, [&] { return CheckMayRead(*peer, request->model()); });
    if (!readable.ok()) return ToGrpcStatus(readable, about);
  }
  // Of all models: of those that the caller may read. What is left of others, commanders see.
  const bool leftovers = deps_.admission.MayCommand(*peer);
  const auto plan = Await<GarbagePlan>(*context, [&manager = deps_.manager, peer = *peer,
                                                  model = request->model(), leftovers](auto done) {
    manager.PlanGarbage(
        model, [&](const std::string& each) { return manager.MayReadModel(peer, each); }, leftovers,
        std::move(done));
  });
  if (!plan.ok()) return ToGrpcStatus(plan.status(), about);
  *response = ToProto(*plan);
  return grpc::Status::OK;
}

}  // namespace modelhost
