// Publish: a ticket for descriptors that follow over handles.sock, or the bytes themselves.
//
// The streamed kind stages on this RPC's own thread, so that disk and network wait for each other
// and nobody else does. Whatever ends it early (the stream, the operator, the daemon, a caller that
// sends nothing for kPublishIdle) removes what was staged.
#include <memory>
#include <numeric>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "daemon/service/control_service.h"
#include "daemon/service/proto_convert.h"

namespace modelhost {
namespace {

constexpr size_t kMostRequirements = 64;

absl::Status CheckBegin(const v1::PublishBegin& begin, size_t most_files) {
  if (!IsValidModelName(begin.model())) {
    return absl::InvalidArgumentError(absl::StrCat("model \"", SafeText(begin.model(), 64),
                                                   "\": not a name ([a-z0-9][a-z0-9._-]{0,63})"));
  }
  if (begin.version() == 0 || begin.version() > INT64_MAX) {
    return absl::InvalidArgumentError(
        absl::StrCat(begin.model(), "@", begin.version(), ": not a version number (from 1)"));
  }
  if (begin.files().empty() || static_cast<size_t>(begin.files_size()) > most_files) {
    return absl::InvalidArgumentError(absl::StrCat(begin.model(), "@", begin.version(), ": ",
                                                   begin.files_size(), " files (from 1 to ",
                                                   most_files, ")"));
  }
  if (static_cast<size_t>(begin.requirements_size()) > kMostRequirements) {
    return absl::InvalidArgumentError(
        absl::StrCat(begin.model(), "@", begin.version(), ": ", begin.requirements_size(),
                     " requirements (at most ", kMostRequirements, ")"));
  }
  uint64_t total = 0;
  for (const v1::PublishFile& file : begin.files()) {
    if (file.bytes() > INT64_MAX - total) {
      return absl::InvalidArgumentError(absl::StrCat(begin.model(), "@", begin.version(),
                                                     ": the sizes add up to more than any "
                                                     "file system holds"));
    }
    total += file.bytes();
  }
  return absl::OkStatus();
}

// Ends a call whose caller stays silent too long, or that nobody wants any more. Read() has no
// deadline of its own.
class IdleGuard : public std::enable_shared_from_this<IdleGuard> {
 public:
  enum class Why { kNone, kSilent, kUnwanted };

  // `unwanted` is asked on the control thread, at every tick.
  IdleGuard(grpc::ServerContext& context, ControlLoop& loop, Clock& clock, absl::Duration limit,
            std::function<bool()> unwanted)
      : loop_(loop),
        clock_(clock),
        limit_(limit),
        unwanted_(std::move(unwanted)),
        context_(&context),
        heard_(clock.Monotonic()) {}

  // Any thread.
  void Arm() {
    loop_.Post([self = shared_from_this()] { self->Look(); });
  }
  void Heard() {
    absl::MutexLock lock(&mutex_);
    heard_ = clock_.Monotonic();
  }
  // After this the context is not touched again.
  void Disarm() {
    absl::MutexLock lock(&mutex_);
    context_ = nullptr;
  }
  Why fired() const {
    absl::MutexLock lock(&mutex_);
    return fired_;
  }

 private:
  void Look() {
    {
      absl::MutexLock lock(&mutex_);
      if (context_ == nullptr) return;
      const bool silent = clock_.Monotonic() - heard_ >= limit_;
      if (silent || unwanted_()) {
        fired_ = silent ? Why::kSilent : Why::kUnwanted;
        context_->TryCancel();
        context_ = nullptr;
        return;
      }
    }
    loop_.PostDelayed(ControlService::kStreamTick, [self = shared_from_this()] { self->Look(); });
  }

  ControlLoop& loop_;
  Clock& clock_;
  const absl::Duration limit_;
  const std::function<bool()> unwanted_;
  mutable absl::Mutex mutex_;
  grpc::ServerContext* context_ ABSL_GUARDED_BY(mutex_);
  absl::Duration heard_ ABSL_GUARDED_BY(mutex_);
  Why fired_ ABSL_GUARDED_BY(mutex_) = Why::kNone;
};

// Puts the chunks of a stream where they belong, and takes nothing that was not announced.
class FileCursor {
 public:
  FileCursor(const std::vector<PublishFile>& files, StagedVersion& staged)
      : files_(files), staged_(staged) {}

