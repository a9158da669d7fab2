#include "daemon/device_agent/agent_link.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

namespace modelhost {
namespace {

constexpr std::chrono::milliseconds kAskInterval{50};

}  // namespace

Result<AgentAnswer> AgentLink::Ask(agent::Frame frame, agent::Request request,
                                   std::span<const UniqueFd* const> fds,
                                   std::chrono::milliseconds stall, const Progress& progress) {
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
  uint64_t done = 0;
  bool cancelled = false;
  std::array<std::byte, abi::kMaxFrameBytes> buffer;
  while (true) {
    const auto now = std::chrono::steady_clock::now();
    auto heard = ReceiveFrame(socket_, buffer, ReceiveWait::kUntilDeadline,
                              std::min(now + kAskInterval, alive + stall));
    if (!heard.ok() && heard.error().code != Code::kDeadlineExceeded) {
      return broken(Code::kUnavailable, "the device agent has ended");
    }
    if (heard.ok()) {
      AgentAnswer answer;
      const auto type = static_cast<agent::Frame>(heard->header.type);
      if (heard->bytes != sizeof(answer.reply) || heard->header.request_id != id ||
          (type != agent::Frame::kReply && type != agent::Frame::kProgress)) {
        return broken(Code::kInternal, "the device agent answers what was not asked");
      }
      std::memcpy(&answer.reply, buffer.data(), sizeof(answer.reply));
      if (type == agent::Frame::kReply) {
        if (answer.reply.dead != 0) broken_ = true;
        if (answer.reply.code != 0) {
          answer.reply.text[sizeof(answer.reply.text) - 1] = '\0';
          return Error{static_cast<Code>(std::min<uint32_t>(answer.reply.code, 15)),
                       answer.reply.text, 0};
        }
        answer.fds = std::move(heard->fds);
        return answer;
      }
      if (answer.reply.bytes > done) alive = std::chrono::steady_clock::now();
      done = std::max<uint64_t>(done, answer.reply.bytes);
    }
    if (!cancelled && progress && !progress(done)) {
      cancelled = true;
      alive = std::chrono::steady_clock::now();
      agent::Request stop{};
      stop.header =
          MakeHeader(static_cast<abi::FrameType>(agent::Frame::kCancel), sizeof(stop), 0, 0);
      (void)SendFrame(socket_, AsBytes(stop), {}, {});
    }
    if (std::chrono::steady_clock::now() - alive >= stall) {
      return broken(
          cancelled ? Code::kCancelled : Code::kDeadlineExceeded,
          "the device agent gave no sign of progress for " + std::to_string(stall.count()) + " ms");
    }
  }
}

}  // namespace modelhost
