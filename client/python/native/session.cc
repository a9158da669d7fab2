#include "client/python/native/session.h"

namespace modelhost::python {
namespace {

std::vector<const char*> Pointers(const std::vector<std::string>& texts) {
  std::vector<const char*> pointers;
  for (const std::string& text : texts) pointers.push_back(text.c_str());
  return pointers;
}

}  // namespace

std::string Held::Name() const {
  return std::string(mh_handle_model(handle_)) + "@" + std::to_string(mh_handle_version(handle_));
}

mh_acquire_options OptionsOf(const Request& request) {
  mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
  options.wait = request.wait ? 1 : 0;
  options.deadline_ms = request.deadline_ms;
  if (request.device == "auto") {
    options.want = MH_WANT_DEVICE_IF_ANY;
  } else if (!request.device.empty()) {
    options.want = MH_WANT_DEVICE;
    if (request.device != "cuda") options.gpu = request.device.c_str();
  }
  if (request.same_addresses) options.device_flags = MH_DEVICE_SAME_ADDRESSES;
  return options;
}

std::shared_ptr<Session> Session::Connect(const std::optional<std::string>& runtime_dir,
                                          uint64_t deadline_ms, int (*interrupted)(void*),
                                          MainThread main_thread, mh_error* error) {
  auto context = std::make_unique<MainThread>(main_thread);
  mh_options options = MH_OPTIONS_INIT;
  options.deadline_ms = deadline_ms;
  options.interrupted = interrupted;
  options.context = context.get();
  if (runtime_dir.has_value()) options.runtime_dir = runtime_dir->c_str();
  mh_client* client = mh_connect(&options, error);
  return client == nullptr ? nullptr : std::make_shared<Session>(client, std::move(context));
}

void Session::Close() {
  closed_.store(true, std::memory_order_release);
  mh_close(client_);
}

mh_status Session::Acquire(const std::string& ref, const Request& request, HeldPtr* held,
                           mh_error* error) {
  const mh_acquire_options options = OptionsOf(request);
  mh_handle* handle = nullptr;
  const mh_status status = mh_acquire(client_, ref.c_str(), &options, &handle, error);
  if (status == MH_OK) *held = std::make_shared<Held>(handle, shared_from_this());
  return status;
}

mh_status Session::AcquireSet(const std::vector<std::string>& refs, const Request& request,
                              std::vector<HeldPtr>* held, mh_error* error) {
  const mh_acquire_options options = OptionsOf(request);
  std::vector<mh_handle*> handles(refs.size());
  const mh_status status =
      mh_acquire_set(client_, Pointers(refs).data(), refs.size(), &options, handles.data(), error);
  if (status != MH_OK) return status;
  for (mh_handle* handle : handles) {
    held->push_back(std::make_shared<Held>(handle, shared_from_this()));
  }
  return status;
}

mh_status Session::Follow(const std::string& ref, const Request& request, mh_live** live,
                          mh_error* error) {
  const mh_acquire_options options = OptionsOf(request);
  return mh_follow(client_, ref.c_str(), &options, live, error);
}

mh_status Session::FollowSet(const std::vector<std::string>& refs, const Request& request,
                             mh_live_set** live, mh_error* error) {
  const mh_acquire_options options = OptionsOf(request);
  return mh_follow_set(client_, Pointers(refs).data(), refs.size(), &options, live, error);
}

}  // namespace modelhost::python
