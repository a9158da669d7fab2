// The RPCs that only look.
#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "daemon/service/control_service.h"
#include "daemon/service/proto_convert.h"

namespace modelhost {
namespace {

std::vector<ModelSnapshot> ReadableModels(const ModelManager& manager, const Peer& peer) {
  std::vector<ModelSnapshot> models = manager.Models();
  std::erase_if(
      models, [&](const ModelSnapshot& model) { return !manager.MayReadModel(peer, model.name); });
  return models;
}

bool MayReadOperation(const ModelManager& manager, const Peer& peer,
                      const OperationSnapshot& operation) {
  return manager.MayReadModel(peer, operation.model) &&
         std::ranges::all_of(operation.result.changes, [&](const LabelChange& change) {
           return manager.MayReadModel(peer, change.model);
         });
}

}  // namespace

grpc::Status ControlService::GetStatus(grpc::ServerContext* context,
                                       const v1::GetStatusRequest* /*request*/,
                                       v1::GetStatusResponse* response) {
  const auto peer = Admit(*context, Right::kRead, "GetStatus");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), {{"verb", "GetStatus"}});
  const StatusSnapshot status = RunAndWait(deps_.loop, [&] {
    StatusSnapshot now = deps_.manager.Status();
    std::erase_if(now.desired.rows, [&](const DesiredRow& row) {
      return !deps_.manager.MayReadModel(*peer, row.model);
    });
    return now;
  });
  ToProto(status, deps_.clock.Wall(), response);
  response->set_version(deps_.info.version);
  response->set_revision(deps_.info.revision);
  response->set_runtime_dir(SafeText(deps_.info.runtime_dir));
  response->set_pid(deps_.info.pid);
  response->set_metrics_address(deps_.info.metrics_address);
  return grpc::Status::OK;
}

grpc::Status ControlService::ListModels(grpc::ServerContext* context,
                                        const v1::ListModelsRequest* /*request*/,
                                        v1::ListModelsResponse* response) {
  const auto peer = Admit(*context, Right::kRead, "ListModels");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), {{"verb", "ListModels"}});
  const auto models = RunAndWait(deps_.loop, [&] { return ReadableModels(deps_.manager, *peer); });
  for (const ModelSnapshot& model : models) *response->add_models() = ToProto(model);
  return grpc::Status::OK;
}

grpc::Status ControlService::GetModel(grpc::ServerContext* context,
                                      const v1::GetModelRequest* request, v1::Model* response) {
  const ErrorMetadata about = {{"verb", "GetModel"}, {"model", request->model()}};
  const auto peer = Admit(*context, Right::kRead, "GetModel");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);
  const auto model = RunAndWait(deps_.loop, [&]() -> absl::StatusOr<ModelSnapshot> {
    if (auto status = CheckMayRead(*peer, request->model()); !status.ok()) return status;
    return deps_.manager.Model(request->model());
  });
  if (!model.ok()) return ToGrpcStatus(model.status(), about);
  *response = ToProto(*model);
  return grpc::Status::OK;
}

grpc::Status ControlService::ListVersions(grpc::ServerContext* context,
                                          const v1::ListVersionsRequest* request,
                                          v1::ListVersionsResponse* response) {
  const ErrorMetadata about = {{"verb", "ListVersions"}, {"model", request->model()}};
  const auto peer = Admit(*context, Right::kRead, "ListVersions");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);
  const auto model = RunAndWait(deps_.loop, [&]() -> absl::StatusOr<ModelSnapshot> {
    if (auto status = CheckMayRead(*peer, request->model()); !status.ok()) return status;
    return deps_.manager.Model(request->model());
  });
  if (!model.ok()) return ToGrpcStatus(model.status(), about);
  for (const VersionSnapshot& version : model->versions) {
    *response->add_versions() = ToProto(version);
  }
  return grpc::Status::OK;
}

