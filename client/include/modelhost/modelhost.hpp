// modelhost for C++17: modelhost.h with owners, spans and results. Header-only.
//
//   auto client = modelhost::Client::Connect().value();
//   auto planner = client.Acquire("planner").value();
//   modelhost::Span<const float> weights =
//   planner.Tensor("layer.0.weight").value().Values<float>().value();
//
// A ModelHandle is a counted reference: copies are cheap, and the version stays mapped, unchanged
// and at one address until the last copy is gone. Tensors and files borrow from it. Threads, errors
// and units are those of modelhost.h.
//
// Nothing here throws but value() of a Result that holds an error (std::runtime_error); test ok()
// first where exceptions are not wanted.
#ifndef MODELHOST_MODELHOST_HPP_
#define MODELHOST_MODELHOST_HPP_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "modelhost/modelhost.h"

namespace modelhost {
// A name of its own in the linker, apart from anything else that is called modelhost.
inline namespace client_v1 {

struct Error {
  mh_status status = MH_UNKNOWN;
  std::string message;
  // "NOT_FOUND: planner@7: tensor 'x': ..."
  std::string ToString() const { return std::string(mh_status_name(status)) + ": " + message; }
};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::in_place_index<0>, std::move(value)) {}
  Result(Error error) : state_(std::in_place_index<1>, std::move(error)) {}

  bool ok() const { return state_.index() == 0; }
  explicit operator bool() const { return ok(); }
  // Requires !ok().
  const Error& error() const { return *std::get_if<1>(&state_); }
  // Throws std::runtime_error with the error's text unless ok().
  T& value() & { return Checked(), *std::get_if<0>(&state_); }
  const T& value() const& { return Checked(), *std::get_if<0>(&state_); }
  T value() && { return Checked(), std::move(*std::get_if<0>(&state_)); }
  // Requires ok().
  T& operator*() & { return *std::get_if<0>(&state_); }
  const T& operator*() const& { return *std::get_if<0>(&state_); }
  T* operator->() { return std::get_if<0>(&state_); }
  const T* operator->() const { return std::get_if<0>(&state_); }

 private:
  void Checked() const {
    if (!ok()) throw std::runtime_error(error().ToString());
  }
  std::variant<T, Error> state_;
};

template <typename T>
class Span {
 public:
  constexpr Span() = default;
  constexpr Span(T* data, size_t size) : data_(data), size_(size) {}
  constexpr T* data() const { return data_; }
  constexpr size_t size() const { return size_; }
  constexpr bool empty() const { return size_ == 0; }
  constexpr T* begin() const { return data_; }
  constexpr T* end() const { return data_ + size_; }
  constexpr T& operator[](size_t i) const { return data_[i]; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

namespace internal {
inline Error TakeError(const mh_error& error) { return Error{error.status, error.message}; }

// The safetensors name of a C++ type; null for one that has none.
template <typename T>
constexpr const char* DTypeOf() {
  if constexpr (std::is_same_v<T, float>) return "F32";
  if constexpr (std::is_same_v<T, double>) return "F64";
  if constexpr (std::is_same_v<T, int8_t>) return "I8";
  if constexpr (std::is_same_v<T, uint8_t>) return "U8";
  if constexpr (std::is_same_v<T, int16_t>) return "I16";
  if constexpr (std::is_same_v<T, uint16_t>) return "U16";
  if constexpr (std::is_same_v<T, int32_t>) return "I32";
  if constexpr (std::is_same_v<T, uint32_t>) return "U32";
  if constexpr (std::is_same_v<T, int64_t>) return "I64";
  if constexpr (std::is_same_v<T, uint64_t>) return "U64";
  return nullptr;
}
}  // namespace internal

// One tensor of a ModelHandle, which must outlive it.
class Tensor {
 public:
  explicit Tensor(const mh_tensor_view& view) : view_(view) {}

  std::string_view name() const { return view_.name; }
  std::string_view component() const { return view_.component; }
  std::string_view file() const { return view_.file; }
  std::string_view dtype() const { return view_.dtype; }
  // In elements, outermost first.
  Span<const int64_t> shape() const { return {view_.shape, view_.rank}; }
  bool row_major() const { return view_.strides == nullptr; }
  // In elements, outermost first; empty when row_major().
  Span<const int64_t> strides() const {
    return {view_.strides, view_.strides == nullptr ? 0 : size_t{view_.rank}};
  }
  bool mappable() const { return (view_.flags & MH_TENSOR_MAPPABLE) != 0; }
  std::string_view reason() const { return view_.reason; }  // Why not mappable.
  const void* data() const { return view_.data; }
  // On the handle's GPU: for kernels, not for the CPU to follow. Null: not there.
  const void* device_data() const { return view_.device_data; }
  uint64_t nbytes() const { return view_.nbytes; }
  Span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(view_.data),
            view_.data == nullptr ? 0 : size_t(view_.nbytes)};
  }
  const mh_tensor_view& view() const { return view_; }

