// manifest.json: what a version consists of, byte for byte. Written last, never changed.
//
//   {"schema": 1, "model": "planner", "version": 8, "created": "2026-01-01T00:00:00Z",
//    "digest": "<hex>", "requires": {"key": "value"},
//    "files": [{"path": "a.safetensors", "size": 123, "sha256": "<hex>", "role": "weights",
//               "chunk_bytes": 16777216, "chunk_sha256": ["<hex>", ...]}]}
//
// Unknown fields, duplicate paths and names that are not plain are refused: INVALID_ARGUMENT with
// the field's name. The version's digest is SHA-256 over the lines "<sha256>  <path>\n" of its
// files sorted by path (the text that `sha256sum` would print), so it names the content and nothing
// else. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "daemon/store/digest.h"

namespace modelhost {

inline constexpr uint64_t kChunkBytes = uint64_t{16} << 20;
// A version has no more files than this, and none of them lies below more directories.
inline constexpr size_t kMostVersionFiles = 100000;
inline constexpr int kMostVersionDepth = 16;
inline constexpr char kManifestName[] = "manifest.json";
inline constexpr char kChecksumsName[] = "checksums.sha256";

struct ManifestFile {
  std::string path;  // Plain relative, '/' between parts.
  uint64_t bytes = 0;
  Digest sha256;
  std::string role;  // "weights" or "sidecar".
  uint64_t chunk_bytes = kChunkBytes;
  std::vector<Digest> chunks;  // ceil(bytes / chunk_bytes); the last one may be short.
};

struct Manifest {
  std::string model;
  uint64_t version = 0;
  absl::Time created;
  Digest digest;
  std::map<std::string, std::string> requires_map;
  std::vector<ManifestFile> files;  // Sorted by path.
  uint64_t TotalBytes() const;
};

Digest VersionDigest(const std::vector<ManifestFile>& files);
// Checks everything that can be checked without the files, the digest too.
absl::StatusOr<Manifest> ParseManifest(absl::string_view json);
std::string SerializeManifest(const Manifest& manifest);

// A `checksums.sha256` in sha256sum's text form: "<hex>  name" or "<hex> *name" lines, as path ->
// digest. A leading "./" is dropped; blank lines, `#` comments and a line about checksums.sha256
// itself (which no file can fulfil) are skipped. INVALID_ARGUMENT with the line otherwise.
absl::StatusOr<std::map<std::string, Digest>> ParseChecksums(absl::string_view text);
// DATA_LOSS naming the file and both digests unless every listed file is in `files` and agrees.
absl::Status CheckAgainst(const std::map<std::string, Digest>& checksums,
                          const std::vector<ManifestFile>& files);

// "8" is; "08", "+8", "0", "" and what exceeds 2^63-1 are not.
absl::StatusOr<uint64_t> ParseVersionNumber(absl::string_view text);

// INVALID_ARGUMENT with the reason, unless "[a-z0-9][a-z0-9._-]{0,63}".
absl::Status CheckModelName(absl::string_view name);
// INVALID_ARGUMENT with the reason, unless `path` is a plain relative name: UTF-8 parts of at most
// 255 bytes with '/' between, at most kMostVersionDepth of these, no empty, "." or ".." part, no
// control character or backslash (which sha256sum would have to escape), and not manifest.json.
absl::Status CheckVersionPath(absl::string_view path);
// The same for a whole version: each name, no duplicates, and no file that is a directory of
// another. At least one, at most kMostVersionFiles.
absl::Status CheckVersionPaths(std::vector<std::string> paths);

}  // namespace modelhost
