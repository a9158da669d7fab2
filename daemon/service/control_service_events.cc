// The stream of events. It reads from the registry's ring at its own pace, so that a reader who is
// slow, or never reads, holds nothing: what has gone from the ring meanwhile is told as a number.
#include "absl/time/clock.h"
#include "daemon/service/control_service.h"
#include "daemon/service/proto_convert.h"

namespace modelhost {
namespace {

constexpr size_t kEventsAtATime = 256;

absl::Time TimeOf(const google::protobuf::Timestamp& time) {
  return absl::FromUnixSeconds(time.seconds()) + absl::Nanoseconds(time.nanos());
}

}  // namespace

grpc::Status ControlService::WatchEvents(grpc::ServerContext* context,
                                         const v1::WatchEventsRequest* request,
                                         grpc::ServerWriter<v1::Event>* writer) {
  const ErrorMetadata about = {{"verb", "WatchEvents"}, {"model", request->model()}};
  const auto peer = Admit(*context, Right::kRead, "WatchEvents", CallGuard::Kind::kWatch);
  if (!peer.ok()) return ToGrpcStatus(peer.status(), about);
  uint64_t epoch = 0;
  uint64_t next = request->after_sequence();
  RunAndWait(deps_.loop, [&] {
    epoch = deps_.manager.Status().epoch;
    if (request->has_after_time()) next = deps_.manager.SequenceAt(TimeOf(request->after_time()));
  });
  uint64_t lost = 0;
  while (true) {
    if (auto status = StillWanted(*context); !status.ok()) return ToGrpcStatus(status, about);
    EventPage page;
    bool at_end = false;
    RunAndWait(deps_.loop, [&] {
      page = deps_.manager.EventsAfter(next, kEventsAtATime);
      at_end = page.events.size() < kEventsAtATime;
      std::erase_if(page.events, [&](const EventRecord& event) {
        return (!request->model().empty() && event.model != request->model()) ||
               !deps_.manager.MayReadModel(*peer, event.model);
      });
    });
    next = page.next;
    lost += page.lost;
    for (const EventRecord& event : page.events) {
      v1::Event message;
      ToProto(event, &message);
      message.set_sequence(event.sequence);
      message.set_epoch(epoch);
      message.set_lost(std::exchange(lost, 0));
      if (!writer->Write(message)) return grpc::Status::CANCELLED;
    }
    if (!at_end) continue;
    if (!request->follow()) return grpc::Status::OK;
    absl::SleepFor(kStreamTick);
  }
}

}  // namespace modelhost
