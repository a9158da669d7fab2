#include "daemon/service/worker_service.h"

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "daemon/service/index_pages.h"
#include "daemon/service/proto_convert.h"

namespace modelhost {
namespace {

ErrorMetadata AboutRef(const std::string& verb, const v1::WorkerRef& ref) {
  ErrorMetadata about = {{"verb", verb}, {"model", ref.model()}, {"label", ref.label()}};
  if (ref.version() != 0) about["version"] = absl::StrCat(ref.version());
  return about;
}

}  // namespace

// gRPC's end of a session. Its calls come on the control thread, gRPC's callbacks on threads of
// gRPC's own, one of a kind at a time; it deletes itself when gRPC is done with it, which is not
// before Finish.
class WorkerService::Stream final
    : public grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionEvent>,
      public SessionStream {
 public:
  Stream(ControlLoop& loop, WorkerSessions& sessions, WorkerSessions::Key key)
      : loop_(loop), sessions_(sessions), key_(key) {}

  WorkerSessions::Key key() const { return key_; }

  void Read() override {
    v1::SessionRequest* request = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      request = &request_;
    }
    StartRead(request);
  }
  void Write(v1::SessionEvent event) override {
    const v1::SessionEvent* written = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      event_ = std::move(event);
      written = &event_;
    }
    StartWrite(written);
  }
  void Finish(const absl::Status& status) override {
    {
      absl::MutexLock lock(&mutex_);  // What came before comes before its end.
    }
    ServerBidiReactor::Finish(ToGrpcStatus(status, {{"verb", "Session"}}));
  }

 private:
  void OnReadDone(bool ok) override {
    v1::SessionRequest request;
    {
      absl::MutexLock lock(&mutex_);
      request = std::move(request_);
      request_.Clear();
    }
    Tell([ok, request = std::move(request)](WorkerSession& session) {
      session.OnRead(ok ? &request : nullptr);
    });
  }
  void OnWriteDone(bool /*ok*/) override {
    // One that failed is followed by OnCancel.
    Tell([](WorkerSession& session) { session.OnWritten(); });
  }
  void OnCancel() override {
    Tell([](WorkerSession& session) { session.OnCancel(); });
  }
  void OnDone() override {
    { absl::MutexLock lock(&mutex_); }
    delete this;  // lint: allow(naked-new) gRPC's last call: a reactor ends itself
  }

  template <typename Call>
  void Tell(Call call) {
    loop_.Post([&sessions = sessions_, key = key_, call = std::move(call)] {
      sessions.With(key, [&](WorkerSession& session) { call(session); });
    });
  }

  ControlLoop& loop_;
  WorkerSessions& sessions_;
  const WorkerSessions::Key key_;
  // Orders what the control thread and gRPC's threads do with the messages; each has them in turn.
  absl::Mutex mutex_;
  v1::SessionRequest request_ ABSL_GUARDED_BY(mutex_);
  v1::SessionEvent event_ ABSL_GUARDED_BY(mutex_);
};

grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionEvent>* WorkerService::Session(
    grpc::CallbackServerContext* context) {
  // lint: allow(naked-new) it ends itself (OnDone)
  auto* stream = new Stream(deps_.loop, deps_.sessions, next_key_++);
  auto peer = deps_.admission.PeerOf(*context, "Session");
  deps_.loop.Post([this, context, stream, peer = std::move(peer)] {
    if (peer.ok()) {
      Begin(*context, *peer, *stream);
    } else {
      stream->Finish(peer.status());
    }
  });
  return stream;
}

void WorkerService::Begin(grpc::CallbackServerContext& context, const Peer& peer, Stream& stream) {
  if (auto status = deps_.admission.AdmitOnLoop(context, peer, Admission::Right::kRead, "Session",
                                                CallGuard::Kind::kSession);
      !status.ok()) {
    stream.Finish(status);
    return;
  }
  auto session = std::make_shared<WorkerSession>(WorkerSession::Deps{deps_.manager, deps_.clock},
                                                 peer, stream);
  deps_.sessions.Add(stream.key(), session);
  session->Start(deps_.manager.Status().epoch, deps_.info.runtime_dir + "/handles.sock");
}

