// Any bytes as a request and its plan: no crash, and what passes keeps the parser's promises.
//
// Input: a count of descriptors, a frame of the right length, then the plan.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "daemon/device_agent/agent_frames.h"

namespace {

using modelhost::agent::Frame;
using modelhost::agent::ParsePlan;
using modelhost::agent::ParseRequest;
using modelhost::agent::Request;
using modelhost::agent::SegmentIsDescriptor;
using modelhost::agent::TextOf;
using modelhost::agent::UploadItem;

void Require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  Require(!ParseRequest(bytes, 0).ok() || size == sizeof(Request));
  if (size <= sizeof(Request)) return 0;
  const size_t fds = data[0];
  const auto request = ParseRequest(bytes.subspan(1, sizeof(Request)), fds);
  const auto plan = bytes.subspan(1 + sizeof(Request));
  if (!request.ok()) {
    Require(!request.error().text.empty());
    return 0;
  }
  Require(TextOf(request->uuid).size() < sizeof(request->uuid));
  Require(TextOf(request->direct_failure).size() < sizeof(request->direct_failure));
  Require(TextOf(request->ipc_failure).size() < sizeof(request->ipc_failure));
  const auto type = static_cast<Frame>(request->header.type);
  const size_t segment = SegmentIsDescriptor(*request) ? 1 : 0;
  if (type == Frame::kVerify || type == Frame::kCheck) Require(fds == segment);
  if (type != Frame::kUpload) return 0;
  Require(fds > segment && request->bytes > 0 && request->bytes % 8 == 0);
  const size_t sources = fds - segment - 1;
  const auto items = ParsePlan(plan, request->items, sources, request->bytes);
  if (!items.ok()) return 0;
  Require(items->size() == plan.size() / sizeof(UploadItem));
  uint64_t end = 0;
  for (const UploadItem& item : *items) {
    Require(item.bytes > 0 && item.source < sources && item.device_offset >= end);
    end = item.device_offset + item.bytes;
    Require(end > item.device_offset && end <= request->bytes);
    Require(item.source_offset + item.bytes <= static_cast<uint64_t>(INT64_MAX));
  }
  return 0;
}
