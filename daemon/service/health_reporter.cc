#include "daemon/service/health_reporter.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace modelhost {
namespace {

constexpr char kLiveness[] = "modelhost.liveness";

}  // namespace

void HealthReporter::Attach(grpc::HealthCheckServiceInterface* service) {
  absl::MutexLock lock(&mutex_);
  service_ = service;
  service_->SetServingStatus("", ready_);
  service_->SetServingStatus(kLiveness, true);
  for (const auto& [model, book] : models_) Tell(model, book);
}

void HealthReporter::Detach() {
  absl::MutexLock lock(&mutex_);
  if (service_ != nullptr) service_->Shutdown();
  service_ = nullptr;
}

bool HealthReporter::Serves(const std::string& model) const {
  absl::ReaderMutexLock lock(&mutex_);
  const auto it = models_.find(model);
  return it != models_.end() && Serves(it->second);
}

bool HealthReporter::Serves(const Book& book) {
  const auto usable = [&](uint64_t version) {
    const auto it = book.usable.find(version);
    return it != book.usable.end() && it->second;
  };
  if (const auto stable = book.labels.find(kDefaultLabel); stable != book.labels.end()) {
    return usable(stable->second);
  }
  return std::any_of(book.labels.begin(), book.labels.end(),
                     [&](const auto& label) { return usable(label.second); });
}

void HealthReporter::Tell(const std::string& model, const Book& book) {
  if (service_ != nullptr) service_->SetServingStatus(absl::StrCat("model/", model), Serves(book));
}

void HealthReporter::OnReady(bool ready) {
  absl::MutexLock lock(&mutex_);
  ready_ = ready;
  if (service_ != nullptr) service_->SetServingStatus("", ready);
}

void HealthReporter::OnVersion(const VersionSnapshot& version) {
  if (!version.invalid.empty()) return;
  absl::MutexLock lock(&mutex_);
  Book& book = models_[version.key.model];
  const bool before = Serves(book);
  book.usable[version.key.version] =
      version.phase == Phase::kReady && version.health != Health::kSuspect;
  // The snapshot has all labels of this version and those of no other.
  std::erase_if(book.labels,
                [&](const auto& label) { return label.second == version.key.version; });
  for (const std::string& label : version.labels) book.labels[label] = version.key.version;
  // A first "not served" is told too: SERVICE_UNKNOWN is for names that nobody knows.
  if (before != Serves(book) || book.usable.size() == 1) Tell(version.key.model, book);
}

void HealthReporter::OnVersionGone(const VersionKey& key) {
  absl::MutexLock lock(&mutex_);
  const auto it = models_.find(key.model);
  if (it == models_.end()) return;
  it->second.usable.erase(key.version);
  Tell(key.model, it->second);
}

void HealthReporter::OnLabelsMoved(std::span<const LabelChange> changes, absl::Duration /*flip*/) {
  absl::MutexLock lock(&mutex_);
  for (const LabelChange& change : changes) {
    Book& book = models_[change.model];
    if (change.to == 0) {
      book.labels.erase(change.label);
    } else {
      book.labels[change.label] = change.to;
    }
  }
  for (const LabelChange& change : changes) Tell(change.model, models_[change.model]);
}

}  // namespace modelhost
