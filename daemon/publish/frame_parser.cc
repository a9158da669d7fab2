#include "daemon/publish/frame_parser.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

using Bytes = std::span<const std::byte>;

constexpr uint32_t kDeviceFlags = abi::kAcquireDevice | abi::kAcquireDeviceIfAny;

absl::Status Malformed(absl::string_view frame, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("malformed ", frame, " frame: ", why));
}

// The caller has checked the length.
template <typename T>
T Read(Bytes frame, size_t offset = 0) {
  T value;
  std::memcpy(&value, frame.data() + offset, sizeof(T));
  return value;
}

absl::Status CheckSize(Bytes frame, size_t wanted, absl::string_view name) {
  if (frame.size() == wanted) return absl::OkStatus();
  return Malformed(name, absl::StrCat(frame.size(), " bytes, expected ", wanted));
}

absl::StatusOr<std::string> ReadName(const char (&field)[abi::kNameBytes], absl::string_view what) {
  const char* end = std::find(std::begin(field), std::end(field), '\0');
  if (end == std::end(field)) return Malformed("Acquire", absl::StrCat(what, " has no end"));
  return std::string(std::begin(field), end);
}

// `declared`: of a lease that the client had before; its label is for people.
absl::StatusOr<RequestedRef> ReadRef(const abi::Ref& raw, uint32_t number, bool declared) {
  RequestedRef ref;
  auto model = ReadName(raw.model, absl::StrCat("model name of reference ", number));
  if (!model.ok()) return model.status();
  auto label = ReadName(raw.label, absl::StrCat("label of reference ", number));
  if (!label.ok()) return label.status();
  if (!abi::IsValidName(model->data(), model->size())) {
    return Malformed("Acquire", absl::StrCat("model name of reference ", number, " is not valid"));
  }
  if (raw.version != 0 && !label->empty() && !declared) {
    return Malformed("Acquire",
                     absl::StrCat("reference ", number, " has both a version and a label"));
  }
  if (raw.version != 0 && label->empty()) {
    // By version alone.
  } else if (!abi::IsValidName(label->data(), label->size())) {
    return Malformed("Acquire", absl::StrCat("label of reference ", number, " is not valid"));
  }
  ref.model = *std::move(model);
  ref.label = *std::move(label);
  ref.version = raw.version;
  std::ranges::copy(raw.digest, ref.digest.begin());
  return ref;
}

absl::StatusOr<HelloRequest> ParseHello(Bytes frame) {
  if (auto size = CheckSize(frame, sizeof(abi::Hello), "Hello"); !size.ok()) return size;
  const auto raw = Read<abi::Hello>(frame);
  if (raw.abi_min > raw.abi_max) {
    return Malformed("Hello", absl::StrCat("abi range ", raw.abi_min, " to ", raw.abi_max));
  }
  return HelloRequest{raw.abi_min, raw.abi_max};
}

// "GPU-1b4e28ba-2fa1-11d2-883f-0016d3cca427": what cuda::FormatUuid makes, and nothing else, so
// that one GPU has one name.
bool IsGpuUuid(absl::string_view text) {
  constexpr absl::string_view kShape = "GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
  if (text.size() != kShape.size()) return false;
  for (size_t i = 0; i < kShape.size(); ++i) {
    const char c = text[i];
    const bool digit = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
    if (kShape[i] == 'x' ? !digit : c != kShape[i]) return false;
  }
  return true;
}

// Whether and where the client wants device memory. `want_at`: where the DeviceWant would be.
absl::Status ReadDevice(Bytes frame, uint32_t flags, size_t want_at, AcquireRequest& request) {
  if ((flags & kDeviceFlags) == 0) return absl::OkStatus();
  const auto want = Read<abi::DeviceWant>(frame, want_at);
  const char* end = std::find(std::begin(want.gpu), std::end(want.gpu), '\0');
  if (end == std::end(want.gpu)) return Malformed("Acquire", "the GPU's UUID has no end");
  std::string gpu(std::begin(want.gpu), end);
  if (!IsGpuUuid(gpu)) return Malformed("Acquire", "the GPU's UUID is not one");
  request.device = (flags & abi::kAcquireDevice) != 0 ? AcquireRequest::Device::kRequired
                                                      : AcquireRequest::Device::kIfAny;
  request.gpu = std::move(gpu);
  return absl::OkStatus();
}

absl::StatusOr<AcquireRequest> ParseAcquire(Bytes frame) {
  if (frame.size() < sizeof(abi::Acquire)) {
    return CheckSize(frame, sizeof(abi::Acquire), "Acquire");
  }
  const auto raw = Read<abi::Acquire>(frame);
  if (raw.count == 0 || raw.count > abi::kMaxSet) {
    return Malformed("Acquire",
                     absl::StrCat(raw.count, " references, expected 1 to ", abi::kMaxSet));
  }
  constexpr uint32_t kKnownFlags = abi::kAcquireWait | abi::kAcquireRedeclare | kDeviceFlags;
  if ((raw.flags & ~kKnownFlags) != 0) {
    return Malformed("Acquire", absl::StrCat("unknown flags ", raw.flags & ~kKnownFlags));
  }
  if ((raw.flags & kDeviceFlags) == kDeviceFlags) {
    return Malformed("Acquire", "device memory is both required and wanted if there is any");
  }
  const size_t refs_end = sizeof(abi::Acquire) + raw.count * sizeof(abi::Ref);
  const size_t want_bytes = (raw.flags & kDeviceFlags) != 0 ? sizeof(abi::DeviceWant) : 0;
  if (auto size = CheckSize(frame, refs_end + want_bytes, "Acquire"); !size.ok()) return size;
  AcquireRequest request;
  if (auto device = ReadDevice(frame, raw.flags, refs_end, request); !device.ok()) return device;
  request.wait = (raw.flags & abi::kAcquireWait) != 0;
  request.redeclare = (raw.flags & abi::kAcquireRedeclare) != 0;
  request.deadline_ms = raw.deadline_ms;
  request.refs.reserve(raw.count);
  for (uint32_t i = 0; i < raw.count; ++i) {
    auto ref = ReadRef(Read<abi::Ref>(frame, sizeof(abi::Acquire) + i * sizeof(abi::Ref)), i,
                       request.redeclare);
    if (!ref.ok()) return ref.status();
    request.refs.push_back(*std::move(ref));
  }
  return request;
}

