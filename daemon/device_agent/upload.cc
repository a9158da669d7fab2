#include "daemon/device_agent/upload.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "daemon/device_agent/checksum.h"

namespace modelhost {
namespace {

constexpr std::chrono::milliseconds kProgressInterval{50};
constexpr uint64_t kSmallestSlot = uint64_t{64} << 10;

uint64_t ChunksOf(uint64_t bytes, uint64_t chunk) { return (bytes + chunk - 1) / chunk; }

// The bytes of chunk [from, from + into.size()) of the segment.
Result<void> FillChunk(std::span<const agent::UploadItem> items,
                       std::span<const SourceFile> sources, SourceReader& reader, uint64_t from,
                       std::span<std::byte> into) {
  auto item = std::ranges::lower_bound(items, from, std::less_equal<>(), [](const auto& one) {
    return one.device_offset + one.bytes;
  });
  uint64_t done = 0;
  for (; item != items.end() && item->device_offset < from + into.size(); ++item) {
    const uint64_t begin = std::max(item->device_offset, from);
    const uint64_t end = std::min(item->device_offset + item->bytes, from + into.size());
    std::memset(into.data() + done, 0, begin - from - done);
    const uint64_t offset = item->source_offset + (begin - item->device_offset);
    auto read = reader.Read(sources[item->source], offset, into.subspan(begin - from, end - begin),
                            into.size() - (begin - from));
    if (!read.ok()) return read;
    done = end - from;
  }
  std::memset(into.data() + done, 0, into.size() - done);
  return {};
}

uint64_t Total(const std::vector<uint64_t>& sums) {
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace

Result<std::unique_ptr<UploadRing>> UploadRing::Create(const cuda::Driver& driver,
                                                       const cuda::PrimaryContext& context,
                                                       uint64_t ring_bytes, uint32_t threads,
                                                       uint64_t chunk_bytes) {
  threads = std::clamp<uint32_t>(threads, 1, kMaxThreads);
  // Fewer threads rather than slots of no use.
  while (threads > 1 && ring_bytes / (2 * threads) < kSmallestSlot) --threads;
  const uint64_t slot = std::clamp(ring_bytes / (2 * threads), kSmallestSlot, chunk_bytes) /
                        kSmallestSlot * kSmallestSlot;
  std::unique_ptr<UploadRing> ring(new UploadRing(driver, context, slot));
  auto stream = cuda::CreateStream(driver);
  if (!stream.ok()) return std::move(stream).error();
  ring->stream_ = *std::move(stream);
  for (uint32_t i = 0; i < 2 * threads; ++i) {
    auto buffer = cuda::PinBuffer(driver, slot);
    if (!buffer.ok()) return std::move(buffer).error();
    auto event = cuda::CreateEvent(driver);
    if (!event.ok()) return std::move(event).error();
    ring->slots_.push_back({*std::move(buffer), *std::move(event), false});
  }
  return ring;
}

UploadRing::~UploadRing() {
  if (stream_.valid()) (void)driver_.call().cuStreamSynchronize(stream_.get());
}

Result<void> UploadRing::ForEachChunk(uint64_t bytes, uint64_t done_before, const Work& work,
                                      const Progress& progress) {
  const uint64_t chunks = ChunksOf(bytes, slot_bytes_);
  std::atomic<uint64_t> next{0};
  std::atomic<uint64_t> done{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable ended;
  uint32_t running = static_cast<uint32_t>(slots_.size() / 2);
  std::optional<Error> error;
  const auto body = [&](uint32_t thread) {
    Result<void> result = context_.MakeCurrent();
    while (result.ok() && !stop) {
      const uint64_t chunk = next++;
      if (chunk >= chunks) break;
      result = work(thread, chunk);
      done += std::min(slot_bytes_, bytes - chunk * slot_bytes_);
    }
    (void)driver_.call().cuCtxSetCurrent(nullptr);
    const std::lock_guard lock(mutex);
    if (!result.ok() && !error.has_value()) {
      error = result.error();
      stop = true;
    }
    --running;
    ended.notify_one();
  };
  std::vector<std::thread> threads;
  for (uint32_t thread = 0; thread < slots_.size() / 2; ++thread) {
    threads.emplace_back(body, thread);
  }
  {
    std::unique_lock lock(mutex);
    while (running > 0) {
      ended.wait_for(lock, kProgressInterval);
      lock.unlock();
      const bool go_on = progress(done_before + done);
      lock.lock();
      if (!go_on && !error.has_value()) {
        error = Error{Code::kCancelled, "the upload was cancelled", 0};
        stop = true;
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (error.has_value()) return *std::move(error);
  return {};
}

Result<void> UploadRing::ReadBack(cuda::DevicePtr at, uint64_t bytes, uint64_t done_before,
                                  std::vector<uint64_t>& sums, const Progress& progress) {
  sums.assign(ChunksOf(bytes, slot_bytes_), 0);
  return ForEachChunk(
      bytes, done_before,
      [&](uint32_t thread, uint64_t chunk) -> Result<void> {
        const uint64_t offset = chunk * slot_bytes_;
        const auto into =
            slots_[2 * thread].buffer.get().first(std::min(slot_bytes_, bytes - offset));
        const cuda::Rc rc = driver_.call().cuMemcpyDtoH(into.data(), at + offset, into.size());
        if (rc != cuda::Rc::kSuccess) return driver_.ToError(rc, "read device memory back");
        sums[chunk] = PlacedSum(into, offset);
        return {};
      },
      progress);
}

Result<uint64_t> UploadRing::Sum(cuda::DevicePtr at, uint64_t bytes, const Progress& progress) {
  std::vector<uint64_t> sums;
  if (auto read = ReadBack(at, bytes, 0, sums, progress); !read.ok()) return read.error();
  return Total(sums);
}

Result<std::vector<uint64_t>> UploadRing::Send(cuda::DevicePtr at, uint64_t bytes,
                                               std::span<const agent::UploadItem> items,
                                               std::span<const SourceFile> sources,
                                               const Progress& progress) {
  std::vector<uint64_t> sent(ChunksOf(bytes, slot_bytes_), 0);
  std::vector<std::unique_ptr<SourceReader>> readers;
  for (size_t i = 0; i < slots_.size() / 2; ++i) {
    readers.push_back(std::make_unique<SourceReader>(slot_bytes_));
  }
  std::vector<uint8_t> turn(slots_.size() / 2, 0);
  const cuda::DriverTable& call = driver_.call();
  const auto copy = [&](uint32_t thread, uint64_t chunk) -> Result<void> {
    Slot& slot = slots_[2 * thread + (turn[thread] ^= 1)];
    if (std::exchange(slot.in_flight, false)) {
      const cuda::Rc rc = call.cuEventSynchronize(slot.event.get());
      if (rc != cuda::Rc::kSuccess) return driver_.ToError(rc, "copy to device memory");
    }
    const uint64_t offset = chunk * slot_bytes_;
    const auto piece = slot.buffer.get().first(std::min(slot_bytes_, bytes - offset));
    auto filled = FillChunk(items, sources, *readers[thread], offset, piece);
    if (!filled.ok()) return filled;
    sent[chunk] = PlacedSum(piece, offset);
    cuda::Rc rc = call.cuMemcpyHtoDAsync(at + offset, piece.data(), piece.size(), stream_.get());
    if (rc == cuda::Rc::kSuccess) {
      slot.in_flight = true;
      rc = call.cuEventRecord(slot.event.get(), stream_.get());
    }
    return driver_.Check(rc, "copy to device memory");
  };
  auto copied = ForEachChunk(bytes, 0, copy, progress);
  // Whatever was started must end before a slot is used for anything else.
  const cuda::Rc rc = call.cuStreamSynchronize(stream_.get());
  for (Slot& slot : slots_) slot.in_flight = false;
  if (!copied.ok()) return std::move(copied).error();
  if (rc != cuda::Rc::kSuccess) return driver_.ToError(rc, "copy to device memory");
  return sent;
}

Result<uint64_t> UploadRing::Upload(cuda::DevicePtr at, uint64_t bytes,
                                    std::span<const agent::UploadItem> items,
                                    std::span<const SourceFile> sources, const Progress& progress) {
  const auto all = Send(at, bytes, items, sources, progress);
  if (!all.ok()) return all.error();
  const std::vector<uint64_t>& sent = *all;
  std::vector<uint64_t> found;
  if (auto read = ReadBack(at, bytes, bytes, found, progress); !read.ok()) return read.error();
  for (size_t chunk = 0; chunk < sent.size(); ++chunk) {
    if (sent[chunk] != found[chunk]) {
      return Error{Code::kDataLoss,
                   "device memory at offset " + std::to_string(chunk * slot_bytes_) +
                       ": it does not hold what was written there",
                   0};
    }
  }
  return Total(sent);
}

}  // namespace modelhost
