#include "daemon/config.h"

#include <cerrno>
#include <fstream>
#include <functional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "daemon/format/requires.h"
#include "daemon/format/text.h"
#include "daemon/observe/http_address.h"
#include "daemon/platform/errno_status.h"
#include "daemon/store/manifest.h"
#include "daemon/store/policy_keys.h"
#include "daemon/store/toml_document.h"

namespace modelhost {
namespace {

constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxRetries = 20;
constexpr int64_t kMaxDeviceThreads = 8;
constexpr uint64_t kLeastRing = uint64_t{1} << 20;
constexpr size_t kMaxFileBytes = size_t{4} << 20;

using KeyReader = std::function<absl::Status(const TomlField&)>;
using Section = std::vector<std::pair<std::string, KeyReader>>;

// Reads every key of a section's table with the reader of its name.
absl::Status ReadSection(absl::string_view file, const TomlEntry& entry, const Section& section) {
  if (entry.value.kind != TomlValue::Kind::kTable) {
    return TomlField(file, "", entry)
        .Error(absl::StrCat("expected a table (write [", entry.key, "])"));
  }
  for (const TomlEntry& inner : entry.value.table) {
    const TomlField field(file, entry.key, inner);
    const KeyReader* reader = nullptr;
    std::vector<absl::string_view> known;
    for (const auto& [key, candidate] : section) {
      known.push_back(key);
      if (key == inner.key) reader = &candidate;
    }
    if (reader == nullptr) {
      return field.Error(absl::StrCat("unknown (known here are ", absl::StrJoin(known, ", "), ")"));
    }
    if (const absl::Status read = (*reader)(field); !read.ok()) return read;
  }
  return absl::OkStatus();
}

// A size is a string with a unit, or a plain number of bytes.
absl::StatusOr<uint64_t> Size(const TomlField& field) {
  if (field.value().kind == TomlValue::Kind::kInteger) {
    if (field.value().integer < 0) return field.Error("expected 0 or more bytes");
    return static_cast<uint64_t>(field.value().integer);
  }
  auto text = field.String();
  if (!text.ok()) return text.status();
  auto bytes = ParseBytes(*text);
  if (!bytes.ok()) return field.Error(bytes.status().message());
  return bytes;
}

// One of a few words.
template <typename T>
absl::Status Choice(const TomlField& field, const std::vector<std::pair<std::string, T>>& choices,
                    T& into) {
  auto text = field.String();
  if (!text.ok()) return text.status();
  std::vector<std::string> words;
  for (const auto& [word, value] : choices) {
    if (word == *text) {
      into = value;
      return absl::OkStatus();
    }
    words.push_back(absl::StrCat("\"", word, "\""));
  }
  return field.Error(absl::StrCat("expected one of ", absl::StrJoin(words, ", ")));
}

template <typename T>
absl::Status Set(absl::StatusOr<T> value, T& into) {
  if (!value.ok()) return value.status();
  into = *std::move(value);
  return absl::OkStatus();
}

Section MemorySection(Config& config) {
  return {{"host_budget",
           [&](const TomlField& field) {
             auto bytes = Size(field);
             if (!bytes.ok()) return bytes.status();
             config.memory.host_budget_bytes = *bytes;
             return absl::OkStatus();
           }},
          {"memlock", [&](const TomlField& field) {
             return Choice<MemlockPolicy>(field,
                                          {{"required", MemlockPolicy::kRequired},
                                           {"best_effort", MemlockPolicy::kBestEffort},
                                           {"off", MemlockPolicy::kOff}},
                                          config.memory.memlock);
           }}};
}

absl::Status ReadIoPriority(const TomlField& field, std::string& into) {
  auto text = field.String();
  if (!text.ok()) return text.status();
  absl::string_view level = *text;
  const bool leveled = absl::ConsumePrefix(&level, "best-effort:") && level.size() == 1 &&
                       level[0] >= '0' && level[0] <= '7';
  if (!leveled && *text != "idle" && *text != "none") {
    return field.Error("expected \"best-effort:N\" with N from 0 to 7, \"idle\" or \"none\"");
  }
  into = *std::move(text);
  return absl::OkStatus();
}

absl::Status ReadPace(const TomlField& field, LoadPace& into) {
  const auto text = field.String();
  if (!text.ok()) return text.status();
  absl::string_view rate = *text;
  if (rate == "auto") {
    into = {};
  } else if (rate == "off") {
    into = {LoadPace::Kind::kOff, 0};
  } else {
    const bool per_second = absl::ConsumeSuffix(&rate, "/s");
    const auto bytes = ParseBytes(rate);
    if (!per_second || !bytes.ok() || *bytes == 0) {
      return field.Error("expected \"auto\", \"off\" or bytes a second, as in \"200MiB/s\"");
    }
    into = {LoadPace::Kind::kRate, *bytes};
  }
  return absl::OkStatus();
}

Section LoadSection(Config& config) {
  return {{"threads",
           [&](const TomlField& field) {
             auto threads = field.Integer();
             if (!threads.ok()) return threads.status();
             if (*threads < 0 || *threads > kMaxThreads) {
               return field.Error(absl::StrCat("expected 0 to ", kMaxThreads));
             }
             config.load.threads = static_cast<int>(*threads);
             return absl::OkStatus();
           }},
          {"retries",
           [&](const TomlField& field) {
             auto retries = field.Integer();
             if (!retries.ok()) return retries.status();
             if (*retries < 0 || *retries > kMaxRetries) {
               return field.Error(absl::StrCat("expected 0 to ", kMaxRetries));
             }
             config.load.retries = static_cast<int>(*retries);
             return absl::OkStatus();
           }},
          {"verify",
           [&](const TomlField& field) {
             return Choice<VerifyPolicy>(field,
                                         {{"full", VerifyPolicy::kFull},
                                          {"manifest", VerifyPolicy::kManifest},
                                          {"none", VerifyPolicy::kNone}},
                                         config.load.verify);
           }},
          {"admission_timeout",
           [&](const TomlField& field) {
             auto text = field.String();
             if (!text.ok()) return text.status();
             auto duration = ParseDuration(*text);
             if (!duration.ok()) return field.Error(duration.status().message());
             config.load.admission_timeout = *duration;
             return absl::OkStatus();
           }},
          {"isolate_parsing",
           [&](const TomlField& field) {
             return Choice<IsolateParsing>(field,
                                           {{"auto", IsolateParsing::kAuto},
                                            {"required", IsolateParsing::kRequired},
                                            {"off", IsolateParsing::kOff}},
                                           config.load.isolate_parsing);
           }},
          {"pace", [&](const TomlField& field) { return ReadPace(field, config.load.pace); }},
          {"io_priority",
           [&](const TomlField& field) { return ReadIoPriority(field, config.load.io_priority); }}};
}

absl::Status Interval(const TomlField& field, absl::Duration least, absl::Duration& into) {
  auto text = field.String();
  if (!text.ok()) return text.status();
  auto duration = ParseDuration(*text);
  if (!duration.ok()) return field.Error(duration.status().message());
  if (*duration < least) {
    return field.Error(absl::StrCat("expected ", absl::FormatDuration(least), " or more"));
  }
  into = *duration;
  return absl::OkStatus();
}

Section DeviceSection(Config& config) {
  return {{"enabled",
           [&](const TomlField& field) { return Set(field.Boolean(), config.device.enabled); }},
          {"pinned_ring",
           [&](const TomlField& field) {
             auto bytes = Size(field);
             if (!bytes.ok()) return bytes.status();
             if (*bytes < kLeastRing) return field.Error("expected \"1MiB\" or more");
             config.device.pinned_ring_bytes = *bytes;
             return absl::OkStatus();
           }},
          {"threads",
           [&](const TomlField& field) {
             auto threads = field.Integer();
             if (!threads.ok()) return threads.status();
             if (*threads < 1 || *threads > kMaxDeviceThreads) {
               return field.Error(absl::StrCat("expected 1 to ", kMaxDeviceThreads));
             }
             config.device.threads = static_cast<int>(*threads);
             return absl::OkStatus();
           }},
          {"stall_timeout",
           [&](const TomlField& field) {
             return Interval(field, absl::Seconds(1), config.device.stall_timeout);
           }},
          {"budget",
           [&](const TomlField& field) {
             auto bytes = Size(field);
             if (!bytes.ok()) return bytes.status();
             config.device.budget_bytes = *bytes;
             return absl::OkStatus();
           }},
          {"segment_size",
           [&](const TomlField& field) { return Set(Size(field), config.device.segment_bytes); }},
          {"check_interval",
           [&](const TomlField& field) {
             return Interval(field, absl::Milliseconds(100), config.device.check_interval);
           }},
          {"allow_registered", [&](const TomlField& field) {
             return Set(field.Boolean(), config.device.allow_registered);
           }}};
}

Section MetricsSection(Config& config) {
  return {{"listen", [&](const TomlField& field) {
             auto listen = field.String();
             if (!listen.ok()) return listen.status();
             const absl::Status good = CheckListenAddress(*listen);
             if (!good.ok()) return field.Error(good.message());
             config.metrics.listen = *std::move(listen);
             config.metrics.given = true;
             return absl::OkStatus();
           }}};
}

absl::Status Quota(const TomlField& field, int64_t most, uint64_t& into) {
  auto number = field.Integer();
  if (!number.ok()) return number.status();
  if (*number < 1 || *number > most) return field.Error(absl::StrCat("expected 1 to ", most));
  into = static_cast<uint64_t>(*number);
  return absl::OkStatus();
}

Section AccessSection(Config& config) {
  return {
      {"read_groups",
       [&](const TomlField& field) { return Set(field.Strings(), config.access.read_groups); }},
      {"admin_groups",
       [&](const TomlField& field) { return Set(field.Strings(), config.access.admin_groups); }},
      {"max_leases_per_uid",
       [&](const TomlField& field) {
         return Quota(field, 1'000'000'000, config.access.max_leases_per_uid);
       }},
      {"max_connections_per_uid", [&](const TomlField& field) {
         // More than that no socket has places for.
         return Quota(field, 1024, config.access.max_connections_per_uid);
       }}};
}

Section DesiredSection(Config& config) {
  return {{"file", [&](const TomlField& field) {
             auto file = field.String();
             if (!file.ok()) return file.status();
             // Where a daemon happens to be started is no place to look from.
             if (!file->empty() && file->front() != '/') {
               return field.Error("expected an absolute path, or \"\" for none");
             }
             config.desired.file = *std::move(file);
             return absl::OkStatus();
           }}};
}

// A value, or an array of them.
absl::Status ReadFact(const TomlField& field, MachineFact& into) {
  const bool list = field.value().kind == TomlValue::Kind::kArray;
  auto values = list ? field.Strings() : absl::StatusOr<std::vector<std::string>>();
  if (!list) {
    auto value = field.String();
    if (!value.ok()) return value.status();
    values = std::vector<std::string>{*std::move(value)};
  }
  if (!values.ok()) return values.status();
  if (values->empty()) return field.Error("expected a value (leave the key out to have it found)");
  for (const std::string& value : *values) {
    absl::Status good = CheckRequiredValue(field.key(), value);
    if (good.ok() && (absl::StrContains(value, "+") || absl::StrContains(value, ","))) {
      good = absl::InvalidArgumentError(
          absl::StrCat(Quoted(value), ": a machine has one version, not a range or list"));
    }
    if (!good.ok()) return field.Error(good.message());
  }
  into.values = *std::move(values);
  into.source = "modelhostd.toml";
  return absl::OkStatus();
}

Section MachineSection(Config& config) {
  const auto fact = [](MachineFact& into) {
    return [&into](const TomlField& field) { return ReadFact(field, into); };
  };
  return {{kNeedsPlatform, fact(config.machine.platform)},
          {kNeedsTensorRt, fact(config.machine.tensorrt)},
          {kNeedsComputeCapability, fact(config.machine.compute_capability)},
          {kNeedsCudaDriver, fact(config.machine.cuda_driver)}};
}

// One [[models]] table.
absl::Status ReadModel(absl::string_view file, const TomlValue& table, Config& config) {
  ModelPolicy policy;
  std::string name;
  for (const TomlEntry& entry : table.table) {
    const TomlField field(file, "models", entry);
    if (entry.key == "name") {
      if (const absl::Status read = Set(field.String(), name); !read.ok()) return read;
      if (const absl::Status good = CheckModelName(name); !good.ok()) {
        return field.Error(good.message());
      }
      continue;
    }
    auto known = ReadPolicyKey(field, policy);
    if (!known.ok()) return known.status();
    if (!*known) {
      return field.Error(absl::StrCat("unknown (known here are name, ", kPolicyKeys, ")"));
    }
  }
  if (name.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ":", table.line, ": [[models]]: the key 'name' is missing"));
  }
  if (!config.models.emplace(name, std::move(policy)).second) {
    return absl::InvalidArgumentError(
        absl::StrCat(file, ":", table.line, ": [[models]]: '", name, "' is given twice"));
  }
  return absl::OkStatus();
}

absl::Status ReadModels(absl::string_view file, const TomlEntry& entry, Config& config) {
  const absl::Status shape =
      TomlField(file, "", entry).Error("expected an array of tables (write [[models]])");
  if (entry.value.kind != TomlValue::Kind::kArray) return shape;
  for (const TomlValue& item : entry.value.array) {
    if (item.kind != TomlValue::Kind::kTable) return shape;
    if (const absl::Status read = ReadModel(file, item, config); !read.ok()) return read;
  }
  return absl::OkStatus();
}

using Sections = std::vector<std::pair<std::string, Section>>;
Sections AllSections(Config& config) {
  return {
      {"memory", MemorySection(config)},   {"load", LoadSection(config)},
      {"device", DeviceSection(config)},   {"metrics", MetricsSection(config)},
      {"access", AccessSection(config)},   {"machine", MachineSection(config)},
      {"desired", DesiredSection(config)},
  };
}

std::string TomlText(const TomlValue& value) {
  switch (value.kind) {
    case TomlValue::Kind::kString: {
      std::string text;
      AppendJsonString(value.string, &text);
      return text;
    }
    case TomlValue::Kind::kInteger:
      return absl::StrCat(value.integer);
    case TomlValue::Kind::kBoolean:
      return value.boolean ? "true" : "false";
    case TomlValue::Kind::kArray: {
      std::vector<std::string> items;
      for (const TomlValue& item : value.array) items.push_back(TomlText(item));
      return absl::StrCat("[", absl::StrJoin(items, ", "), "]");
    }
    case TomlValue::Kind::kTable: {
      std::vector<std::string> items;
      for (const TomlEntry& item : value.table) {
        items.push_back(absl::StrCat(item.key, " = ", TomlText(item.value)));
      }
      return absl::StrCat("{ ", absl::StrJoin(items, ", "), " }");
    }
    case TomlValue::Kind::kFloat:  // No key takes one of these.
    case TomlValue::Kind::kTime:
      break;
  }
  return "";
}

// Of a file that was found good.
void RecordGiven(const TomlValue& top, Config& config) {
  const auto record = [&config](const std::string& table, const TomlEntry& entry) {
    config.given[absl::StrCat(table, ".", entry.key)] = {entry.line, TomlText(entry.value)};
  };
  for (const TomlEntry& section : top.table) {
    if (section.key != "models") {
      for (const TomlEntry& entry : section.value.table) record(section.key, entry);
      continue;
    }
    for (const TomlValue& model : section.value.array) {
      std::string name;
      for (const TomlEntry& entry : model.table) {
        if (entry.key == "name") name = entry.value.string;
      }
      for (const TomlEntry& entry : model.table) {
        if (entry.key != "name") record(absl::StrCat("models.", name), entry);
      }
    }
  }
}

}  // namespace