void WorkerService::EndSessions() {
  RunAndWait(deps_.loop, [&] { deps_.sessions.StopAll(); });
}

absl::StatusOr<WorkerService::Found> WorkerService::Find(const Peer& peer,
                                                         const AcquireRef& ref) const {
  if (auto status = deps_.admission.CheckMayRead(peer, ref.model); !status.ok()) return status;
  Found found;
  VersionKey key{ref.model, ref.version};
  if (ref.version == 0) {
    auto resolved = deps_.manager.Resolve(ref.model, ref.label);
    if (!resolved.ok()) return resolved.status();
    key = *std::move(resolved);
    const auto model = deps_.manager.Model(ref.model);
    if (!model.ok()) return model.status();
    const auto label = model->labels.find(ref.label);
    if (label != model->labels.end()) found.generation = label->second.generation;
  }
  auto version = deps_.manager.Version(key);
  if (!version.ok()) return version.status();
  found.version = *std::move(version);
  found.epoch = deps_.manager.Status().epoch;
  const auto& digest = found.version.digest;
  if (!ref.digest.IsZero() && digest.has_value() && *digest != ref.digest) {
    return absl::NotFoundError(absl::StrCat(key.ToString(), ": has digest ", digest->Short(),
                                            ", not ", ref.digest.Short(), " as asked"));
  }
  return found;
}

grpc::Status WorkerService::Resolve(grpc::ServerContext* context, const v1::ResolveRequest* request,
                                    v1::Resolved* response) {
  const ErrorMetadata about = AboutRef("Resolve", request->ref());
  const auto peer =
      deps_.admission.Admit(*context, Admission::Right::kRead, "Resolve", CallGuard::Kind::kCall);
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);
  const auto ref = ToRef(request->ref(), /*redeclare=*/false);
  if (!ref.ok()) return ToGrpcStatus(ref.status(), about);
  const auto found = RunAndWait(deps_.loop, [&] { return Find(*peer, *ref); });
  if (!found.ok()) return ToGrpcStatus(found.status(), about);
  const v1::Version version = ToProto(found->version);
  response->set_model(version.model());
  response->set_version(version.version());
  response->set_label(ref->label);
  response->set_generation(found->generation);
  response->set_digest(version.digest());
  response->set_phase(version.phase());
  response->set_health(version.health());
  response->set_reason(version.reason());
  response->set_epoch(found->epoch);
  return grpc::Status::OK;
}

grpc::Status WorkerService::GetIndex(grpc::ServerContext* context,
                                     const v1::GetIndexRequest* request,
                                     grpc::ServerWriter<v1::IndexPage>* writer) {
  const ErrorMetadata about = AboutRef("GetIndex", request->ref());
  const auto peer =
      deps_.admission.Admit(*context, Admission::Right::kRead, "GetIndex", CallGuard::Kind::kCall);
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);
  const auto ref = ToRef(request->ref(), /*redeclare=*/false);
  if (!ref.ok()) return ToGrpcStatus(ref.status(), about);
  auto found = RunAndWait(deps_.loop, [&] { return Find(*peer, *ref); });
  if (!found.ok()) return ToGrpcStatus(found.status(), about);
  if (found->version.resident == nullptr) {
    return ToGrpcStatus(
        absl::FailedPreconditionError(absl::StrCat(
            found->version.key.ToString(), ": not READY but ", PhaseName(found->version.phase),
            ": there is no index yet (acquire it, or `modelctl load ",
            found->version.key.ToString(), "`)")),
        about);
  }
  const auto index = FlatIndex::Map(found->version.resident->index);
  found->version.resident.reset();  // The reader may be slow; the weights need not wait for it.
  if (!index.ok()) return ToGrpcStatus(index.status(), about);
  IndexPages pages(*index, request->page_tensors());
  while (true) {
    if (auto status = deps_.admission.StillWanted(*context); !status.ok()) {
      return ToGrpcStatus(status, about);
    }
    v1::IndexPage page;
    const auto more = pages.Next(&page);
    if (!more.ok()) return ToGrpcStatus(more.status(), about);
    if (!*more) return grpc::Status::OK;
    if (!writer->Write(page)) return grpc::Status::CANCELLED;
  }
}

}  // namespace modelhost