  // The elements, in row-major order. FAILED_PRECONDITION: another dtype, strided, not mappable, or
  // not aligned for T in its file.
  template <typename T>
  Result<Span<const T>> Values() const {
    static_assert(internal::DTypeOf<T>() != nullptr, "no dtype is this C++ type");
    if (dtype() != internal::DTypeOf<T>()) return Unfit("its dtype is " + std::string(dtype()));
    if (!mappable()) return Unfit(std::string(reason()));
    if (!row_major()) return Unfit("it has strides (read it through data() and strides())");
    if (view_.nbytes != 0 && view_.alignment % alignof(T) != 0) {
      return Unfit("it is not aligned in its file (copy it)");
    }
    return Span<const T>(static_cast<const T*>(view_.data), view_.nbytes / sizeof(T));
  }

 private:
  Error Unfit(const std::string& why) const {
    return Error{MH_FAILED_PRECONDITION, "tensor '" + std::string(name()) + "': " + why};
  }
  mh_tensor_view view_;
};

// One file of a ModelHandle, which must outlive it.
class File {
 public:
  explicit File(const mh_file_view& view) : view_(view) {}
  std::string_view path() const { return view_.path; }
  std::string_view role() const { return view_.role; }
  uint64_t nbytes() const { return view_.nbytes; }
  // Empty when it was not fetched (FileAt).
  std::string_view text() const {
    return {static_cast<const char*>(view_.data), view_.data == nullptr ? 0 : size_t(view_.nbytes)};
  }
  // "/proc/self/fd/N"; empty when it was not fetched.
  std::string fd_path() const { return view_.fd_path == nullptr ? "" : view_.fd_path; }
  int fd() const { return view_.fd; }
  const mh_file_view& view() const { return view_; }

 private:
  mh_file_view view_;
};

