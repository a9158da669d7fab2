#include "client/modelctl/strided_gather.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace modelhost::modelctl {
namespace {

constexpr uint64_t kWindowBytes = 1 << 20;
// A gap that costs less to read than another call of the system does.
constexpr uint64_t kGapBytes = 1024;

// A dimension of a box: its size, and the way from one index to the next in file and result.
struct Axis {
  uint64_t size, from, to;  // Both ways in units.
};

void CopyUnits(size_t unit, const Axis& axis, const std::byte* from, std::byte* to) {
  const auto copy = [&]<size_t kBytes>() {
    for (uint64_t i = 0; i < axis.size; ++i) {
      std::memcpy(to + i * axis.to * kBytes, from + i * axis.from * kBytes, kBytes);
    }
  };
  switch (unit) {
    case 1:
      return copy.operator()<1>();
    case 2:
      return copy.operator()<2>();
    case 4:
      return copy.operator()<4>();
    case 8:
      return copy.operator()<8>();
    default:
      return copy.operator()<16>();
  }
}

// Units of a box of the view: every index of some axes, from one place on.
class Box {
 public:
  Box(RangeSource& files, const StridedView& view, std::byte* out)
      : files_(files), view_(view), out_(out) {}

  void Add(const Axis& axis) {
    if (axis.size > 1) (axis.from == 0 ? repeated_ : axes_).push_back(axis);
  }
  absl::Status Copy(uint64_t from) {
    std::sort(axes_.begin(), axes_.end(),
              [](const Axis& a, const Axis& b) { return a.from > b.from; });
    return Walk(0, from, 0);
  }

