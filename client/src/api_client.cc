// The C API: clients, acquiring, following.
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "client/src/api_support.h"
#include "client/src/guarded_copy.h"
#include "client/src/handle.h"
#include "client/src/live_model.h"
#include "client/src/reference.h"
#include "client/src/session.h"
#include "client/src/socket_path.h"

using modelhost::abi::Ref;

struct mh_client {
  std::shared_ptr<modelhost::Session> session;
};
struct mh_live {
  std::shared_ptr<modelhost::LiveModels> models;
};
struct mh_live_set {
  std::shared_ptr<modelhost::LiveModels> models;
};

namespace modelhost {
namespace {

// To the end of what was last in the first version: structs grow, these do not.
constexpr size_t kLeastOptions = offsetof(mh_options, deadline_ms) + sizeof(uint64_t);
constexpr size_t kLeastAcquireOptions =
    offsetof(mh_acquire_options, deadline_ms) + sizeof(uint64_t);
constexpr size_t kLeastClientView = offsetof(mh_client_view, reconnects) + sizeof(uint64_t);
// Longer than any process waits; added to a clock it does not overflow.
constexpr uint64_t kLongestDeadlineMs = uint64_t{365} * 24 * 3600 * 1000;

struct Asked {
  std::vector<Ref> refs;
  bool wait = false;
  SteadyTime deadline;
  DeviceRequest device;
};

// Which GPU, and its context, before anything is asked of the daemon.
Result<DeviceRequest> ReadDevice(const mh_acquire_options& options, bool may_keep_addresses) {
  using Want = DeviceRequest::Want;
  const auto invalid = [](const char* why) {
    return Error{Code::kInvalidArgument, std::string("acquire: ") + why, 0};
  };
  DeviceRequest request;
  if (options.want > MH_WANT_DEVICE_IF_ANY || options.device_flags > MH_DEVICE_SAME_ADDRESSES) {
    return invalid("`want` or `device_flags` is not a value that this library knows");
  }
  request.same_addresses = options.device_flags == MH_DEVICE_SAME_ADDRESSES;
  if (request.same_addresses && (!may_keep_addresses || options.want != MH_WANT_DEVICE)) {
    return invalid("MH_DEVICE_SAME_ADDRESSES goes with mh_follow and MH_WANT_DEVICE alone");
  }
  if (options.want == MH_WANT_HOST) {
    if (options.gpu != nullptr) return invalid("a GPU is named, but nothing is wanted on it");
    return request;
  }
  request.want = options.want == MH_WANT_DEVICE ? Want::kDevice : Want::kDeviceIfAny;
  auto device = CudaDevice::Open(options.gpu);
  if (device.ok()) {
    request.device = *std::move(device);
  } else if (request.want == Want::kDevice) {
    return std::move(device).error();
  } else {
    request.why_not = device.error().text;
  }
  return request;
}

Result<Asked> ReadRequest(const mh_client* client, const char* const* refs, size_t count,
                          const mh_acquire_options* options, bool may_keep_addresses = false) {
  if (client == nullptr || refs == nullptr) {
    return Error{Code::kInvalidArgument, "acquire: the client or the reference is NULL", 0};
  }
  if (count == 0 || count > abi::kMaxSet) {
    return Error{Code::kInvalidArgument,
                 "acquire: a set of " + std::to_string(count) + " references (1 to " +
                     std::to_string(abi::kMaxSet) + " are allowed)",
                 0};
  }
  mh_acquire_options read = MH_ACQUIRE_OPTIONS_INIT;
  if (!CopyIn(options, kLeastAcquireOptions, &read) || read.reserved != 0 || read.wait > 1) {
    return Error{Code::kInvalidArgument,
                 "acquire: options of a size or with values that this library does not know", 0};
  }
  Asked asked;
  for (size_t i = 0; i < count; ++i) {
    if (refs[i] == nullptr) {
      return Error{Code::kInvalidArgument, "acquire: a reference is NULL", 0};
    }
    auto ref = ParseReference(refs[i]);
    if (!ref.ok()) return std::move(ref).error();
    asked.refs.push_back(*ref);
  }
  asked.wait = read.wait != 0;
  asked.deadline =
      read.deadline_ms == 0
          ? client->session->DefaultDeadline()
          : std::chrono::steady_clock::now() +
                std::chrono::milliseconds(std::min(read.deadline_ms, kLongestDeadlineMs));
  auto device = ReadDevice(read, may_keep_addresses);
  if (!device.ok()) return std::move(device).error();
  asked.device = *std::move(device);
  return asked;
}

Result<std::shared_ptr<LiveModels>> StartLive(mh_client* client, const char* const* refs,
                                              size_t count, const mh_acquire_options* options,
                                              bool may_keep_addresses) {
  auto asked = ReadRequest(client, refs, count, options, may_keep_addresses);
  if (!asked.ok()) return std::move(asked).error();
  return LiveModels::Start(client->session, std::move(asked->refs), asked->wait, asked->deadline,
                           std::move(asked->device));
}

mh_status ReportLive(const std::shared_ptr<LiveModels>& models, mh_error* error) {
  return Guarded(error, [&] {
    const std::optional<Error> failure = models->status();
    return failure.has_value() ? Report(error, *failure) : ReportOk(error);
  });
}

}  // namespace
}  // namespace modelhost

