// From nothing to the first tensor's bytes: connect, acquire, look one tensor up, read its first
// byte. Beside it, in the same run: the same header parsed in this process, and one gRPC call on a
// warm and on a new channel, and the least that the machine asks for the same shape of work
// (attach_floor.h).
//
//   attach_bench --runtime-dir=D --ref=R --tensor=NAME --file=F --rounds=N --parses=N
//
// Prints one JSON object of microseconds.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "daemon/format/format_reader.h"
#include "modelhost/modelhost.h"
#include "modelhost/v1/control.grpc.pb.h"
#include "tests/bench/attach_floor.h"
#include "tests/bench/bench_util.h"

namespace modelhost::bench {
namespace {

// One file, mapped. The tensors' bytes are never touched: only the header is read.
class MappedFile : public FileSource {
 public:
  explicit MappedFile(const std::string& path) {
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat stat = {};
    if (fd < 0 || ::fstat(fd, &stat) != 0) Die(path, "cannot be opened");
    size_ = static_cast<size_t>(stat.st_size);
    data_ = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
    ::close(fd);
    if (data_ == MAP_FAILED) Die(path, "cannot be mapped");
  }
  ~MappedFile() override { ::munmap(data_, size_); }
  absl::StatusOr<std::span<const std::byte>> Open(const std::string&) override {
    return std::span<const std::byte>(static_cast<const std::byte*>(data_), size_);
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

std::vector<uint64_t> Attach(const std::string& runtime_dir, const std::string& ref,
                             const std::string& tensor, int rounds) {
  std::vector<uint64_t> samples;
  for (int i = -rounds / 10 - 1; i < rounds; ++i) {
    const uint64_t start = NowNs();
    mh_client* client = Connect(runtime_dir);
    mh_handle* handle = Acquire(client, ref);
    mh_tensor_view view = MH_TENSOR_VIEW_INIT;
    if (mh_tensor(handle, tensor.c_str(), &view) != MH_OK) Die(tensor, "is not in the model");
    const volatile auto* first = static_cast<const volatile unsigned char*>(view.data);
    (void)*first;
    if (i >= 0) samples.push_back(NowNs() - start);  // The first ones warm caches up.
    mh_release(handle);
    mh_disconnect(client);
  }
  return samples;
}

std::vector<uint64_t> Parse(const std::string& path, const std::string& tensor, int rounds) {
  std::vector<uint64_t> samples;
  const std::string name = path.substr(path.rfind('/') + 1);
  for (int i = 0; i < rounds; ++i) {
    const uint64_t start = NowNs();
    MappedFile file(path);
    const absl::StatusOr<TensorIndex> index = ReadModel(name, file);
    if (!index.ok()) Die(path, std::string(index.status().message()));
    bool found = false;
    for (size_t t = 0; t < index->size() && !found; ++t) found = index->at(t).name == tensor;
    if (!found) Die(tensor, "is not in the file");
    samples.push_back(NowNs() - start);
  }
  return samples;
}

std::vector<uint64_t> Rpc(const std::string& runtime_dir, int rounds, bool new_channel) {
  std::vector<uint64_t> samples;
  std::unique_ptr<v1::Control::Stub> stub;
  for (int i = -2; i < rounds; ++i) {
    const uint64_t start = NowNs();
    if (stub == nullptr || new_channel) {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // Really a new one.
      stub = v1::Control::NewStub(grpc::CreateCustomChannel(
          "unix:" + runtime_dir + "/control.sock", grpc::InsecureChannelCredentials(), arguments));
    }
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    v1::GetStatusResponse response;
    const grpc::Status status = stub->GetStatus(&context, v1::GetStatusRequest(), &response);
    if (!status.ok()) Die("GetStatus", status.error_message());
    if (i >= 0) samples.push_back(NowNs() - start);
  }
  return samples;
}

int Main(int argc, char** argv) {
  const std::string runtime_dir = Flag(argc, argv, "runtime-dir", "");
  const std::string ref = Flag(argc, argv, "ref", "");
  const std::string tensor = Flag(argc, argv, "tensor", "");
  const std::string file = Flag(argc, argv, "file", "");
  const int rounds = std::stoi(Flag(argc, argv, "rounds", "2000"));
  const int parses = std::stoi(Flag(argc, argv, "parses", "20"));

  const std::vector<uint64_t> attach = Attach(runtime_dir, ref, tensor, rounds);
  const std::vector<uint64_t> parse = Parse(file, tensor, parses);
  const std::vector<uint64_t> warm = Rpc(runtime_dir, rounds / 2 + 1, false);
  const std::vector<uint64_t> cold = Rpc(runtime_dir, rounds / 20 + 1, true);
  std::printf(
      "{\"p50_us\": %.2f, \"p99_us\": %.2f, \"floor_p50_us\": %.2f, \"parse_p50_us\": %.2f, "
      "\"rpc_p50_us\": %.2f, \"new_channel_rpc_p50_us\": %.2f, \"rounds\": %d}\n",
      Percentile(attach, 0.5) / 1e3, Percentile(attach, 0.99) / 1e3,
      Percentile(AttachFloor(file, rounds), 0.5) / 1e3, Percentile(parse, 0.5) / 1e3,
      Percentile(warm, 0.5) / 1e3, Percentile(cold, 0.5) / 1e3, rounds);
  return 0;
}

}  // namespace
}  // namespace modelhost::bench

int main(int argc, char** argv) { return modelhost::bench::Main(argc, argv); }
