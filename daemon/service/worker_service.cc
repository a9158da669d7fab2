#include "daemon/service/worker_service.h"

#include <grpcpp/support/proto_buffer_reader.h>
#include <grpcpp/support/proto_buffer_writer.h>

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
    : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
      public SessionStream {
 public:
  Stream(ControlLoop& loop, WorkerSessions& sessions, WorkerSessions::Key key)
      : loop_(loop), sessions_(sessions), key_(key) {}

  WorkerSessions::Key key() const { return key_; }

  void Read() override {
    grpc::ByteBuffer* request = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      request = &request_;
    }
    StartRead(request);
  }
  void Write(v1::SessionEvent event) override {
    const grpc::ByteBuffer* written = nullptr;
    {
      absl::MutexLock lock(&mutex_);
      event_.Clear();
      bool own = false;
      // It cannot fail: there is nothing that a message of ours lacks.
      (void)grpc::GenericSerialize<grpc::ProtoBufferWriter, v1::SessionEvent>(event, &event_, &own);
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
    if (!ok) {
      Tell([](WorkerSession& session) { session.OnRead(nullptr); });
      return;
    }
    auto request = Parse();
    if (!request.ok()) {
      Tell([status = request.status()](WorkerSession& session) { session.OnBadRequest(status); });
      return;
    }
    Tell([request = *std::move(request)](WorkerSession& session) { session.OnRead(&request); });
  }
  absl::StatusOr<v1::SessionRequest> Parse() {
    grpc::ByteBuffer bytes;
    {
      absl::MutexLock lock(&mutex_);
      bytes.Swap(&request_);
    }
    if (bytes.Length() > WorkerSession::kMostRequestBytes) {
      return absl::InvalidArgumentError(absl::StrCat("session: a request of ", bytes.Length(),
                                                     " bytes, expected at most ",
                                                     WorkerSession::kMostRequestBytes));
    }
    v1::SessionRequest request;
    if (!grpc::GenericDeserialize<grpc::ProtoBufferReader, v1::SessionRequest>(&bytes, &request)
             .ok()) {
      return absl::InvalidArgumentError("session: a message that is no SessionRequest");
    }
    return request;
  }
  void OnWriteDone(bool /*ok*/) override {
    // One that failed is followed by OnCancel.
    Tell([](WorkerSession& session) { session.OnWritten(); });
  }
  void OnCancel() override {
    Tell([](WorkerSession& session) { session.OnCancel(); });
  }
  void OnDone() override {
    const std::unique_ptr<Stream> self(this);
    absl::MutexLock lock(&self->mutex_);  // What came before comes before its end.
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
  grpc::ByteBuffer request_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer event_ ABSL_GUARDED_BY(mutex_);
};

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* WorkerService::Session(
    grpc::CallbackServerContext* context) {
  // Its own owner, until OnDone.
  Stream* stream = std::make_unique<Stream>(deps_.loop, deps_.sessions, next_key_++).release();
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
  session->Start(deps_.manager.epoch(), deps_.info.runtime_dir + "/handles.sock");
  deps_.sessions.Add(stream.key(), session);
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
  found.epoch = deps_.manager.epoch();
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
      deps_.admission.Admit(*context, Admission::Right::kRead, "GetIndex", CallGuard::Kind::kIndex);
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
  const auto sent = SendPages(
      *index, request->page_tensors(), deps_.clock, [&](const v1::IndexPage& page) -> absl::Status {
        if (auto status = deps_.admission.StillWanted(*context); !status.ok()) return status;
        if (!writer->Write(page)) return absl::CancelledError("the caller has gone");
        return absl::OkStatus();
      });
  return ToGrpcStatus(sent, about);
}

}  // namespace modelhost
