// Fills a segment of device memory through a small ring of pinned slots, and reads it back.
//
// Each thread has two slots: it fills one while the other is copied. A slot is filled again only
// after the event behind its copy. Gaps between tensors become zeros, so that a segment has one
// checksum and shows nobody what lay there before. Needs a current context on the calling thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "daemon/device_agent/agent_wire.h"
#include "daemon/device_agent/source_reader.h"
#include "proto/cuda/handles.h"

namespace modelhost {

class UploadRing {
 public:
  static constexpr uint64_t kChunkBytes = uint64_t{16} << 20;
  static constexpr uint32_t kMaxThreads = 8;

  // At most `ring_bytes` of pinned memory, in 2 x `threads` slots of at most `chunk_bytes`.
  static Result<std::unique_ptr<UploadRing>> Create(const cuda::Driver& driver,
                                                    const cuda::PrimaryContext& context,
                                                    uint64_t ring_bytes, uint32_t threads,
                                                    uint64_t chunk_bytes = kChunkBytes);
  UploadRing(const UploadRing&) = delete;
  ~UploadRing();  // Waits for copies that are in flight.

  // Called every now and then with the bytes done, on the calling thread; false ends the work with
  // CANCELLED.
  using Progress = std::function<bool(uint64_t done)>;

  // Writes [at, at + bytes), reads it back and compares. Its checksum. DATA_LOSS: a source is too
  // short, or the device does not have what was sent.
  Result<uint64_t> Upload(cuda::DevicePtr at, uint64_t bytes,
                          std::span<const agent::UploadItem> items,
                          std::span<const SourceFile> sources, const Progress& progress);
  // As Upload, without reading back: the checksum of each slot_bytes() that were sent.
  Result<std::vector<uint64_t>> Send(cuda::DevicePtr at, uint64_t bytes,
                                     std::span<const agent::UploadItem> items,
                                     std::span<const SourceFile> sources, const Progress& progress);
  // The checksum of what is there.
  Result<uint64_t> Sum(cuda::DevicePtr at, uint64_t bytes, const Progress& progress);

  uint64_t slot_bytes() const { return slot_bytes_; }

 private:
  struct Slot {
    cuda::PinnedBuffer buffer;
    cuda::Event event;
    bool in_flight = false;
  };
  using Work = std::function<Result<void>(uint32_t thread, uint64_t chunk)>;

  UploadRing(const cuda::Driver& driver, const cuda::PrimaryContext& context, uint64_t slot_bytes)
      : driver_(driver), context_(context), slot_bytes_(slot_bytes) {}
  // Runs `work` for every chunk of `bytes` on the threads.
  Result<void> ForEachChunk(uint64_t bytes, uint64_t done_before, const Work& work,
                            const Progress& progress);
  Result<void> ReadBack(cuda::DevicePtr at, uint64_t bytes, uint64_t done_before,
                        std::vector<uint64_t>& sums, const Progress& progress);

  const cuda::Driver& driver_;
  const cuda::PrimaryContext& context_;
  const uint64_t slot_bytes_;
  cuda::Stream stream_;
  std::vector<Slot> slots_;  // Of thread t: 2t and 2t + 1.
};

}  // namespace modelhost
