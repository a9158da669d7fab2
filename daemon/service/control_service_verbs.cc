// The RPCs that change something.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "daemon/service/control_service.h"
#include "daemon/service/control_service_await.h"
#include "daemon/service/proto_convert.h"

namespace modelhost {
namespace {

ErrorMetadata About(const std::string& model, uint64_t version, const std::string& label = "") {
  ErrorMetadata about = {{"model", model}, {"label", label}};
  if (version != 0) about["version"] = absl::StrCat(version);
  return about;
}

absl::Status CheckModelName(const std::string& model) {
  if (IsValidModelName(model)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("model \"", SafeText(model, 64), "\": not a name ([a-z0-9][a-z0-9._-]{0,63})"));
}

absl::Status CheckVersion(const std::string& model, uint64_t version) {
  if (auto status = CheckModelName(model); !status.ok()) return status;
  if (version != 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(model, ": no version given (numbers from 1)"));
}

absl::StatusOr<std::string> LabelOrDefault(const std::string& label) {
  if (label.empty()) return std::string(kDefaultLabel);
  if (IsValidModelName(label)) return label;
  return absl::InvalidArgumentError(
      absl::StrCat("label \"", SafeText(label, 64), "\": not a name ([a-z0-9][a-z0-9._-]{0,63})"));
}

absl::Status CheckSwap(const v1::SwapRequest& request) {
  constexpr int kMostTargets = 64;
  if (request.targets().empty()) return absl::InvalidArgumentError("swap: no model given");
  if (request.targets_size() > kMostTargets) {
    return absl::InvalidArgumentError(absl::StrCat("swap: ", request.targets_size(),
                                                   " models, at most ", kMostTargets, " in a set"));
  }
  for (const v1::SwapTarget& target : request.targets()) {
    if (auto status = CheckVersion(target.model(), target.version()); !status.ok()) return status;
  }
  return LabelOrDefault(request.label()).status();
}

}  // namespace

grpc::Status ControlService::Verify(grpc::ServerContext* context, const v1::VerifyRequest* request,
                                    grpc::ServerWriter<v1::OperationEvent>* writer) {
  return RunOperation(
      *context, "Verify", About(request->model(), request->version()),
      [&](ModelManager& manager, uint32_t uid) -> absl::StatusOr<OperationId> {
        if (auto status = CheckVersion(request->model(), request->version()); !status.ok()) {
          return status;
        }
        return manager.Verify({request->model(), request->version()}, uid);
      },
      *writer);
}

grpc::Status ControlService::Load(grpc::ServerContext* context, const v1::LoadRequest* request,
                                  grpc::ServerWriter<v1::OperationEvent>* writer) {
  return RunOperation(
      *context, "Load", About(request->model(), request->version()),
      [&](ModelManager& manager, uint32_t uid) -> absl::StatusOr<OperationId> {
        if (auto status = CheckVersion(request->model(), request->version()); !status.ok()) {
          return status;
        }
        return manager.Load({request->model(), request->version()}, uid);
      },
      *writer);
}

grpc::Status ControlService::Unload(grpc::ServerContext* context, const v1::UnloadRequest* request,
                                    grpc::ServerWriter<v1::OperationEvent>* writer) {
  return RunOperation(
      *context, "Unload", About(request->model(), request->version()),
      [&](ModelManager& manager, uint32_t uid) -> absl::StatusOr<OperationId> {
        if (auto status = CheckVersion(request->model(), request->version()); !status.ok()) {
          return status;
        }
        std::optional<absl::Duration> timeout;
        if (request->has_drain_timeout()) {
          auto given = FromProto(request->drain_timeout());
          if (!given.ok()) return given.status();
          timeout = *given;
        }
        return manager.Unload({request->model(), request->version()}, timeout,
                              request->release_on_deadline(), uid);
      },
      *writer);
}

grpc::Status ControlService::Swap(grpc::ServerContext* context, const v1::SwapRequest* request,
                                  grpc::ServerWriter<v1::OperationEvent>* writer) {
  const bool empty = request->targets().empty();
  return RunOperation(
      *context, "Swap",
      About(empty ? "" : request->targets(0).model(), empty ? 0 : request->targets(0).version(),
            request->label()),
      [&](ModelManager& manager, uint32_t uid) -> absl::StatusOr<OperationId> {
        if (auto status = CheckSwap(*request); !status.ok()) return status;
        return manager.Swap(FromProto(*request), uid);
      },
      *writer);
}

grpc::Status ControlService::PlanSwap(grpc::ServerContext* context, const v1::SwapRequest* request,
                                      v1::SwapPlan* response) {
  const ErrorMetadata about = {{"verb", "PlanSwap"}, {"label", request->label()}};
  const auto peer = Admit(*context, Right::kRead, "PlanSwap");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);
  if (auto status = CheckSwap(*request); !status.ok()) return ToGrpcStatus(status, about);
  const auto plan = RunAndWait(deps_.loop, [&]() -> absl::StatusOr<SwapPlan> {
    for (const v1::SwapTarget& target : request->targets()) {
      if (auto status = CheckMayRead(*peer, target.model()); !status.ok()) return status;
    }
    return deps_.manager.PlanSwap(FromProto(*request));
  });
  if (!plan.ok()) return ToGrpcStatus(plan.status(), about);
  *response = ToProto(*plan);
  return grpc::Status::OK;
}