Config DefaultConfig() { return Config(); }

absl::Status CheckListenAddress(absl::string_view listen) {
  return listen == "off" ? absl::OkStatus() : ParseHttpAddress(listen).status();
}

absl::StatusOr<Config> ParseConfig(absl::string_view text, absl::string_view file) {
  auto top = ParseToml(text, file);
  if (!top.ok()) return top.status();
  Config config;
  const Sections sections = AllSections(config);
  for (const TomlEntry& entry : top->table) {
    absl::Status read;
    if (entry.key == "models") {
      read = ReadModels(file, entry, config);
    } else {
      const Section* found = nullptr;
      std::vector<std::string> known;
      for (const auto& [name, section] : sections) {
        known.push_back(absl::StrCat("[", name, "]"));
        if (name == entry.key) found = &section;
      }
      read = found != nullptr
                 ? ReadSection(file, entry, *found)
                 : TomlField(file, "", entry)
                       .Error(absl::StrCat("unknown (known here are ", absl::StrJoin(known, ", "),
                                           ", [[models]])"));
    }
    if (!read.ok()) return read;
  }
  RecordGiven(*top, config);
  return config;
}

std::vector<std::string> ConfigKeys() {
  Config unused;
  std::vector<std::string> keys;
  for (const auto& [name, section] : AllSections(unused)) {
    for (const auto& [key, reader] : section) keys.push_back(absl::StrCat(name, ".", key));
  }
  return keys;
}

