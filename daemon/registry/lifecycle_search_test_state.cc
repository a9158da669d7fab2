// States as keys and in words, and what must not be.
#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/registry/lifecycle_search_test_daemon.h"

namespace modelhost {
namespace {

// Every combination of tracks that the tables can reach, under its phase and whether it is suspect.
const VersionTracks& Prototype(Phase phase, bool suspect) {
  static const auto prototypes = [] {
    std::array<std::array<VersionTracks, 2>, 8> made{};
    const auto keep = [&](const VersionTracks& tracks) {
      made[static_cast<size_t>(Phase{tracks.phase})][tracks.health == Health::kSuspect] = tracks;
    };
    const HealthState bad{Health::kSuspect, HealthReason::kSourceChanged};
    VersionTracks tracks;
    keep(tracks);
    VersionTracks quarantined = tracks;
    (void)quarantined.MoveTo(Phase::kQuarantined);
    keep(quarantined);
    for (const Phase next :
         {Phase::kReserved, Phase::kLoading, Phase::kReady, Phase::kDraining, Phase::kUnloading}) {
      if (next == Phase::kReady) {
        VersionTracks failed = tracks;
        (void)failed.MoveTo(Phase::kFailed);
        keep(failed);
        (void)tracks.SetHostTier(HostTier::kPinned);
      }
      (void)tracks.MoveTo(next);
      keep(tracks);
      VersionTracks doubtful = tracks;
      if (doubtful.SetHealth(bad, HealthCause::kHealthCheck).ok()) keep(doubtful);
    }
    return made;
  }();
  return prototypes[static_cast<size_t>(phase)][suspect];
}

class Packer {
 public:
  void Put(uint64_t value, int bits) {
    word_ |= value << at_;
    at_ += bits;
  }
  uint64_t word() const { return word_; }

 private:
  uint64_t word_ = 0;
  int at_ = 0;
};

class Unpacker {
 public:
  explicit Unpacker(uint64_t word) : word_(word) {}
  uint64_t Take(int bits) {
    const uint64_t value = word_ & ((uint64_t{1} << bits) - 1);
    word_ >>= bits;
    return value;
  }

