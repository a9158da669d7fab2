// One version as this process has it: the index and the regions, mapped.
//
// Built from the frames of a grant (grant_builder.h), then read by any thread. The regions with
// tensors are mapped when it is built and their descriptors closed; other files, and paths, come
// when somebody asks (AttachFile), once each, and stay. Addresses never change. Sizes are in bytes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "client/src/cuda_image.h"
#include "client/src/index_reader.h"
#include "client/src/mutex.h"
#include "proto/abi/handle_frame.h"
#include "proto/handle/error.h"
#include "proto/handle/mapping.h"
#include "proto/handle/unique_fd.h"

namespace modelhost {

class Model {
 public:
  // Maps the index that came with `head` and checks that it is the index of that version.
  // DATA_LOSS, RESOURCE_EXHAUSTED.
  static Result<std::unique_ptr<Model>> Create(const abi::Granted& head, const UniqueFd& index);

  // Maps a region that the grant brought. INTERNAL (not in the index, or came twice), DATA_LOSS
  // (not sealed, not of its size), RESOURCE_EXHAUSTED.
  Result<void> AddRegion(const abi::RegionRef& ref, const UniqueFd& fd);
  // INTERNAL unless all regions have come that come with a grant.
  Result<void> CheckComplete() const;

  const std::string& model() const { return model_; }
  const std::string& label() const { return label_; }  // Empty for a fixed version.
  const std::string& digest_hex() const { return digest_hex_; }
  uint64_t version() const { return version_; }
  const IndexReader& index() const { return index_; }
  std::string Name() const;  // "planner@7"

  // The first byte of a region. Null: not mapped in this process yet, or empty.
  const std::byte* RegionData(uint32_t region) const;

  // Before the model is shared: maps what came of device memory, or says why there is none.
  // `map` false: it is imported, and whoever holds the model maps it. Errors as CudaImage.
  Result<void> AttachDevice(const std::shared_ptr<const CudaDevice>& device, DeviceGrant grant,
                            bool map);
  void SetNoDevice(std::string why) { no_device_ = std::move(why); }
  // Null: none, for the reason no_device().
  CudaImage* image() const { return image_.get(); }
  const std::string& no_device() const { return no_device_; }
  // Where a GPU has this tensor. Null: nowhere, or not now, or in a forked child.
  const void* DeviceData(const abi::TensorEntry& tensor) const;

  struct OpenFile {
    const std::byte* data = nullptr;  // Null only when empty.
    int fd = -1;
    const char* path = nullptr;  // "/proc/self/fd/N"
  };
  // False: nobody has attached this region's descriptor yet.
  bool FileOf(uint32_t region, OpenFile* file) const;
  // Keeps `fd` and maps the region if it is not mapped. A second descriptor for a region is closed.
  // Errors as AddRegion.
  Result<void> AttachFile(const abi::RegionRef& ref, UniqueFd fd);

 private:
  struct Region {
    ReadOnlyMapping mapping;
    std::atomic<bool> mapped{false};  // `mapping` is final.
    UniqueFd fd;
    std::array<char, 32> path{};
    std::atomic<bool> open{false};  // `fd` and `path` are final.
  };

  Model() = default;
  // INTERNAL unless the index has this region, of this kind and size.
  Result<void> CheckRef(const abi::RegionRef& ref) const;
  Result<void> MapRegion(const abi::RegionRef& ref, const UniqueFd& fd);
  std::string RegionName(uint32_t region) const;

  std::string model_;
  std::string label_;
  std::string digest_hex_;
  uint64_t version_ = 0;
  ReadOnlyMapping index_mapping_;
  IndexReader index_;
  std::string no_device_ = "it was not asked for";
  // As many as the index has regions. Written before the model is shared; afterwards under
  // `mutex_`, and published by the flags.
  std::unique_ptr<Region[]> regions_;
  Mutex mutex_;
  // After the regions, which the GPU may read: it goes first.
  std::unique_ptr<CudaImage> image_;
};

}  // namespace modelhost
