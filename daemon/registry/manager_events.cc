// What happened, for those who look afterwards: the ring of all, and the last of each model.
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "daemon/registry/manager_impl.h"

namespace modelhost {
namespace {

constexpr size_t kEventsPerModel = 64;

}  // namespace

void ModelManager::Impl::Note(const VersionKey& key, const std::string& what,
                              const std::string& detail) {
  const EventRecord& event =
      events.Add({deps.clock.Wall(), what, key.model, key.version, detail, 0});
  auto& of_model = Book(key.model).events;
  of_model.push_back(event);
  if (of_model.size() > kEventsPerModel) of_model.pop_front();
}

// Only in the ring: a model may be none of ours, and its own events tell what came of it.
void ModelManager::Impl::NoteOperation(const OperationSnapshot& operation) {
  if (operation.sequence > 1 && !operation.finished_state()) return;
  const std::string what = absl::StrCat(
      OperationKindName(operation.kind), " ",
      operation.finished_state() ? absl::AsciiStrToLower(OperationStateName(operation.state))
                                 : "started");
  events.Add({deps.clock.Wall(), what, operation.model, operation.version,
              absl::StrCat("op-", operation.id, operation.status.ok() ? "" : ": ",
                           operation.status.message()),
              0});
}

std::vector<EventRecord> ModelManager::Events(const std::string& model) const {
  const auto it = impl_->models.find(model);
  if (it == impl_->models.end()) return {};
  return {it->second.events.begin(), it->second.events.end()};
}

EventPage ModelManager::EventsAfter(uint64_t sequence, size_t most) const {
  EventRing::Page page = impl_->events.After(sequence, most);
  return {std::move(page.events), page.lost, page.next};
}

uint64_t ModelManager::SequenceAt(absl::Time since) const { return impl_->events.Before(since); }

}  // namespace modelhost
