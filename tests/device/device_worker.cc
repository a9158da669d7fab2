// A client with device memory for tests: commands on stdin, one line of JSON on stdout for each.
//
//   usage: device_worker RUNTIME_DIR
//
//   acquire KEY REF [device|ifany|host] [GPU|-] [WAIT_MS]   -> version, gpu, mode, reason
//   follow KEY REF [GPU|-] [same]                -> version, gpu, mode
//   tensors KEY                                  -> names of those on the device, in order
//   sha256 KEY TENSOR                            -> of its bytes, copied back from the device
//   compare KEY                                  -> tensors on the device, of all, that differ
//   addresses KEY                                -> device address of each, in hex
//   superseded KEY                               -> 0 or 1
//   adopt KEY, remap KEY                         -> version now
//   release KEY
//   context [N]       makes the primary context of device N current on this thread
//   store KEY TENSOR  writes a byte through the device address: a fault ends the process
//   write KEY TENSOR  asks the driver to copy a byte there     -> the driver's number
//   fork KEY          a child looks at the handle, and ends    -> what it saw
//   state             -> connected, leases, reconnects
//   exit
//
// Every answer has "ok"; a failure has "status" and "message". Exit 0 at `exit` or end of input.
#include <openssl/evp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "modelhost/modelhost.h"
#include "proto/cuda/handles.h"

namespace modelhost {
namespace {

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out += ' ';
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string Sha256Hex(const std::string& bytes) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int length = 0;
  if (EVP_Digest(bytes.data(), bytes.size(), digest, &length, EVP_sha256(), nullptr) != 1) {
    std::abort();
  }
  std::string text;
  for (unsigned int i = 0; i < length; ++i) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", digest[i]);
    text += hex;
  }
  return text;
}

cuda::DevicePtr AddressOf(const void* at) {
  return static_cast<cuda::DevicePtr>(reinterpret_cast<uintptr_t>(at));
}

// The driver of this program, beside the library's. Contexts are retained until it ends.
class OwnDriver {
 public:
  // Empty: there is one.
  std::string Load() {
    if (driver_ != nullptr) return "";
    cuda::DriverLoad load = cuda::Driver::Load();
    driver_ = std::move(load.driver);
    return load.text;
  }
  const cuda::Driver& driver() const { return *driver_; }
  Result<void> MakeCurrent(const std::string& gpu) {
    const auto device = driver_->FindDevice(gpu);
    if (!device.ok()) return device.error();
    return MakeCurrent(*device);
  }
  Result<void> MakeCurrent(cuda::Device device) {
    auto [at, is_new] = contexts_.try_emplace(device);
    if (is_new) {
      auto context = cuda::PrimaryContext::Retain(*driver_, device);
      if (!context.ok()) {
        contexts_.erase(at);
        return std::move(context).error();
      }
      at->second = std::make_unique<cuda::PrimaryContext>(*std::move(context));
    }
    return at->second->MakeCurrent();
  }

 private:
  std::shared_ptr<const cuda::Driver> driver_;
  std::map<cuda::Device, std::unique_ptr<cuda::PrimaryContext>> contexts_;
};

struct Answer {
  bool ok = true;
  std::string fields;
  void Add(const char* name, const std::string& text) {
    fields += std::string(", \"") + name + "\": " + Quoted(text);
  }
  void Add(const char* name, uint64_t number) {
    fields += std::string(", \"") + name + "\": " + std::to_string(number);
  }
  void AddList(const char* name, const std::vector<std::string>& texts) {
    fields += std::string(", \"") + name + "\": [";
    for (size_t i = 0; i < texts.size(); ++i) fields += (i == 0 ? "" : ", ") + Quoted(texts[i]);
    fields += "]";
  }
  void Fail(const char* status, const std::string& message) {
    ok = false;
    Add("status", status);
    Add("message", message);
  }
};

class Worker {
 public:
  explicit Worker(std::string runtime_dir) : runtime_dir_(std::move(runtime_dir)) {}
  ~Worker() {
    for (auto& [key, held] : held_) Release(held);
    mh_disconnect(client_);
  }
  Worker(const Worker&) = delete;

  // False: no more commands.
  bool Run(const std::string& line) {
    std::istringstream words(line);
    std::vector<std::string> parts;
    for (std::string word; words >> word;) parts.push_back(word);
    if (parts.empty()) return true;
    if (parts[0] == "exit") return false;
    Answer answer;
    Dispatch(parts, answer);
    std::printf("{\"ok\": %s%s}\n", answer.ok ? "true" : "false", answer.fields.c_str());
    std::fflush(stdout);
    return true;
  }

 private:
  struct Held {
    mh_handle* handle = nullptr;
    mh_live* live = nullptr;
    const mh_handle* now() const { return live == nullptr ? handle : mh_live_current(live); }
  };