class ModelHandle {
 public:
  ModelHandle() = default;
  // Takes over one reference.
  static ModelHandle Own(mh_handle* handle) { return ModelHandle(handle); }
  // Takes a reference of its own.
  static ModelHandle Share(const mh_handle* handle) { return ModelHandle(mh_retain(handle)); }
  ModelHandle(const ModelHandle& other) : handle_(mh_retain(other.handle_)) {}
  ModelHandle(ModelHandle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  ModelHandle& operator=(ModelHandle other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~ModelHandle() { mh_release(handle_); }

  explicit operator bool() const { return handle_ != nullptr; }
  const mh_handle* get() const { return handle_; }
  // The same version of the same model, by the same act of acquiring.
  friend bool operator==(const ModelHandle& a, const ModelHandle& b) {
    return a.handle_ == b.handle_;
  }
  friend bool operator!=(const ModelHandle& a, const ModelHandle& b) { return !(a == b); }

  std::string_view model() const { return mh_handle_model(handle_); }
  std::string_view label() const { return mh_handle_label(handle_); }
  uint64_t version() const { return mh_handle_version(handle_); }
  uint64_t generation() const { return mh_handle_generation(handle_); }
  std::string_view digest() const { return mh_handle_digest(handle_); }
  std::string_view format() const { return mh_handle_format(handle_); }
  // "planner@7"
  std::string name() const { return std::string(model()) + "@" + std::to_string(version()); }
  // One atomic load.
  bool superseded() const { return mh_superseded(handle_) != 0; }
  // UUID; empty without device memory.
  std::string_view gpu() const { return mh_handle_gpu(handle_); }
  std::string_view device_mode() const { return mh_handle_device_mode(handle_); }
  std::string_view device_reason() const { return mh_handle_device_reason(handle_); }

  Result<class Tensor> Tensor(const char* name) const {
    return View<client_v1::Tensor>(
        [&](mh_tensor_view* view) { return mh_tensor(handle_, name, view); });
  }
  Result<class Tensor> Tensor(const std::string& name) const { return Tensor(name.c_str()); }
  size_t tensor_count() const { return mh_tensor_count(handle_); }
  Result<class Tensor> TensorAt(size_t number) const {
    return View<client_v1::Tensor>(
        [&](mh_tensor_view* view) { return mh_tensor_at(handle_, number, view); });
  }

  // With bytes, descriptor and path.
  Result<class File> File(const std::string& path) const {
    return View<client_v1::File>(
        [&](mh_file_view* view) { return mh_file(handle_, path.c_str(), view); });
  }
  size_t file_count() const { return mh_file_count(handle_); }
  Result<class File> FileAt(size_t number) const {
    return View<client_v1::File>(
        [&](mh_file_view* view) { return mh_file_at(handle_, number, view); });
  }

  // Empty when there is none of this key.
  std::string_view Metadata(const std::string& key) const {
    size_t length = 0;
    const char* value = mh_metadata(handle_, key.c_str(), &length);
    return value == nullptr ? std::string_view() : std::string_view(value, length);
  }

 private:
  explicit ModelHandle(mh_handle* handle) : handle_(handle) {}

  static void Init(mh_tensor_view* view) { *view = mh_tensor_view MH_TENSOR_VIEW_INIT; }
  static void Init(mh_file_view* view) { *view = mh_file_view MH_FILE_VIEW_INIT; }
  template <typename Wrapper, typename Fill>
  static Result<Wrapper> View(Fill fill) {
    std::decay_t<decltype(std::declval<Wrapper>().view())> view;
    mh_error error{};
    Init(&view);
    view.error = &error;
    const mh_status status = fill(&view);
    if (status != MH_OK) {
      // Arguments that are wrong as such come without a text.
      if (error.status == MH_OK) return Error{status, "the handle is empty, or the name is NULL"};
      return internal::TakeError(error);
    }
    view.error = nullptr;
    return Wrapper(view);
  }

  mh_handle* handle_ = nullptr;
};

// Follows a label. One thread at a time adopts.
class LiveModel {
 public:
  explicit LiveModel(mh_live* live) : live_(live) {}

  // The newest version that is attached. The one before goes when its last ModelHandle does.
  ModelHandle Adopt() { return ModelHandle::Share(mh_live_adopt(live_.get())); }
  // With same_addresses: the newest version takes the place of the one before on the GPU, at the
  // same addresses. For a moment when no kernel reads them.
  Result<ModelHandle> Remap() {
    mh_error error{};
    const mh_handle* handle = nullptr;
    if (mh_live_remap(live_.get(), &handle, &error) != MH_OK) return internal::TakeError(error);
    return ModelHandle::Share(handle);
  }
  ModelHandle current() const { return ModelHandle::Share(mh_live_current(live_.get())); }
  // Why the last try to attach a newer version failed; MH_OK in `status` when it did not.
  Error status() const {
    mh_error error{};
    mh_live_status(live_.get(), &error);
    return internal::TakeError(error);
  }

 private:
  struct Releaser {
    void operator()(mh_live* live) const { mh_live_release(live); }
  };
  std::unique_ptr<mh_live, Releaser> live_;
};

// Follows several labels that change together.
class LiveSet {
 public:
  LiveSet(mh_live_set* live, size_t size) : live_(live), handles_(size) {}

  // True when a newer set took the place of the one before, whose handles are dead then unless
  // shared.
  bool Adopt() { return mh_live_set_adopt(live_.get(), handles_.data(), handles_.size()) != 0; }
  size_t size() const { return handles_.size(); }
  // Of the set adopted last, in the order of the references. Valid after the first Adopt.
  ModelHandle operator[](size_t number) const { return ModelHandle::Share(handles_[number]); }
  // Why the last try to attach a newer set failed; MH_OK in `status` when it did not.
  Error status() const {
    mh_error error{};
    mh_live_set_status(live_.get(), &error);
    return internal::TakeError(error);
  }

 private:
  struct Releaser {
    void operator()(mh_live_set* live) const { mh_live_set_release(live); }
  };
  std::unique_ptr<mh_live_set, Releaser> live_;
  std::vector<const mh_handle*> handles_;
};

enum class Want { kHost, kDevice, kDeviceIfAny };

struct AcquireOptions {
  bool wait = false;                      // Until READY or the deadline.
  std::chrono::milliseconds deadline{0};  // 0: the client's.
  Want want = Want::kHost;
  std::string gpu;              // With a want: a UUID. Empty: as modelhost.h says.
  bool same_addresses = false;  // Of Follow, with kDevice: LiveModel::Remap.
};

class Client {
 public:
  struct Options {
    std::string runtime_dir;                // Empty: as modelhost.h says.
    std::chrono::milliseconds deadline{0};  // 0: five seconds.
  };

  static Result<Client> Connect(const Options& options) {
    mh_options c_options = MH_OPTIONS_INIT;
    if (!options.runtime_dir.empty()) c_options.runtime_dir = options.runtime_dir.c_str();
    c_options.deadline_ms = static_cast<uint64_t>(options.deadline.count());
    mh_error error{};
    mh_client* client = mh_connect(&c_options, &error);
    if (client == nullptr) return internal::TakeError(error);
    return Client(client);
  }
  static Result<Client> Connect() { return Connect(Options{}); }

  // "planner", "planner:canary", "planner@7".
  Result<ModelHandle> Acquire(const std::string& ref, const AcquireOptions& options = {}) {
    const mh_acquire_options c_options = ToC(options);
    mh_handle* handle = nullptr;
    mh_error error{};
    if (mh_acquire(client_.get(), ref.c_str(), &c_options, &handle, &error) != MH_OK) {
      return internal::TakeError(error);
    }
    return ModelHandle::Own(handle);
  }

  // All from one snapshot, or none.
  Result<std::vector<ModelHandle>> AcquireSet(const std::vector<std::string>& refs,
                                              const AcquireOptions& options = {}) {
    const mh_acquire_options c_options = ToC(options);
    const std::vector<const char*> c_refs = Pointers(refs);
    std::vector<mh_handle*> handles(refs.size());
    mh_error error{};
    if (mh_acquire_set(client_.get(), c_refs.data(), refs.size(), &c_options, handles.data(),
                       &error) != MH_OK) {
      return internal::TakeError(error);
    }
    std::vector<ModelHandle> owned;
    for (mh_handle* handle : handles) owned.push_back(ModelHandle::Own(handle));
    return owned;
  }

  Result<LiveModel> Follow(const std::string& ref, const AcquireOptions& options = {}) {
    const mh_acquire_options c_options = ToC(options);
    mh_live* live = nullptr;
    mh_error error{};
    if (mh_follow(client_.get(), ref.c_str(), &c_options, &live, &error) != MH_OK) {
      return internal::TakeError(error);
    }
    return LiveModel(live);
  }

  Result<LiveSet> FollowSet(const std::vector<std::string>& refs,
                            const AcquireOptions& options = {}) {
    const mh_acquire_options c_options = ToC(options);
    const std::vector<const char*> c_refs = Pointers(refs);
    mh_live_set* live = nullptr;
    mh_error error{};
    if (mh_follow_set(client_.get(), c_refs.data(), refs.size(), &c_options, &live, &error) !=
        MH_OK) {
      return internal::TakeError(error);
    }
    LiveSet set(live, refs.size());
    (void)set.Adopt();  // Fills in the handles.
    return set;
  }

  // Readable when something changed; -1 when it cannot be had.
  int event_fd() { return mh_event_fd(client_.get()); }
  void ClearEvents() { mh_clear_events(client_.get()); }
  // Ends the session and all its leases now, also calls of other threads that wait.
  void Close() { mh_close(client_.get()); }
  // Zeros in a forked child.
  mh_client_view state() const {
    mh_client_view view = MH_CLIENT_VIEW_INIT;
    mh_client_state(client_.get(), &view);
    return view;
  }
  mh_client* get() const { return client_.get(); }

 private:
  struct Disconnecter {
    void operator()(mh_client* client) const { mh_disconnect(client); }
  };
  explicit Client(mh_client* client) : client_(client) {}
  // Points into `options`.
  static mh_acquire_options ToC(const AcquireOptions& options) {
    mh_acquire_options c_options = MH_ACQUIRE_OPTIONS_INIT;
    c_options.wait = options.wait ? 1 : 0;
    if (options.want == Want::kDevice) c_options.want = MH_WANT_DEVICE;
    if (options.want == Want::kDeviceIfAny) c_options.want = MH_WANT_DEVICE_IF_ANY;
    if (!options.gpu.empty()) c_options.gpu = options.gpu.c_str();
    if (options.same_addresses) c_options.device_flags = MH_DEVICE_SAME_ADDRESSES;
    c_options.deadline_ms = static_cast<uint64_t>(options.deadline.count());
    return c_options;
  }
  static std::vector<const char*> Pointers(const std::vector<std::string>& texts) {
    std::vector<const char*> pointers;
    for (const std::string& text : texts) pointers.push_back(text.c_str());
    return pointers;
  }
  std::unique_ptr<mh_client, Disconnecter> client_;
};

}  // namespace client_v1
}  // namespace modelhost

#endif  // MODELHOST_MODELHOST_HPP_