void TakeReloadable(Config fresh, Config& running) {
  running.models = std::move(fresh.models);
  running.machine = std::move(fresh.machine);
  running.desired = std::move(fresh.desired);
  const auto reloadable = [](absl::string_view key) {
    return absl::StartsWith(key, "models.") || absl::StartsWith(key, "machine.") ||
           absl::StartsWith(key, "desired.");
  };
  std::erase_if(running.given, [&](const auto& item) { return reloadable(item.first); });
  for (auto& [key, given] : fresh.given) {
    if (reloadable(key)) running.given[key] = std::move(given);
  }
}

absl::StatusOr<Config> LoadConfig(const std::string& path) {
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  if (!in) return ErrnoStatus(errno != 0 ? errno : EIO, absl::StrCat("configuration ", path));
  std::string text;
  char part[4096];
  do {
    in.read(part, sizeof(part));
    text.append(part, static_cast<size_t>(in.gcount()));
    if (text.size() > kMaxFileBytes) {
      return absl::InvalidArgumentError(absl::StrCat("configuration ", path, ": longer than ",
                                                     kMaxFileBytes,
                                                     " bytes (is it the right file?)"));
    }
  } while (in);
  if (in.bad()) return ErrnoStatus(errno != 0 ? errno : EIO, absl::StrCat("configuration ", path));
  return ParseConfig(text, path);
}

}  // namespace modelhost