grpc::Status ControlService::GetVersion(grpc::ServerContext* context,
                                        const v1::GetVersionRequest* request,
                                        v1::Version* response) {
  ErrorMetadata about = {
      {"verb", "GetVersion"}, {"model", request->model()}, {"label", request->label()}};
  if (request->version() != 0) about["version"] = absl::StrCat(request->version());
  const auto peer = Admit(*context, Right::kRead, "GetVersion");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);
  std::vector<EventRecord> events;
  const auto version = RunAndWait(deps_.loop, [&]() -> absl::StatusOr<VersionSnapshot> {
    if (auto status = CheckMayRead(*peer, request->model()); !status.ok()) return status;
    VersionKey key{request->model(), request->version()};
    if (key.version == 0) {
      auto resolved = deps_.manager.Resolve(
          request->model(), request->label().empty() ? kDefaultLabel : request->label());
      if (!resolved.ok()) return resolved.status();
      key = *std::move(resolved);
    }
    events = deps_.manager.Events(key.model);
    return deps_.manager.Version(key);
  });
  if (!version.ok()) return ToGrpcStatus(version.status(), about);
  *response = ToProto(*version);
  AddDetails(*version, events, response);
  return grpc::Status::OK;
}

grpc::Status ControlService::WatchModels(grpc::ServerContext* context,
                                         const v1::WatchModelsRequest* /*request*/,
                                         grpc::ServerWriter<v1::Model>* writer) {
  const ErrorMetadata about = {{"verb", "WatchModels"}};
  const auto peer = Admit(*context, Right::kRead, "WatchModels", CallGuard::Kind::kWatch);
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);
  // Subscribed first: what changes while the first state is sent is sent again.
  const auto subscription = deps_.watcher.Subscribe();
  for (const ModelSnapshot& model :
       RunAndWait(deps_.loop, [&] { return ReadableModels(deps_.manager, *peer); })) {
    if (!writer->Write(ToProto(model))) return grpc::Status::CANCELLED;
  }
  absl::Duration told = deps_.clock.Monotonic();
  while (true) {
    if (auto status = StillWanted(*context); !status.ok()) return ToGrpcStatus(status, about);
    for (const std::string& name : subscription->Take(kStreamTick)) {
      bool readable = false;
      const auto model = RunAndWait(deps_.loop, [&] {
        readable = deps_.manager.MayReadModel(*peer, name);
        return deps_.manager.Model(name);
      });
      if (!readable) continue;
      v1::Model message;
      if (model.ok()) {
        message = ToProto(*model);
      } else {
        message.set_name(SafeText(name));  // Gone: no versions, no labels.
      }
      if (!writer->Write(message)) return grpc::Status::CANCELLED;
    }
    // Ten times a second is often enough for anyone who looks, also while a load makes progress.
    const absl::Duration early = kStreamTick - (deps_.clock.Monotonic() - told);
    if (early > absl::ZeroDuration()) absl::SleepFor(early);
    told = deps_.clock.Monotonic();
  }
}

grpc::Status ControlService::GetOperation(grpc::ServerContext* context,
                                          const v1::GetOperationRequest* request,
                                          v1::Operation* response) {
  const ErrorMetadata about = {{"verb", "GetOperation"}, {"operation", request->id()}};
  const auto peer = Admit(*context, Right::kRead, "GetOperation");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);
  const auto id = ParseOperationName(request->id());
  if (!id.ok()) return ToGrpcStatus(id.status(), about);
  const auto operation = RunAndWait(deps_.loop, [&]() -> absl::StatusOr<OperationSnapshot> {
    auto found = deps_.manager.GetOperation(*id);
    if (!found.ok()) return found;
    if (auto status = CheckMayRead(*peer, *found); !status.ok()) return status;
    return found;
  });
  if (!operation.ok()) return ToGrpcStatus(operation.status(), about);
  *response = ToProto(*operation);
  return grpc::Status::OK;
}

grpc::Status ControlService::ListOperations(grpc::ServerContext* context,
                                            const v1::ListOperationsRequest* /*request*/,
                                            v1::ListOperationsResponse* response) {
  const auto peer = Admit(*context, Right::kRead, "ListOperations");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), {{"verb", "ListOperations"}});
  const auto operations = RunAndWait(deps_.loop, [&] {
    auto all = deps_.manager.ListOperations();
    std::erase_if(all, [&](const OperationSnapshot& operation) {
      return !MayReadOperation(deps_.manager, *peer, operation);
    });
    return all;
  });
  for (const OperationSnapshot& operation : operations) {
    *response->add_operations() = ToProto(operation);
  }
  return grpc::Status::OK;
}