using modelhost::Guarded;
using modelhost::Report;
using modelhost::ReportOk;

extern "C" {

uint32_t mh_abi_version(void) { return MH_ABI_VERSION; }

const char* mh_status_name(mh_status status) {
  switch (status) {
    case MH_OK:
      return "OK";
    case MH_CANCELLED:
      return "CANCELLED";
    case MH_UNKNOWN:
      return "UNKNOWN";
    case MH_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case MH_DEADLINE_EXCEEDED:
      return "DEADLINE_EXCEEDED";
    case MH_NOT_FOUND:
      return "NOT_FOUND";
    case MH_ALREADY_EXISTS:
      return "ALREADY_EXISTS";
    case MH_PERMISSION_DENIED:
      return "PERMISSION_DENIED";
    case MH_RESOURCE_EXHAUSTED:
      return "RESOURCE_EXHAUSTED";
    case MH_FAILED_PRECONDITION:
      return "FAILED_PRECONDITION";
    case MH_ABORTED:
      return "ABORTED";
    case MH_OUT_OF_RANGE:
      return "OUT_OF_RANGE";
    case MH_UNIMPLEMENTED:
      return "UNIMPLEMENTED";
    case MH_INTERNAL:
      return "INTERNAL";
    case MH_UNAVAILABLE:
      return "UNAVAILABLE";
    case MH_DATA_LOSS:
      return "DATA_LOSS";
    case MH_UNAUTHENTICATED:
      return "UNAUTHENTICATED";
  }
  return "UNKNOWN";
}

mh_client* mh_connect(const mh_options* options, mh_error* error) {
  mh_client* client = nullptr;
  (void)Guarded(error, [&] {
    mh_options read = MH_OPTIONS_INIT;
    if (!modelhost::CopyIn(options, modelhost::kLeastOptions, &read)) {
      return Report(error, MH_INVALID_ARGUMENT,
                    "connect: options of a size or with values that this library does not know");
    }
    modelhost::Session::Options session_options;
    session_options.sockets =
        modelhost::SocketCandidates(read.runtime_dir == nullptr ? "" : read.runtime_dir);
    if (read.deadline_ms != 0) {
      session_options.deadline =
          std::chrono::milliseconds(std::min(read.deadline_ms, modelhost::kLongestDeadlineMs));
    }
    session_options.interrupted = read.interrupted;
    session_options.context = read.context;
    auto made = std::make_unique<mh_client>();
    auto session = modelhost::Session::Connect(std::move(session_options));
    if (!session.ok()) return Report(error, session.error());
    made->session = *std::move(session);
    client = made.release();
    return ReportOk(error);
  });
  return client;
}

void mh_disconnect(mh_client* client) {
  if (client == nullptr) return;
  (void)Guarded(nullptr, [&] {
    client->session->Close();
    return MH_OK;
  });
  delete client;
}

void mh_close(mh_client* client) {
  if (client == nullptr) return;
  (void)Guarded(nullptr, [&] {
    client->session->Close();
    return MH_OK;
  });
}

mh_status mh_client_state(const mh_client* client, mh_client_view* view) {
  if (client == nullptr || view == nullptr) return MH_INVALID_ARGUMENT;
  return Guarded(nullptr, [&] {
    auto state = client->session->GetState();
    if (!state.ok()) return Report(nullptr, state.error());
    mh_client_view made = MH_CLIENT_VIEW_INIT;
    made.socket = state->socket;
    made.epoch = state->epoch;
    made.connected = state->connected ? 1 : 0;
    made.leases = state->leases;
    made.reconnects = state->reconnects;
    return modelhost::CopyOut(made, modelhost::kLeastClientView, view) ? MH_OK
                                                                       : MH_INVALID_ARGUMENT;
  });
}

int mh_event_fd(mh_client* client) {
  int fd = -1;
  if (client == nullptr) return fd;
  (void)Guarded(nullptr, [&] {
    auto made = client->session->EventFd();
    if (made.ok()) fd = *made;
    return MH_OK;
  });
  return fd;
}

void mh_clear_events(mh_client* client) {
  if (client != nullptr) client->session->ClearEvents();
}

mh_status mh_resolve(const mh_client* client, const char* ref, uint64_t* version,
                     uint64_t* generation, mh_error* error) {
  return Guarded(error, [&] {
    if (client == nullptr || ref == nullptr) {
      return Report(error, MH_INVALID_ARGUMENT, "resolve: the client or the reference is NULL");
    }
    auto parsed = modelhost::ParseReference(ref);
    if (!parsed.ok()) return Report(error, parsed.error());
    auto label = client->session->Resolve(*parsed);
    if (!label.ok()) return Report(error, label.error());
    if (version != nullptr) *version = label->version;
    if (generation != nullptr) *generation = label->generation;
    return ReportOk(error);
  });
}

mh_status mh_acquire(mh_client* client, const char* ref, const mh_acquire_options* options,
                     mh_handle** handle, mh_error* error) {
  return mh_acquire_set(client, &ref, 1, options, handle, error);
}

mh_status mh_acquire_set(mh_client* client, const char* const* refs, size_t count,
                         const mh_acquire_options* options, mh_handle** handles, mh_error* error) {
  return Guarded(error, [&] {
    if (handles == nullptr) {
      return Report(error, MH_INVALID_ARGUMENT, "acquire: no place for the handle (NULL)");
    }
    auto asked = modelhost::ReadRequest(client, refs, count, options);
    if (!asked.ok()) return Report(error, asked.error());
    auto held = client->session->Acquire(asked->refs, asked->wait, asked->deadline, asked->device);
    if (!held.ok()) return Report(error, held.error());
    std::vector<modelhost::HandleRef> made;
    made.reserve(count);
    for (modelhost::Held& each : *held) {
      made.emplace_back(new mh_handle(client->session, std::move(each)));
    }
    for (size_t i = 0; i < count; ++i) handles[i] = made[i].release();
    return ReportOk(error);
  });
}

mh_handle* mh_retain(const mh_handle* handle) {
  return handle == nullptr ? nullptr : modelhost::Retain(handle);
}

void mh_release(mh_handle* handle) {
  if (handle != nullptr) modelhost::Drop(handle);
}

void mh_release_later(mh_handle* handle) {
  if (handle != nullptr) modelhost::DropLater(handle);
}

mh_status mh_follow(mh_client* client, const char* ref, const mh_acquire_options* options,
                    mh_live** live, mh_error* error) {
  return Guarded(error, [&] {
    if (live == nullptr) {
      return Report(error, MH_INVALID_ARGUMENT, "follow: no place for the live model (NULL)");
    }
    auto models = modelhost::StartLive(client, &ref, 1, options, /*may_keep_addresses=*/true);
    if (!models.ok()) return Report(error, models.error());
    *live = new mh_live{*std::move(models)};
    return ReportOk(error);
  });
}

const mh_handle* mh_live_adopt(mh_live* live) {
  live->models->Adopt();
  return live->models->current(0);
}

const mh_handle* mh_live_current(const mh_live* live) { return live->models->current(0); }

mh_status mh_live_remap(mh_live* live, const mh_handle** handle, mh_error* error) {
  return Guarded(error, [&] {
    if (live == nullptr) return Report(error, MH_INVALID_ARGUMENT, "remap: no live model (NULL)");
    const auto remapped = live->models->Remap();
    if (handle != nullptr) *handle = live->models->current(0);
    return remapped.ok() ? ReportOk(error) : Report(error, remapped.error());
  });
}

mh_status mh_live_status(const mh_live* live, mh_error* error) {
  return modelhost::ReportLive(live->models, error);
}

void mh_live_release(mh_live* live) {
  if (live == nullptr) return;
  live->models->Stop();
  delete live;
}

mh_status mh_follow_set(mh_client* client, const char* const* refs, size_t count,
                        const mh_acquire_options* options, mh_live_set** live, mh_error* error) {
  return Guarded(error, [&] {
    if (live == nullptr) {
      return Report(error, MH_INVALID_ARGUMENT, "follow: no place for the live set (NULL)");
    }
    auto models = modelhost::StartLive(client, refs, count, options, /*may_keep_addresses=*/false);
    if (!models.ok()) return Report(error, models.error());
    *live = new mh_live_set{*std::move(models)};
    return ReportOk(error);
  });
}

int mh_live_set_adopt(mh_live_set* live, const mh_handle** handles, size_t count) {
  const bool adopted = live->models->Adopt();
  const size_t given = handles == nullptr ? 0 : std::min(count, live->models->size());
  for (size_t i = 0; i < given; ++i) handles[i] = live->models->current(i);
  return adopted ? 1 : 0;
}

mh_status mh_live_set_status(const mh_live_set* live, mh_error* error) {
  return modelhost::ReportLive(live->models, error);
}

void mh_live_set_release(mh_live_set* live) {
  if (live == nullptr) return;
  live->models->Stop();
  delete live;
}

mh_status mh_copy(void* to, const void* from, size_t nbytes) {
  return Guarded(nullptr, [&] {
    if (nbytes != 0 && (to == nullptr || from == nullptr)) return MH_INVALID_ARGUMENT;
    auto copied = modelhost::GuardedCopy(to, from, nbytes);
    return copied.ok() ? MH_OK : Report(nullptr, copied.error());
  });
}

}  // extern "C"