absl::StatusOr<FetchRequest> ParseFetch(Bytes frame) {
  if (auto size = CheckSize(frame, sizeof(abi::Fetch), "Fetch"); !size.ok()) return size;
  const auto raw = Read<abi::Fetch>(frame);
  return FetchRequest{raw.lease_id, raw.region};
}

absl::StatusOr<ReleaseRequest> ParseRelease(Bytes frame) {
  if (auto size = CheckSize(frame, sizeof(abi::Release), "Release"); !size.ok()) return size;
  return ReleaseRequest{Read<abi::Release>(frame).lease_id};
}

absl::StatusOr<SubscribeRequest> ParseSubscribe(Bytes frame) {
  if (auto size = CheckSize(frame, sizeof(abi::Subscribe), "Subscribe"); !size.ok()) return size;
  return SubscribeRequest{};
}

absl::StatusOr<UploadRequest> ParseUpload(Bytes frame, size_t fd_count) {
  if (auto size = CheckSize(frame, sizeof(abi::Upload), "Upload"); !size.ok()) return size;
  const auto raw = Read<abi::Upload>(frame);
  if (fd_count == 0) return Malformed("Upload", "no descriptor came with it");
  if (raw.last > 1) return Malformed("Upload", absl::StrCat("last is ", raw.last));
  if (raw.first > std::numeric_limits<uint32_t>::max() - fd_count) {
    return Malformed("Upload", absl::StrCat("first file is number ", raw.first));
  }
  UploadRequest request;
  std::ranges::copy(raw.ticket, request.ticket.begin());
  request.first = raw.first;
  request.last = raw.last == 1;
  return request;
}

template <typename T>
absl::StatusOr<Request> Finish(uint32_t request_id, absl::StatusOr<T> body) {
  if (!body.ok()) return body.status();
  return Request{request_id, *std::move(body)};
}

}  // namespace

absl::StatusOr<Request> ParseRequest(Bytes frame, size_t fd_count) {
  if (frame.size() < sizeof(abi::FrameHeader) || frame.size() > abi::kMaxFrameBytes) {
    return absl::InvalidArgumentError(absl::StrCat("malformed frame: ", frame.size(), " bytes"));
  }
  const auto header = Read<abi::FrameHeader>(frame);
  if (header.magic != abi::kFrameMagic || header.bytes != frame.size()) {
    return absl::InvalidArgumentError("malformed frame: bad magic or length");
  }
  if (header.fd_count != fd_count || fd_count > abi::kMaxFdsPerFrame) {
    return absl::InvalidArgumentError(absl::StrCat(
        "malformed frame: ", fd_count, " descriptors came, ", header.fd_count, " were announced"));
  }
  if (header.request_id == 0) {
    return absl::InvalidArgumentError("malformed frame: request id 0 is for events");
  }
  const auto type = static_cast<abi::FrameType>(header.type);
  if (fd_count != 0 && type != abi::FrameType::kUpload) {
    return absl::InvalidArgumentError(absl::StrCat(
        "malformed frame: ", fd_count, " descriptors with a frame that may carry none"));
  }
  switch (type) {
    case abi::FrameType::kHello:
      return Finish(header.request_id, ParseHello(frame));
    case abi::FrameType::kAcquire:
      return Finish(header.request_id, ParseAcquire(frame));
    case abi::FrameType::kFetch:
      return Finish(header.request_id, ParseFetch(frame));
    case abi::FrameType::kRelease:
      return Finish(header.request_id, ParseRelease(frame));
    case abi::FrameType::kSubscribe:
      return Finish(header.request_id, ParseSubscribe(frame));
    case abi::FrameType::kUpload:
      return Finish(header.request_id, ParseUpload(frame, fd_count));
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("malformed frame: type ", header.type, " is no request"));
  }
}

uint32_t RequestIdOf(Bytes frame) {
  if (frame.size() < sizeof(abi::FrameHeader)) return 0;
  const auto header = Read<abi::FrameHeader>(frame);
  return header.magic == abi::kFrameMagic ? header.request_id : 0;
}

absl::StatusOr<uint32_t> NegotiateAbi(const HelloRequest& hello) {
  const uint32_t newest = std::min(hello.abi_max, abi::kFrameAbi);
  if (newest >= hello.abi_min && newest >= abi::kFrameAbiMin) return newest;
  return absl::UnimplementedError(absl::StrCat(
      "handle protocol: this client speaks ", hello.abi_min, " to ", hello.abi_max,
      ", this daemon speaks ", abi::kFrameAbiMin, " to ", abi::kFrameAbi, " (",
      hello.abi_max < abi::kFrameAbiMin ? "update libmodelhost" : "update modelhostd", ")"));
}

}  // namespace modelhost