grpc::Status ControlService::WatchOperation(grpc::ServerContext* context,
                                            const v1::GetOperationRequest* request,
                                            grpc::ServerWriter<v1::OperationEvent>* writer) {
  const ErrorMetadata about = {{"verb", "WatchOperation"}, {"operation", request->id()}};
  const auto peer = Admit(*context, Right::kRead, "WatchOperation", CallGuard::Kind::kWatch);
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);
  const auto id = ParseOperationName(request->id());
  if (!id.ok()) return ToGrpcStatus(id.status(), about);
  const absl::Status readable = RunAndWait(deps_.loop, [&] {
    const auto found = deps_.manager.GetOperation(*id);
    return found.ok() ? CheckMayRead(*peer, *found) : found.status();
  });
  if (!readable.ok()) return ToGrpcStatus(readable, about);
  return StreamOperation(*context, *id, *writer);
}

namespace {

// One moment's leases, and who holds them.
struct LeaseView {
  std::vector<Lease> leases;
  std::map<SessionId, Session> sessions;
};

LeaseView LookAtLeases(const ModelManager& manager, const Peer& peer) {
  LeaseView view;
  view.leases = manager.Leases();
  std::erase_if(view.leases,
                [&](const Lease& lease) { return !manager.MayReadModel(peer, lease.key.model); });
  for (Session& session : manager.Sessions()) {
    const SessionId id = session.id;
    view.sessions.emplace(id, std::move(session));
  }
  return view;
}

v1::Lease Describe(const LeaseView& view, const Lease& lease) {
  const auto session = view.sessions.find(lease.session);
  return ToProto(lease, session == view.sessions.end() ? nullptr : &session->second);
}

}  // namespace

grpc::Status ControlService::ListClients(grpc::ServerContext* context,
                                         const v1::ListClientsRequest* request,
                                         v1::ListClientsResponse* response) {
  const auto peer = Admit(*context, Right::kRead, "ListClients");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), {{"verb", "ListClients"}});
  const LeaseView view = RunAndWait(deps_.loop, [&] { return LookAtLeases(deps_.manager, *peer); });
  std::map<SessionId, v1::ClientInfo> clients;
  for (const auto& [id, session] : view.sessions) clients[id] = ToProto(session);
  for (const Lease& lease : view.leases) {
    const bool wanted = request->model().empty() || lease.key.model == request->model();
    const auto client = clients.find(lease.session);
    if (wanted && client != clients.end()) *client->second.add_leases() = Describe(view, lease);
  }
  for (auto& [id, client] : clients) {
    if (!request->model().empty() && client.leases().empty()) continue;
    *response->add_clients() = std::move(client);
  }
  return grpc::Status::OK;
}

grpc::Status ControlService::ListLeases(grpc::ServerContext* context,
                                        const v1::ListLeasesRequest* request,
                                        v1::ListLeasesResponse* response) {
  const auto peer = Admit(*context, Right::kRead, "ListLeases");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), {{"verb", "ListLeases"}});
  const LeaseView view = RunAndWait(deps_.loop, [&] { return LookAtLeases(deps_.manager, *peer); });
  for (const Lease& lease : view.leases) {
    if (!request->model().empty() && lease.key.model != request->model()) continue;
    if (request->stale_only() && !lease.stale_for.has_value()) continue;
    *response->add_leases() = Describe(view, lease);
  }
  return grpc::Status::OK;
}

grpc::Status ControlService::GetConfig(grpc::ServerContext* context,
                                       const v1::GetConfigRequest* /*request*/,
                                       v1::Config* response) {
  const auto peer = Admit(*context, Right::kRead, "GetConfig");
  if (!peer.ok()) return ToGrpcStatus(peer.status(), {{"verb", "GetConfig"}});
  const ConfigView view = RunAndWait(deps_.loop, [&] {
    ConfigView now = deps_.config.Effective();
    // What is about one model is told to those who may read it.
    std::erase_if(now.entries, [&](const ConfigEntry& entry) {
      absl::string_view name = entry.key;
      if (!absl::ConsumePrefix(&name, "models.")) return false;
      return !deps_.manager.MayReadModel(*peer, std::string(name.substr(0, name.rfind('.'))));
    });
    return now;
  });
  response->set_file(SafeText(view.file));
  for (const ConfigEntry& entry : view.entries) {
    v1::ConfigEntry* added = response->add_entries();
    added->set_key(SafeText(entry.key));
    added->set_value(SafeText(entry.value));
    added->set_source(SafeText(entry.source));
    added->set_reloadable(entry.reloadable);
  }
  return grpc::Status::OK;
}

}  // namespace modelhost
