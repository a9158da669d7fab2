// What must be the same for a file to be taken as unchanged since it was read. Pure.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/platform/os.h"
#include "daemon/store/json_reader.h"
#include "daemon/store/json_writer.h"

namespace modelhost {

struct FileIdentity {
  uint64_t device = 0;
  uint64_t inode = 0;
  uint64_t bytes = 0;
  int64_t mtime_ns = 0;
  int64_t ctime_ns = 0;
  friend bool operator==(const FileIdentity&, const FileIdentity&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const FileIdentity& i) {
    return H::combine(std::move(h), i.device, i.inode, i.bytes, i.mtime_ns, i.ctime_ns);
  }
};

FileIdentity IdentityOf(const FileInfo& info);
// The five fields of an object, under their names above.
absl::StatusOr<FileIdentity> ReadIdentity(JsonObject& object);
void AppendIdentity(const FileIdentity& identity, JsonWriter& json);

}  // namespace modelhost