grpc::Status ControlService::Rollback(grpc::ServerContext* context,
                                      const v1::RollbackRequest* request,
                                      grpc::ServerWriter<v1::OperationEvent>* writer) {
  return RunOperation(
      *context, "Rollback", About(request->model(), request->to(), request->label()),
      [&](ModelManager& manager, uint32_t uid) -> absl::StatusOr<OperationId> {
        if (auto status = CheckModelName(request->model()); !status.ok()) return status;
        auto label = LabelOrDefault(request->label());
        if (!label.ok()) return label.status();
        return manager.Rollback(request->model(), *label, request->to(), uid, request->strategy(),
                                request->allow_downtime());
      },
      *writer);
}

grpc::Status ControlService::SetLabel(grpc::ServerContext* context,
                                      const v1::SetLabelRequest* request,
                                      v1::LabelChange* response) {
  ErrorMetadata about = About(request->model(), request->version(), request->label());
  about["verb"] = "SetLabel";
  if (const auto peer = Admit(*context, Right::kCommand, "SetLabel"); !peer.ok()) {
    return ToGrpcStatus(peer.status(), about);
  }
  absl::Status valid = CheckVersion(request->model(), request->version());
  const auto label = LabelOrDefault(request->label());
  valid.Update(label.status());
  if (!valid.ok()) return ToGrpcStatus(valid, about);

  std::optional<uint64_t> if_current;
  if (request->has_if_current()) if_current = request->if_current();
  // By value: the work may outlive this call.
  const auto change = Await<LabelChange>(
      *context, [&manager = deps_.manager, model = request->model(), label = *label,
                 version = request->version(), if_current](auto done) {
        manager.SetLabel(model, label, version, if_current, std::move(done));
      });
  if (!change.ok()) return ToGrpcStatus(change.status(), about);
  *response = ToProto(*change);
  return grpc::Status::OK;
}

grpc::Status ControlService::RemoveLabel(grpc::ServerContext* context,
                                         const v1::RemoveLabelRequest* request,
                                         v1::LabelChange* response) {
  ErrorMetadata about = About(request->model(), 0, request->label());
  about["verb"] = "RemoveLabel";
  if (const auto peer = Admit(*context, Right::kCommand, "RemoveLabel"); !peer.ok()) {
    return ToGrpcStatus(peer.status(), about);
  }
  absl::Status valid = CheckModelName(request->model());
  if (request->label().empty()) {
    valid.Update(absl::InvalidArgumentError("label: none given (say which one to remove)"));
  }
  valid.Update(LabelOrDefault(request->label()).status());
  if (!valid.ok()) return ToGrpcStatus(valid, about);

  std::optional<uint64_t> if_current;
  if (request->has_if_current()) if_current = request->if_current();
  const auto change = Await<LabelChange>(
      *context,
      [&manager = deps_.manager, model = request->model(), label = request->label(),
       if_current](auto done) { manager.RemoveLabel(model, label, if_current, std::move(done)); });
  if (!change.ok()) return ToGrpcStatus(change.status(), about);
  *response = ToProto(*change);
  return grpc::Status::OK;
}

