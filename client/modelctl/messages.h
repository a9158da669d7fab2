// The daemon's messages as JSON fields and as words. Each writer fills an object that is open.
#pragma once

#include <map>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "client/modelctl/json.h"
#include "modelhost/v1/control.pb.h"

namespace modelhost::modelctl {

std::string UnknownEnum(int number);                  // "UNKNOWN_9": a newer daemon's.
std::string PhaseName(v1::VersionPhase phase);        // "READY"
std::string HealthName(v1::Health health);            // "OK"
std::string VersionName(const v1::Version& version);  // "planner@8"; on disk's name when INVALID.
// Sorted by key; as "KEY=VALUE, ...", empty without any.
std::map<std::string, std::string> RequirementsOf(const v1::Version& version);
std::string RequirementsText(const v1::Version& version);
std::string LabelsOf(const v1::Version& version);  // "stable,canary"
// Why it is as it is: the reason of a bad phase or health, or how far a load has come.
std::string ReasonOf(const v1::Version& version);
// "7 -> 8", "none -> 8".
std::string Move(const v1::LabelChange& change);

// What one model is like as a whole, for a row.
struct ModelSummary {
  std::string labels;          // "stable=8,canary=9"
  std::string versions_ready;  // "7,8"
  uint64_t host_bytes = 0;
  uint64_t device_bytes = 0;  // On all GPUs.
  bool device_lost = false;
  uint64_t leases = 0;
  // OK, DEGRADED, SUSPECT; NOT_READY when a label names a version that is not READY; empty when
  // nothing is resident and nothing need be.
  std::string health;
  std::string why;      // Of a health that is not OK.
  bool broken = false;  // NOT_READY, and it will not become READY by waiting.
};
ModelSummary Summarise(const v1::Model& model);

void WriteVersion(JsonWriter& json, const v1::Version& version);
void WriteModel(JsonWriter& json, const v1::Model& model);
void WriteLabel(JsonWriter& json, const v1::Label& label);
void WriteLease(JsonWriter& json, const v1::Lease& lease);
void WriteClient(JsonWriter& json, const v1::ClientInfo& client);
void WriteChange(JsonWriter& json, const v1::LabelChange& change);
void WriteStatus(JsonWriter& json, const v1::GetStatusResponse& status);
void WriteEvent(JsonWriter& json, const v1::Event& event);  // Of a stream of them.
void WriteResult(JsonWriter& json, const v1::OperationResult& result);

}  // namespace modelhost::modelctl