  static void Release(Held& held) {
    mh_release(held.handle);
    mh_live_release(held.live);
    held = {};
  }
  static void Report(const mh_error& error, Answer& answer) {
    answer.Fail(mh_status_name(error.status), error.message);
  }
  static std::string Part(const std::vector<std::string>& parts, size_t number) {
    return number < parts.size() && parts[number] != "-" ? parts[number] : "";
  }

  bool Connected(Answer& answer) {
    if (client_ != nullptr) return true;
    mh_options options = MH_OPTIONS_INIT;
    options.runtime_dir = runtime_dir_.c_str();
    options.deadline_ms = 20'000;
    mh_error error{};
    client_ = mh_connect(&options, &error);
    if (client_ == nullptr) Report(error, answer);
    return client_ != nullptr;
  }

  void Dispatch(const std::vector<std::string>& parts, Answer& answer) {
    const std::string& what = parts[0];
    if (what == "context") {
      UseContext(static_cast<int>(std::strtol(Part(parts, 1).c_str(), nullptr, 10)), answer);
      return;
    }
    if (what == "acquire" && parts.size() >= 3) {
      AcquireOne(parts, answer);
      return;
    }
    if (what == "follow" && parts.size() >= 3) {
      FollowOne(parts, answer);
      return;
    }
    if (what == "state") {
      State(answer);
      return;
    }
    const auto at = held_.find(Part(parts, 1));
    if (at == held_.end()) {
      answer.Fail("INVALID_ARGUMENT", "no such command, or nothing is held by that key");
      return;
    }
    Held& held = at->second;
    if (what == "release") {
      Release(held);
      held_.erase(at);
    } else if (what == "superseded") {
      answer.Add("superseded", static_cast<uint64_t>(mh_superseded(held.now())));
    } else if (what == "adopt" && held.live != nullptr) {
      answer.Add("version", mh_handle_version(mh_live_adopt(held.live)));
    } else if (what == "remap" && held.live != nullptr) {
      mh_error error{};
      const mh_handle* now = nullptr;
      if (mh_live_remap(held.live, &now, &error) != MH_OK) Report(error, answer);
      answer.Add("version", mh_handle_version(now));
    } else if (what == "tensors" || what == "addresses") {
      List(held.now(), what == "addresses", answer);
    } else if (what == "compare") {
      Compare(held.now(), answer);
    } else if (what == "fork") {
      Fork(held.now(), answer);
    } else if (what == "sha256" || what == "store" || what == "write") {
      OneTensor(held.now(), what, Part(parts, 2), answer);
    } else {
      answer.Fail("INVALID_ARGUMENT", "no such command: " + what);
    }
  }

  void UseContext(int device, Answer& answer) {
    if (const std::string why = own_.Load(); !why.empty()) {
      answer.Fail("FAILED_PRECONDITION", why);
      return;
    }
    const auto made = own_.MakeCurrent(device);
    if (!made.ok()) answer.Fail("FAILED_PRECONDITION", made.error().text);
  }

  static void Describe(const mh_handle* handle, Answer& answer) {
    answer.Add("version", mh_handle_version(handle));
    answer.Add("gpu", mh_handle_gpu(handle));
    answer.Add("mode", mh_handle_device_mode(handle));
    answer.Add("reason", mh_handle_device_reason(handle));
  }

  void AcquireOne(const std::vector<std::string>& parts, Answer& answer) {
    if (!Connected(answer)) return;
    const std::string want = parts.size() > 3 ? parts[3] : "device";
    const std::string gpu = Part(parts, 4);
    const std::string wait_ms = Part(parts, 5);
    mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
    options.want = want == "host"    ? MH_WANT_HOST
                   : want == "ifany" ? MH_WANT_DEVICE_IF_ANY
                                     : MH_WANT_DEVICE;
    if (!gpu.empty()) options.gpu = gpu.c_str();
    options.wait = wait_ms.empty() ? 0 : 1;
    options.deadline_ms = wait_ms.empty() ? 0 : std::strtoull(wait_ms.c_str(), nullptr, 10);
    mh_error error{};
    mh_handle* handle = nullptr;
    if (mh_acquire(client_, parts[2].c_str(), &options, &handle, &error) != MH_OK) {
      Report(error, answer);
      return;
    }
    Release(held_[parts[1]]);
    held_[parts[1]].handle = handle;
    Describe(handle, answer);
  }

  void FollowOne(const std::vector<std::string>& parts, Answer& answer) {
    if (!Connected(answer)) return;
    const std::string gpu = Part(parts, 3);
    mh_acquire_options options = MH_ACQUIRE_OPTIONS_INIT;
    options.want = MH_WANT_DEVICE;
    if (!gpu.empty()) options.gpu = gpu.c_str();
    if (Part(parts, 4) == "same") options.device_flags = MH_DEVICE_SAME_ADDRESSES;
    mh_error error{};
    mh_live* live = nullptr;
    if (mh_follow(client_, parts[2].c_str(), &options, &live, &error) != MH_OK) {
      Report(error, answer);
      return;
    }
    Release(held_[parts[1]]);
    held_[parts[1]].live = live;
    Describe(mh_live_current(live), answer);
  }

