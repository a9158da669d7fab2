// Any bytes as a frame: no crash, and what passes keeps the parser's promises.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>
#include <variant>

#include "daemon/publish/frame_parser.h"

namespace modelhost {
namespace {

void Require(bool holds) {
  if (!holds) std::abort();
}

void Check(std::span<const std::byte> frame, size_t fd_count) {
  const auto request = ParseRequest(frame, fd_count);
  if (!request.ok()) {
    Require(!request.status().message().empty());
    return;
  }
  Require(request->request_id != 0 && request->request_id == RequestIdOf(frame));
  if (const auto* hello = std::get_if<HelloRequest>(&request->body)) {
    const auto abi = NegotiateAbi(*hello);
    Require(!abi.ok() || (*abi >= hello->abi_min && *abi <= hello->abi_max));
  }
  if (const auto* acquire = std::get_if<AcquireRequest>(&request->body)) {
    Require((acquire->device == AcquireRequest::Device::kNone) == acquire->gpu.empty());
    Require(acquire->gpu.size() < abi::kGpuUuidBytes);
    Require(!acquire->refs.empty() && acquire->refs.size() <= abi::kMaxSet);
    for (const RequestedRef& ref : acquire->refs) {
      Require(abi::IsValidName(ref.model.data(), ref.model.size()));
      const bool named = abi::IsValidName(ref.label.data(), ref.label.size());
      Require(ref.version == 0 || acquire->redeclare ? named || ref.version != 0 : !named);
    }
  }
  Require((fd_count != 0) == std::holds_alternative<UploadRequest>(request->body));
}

}  // namespace
}  // namespace modelhost

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto frame = std::as_bytes(std::span(data, size));
  // The count of descriptors comes from the kernel, not from the frame: try the honest one too.
  uint32_t announced = 0;
  if (size >= 16) std::memcpy(&announced, data + 12, sizeof(announced));
  modelhost::Check(frame, announced);
  modelhost::Check(frame, 0);
  modelhost::Check(frame, 64);
  return 0;
}