 private:
  // As deep as there are axes of more than one index: fewer than 64, or 64 bits could not count
  // the units.
  absl::Status Walk(size_t axis, uint64_t from, uint64_t to) {
    const auto [units, reach] = Extent(axis);
    if (Fits(units, reach)) return Window(axis, from, to, reach);
    // By parts of the axis that a window holds, or by its single indexes.
    const Axis all = axes_[axis];
    const uint64_t most = kWindowBytes / view_.unit_bytes;
    const auto [inner_units, inner_reach] = Extent(axis + 1);
    uint64_t wide =
        inner_reach > most ? 1 : std::min(all.size, 1 + (most - inner_reach) / all.from);
    if (!Fits(inner_units * wide, inner_reach + (wide - 1) * all.from)) wide = 1;
    for (uint64_t at = 0; at < all.size; at += wide) {
      const uint64_t in_file = from + at * all.from;
      const uint64_t in_result = to + at * all.to;
      absl::Status status;
      if (wide == 1) {
        status = Walk(axis + 1, in_file, in_result);
      } else {
        axes_[axis].size = std::min(wide, all.size - at);
        status = Window(axis, in_file, in_result, inner_reach + (axes_[axis].size - 1) * all.from);
        axes_[axis].size = all.size;
      }
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Units of the axes from `axis` on, and of the range that holds them all.
  std::pair<uint64_t, uint64_t> Extent(size_t axis) const {
    std::pair<uint64_t, uint64_t> extent = {1, 1};
    for (; axis < axes_.size(); ++axis) {
      extent.first *= axes_[axis].size;
      extent.second += (axes_[axis].size - 1) * axes_[axis].from;
    }
    return extent;
  }

  bool Fits(uint64_t units, uint64_t reach) const {
    return reach <= kWindowBytes / view_.unit_bytes &&
           (reach <= units || (reach - units) / units * view_.unit_bytes <= kGapBytes);
  }

  absl::Status Window(size_t axis, uint64_t from, uint64_t to, uint64_t reach) {
    window_.resize(reach * view_.unit_bytes);
    const absl::Status status =
        files_.ReadAt(view_.file, view_.offset + from * view_.unit_bytes, window_);
    if (!status.ok()) return status;
    std::vector<Axis> all(axes_.begin() + static_cast<ptrdiff_t>(axis), axes_.end());
    all.insert(all.end(), repeated_.begin(), repeated_.end());
    Scatter(all, 0, 0, to);
    return absl::OkStatus();
  }

  void Scatter(const std::vector<Axis>& axes, size_t axis, uint64_t from, uint64_t to) {
    const size_t unit = view_.unit_bytes;
    if (axes.size() - axis <= 1) {
      return CopyUnits(unit, axes.empty() ? Axis{1, 0, 0} : axes[axis],
                       window_.data() + from * unit, out_ + to * unit);
    }
    for (uint64_t i = 0; i < axes[axis].size; ++i) {
      Scatter(axes, axis + 1, from + i * axes[axis].from, to + i * axes[axis].to);
    }
  }

  RangeSource& files_;
  const StridedView& view_;
  std::byte* out_;
  std::vector<Axis> axes_;      // Those that lead on in the file; the longest way first.
  std::vector<Axis> repeated_;  // Those that stay: the same unit again.
  std::vector<std::byte> window_;
};

struct Place {
  uint64_t from;  // Unit of the range.
  uint64_t to;    // Unit of the result.
};

uint64_t PlaceOf(const StridedView& view, uint64_t index) {
  uint64_t place = 0;
  for (size_t i = view.shape.size(); i-- > 0;) {
    const auto size = static_cast<uint64_t>(view.shape[i]);
    place += index % size * static_cast<uint64_t>(view.strides[i]);
    index /= size;
  }
  return place;
}

}  // namespace

absl::Status GatherStrided(RangeSource& files, const StridedView& view, uint64_t first,
                           std::span<std::byte> out) {
  const size_t rank = view.shape.size();
  std::vector<uint64_t> at(rank);
  const uint64_t count = out.size() / view.unit_bytes;
  for (uint64_t done = 0; done < count;) {
    uint64_t rest = first + done;
    uint64_t from = 0;
    for (size_t i = rank; i-- > 0;) {
      at[i] = rest % static_cast<uint64_t>(view.shape[i]);
      rest /= static_cast<uint64_t>(view.shape[i]);
      from += at[i] * static_cast<uint64_t>(view.strides[i]);
    }
    // The largest box that begins here: whole dimensions, and a part of the one before them.
    Box box(files, view, out.data() + done * view.unit_bytes);
    uint64_t units = 1;
    for (size_t i = rank; i-- > 0;) {
      const auto size = static_cast<uint64_t>(view.shape[i]);
      const uint64_t take = std::min(size - at[i], (count - done) / units);
      if (take == 0) break;
      box.Add({take, static_cast<uint64_t>(view.strides[i]), units});
      units *= take;
      if (take < size) break;
    }
    if (absl::Status status = box.Copy(from); !status.ok()) return status;
    done += units;
  }
  return absl::OkStatus();
}

absl::Status CollectByIndex(RangeSource& files, const StridedView& view, uint64_t first,
                            std::span<std::byte> out) {
  const size_t unit = view.unit_bytes;
  std::vector<Place> places(out.size() / unit);
  for (uint64_t i = 0; i < places.size(); ++i) places[i] = {PlaceOf(view, first + i), i};
  std::sort(places.begin(), places.end(),
            [](const Place& a, const Place& b) { return a.from < b.from; });
  std::vector<std::byte> window;
  for (size_t begin = 0; begin < places.size();) {
    size_t end = begin + 1;
    while (end < places.size() && (places[end].from - places[end - 1].from) * unit <= kGapBytes &&
           (places[end].from - places[begin].from + 1) * unit <= kWindowBytes) {
      ++end;
    }
    window.resize((places[end - 1].from - places[begin].from + 1) * unit);
    const absl::Status status =
        files.ReadAt(view.file, view.offset + places[begin].from * unit, window);
    if (!status.ok()) return status;
    for (size_t i = begin; i < end; ++i) {
      std::memcpy(out.data() + places[i].to * unit,
                  window.data() + (places[i].from - places[begin].from) * unit, unit);
    }
    begin = end;
  }
  return absl::OkStatus();
}

}  // namespace modelhost::modelctl