  void State(Answer& answer) {
    if (!Connected(answer)) return;
    mh_client_view view = MH_CLIENT_VIEW_INIT;
    if (const mh_status status = mh_client_state(client_, &view); status != MH_OK) {
      answer.Fail(mh_status_name(status), "state");
      return;
    }
    answer.Add("connected", view.connected);
    answer.Add("leases", view.leases);
    answer.Add("reconnects", view.reconnects);
  }

  static std::vector<mh_tensor_view> OnDevice(const mh_handle* handle) {
    std::vector<mh_tensor_view> views;
    for (size_t i = 0; i < mh_tensor_count(handle); ++i) {
      mh_tensor_view view = MH_TENSOR_VIEW_INIT;
      if (mh_tensor_at(handle, i, &view) == MH_OK && view.device_data != nullptr) {
        views.push_back(view);
      }
    }
    return views;
  }

  static void List(const mh_handle* handle, bool addresses, Answer& answer) {
    std::vector<std::string> texts;
    for (const mh_tensor_view& view : OnDevice(handle)) {
      char hex[32];
      std::snprintf(hex, sizeof hex, "0x%" PRIxPTR, reinterpret_cast<uintptr_t>(view.device_data));
      texts.emplace_back(addresses ? hex : view.name);
    }
    answer.AddList(addresses ? "addresses" : "tensors", texts);
  }

  // What the GPU has at a tensor's address. False: `answer` says why not.
  bool ReadBack(const mh_handle* handle, const mh_tensor_view& view, std::string& bytes,
                Answer& answer) {
    if (const std::string why = own_.Load(); !why.empty()) {
      answer.Fail("FAILED_PRECONDITION", why);
      return false;
    }
    auto current = own_.MakeCurrent(std::string(mh_handle_gpu(handle)));
    if (current.ok()) {
      bytes.resize(view.nbytes);
      const cuda::Driver& driver = own_.driver();
      const cuda::Rc rc =
          driver.call().cuMemcpyDtoH(bytes.data(), AddressOf(view.device_data), view.nbytes);
      current = driver.Check(rc, "copy from the device");
    }
    if (!current.ok()) answer.Fail("UNAVAILABLE", current.error().text);
    return current.ok();
  }

  void Compare(const mh_handle* handle, Answer& answer) {
    uint64_t differ = 0;
    const std::vector<mh_tensor_view> views = OnDevice(handle);
    for (const mh_tensor_view& view : views) {
      std::string bytes;
      if (!ReadBack(handle, view, bytes, answer)) return;
      differ += std::memcmp(bytes.data(), view.data, view.nbytes) == 0 ? 0 : 1;
    }
    answer.Add("tensors", views.size());
    answer.Add("of", mh_tensor_count(handle));
    answer.Add("differ", differ);
  }

  void OneTensor(const mh_handle* handle, const std::string& what, const std::string& name,
                 Answer& answer) {
    mh_error error{};
    mh_tensor_view view = MH_TENSOR_VIEW_INIT;
    view.error = &error;
    if (mh_tensor(handle, name.c_str(), &view) != MH_OK) {
      Report(error, answer);
      return;
    }
    if (view.device_data == nullptr) {
      answer.Fail("NOT_FOUND", name + " is not on the device");
      return;
    }
    if (what == "store") {
      *static_cast<volatile unsigned char*>(const_cast<void*>(view.device_data)) = 1;
      return;
    }
    std::string bytes;
    if (!ReadBack(handle, view, bytes, answer)) return;
    if (what == "sha256") {
      answer.Add("sha256", Sha256Hex(bytes));
      answer.Add("host_sha256",
                 Sha256Hex(std::string(static_cast<const char*>(view.data), view.nbytes)));
      return;
    }
    const cuda::Rc rc =
        own_.driver().call().cuMemcpyHtoD(AddressOf(view.device_data), bytes.data(), 1);
    answer.Add("rc", static_cast<uint64_t>(rc));
  }

  static void Fork(const mh_handle* handle, Answer& answer) {
    std::fflush(stdout);
    const size_t here = OnDevice(handle).size();
    const pid_t child = ::fork();
    if (child == 0) ::_exit(OnDevice(handle).empty() ? 10 : 11);
    int status = 0;
    ::waitpid(child, &status, 0);
    answer.Add("on_device", here);
    answer.Add("child_sees", WIFEXITED(status) && WEXITSTATUS(status) == 10 ? "nothing" : "more");
  }

  const std::string runtime_dir_;
  mh_client* client_ = nullptr;
  std::map<std::string, Held> held_;
  OwnDriver own_;
};

}  // namespace
}  // namespace modelhost

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: device_worker RUNTIME_DIR\n");
    return 2;
  }
  modelhost::Worker worker(argv[1]);
  for (std::string line; std::getline(std::cin, line);) {
    if (!worker.Run(line)) break;
  }
  return 0;
}
