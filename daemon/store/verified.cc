#include "daemon/store/verified.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "daemon/store/atomic_file.h"
#include "daemon/store/file_identity.h"
#include "daemon/store/json_reader.h"
#include "daemon/store/json_writer.h"

namespace modelhost {
namespace {

constexpr char kVerifiedName[] = "verified.json";
constexpr uint64_t kVerifiedSchema = 1;
constexpr uint64_t kMaxVerifiedBytes = uint64_t{256} << 20;
// Files that are gone are never asked for again; the oldest entries make room.
constexpr size_t kMaxEntries = 65536;

struct Entry {
  Digest digest;
  uint64_t used = 0;  // Larger is later.
};
using Entries = absl::flat_hash_map<FileIdentity, Entry>;

absl::StatusOr<Entries> Parse(absl::string_view text) {
  auto document = JsonDocument::Parse(kVerifiedName, text);
  if (!document.ok()) return document.status();
  auto object = JsonObject::Of(document->root(), kVerifiedName);
  if (!object.ok()) return object.status();
  auto schema = object->Uint("schema");
  if (!schema.ok()) return schema.status();
  if (*schema != kVerifiedSchema) return object->ErrorAt("schema", "unknown");
  auto files = object->Array("files");
  if (!files.ok()) return files.status();
  Entries entries;
  for (const simdjson::dom::element json : *files) {
    auto file = JsonObject::Of(json, object->Place("files"));
    if (!file.ok()) return file.status();
    auto identity = ReadIdentity(*file);
    if (!identity.ok()) return identity.status();
    auto digest = file->Sha256("sha256");
    if (!digest.ok()) return digest.status();
    if (const absl::Status done = file->Finish(); !done.ok()) return done;
    entries[*identity] = Entry{*digest, entries.size() + 1};
  }
  if (const absl::Status done = object->Finish(); !done.ok()) return done;
  return entries;
}

class VerifiedFilesImpl final : public VerifiedFiles {
 public:
  VerifiedFilesImpl(Os& os, Entries entries)
      : os_(os), entries_(std::move(entries)), clock_(entries_.size()) {}

  std::optional<Digest> Find(const FileInfo& info) override {
    absl::MutexLock lock(&mutex_);
    const auto it = entries_.find(IdentityOf(info));
    if (it == entries_.end()) return std::nullopt;
    it->second.used = ++clock_;
    return it->second.digest;
  }

  void Record(const FileInfo& info, const Digest& digest) override {
    absl::MutexLock lock(&mutex_);
    Entry& entry = entries_[IdentityOf(info)];
    if (entry.used == 0 || entry.digest != digest) ++changes_;
    entry = Entry{digest, ++clock_};
  }

  void Forget(const FileInfo& info) override {
    absl::MutexLock lock(&mutex_);
    if (entries_.erase(IdentityOf(info)) > 0) ++changes_;
  }

  size_t ForgetOthers(const std::vector<FileInfo>& files, bool only_count) override {
    absl::flat_hash_set<FileIdentity> there;
    for (const FileInfo& file : files) there.insert(IdentityOf(file));
    absl::MutexLock lock(&mutex_);
    size_t others = 0;
    for (auto it = entries_.begin(); it != entries_.end();) {
      const auto entry = it++;
      if (there.contains(entry->first)) continue;
      ++others;
      if (!only_count) entries_.erase(entry);
    }
    if (!only_count && others > 0) ++changes_;
    return others;
  }

  absl::Status Save(const UniqueFd& state_dir) override {
    absl::MutexLock one_at_a_time(&save_mutex_);
    uint64_t changes = 0;
    std::vector<std::pair<FileIdentity, Entry>> sorted;
    {
      absl::MutexLock lock(&mutex_);
      if (changes_ == saved_changes_) return absl::OkStatus();
      changes = changes_;
      sorted.assign(entries_.begin(), entries_.end());
      std::sort(sorted.begin(), sorted.end(),
                [](const auto& a, const auto& b) { return a.second.used < b.second.used; });
      if (sorted.size() > kMaxEntries) {
        const auto keep = sorted.end() - static_cast<ptrdiff_t>(kMaxEntries);
        for (auto it = sorted.begin(); it != keep; ++it) entries_.erase(it->first);
        sorted.erase(sorted.begin(), keep);
      }
    }
    JsonWriter json;
    json.BeginObject();
    json.Key("schema").Uint(kVerifiedSchema);
    json.Key("files").BeginArray();
    for (const auto& [identity, entry] : sorted) {
      json.BeginObject();
      AppendIdentity(identity, json);
      json.Key("sha256").String(entry.digest.Hex());
      json.EndObject();
    }
    json.EndArray();
    json.EndObject();
    const absl::Status written =
        ReplaceFileAt(os_, state_dir, kVerifiedName, 0600, std::move(json).Take());
    if (!written.ok()) return written;
    absl::MutexLock lock(&mutex_);
    saved_changes_ = changes;
    return absl::OkStatus();
  }

 private:
  Os& os_;
  absl::Mutex save_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  absl::Mutex mutex_;
  Entries entries_ ABSL_GUARDED_BY(mutex_);
  uint64_t clock_ ABSL_GUARDED_BY(mutex_);
  uint64_t changes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t saved_changes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

std::unique_ptr<VerifiedFiles> VerifiedFiles::Load(Os& os, const UniqueFd& state_dir) {
  Entries entries;
  if (auto text = ReadSmallFileAt(os, state_dir, kVerifiedName, kMaxVerifiedBytes); text.ok()) {
    if (auto parsed = Parse(*text); parsed.ok()) entries = *std::move(parsed);
  }
  return std::make_unique<VerifiedFilesImpl>(os, std::move(entries));
}

}  // namespace modelhost
