// How fast bytes get onto the device: the ceiling of pinned memory, our ring, and its alternatives.
#include <fcntl.h>

#include <algorithm>
#include <array>

#include "daemon/device_agent/upload.h"
#include "proto/handle/mapping.h"
#include "tests/gpu/gpu_check.h"

namespace modelhost::gpu {
namespace {

using cuda::Rc;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr double kEnough = 0.85;

// Of copies of all of `from`, best of five.
double CopySpeed(const Gpu& gpu, cuda::DevicePtr to, std::span<const std::byte> from) {
  const cuda::Stream stream = Must(cuda::CreateStream(*gpu.driver));
  double best = 0;
  for (int i = 0; i < 5; ++i) {
    const double before = Seconds();
    Rc rc = gpu.driver->call().cuMemcpyHtoDAsync(to, from.data(), from.size(), stream.get());
    if (rc == Rc::kSuccess) rc = gpu.driver->call().cuStreamSynchronize(stream.get());
    MustBe(gpu.driver->Check(rc, "copy"));
    best = std::max(best, GbPerSecond(from.size(), Seconds() - before));
  }
  return best;
}

double Ceiling(const Gpu& gpu, cuda::DevicePtr to, uint64_t bytes) {
  const double before = Seconds();
  const cuda::PinnedBuffer pinned = Must(cuda::PinBuffer(*gpu.driver, bytes));
  Print("pin_ms", (Seconds() - before) * 1e3);
  std::ranges::fill(pinned.get(), std::byte{1});
  return CopySpeed(gpu, to, pinned.get());
}

// The best of our ring over chunks and threads.
double RingSweep(const Gpu& gpu, cuda::DevicePtr to, uint64_t bytes, const SealedRegion& weights) {
  const agent::UploadItem item{0, bytes, 0, 0, 0};
  std::array<SourceFile, 1> sources;
  sources[0] = Must(OpenSource(UniqueFd(::fcntl(weights.fd.get(), F_DUPFD_CLOEXEC, 3)), false));
  double best = 0;
  for (const uint64_t chunk : {4 * kMiB, 16 * kMiB, 64 * kMiB}) {
    for (const uint32_t threads : {1U, 2U, 4U, 8U}) {
      const auto ring =
          Must(UploadRing::Create(*gpu.driver, gpu.context, 2 * threads * chunk, threads, chunk));
      const double before = Seconds();
      (void)Must(
          ring->Send(to, bytes, std::span(&item, 1), sources, [](uint64_t) { return true; }));
      const double speed = GbPerSecond(bytes, Seconds() - before);
      Print("ring_gb_per_s." + std::to_string(chunk / kMiB) + "mib_" + std::to_string(threads) +
                "_threads",
            speed);
      best = std::max(best, speed);
    }
  }
  return best;
}

// Host pages that are registered instead of copied through a ring.
void Registered(const Gpu& gpu, cuda::DevicePtr to, uint64_t bytes, const SealedRegion& weights) {
  const cuda::DriverTable& call = gpu.driver->call();
  auto region = Must(WritableRegion::Create("registered", bytes, HugePages::kAuto));
  std::ranges::fill(region.bytes(), std::byte{1});
  const double before = Seconds();
  const Rc rc = call.cuMemHostRegister(region.bytes().data(), bytes, 0);
  if (rc == Rc::kSuccess) {
    Print("register_memfd_ms", (Seconds() - before) * 1e3);
    const cuda::HostRegistration registration(*gpu.driver, region.bytes().data());
    Print("registered_gb_per_s", CopySpeed(gpu, to, region.bytes()));
  } else {
    Print("register_memfd", gpu.driver->Name(rc));
  }
  // What host_registered would need for pages that clients cannot write to.
  const auto sealed = Must(ReadOnlyMapping::MapSealed(weights.fd, weights.bytes));
  // The driver's interface takes no const.
  auto* const pages = const_cast<std::byte*>(sealed.bytes().data());
  for (const auto& [name, flags] : {std::pair("register_sealed_read_only_rc", 8U),
                                    std::pair("register_sealed_default_rc", 0U)}) {
    const Rc said = call.cuMemHostRegister(pages, bytes, flags);
    Print(name, std::to_string(static_cast<int>(said)));
    if (said == Rc::kSuccess) (void)call.cuMemHostUnregister(pages);
  }
}

}  // namespace

void CheckUploadSpeed(const Machine& machine, const SealedRegion& weights) {
  const uint64_t bytes = std::min(machine.bytes, 1024 * kMiB);
  auto ends = Must(MakeSeqpacketPair());
  const pid_t child = Spawn([&] {
    const Gpu gpu;
    const auto memory = Must(cuda::CreateAllocation(*gpu.driver, 0, bytes));
    const auto at = Must(cuda::ReserveAddresses(*gpu.driver, bytes));
    const auto mapped =
        Must(cuda::MapAllocation(*gpu.driver, memory, at.get(), 0, cuda::Access::kReadWrite));
    const double ceiling = Ceiling(gpu, mapped.get().at, bytes);
    Print("pinned_gb_per_s", ceiling);
    const double best = RingSweep(gpu, mapped.get().at, bytes, weights);
    Print("ring_best_gb_per_s", best);
    Print("ring_of_ceiling", best / ceiling);
    const std::vector<std::byte> pageable(bytes, std::byte{1});
    Print("pageable_gb_per_s", CopySpeed(gpu, mapped.get().at, pageable));
    Registered(gpu, mapped.get().at, bytes, weights);
    Say(ends.second, best >= kEnough * ceiling ? 1 : 2);
    return 0;
  });
  ends.second.Reset();
  const uint32_t said = Hear(ends.first);
  Verdict("the_ring_uploads", Good(child) && said != 0);
  // The fake copies at the speed of this machine's memory: what it measures is nothing.
  if (!machine.fake) Verdict("the_ring_reaches_85_percent_of_pinned_copies", said == 1);
}

}  // namespace modelhost::gpu
