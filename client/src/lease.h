// A lease of this process: what a handle holds in the daemon, and where its label's generation
// stands.
//
// Superseded() is for any thread at any time: two atomic words of its own and one of the shared
// page. After a restart of the daemon the session points `word` into the new page; the old pages
// stay mapped for as long as the lease lives, for a thread may be reading one. All other members
// belong to the session's lock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/src/catalogue_reader.h"
#include "proto/abi/handle_frame.h"

namespace modelhost {

struct Lease {
  enum class State : uint8_t {
    kHeld,      // `id` is good on the present connection.
    kDue,       // To be declared again, from `declare_at` on.
    kAsked,     // Declared; the answer is under way.
    kLost,      // The daemon does not know the version any more. The mappings stay good.
    kReleased,  // By its owner.
  };

  // Fixed once the lease is shared.
  std::string model;
  std::string label;        // Empty for a fixed version.
  uint64_t generation = 0;  // When it was granted.
  abi::Ref fixed{};         // The very version and digest, to declare it again.
  std::string gpu;          // Whose copy of the version is mapped too; empty: none.

  std::atomic<uint64_t> seen{0};  // The generation that is not newer.
  std::atomic<const std::atomic<uint64_t>*> word{nullptr};

  // The page in use has no slot for the label, and something has happened: who follows it asks the
  // daemon.
  bool look = false;
  State state = State::kHeld;
  uint64_t id = 0;
  std::chrono::steady_clock::time_point declare_at{};
  std::chrono::milliseconds patience{};  // Before the next try.
  std::vector<std::shared_ptr<const CatalogueReader>> pages;

  bool Superseded() const {
    const std::atomic<uint64_t>* now = word.load(std::memory_order_acquire);
    return now != nullptr &&
           now->load(std::memory_order_acquire) > seen.load(std::memory_order_relaxed);
  }
};

}  // namespace modelhost