  absl::Status Take(const v1::PublishChunk& chunk, size_t most_bytes) {
    if (chunk.data().size() > most_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("chunk of ", chunk.data().size(), " bytes: more than ", most_bytes));
    }
    if (chunk.file() >= files_.size() || chunk.file() < file_) {
      return absl::InvalidArgumentError(absl::StrCat(
          "chunk for file ", chunk.file(), ": not in the order announced (now at ", file_, ")"));
    }
    if (auto status = AdvanceTo(chunk.file()); !status.ok()) return status;
    const PublishFile& file = files_[file_];
    if (chunk.data().size() > file.bytes - in_file_) {
      return absl::InvalidArgumentError(absl::StrCat(SafeText(file.path, 256), ": more than the ",
                                                     file.bytes, " bytes that were announced"));
    }
    auto status = staged_.AppendBytes(
        file, std::as_bytes(std::span(chunk.data().data(), chunk.data().size())));
    if (!status.ok()) return status;
    begun_ = true;
    in_file_ += chunk.data().size();
    done_ += chunk.data().size();
    return absl::OkStatus();
  }

  // The stream has ended: everything must have come.
  absl::Status Finish() { return AdvanceTo(files_.size()); }

  uint64_t bytes_done() const { return done_; }

 private:
  absl::Status AdvanceTo(size_t next) {
    while (file_ < next) {
      const PublishFile& file = files_[file_];
      if (in_file_ != file.bytes) {
        return absl::InvalidArgumentError(absl::StrCat(SafeText(file.path, 256), ": ", in_file_,
                                                       " bytes came of the ", file.bytes,
                                                       " that were announced"));
      }
      if (!begun_) {  // An empty file.
        if (auto status = staged_.AppendBytes(file, {}); !status.ok()) return status;
      }
      ++file_;
      in_file_ = 0;
      begun_ = false;
    }
    return absl::OkStatus();
  }

  const std::vector<PublishFile>& files_;
  StagedVersion& staged_;
  size_t file_ = 0;
  uint64_t in_file_ = 0;
  uint64_t done_ = 0;
  bool begun_ = false;
};

}  // namespace

absl::StatusOr<PublishResult> ControlService::ReceiveFiles(
    grpc::ServerContext& context, grpc::ServerReader<v1::PublishRequest>& reader,
    const PublishRequest& request, OperationId operation) {
  auto staged =
      deps_.publisher.Stage(request.model, request.version, request.files, request.requirements);
  if (!staged.ok()) return staged.status();
  // What is compared with the store's files at the end of each can take long: it stops when asked.
  (*staged)->OnProgress(
      [&](uint64_t) { return !deps_.admission.stopping() && !context.IsCancelled(); });
  FileCursor cursor(request.files, **staged);

  auto guard = std::make_shared<IdleGuard>(
      context, deps_.loop, deps_.clock, kPublishIdle, [this, operation] {
        return deps_.admission.stopping() || deps_.manager.IsOperationCancelled(operation);
      });
  const absl::Cleanup disarm = [&] { guard->Disarm(); };
  guard->Arm();

  absl::Duration told = absl::ZeroDuration();
  v1::PublishRequest message;
  while (reader.Read(&message)) {
    guard->Heard();
    if (!message.has_chunk()) {
      return absl::InvalidArgumentError("publish: only chunks may follow the first message");
    }
    if (auto status = cursor.Take(message.chunk(), kMostChunkBytes); !status.ok()) return status;
    const absl::Duration now = deps_.clock.Monotonic();
    if (now - told < kStreamTick) continue;
    told = now;
    if (deps_.admission.stopping())
      return absl::UnavailableError("publish: the daemon is stopping");
    const bool cancelled = RunAndWait(deps_.loop, [&] {
      deps_.manager.ReportPublishProgress(operation, cursor.bytes_done());
      return deps_.manager.IsOperationCancelled(operation);
    });
    if (cancelled) return absl::CancelledError("publish: cancelled");
  }
  switch (guard->fired()) {
    case IdleGuard::Why::kSilent:
      return absl::DeadlineExceededError(
          absl::StrCat("publish: nothing came for ", absl::FormatDuration(kPublishIdle)));
    case IdleGuard::Why::kUnwanted:
      if (deps_.admission.stopping())
        return absl::UnavailableError("publish: the daemon is stopping");
      return absl::CancelledError("publish: cancelled");
    case IdleGuard::Why::kNone:
      break;
  }
  if (context.IsCancelled()) {
    return absl::CancelledError("publish: the caller left before everything had come");
  }
  if (auto status = cursor.Finish(); !status.ok()) return status;
  // The commit syncs and may take long; from here the caller's silence is no fault.
  guard->Disarm();
  const VersionKey key{request.model, request.version};
  std::shared_ptr<CommitGate> gate;
  const bool replace_bad = RunAndWait(deps_.loop, [&] {
    gate = deps_.manager.PublishGate(operation);
    deps_.manager.ReportPublishProgress(operation, cursor.bytes_done());
    return deps_.manager.IsQuarantined(key);
  });
  if (gate == nullptr) return absl::CancelledError("publish: cancelled");
  (*staged)->BeforeRename([gate] { return gate->Pass(); });
  return (*staged)->Commit(LooksLikeWeights, replace_bad);
}

