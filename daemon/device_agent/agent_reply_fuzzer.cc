// Any bytes as a reply of a device agent: no crash, and what passes keeps the parser's promises.
//
// Input: a count of descriptors, then the frame.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string_view>

#include "daemon/device_agent/agent_frames.h"
#include "daemon/device_agent/device_mode.h"

namespace {

void Require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using modelhost::agent::IsLast;
  using modelhost::agent::ParseReply;
  using modelhost::agent::TextOf;
  if (size == 0) return 0;
  const size_t fds = data[0];
  const auto reply = ParseReply(std::as_bytes(std::span(data + 1, size - 1)), fds, 7);
  if (!reply.ok()) {
    Require(reply.error().code == modelhost::Code::kInternal);
    return 0;
  }
  Require(fds <= (IsLast(*reply) ? 1U : 0U) && reply->header.request_id == 7);
  Require(reply->code <= static_cast<uint32_t>(modelhost::Code::kDataLoss));
  Require(TextOf(reply->text).size() < sizeof(reply->text));
  Require(TextOf(reply->device.uuid).size() < sizeof(reply->device.uuid));
  Require(TextOf(reply->device.name).size() < sizeof(reply->device.name));
  Require(TextOf(reply->device.reason).size() < sizeof(reply->device.reason));
  const auto mode = static_cast<modelhost::DeviceMode>(reply->device.mode);
  Require(std::string_view(modelhost::DeviceModeName(mode)) != "unknown");
  Require(reply->devices <= modelhost::agent::kMaxDevices);
  return 0;
}