grpc::Status ControlService::Rescan(grpc::ServerContext* context,
                                    const v1::RescanRequest* /*request*/,
                                    v1::RescanResponse* response) {
  const ErrorMetadata about = {{"verb", "Rescan"}};
  if (const auto peer = Admit(*context, Right::kCommand, "Rescan"); !peer.ok()) {
    return ToGrpcStatus(peer.status(), about);
  }
  const auto result = Await<ModelManager::RescanResult>(
      *context, [&manager = deps_.manager](auto done) { manager.Rescan(std::move(done)); });
  if (!result.ok()) return ToGrpcStatus(result.status(), about);
  response->set_models(result->models);
  response->set_versions(result->versions);
  response->set_added(result->added);
  response->set_gone(result->gone);
  response->set_invalid(result->invalid);
  return grpc::Status::OK;
}

grpc::Status ControlService::ReloadConfig(grpc::ServerContext* context,
                                          const v1::ReloadConfigRequest* /*request*/,
                                          v1::ReloadConfigResponse* response) {
  const ErrorMetadata about = {{"verb", "ReloadConfig"}};
  if (const auto peer = Admit(*context, Right::kCommand, "ReloadConfig"); !peer.ok()) {
    return ToGrpcStatus(peer.status(), about);
  }
  const auto report = Await<ReloadReport>(
      *context, [&config = deps_.config](auto done) { config.Reload(std::move(done)); });
  if (!report.ok()) return ToGrpcStatus(report.status(), about);
  response->set_file(SafeText(report->file));
  response->set_store_error(SafeText(report->store_error));
  for (const ConfigChange& change : report->changes) {
    v1::ConfigChange* added = response->add_changes();
    added->set_key(SafeText(change.key));
    added->set_from(SafeText(change.from));
    added->set_to(SafeText(change.to));
    added->set_needs_restart(change.needs_restart);
  }
  return grpc::Status::OK;
}

grpc::Status ControlService::CancelOperation(grpc::ServerContext* context,
                                             const v1::GetOperationRequest* request,
                                             v1::Operation* response) {
  const ErrorMetadata about = {{"verb", "CancelOperation"}, {"operation", request->id()}};
  if (const auto peer = Admit(*context, Right::kCommand, "CancelOperation"); !peer.ok()) {
    return ToGrpcStatus(peer.status(), about);
  }
  const auto id = ParseOperationName(request->id());
  if (!id.ok()) return ToGrpcStatus(id.status(), about);
  const auto operation = RunAndWait(deps_.loop, [&]() -> absl::StatusOr<OperationSnapshot> {
    if (auto status = deps_.manager.CancelOperation(*id); !status.ok()) return status;
    return deps_.manager.GetOperation(*id);
  });
  if (!operation.ok()) return ToGrpcStatus(operation.status(), about);
  *response = ToProto(*operation);
  return grpc::Status::OK;
}

grpc::Status ControlService::EvictLease(grpc::ServerContext* context,
                                        const v1::EvictLeaseRequest* request, v1::Lease* response) {
  const ErrorMetadata about = {{"verb", "EvictLease"}, {"lease", absl::StrCat(request->lease())}};
  if (const auto peer = Admit(*context, Right::kCommand, "EvictLease"); !peer.ok()) {
    return ToGrpcStatus(peer.status(), about);
  }
  const auto evicted = RunAndWait(deps_.loop, [&]() -> absl::StatusOr<v1::Lease> {
    const std::vector<Lease> leases = deps_.manager.Leases();
    const auto lease = std::find_if(leases.begin(), leases.end(), [&](const Lease& candidate) {
      return candidate.id == request->lease();
    });
    v1::Lease described;
    if (lease != leases.end()) {
      const std::vector<Session> sessions = deps_.manager.Sessions();
      const auto session = std::find_if(sessions.begin(), sessions.end(), [&](const Session& one) {
        return one.id == lease->session;
      });
      described = ToProto(*lease, session == sessions.end() ? nullptr : &*session);
    }
    if (auto status = deps_.manager.Evict(request->lease()); !status.ok()) return status;
    return described;
  });
  if (!evicted.ok()) return ToGrpcStatus(evicted.status(), about);
  *response = *evicted;
  return grpc::Status::OK;
}

}  // namespace modelhost