grpc::Status ControlService::Publish(grpc::ServerContext* context,
                                     grpc::ServerReader<v1::PublishRequest>* reader,
                                     v1::PublishResponse* response) {
  ErrorMetadata about = {{"verb", "Publish"}};
  const auto peer = Admit(*context, Right::kCommand, "Publish", CallGuard::Kind::kPublish);
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);

  auto guard = std::make_shared<IdleGuard>(*context, deps_.loop, deps_.clock, kPublishIdle,
                                           [this] { return deps_.admission.stopping(); });
  guard->Arm();
  v1::PublishRequest first;
  const bool came = reader->Read(&first);
  guard->Disarm();
  if (!came || !first.has_begin()) {
    return ToGrpcStatus(
        absl::InvalidArgumentError("publish: the first message must say what is to come"), about);
  }
  const v1::PublishBegin& begin = first.begin();
  about["model"] = begin.model();
  about["version"] = absl::StrCat(begin.version());
  if (auto status = CheckBegin(begin, kMostPublishFiles); !status.ok()) {
    return ToGrpcStatus(status, about);
  }
  const PublishRequest request = FromProto(begin);

  if (begin.descriptors_follow()) {
    const auto ticket = RunAndWait(
        deps_.loop, [&] { return deps_.manager.PublishFromDescriptors(request, *peer); });
    if (!ticket.ok()) return ToGrpcStatus(ticket.status(), about);
    response->set_operation_id(OperationName(ticket->operation));
    response->set_ticket(ticket->ticket.data(), ticket->ticket.size());
    return grpc::Status::OK;
  }

  const auto operation = RunAndWait(
      deps_.loop, [&] { return deps_.manager.BeginStreamedPublish(request, peer->uid); });
  if (!operation.ok()) return ToGrpcStatus(operation.status(), about);
  about["operation"] = OperationName(*operation);
  auto result = ReceiveFiles(*context, *reader, request, *operation);
  const absl::Status received = result.status();
  RunAndWait(deps_.loop,
             [&] { deps_.manager.FinishStreamedPublish(*operation, std::move(result)); });
  if (!received.ok()) return ToGrpcStatus(received, about);

  // The operation ends when the version can be used.
  absl::Status ended;
  const absl::Status followed =
      FollowOperation(*context, *operation, [&](const OperationSnapshot& step) {
        if (!step.finished_state()) return true;
        ended = step.status;
        *response->mutable_result() = ToProto(step).result();
        return true;
      });
  ended.Update(followed);
  if (!ended.ok()) return ToGrpcStatus(ended, about);
  response->set_operation_id(OperationName(*operation));
  return grpc::Status::OK;
}

}  // namespace modelhost
