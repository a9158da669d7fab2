// A broker on a real manager, store and loop, and clients that speak raw frames. For tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "daemon/platform/clock.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/fd_closer.h"
#include "daemon/platform/linux_os.h"
#include "daemon/platform/thread_pool.h"
#include "daemon/publish/catalogue_writer.h"
#include "daemon/publish/handle_broker.h"
#include "daemon/publish/index_writer.h"
#include "daemon/region/loader.h"
#include "daemon/registry/model_manager.h"
#include "daemon/store/publish.h"
#include "daemon/store/store.h"
#include "daemon/store/verified.h"
#include "gtest/gtest.h"
#include "proto/abi/handle_frame.h"
#include "proto/handle/fd_channel.h"

namespace modelhost {

using Bytes = std::vector<std::byte>;

// The bytes of a frame with its header filled in.
template <typename T>
Bytes MakeFrame(abi::FrameType type, T frame, const Bytes& tail = {}, uint32_t request_id = 1,
                uint32_t fds = 0) {
  frame.header = MakeHeader(type, sizeof(T) + tail.size(), request_id, fds);
  Bytes bytes(AsBytes(frame).begin(), AsBytes(frame).end());
  bytes.insert(bytes.end(), tail.begin(), tail.end());
  return bytes;
}
Bytes HelloBytes(uint32_t abi_min = abi::kFrameAbi, uint32_t abi_max = abi::kFrameAbi);
abi::Ref LabelRef(const std::string& model, const std::string& label = kDefaultLabel);
abi::Ref VersionRef(const std::string& model, uint64_t version);
Bytes AcquireBytes(const std::vector<abi::Ref>& refs, uint32_t request_id = 1,
                   uint32_t flags = abi::kAcquireWait, uint64_t deadline_ms = 20'000);

// Nothing is bound to it here.
class NoMachine : public Machine {
 public:
  absl::StatusOr<MachineFacts> Facts(const FactsNeeded&, const std::function<bool()>&) override {
    return MachineFacts();
  }
  std::shared_ptr<const MachineFacts> Known() override {
    return std::make_shared<const MachineFacts>();
  }
};

// A frame as it came.
struct Frame {
  abi::FrameHeader header{};
  Bytes bytes;
  std::vector<UniqueFd> fds;

  abi::FrameType type() const { return static_cast<abi::FrameType>(header.type); }
  template <typename T>
  T As() const {
    T value{};
    if (bytes.size() >= sizeof(T)) std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  template <typename T>
  std::vector<abi::RegionRef> Refs() const {
    std::vector<abi::RegionRef> refs((bytes.size() - sizeof(T)) / sizeof(abi::RegionRef));
    std::memcpy(refs.data(), bytes.data() + sizeof(T), refs.size() * sizeof(abi::RegionRef));
    return refs;
  }
  std::string ErrorText() const;  // "CODE: text", or "" for another frame.
};

class TestClient {
 public:
  explicit TestClient(const std::string& path);

  bool connected() const { return socket_.valid(); }
  const UniqueFd& socket() const { return socket_; }
  void Send(const Bytes& frame, const std::vector<const UniqueFd*>& fds = {});
  // Nullopt when the daemon has closed the connection. A failure when nothing comes in 20 s.
  std::optional<Frame> Receive();
  // What is there now.
  std::optional<Frame> ReceiveNow();
  void Close() { socket_.Reset(); }

 private:
  UniqueFd socket_;
};

class BrokerFixture : public ::testing::Test {
 protected:
  BrokerFixture();
  ~BrokerFixture() override;

  // Before StartDaemon. `files`: names and bytes of a version.
  void AddVersion(const std::string& model, uint64_t version,
                  const std::map<std::string, std::string>& files);
  void SetLabel(const std::string& model, const std::string& label, uint64_t version,
                uint64_t generation);
  // A safetensors file with one U8 tensor `name` of the bytes of `values`.
  static std::string Safetensors(const std::string& name, const std::string& values);

  void StartDaemon(BrokerOptions options = {});
  // planner:stable is version 7, generation 12, with a config.json; version 8 is there too.
  void StartWithPlanner(BrokerOptions options = {});
  TestClient Connect();  // Has said Hello.
  // Has a lease on planner:stable, whose frame it has read.
  TestClient ConnectAndAcquire(uint64_t* lease = nullptr);
  TestClient ConnectSilently() { return TestClient(socket_path_); }

  template <typename Function>
  auto OnLoop(Function function) {
    return RunAndWait(*loop_, std::move(function));
  }
  // Until `condition` holds on the loop; false after 20 s.
  bool Eventually(const std::function<bool()>& condition);
  BrokerStats Stats() {
    return OnLoop([this] { return broker_->stats(); });
  }
  size_t Leases() {
    return OnLoop([this] { return manager_->Leases().size(); });
  }
  static size_t OpenFds();

  std::string dir_;
  std::string socket_path_;
  LabelFile labels_;
  std::map<std::string, ModelPolicy> model_policies_;  // Before StartDaemon.
  Observer* observer_ = nullptr;                       // Likewise; outlives the fixture's daemon.
  std::unique_ptr<HandleBroker> broker_;
  std::unique_ptr<ModelManager> manager_;
  std::unique_ptr<CatalogueWriter> catalogue_;
  FdCloser closer_;

 private:
  LinuxOs os_;
  SystemClock clock_;
  UniqueFd state_dir_;
  RegionCache regions_;
  BudgetPool host_{"host", UINT64_MAX};
  BudgetPool memlock_{"memlock", UINT64_MAX};
  InProcessIndexer indexer_;
  IndexWriter index_writer_;
  NoMachine machine_;
  AccessPolicy access_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<VerifiedFiles> verified_;
  std::unique_ptr<Publisher> publisher_;
  std::unique_ptr<ThreadPool> chunks_;
  std::unique_ptr<Loader> loader_;
  std::unique_ptr<ThreadPool> pool_;
  std::thread thread_;
};

}  // namespace modelhost