 private:
  uint64_t word_;
};

constexpr int kVersionBits = 19;
constexpr int kModelBits = kVersionBits * kSearchVersions + 1;
static_assert(kModelBits + 6 <= 64);

uint64_t PackVersion(const SearchVersion& v) {
  Packer packer;
  packer.Put(static_cast<uint64_t>(Phase{v.tracks.phase}), 3);
  packer.Put(v.tracks.health == Health::kSuspect, 1);
  packer.Put(static_cast<uint64_t>(v.dir), 2);
  for (const bool bit :
       {v.known, v.lease, v.released, v.unload_asked, v.booked, v.waits, v.cancelled, v.label,
        v.label_on_disk, v.label_in_page, v.maybe_labelled, v.swap_target, v.write_target}) {
    packer.Put(bit, 1);
  }
  return packer.word();
}

SearchVersion UnpackVersion(uint64_t word) {
  Unpacker unpacker(word);
  SearchVersion v;
  const Phase phase = static_cast<Phase>(unpacker.Take(3));
  v.tracks = Prototype(phase, unpacker.Take(1) != 0);
  v.dir = static_cast<SearchDir>(unpacker.Take(2));
  for (bool* bit : {&v.known, &v.lease, &v.released, &v.unload_asked, &v.booked, &v.waits,
                    &v.cancelled, &v.label, &v.label_on_disk, &v.label_in_page, &v.maybe_labelled,
                    &v.swap_target, &v.write_target}) {
    *bit = unpacker.Take(1) != 0;
  }
  return v;
}

}  // namespace

SearchKey EncodeSearchState(const SearchState& state) {
  SearchKey key;
  for (int m = 0; m < kSearchModels; ++m) {
    std::array<uint64_t, kSearchVersions> words{};
    for (int n = 0; n < kSearchVersions; ++n) words[n] = PackVersion(state.models[m].versions[n]);
    std::ranges::sort(words);
    Packer packer;
    for (const uint64_t word : words) packer.Put(word, kVersionBits);
    packer.Put(state.models[m].written, 1);
    key.words[m] = packer.word();
  }
  std::ranges::sort(key.words);
  key.words[0] |= static_cast<uint64_t>(state.write) << kModelBits;
  key.words[0] |= static_cast<uint64_t>(state.swap) << (kModelBits + 2);
  key.words[0] |= static_cast<uint64_t>(state.gap) << (kModelBits + 4);
  key.words[0] |= static_cast<uint64_t>(state.in_doubt) << (kModelBits + 5);
  return key;
}

SearchState DecodeSearchState(const SearchKey& key) {
  SearchState state;
  for (int m = 0; m < kSearchModels; ++m) {
    Unpacker unpacker(key.words[m]);
    for (SearchVersion& v : state.models[m].versions) {
      v = UnpackVersion(unpacker.Take(kVersionBits));
    }
    state.models[m].written = unpacker.Take(1) != 0;
    if (m != 0) continue;
    state.write = static_cast<LabelWrite>(unpacker.Take(2));
    state.swap = static_cast<SearchSwap>(unpacker.Take(2));
    state.gap = unpacker.Take(1) != 0;
    state.in_doubt = unpacker.Take(1) != 0;
  }
  return state;
}

std::string SearchStepName::Text() const {
  std::string text = what;
  const auto append = [&](const std::array<int, kSearchModels>& named) {
    for (int m = 0; m < kSearchModels; ++m) {
      if (named[m] >= 0) absl::StrAppend(&text, " m", m, " v", named[m]);
    }
  };
  append(versions);
  if (model >= 0) absl::StrAppend(&text, " m", model);
  if (evicts != std::array<int, kSearchModels>{-1, -1}) text += ", evicting";
  append(evicts);
  return text;
}

std::string FindViolation(const SearchState& state, int capacity) {
  int booked = 0;
  bool set = true;
  std::array<bool, kSearchModels> moved{};
  std::array<bool, kSearchModels> moved_on_disk{};
  for (int m = 0; m < kSearchModels; ++m) {
    const SearchState::Model& model = state.models[m];
    // Both of its labels move: one that is there already when the other flips is no half.
    set = set && model.written;
    for (const SearchVersion& v : model.versions) {
      const bool bytes = v.tracks.host_tier != HostTier::kNone;
      booked += v.booked;
      moved[m] = moved[m] || (v.write_target && v.label);
      moved_on_disk[m] = moved_on_disk[m] || (v.write_target && v.label_on_disk);
      if (v.label_on_disk && v.dir == SearchDir::kAbsent) return "a label on disk names nothing";
      if (v.label && v.dir == SearchDir::kAbsent) return "a label in memory names nothing";
      if (v.label_in_page && !(v.tracks.phase == Phase::kReady && bytes)) {
        return "the page shows a version on which no lease can be granted";
      }
      if (v.label_in_page && !v.label) return "the page shows what is not the label";
      // Nobody was told yet of a rename; a disk that fails is written to until it does not.
      const bool disk_may_differ = state.write == LabelWrite::kRenamed || state.in_doubt;
      if (v.label_in_page && !v.label_on_disk && !disk_may_differ) {
        return "clients see a label that is not durable";
      }
      if (v.lease && !v.released && !InMemory(v)) return "a lease is on freed bytes";
      if (v.lease && v.dir == SearchDir::kAbsent) return "what is leased was deleted";
      if (v.dir == SearchDir::kAbsent && (v.waits || !AtRest(v.tracks.phase))) {
        return "what is awaited was deleted";
      }
      if (v.booked != (bytes || v.tracks.phase == Phase::kLoading)) {
        return v.booked ? "a booking has no bytes" : "bytes are not booked";
      }
    }
  }
  if (booked > capacity) return "more is booked than there is";
  const bool half_on_disk = !state.in_doubt && moved_on_disk[0] != moved_on_disk[1];
  if (set && (moved[0] != moved[1] || half_on_disk)) {
    return "half of a set has moved";
  }
  return "";
}

bool EveryLabelServes(const SearchState& state) {
  for (const SearchState::Model& model : state.models) {
    for (const SearchVersion& v : model.versions) {
      if (v.label && !(v.tracks.phase == Phase::kReady && v.tracks.health != Health::kSuspect &&
                       v.label_in_page)) {
        return false;
      }
    }
  }
  return true;
}

std::string DescribeSearchState(const SearchState& state) {
  std::string out;
  for (int m = 0; m < kSearchModels; ++m) {
    for (const SearchVersion& v : state.models[m].versions) {
      absl::StrAppend(&out, "  m", m, " ", PhaseName(v.tracks.phase),
                      v.tracks.health == Health::kSuspect ? " suspect" : "",
                      v.dir == SearchDir::kAbsent ? " absent"
                      : v.dir == SearchDir::kBad  ? " bad"
                                                  : "",
                      v.known ? "" : " unknown", v.lease ? " leased" : "",
                      v.released ? " released" : "", v.unload_asked ? " asked" : "",
                      v.booked ? " booked" : "", v.waits ? " waits" : "",
                      v.cancelled ? " cancelled" : "");
      absl::StrAppend(&out, v.label ? " label" : "", v.label_on_disk ? " label-on-disk" : "",
                      v.label_in_page ? " label-in-page" : "", v.maybe_labelled ? " maybe" : "",
                      v.swap_target ? " swap-target" : "", v.write_target ? " write-target" : "",
                      "\n");
    }
  }
  absl::StrAppend(&out, "  write ", static_cast<int>(state.write), " swap ",
                  static_cast<int>(state.swap), state.gap ? " with a gap" : "",
                  state.in_doubt ? " in doubt" : "", "\n");
  return out;
}

}  // namespace modelhost
