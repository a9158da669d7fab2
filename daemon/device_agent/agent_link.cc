#include "daemon/device_agent/agent_link.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "daemon/device_agent/agent_frames.h"

namespace modelhost {
namespace {

constexpr std::chrono::milliseconds kAskInterval{20};

constexpr char kEnded[] = "the daemon ends";

}  // namespace

Result<AgentAnswer> AgentLink::Ask(agent::Frame frame, agent::Request request,
                                   std::span<const UniqueFd* const> fds,
                                   const AgentPatience& patience, const Progress& progress) {
  answered_ = false;
  const auto ended = [&] { return patience.ended != nullptr && patience.ended->load(); };
  if (ended()) return Error{Code::kCancelled, kEnded, 0};
  if (progress && !progress(0)) {
    return Error{Code::kCancelled, "it was cancelled before the device agent was asked", 0};
  }
  const uint32_t id = next_request_++;
  request.header = MakeHeader(static_cast<abi::FrameType>(frame), sizeof(request), id, fds.size());
  const auto broken = [&](Code code, std::string why) {
    broken_ = true;
    return Error{code, std::move(why), 0};
  };
  if (auto sent = SendFrame(socket_, AsBytes(request), {}, fds); !sent.ok()) {
    return broken(Code::kUnavailable, "the device agent has ended");
  }
  auto alive = std::chrono::steady_clock::now();
  auto limit = patience.stall;
  uint64_t done = 0;
  bool cancelled = false;
  std::array<std::byte, abi::kMaxFrameBytes> buffer;
  while (true) {
    const auto now = std::chrono::steady_clock::now();
    auto heard = ReceiveFrame(socket_, buffer, ReceiveWait::kUntilDeadline,
                              std::min(now + kAskInterval, alive + limit));
    if (!heard.ok() && heard.error().code != Code::kDeadlineExceeded) {
      const bool gone = heard.error().code == Code::kUnavailable;
      return broken(heard.error().code, gone ? "the device agent has ended"
                                             : "the device agent: " + heard.error().text);
    }
    if (heard.ok()) {
      auto reply = agent::ParseReply(std::span(buffer).first(heard->bytes), heard->fds.size(), id);
      if (!reply.ok()) return broken(reply.error().code, reply.error().text);
      if (agent::IsLast(*reply)) {
        answered_ = true;
        if (reply->dead != 0) broken_ = true;
        if (reply->code != 0) {
          return Error{static_cast<Code>(reply->code), std::string(agent::TextOf(reply->text)), 0};
        }
        return AgentAnswer{*reply, std::move(heard->fds)};
      }
      const uint64_t told = std::min(reply->bytes, 2 * request.bytes);
      if (told > done && !cancelled) alive = std::chrono::steady_clock::now();
      done = std::max(done, told);
    }
    if (ended()) return broken(Code::kCancelled, kEnded);
    if (!cancelled && progress && !progress(done)) {
      cancelled = true;
      alive = std::chrono::steady_clock::now();
      limit = patience.cancel;
      agent::Request stop{};
      stop.header =
          MakeHeader(static_cast<abi::FrameType>(agent::Frame::kCancel), sizeof(stop), 0, 0);
      (void)SendFrame(socket_, AsBytes(stop), {}, {});
    }
    if (std::chrono::steady_clock::now() - alive < limit) continue;
    const std::string waited = " for " + std::to_string(limit.count()) + " ms";
    return cancelled ? broken(Code::kCancelled, "the device agent did not stop" + waited)
                     : broken(Code::kDeadlineExceeded,
                              "the device agent gave no sign of progress" + waited);
  }
}

}  // namespace modelhost
