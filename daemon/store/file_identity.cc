#include "daemon/store/file_identity.h"

namespace modelhost {

FileIdentity IdentityOf(const FileInfo& info) {
  return {info.device, info.inode, info.bytes, info.mtime_ns, info.ctime_ns};
}

absl::StatusOr<FileIdentity> ReadIdentity(JsonObject& object) {
  FileIdentity identity;
  for (const auto& [key, into] : {std::pair<const char*, uint64_t*>{"device", &identity.device},
                                  {"inode", &identity.inode},
                                  {"bytes", &identity.bytes}}) {
    auto value = object.Uint(key);
    if (!value.ok()) return value.status();
    *into = *value;
  }
  for (const auto& [key, into] : {std::pair<const char*, int64_t*>{"mtime_ns", &identity.mtime_ns},
                                  {"ctime_ns", &identity.ctime_ns}}) {
    auto value = object.Int(key);
    if (!value.ok()) return value.status();
    *into = *value;
  }
  return identity;
}

void AppendIdentity(const FileIdentity& identity, JsonWriter& json) {
  json.Key("device").Uint(identity.device);
  json.Key("inode").Uint(identity.inode);
  json.Key("bytes").Uint(identity.bytes);
  json.Key("mtime_ns").Int(identity.mtime_ns);
  json.Key("ctime_ns").Int(identity.ctime_ns);
}

}  // namespace modelhost
