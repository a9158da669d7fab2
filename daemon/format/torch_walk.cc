#include "daemon/format/torch_walk.h"

#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/pickle_number.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

constexpr std::string_view kWalkHint =
    "save a state_dict with plain names with torch.save, or as safetensors";
// Python's own pickler gives up before that.
constexpr size_t kMaxDepth = 1000;
// Shared parts may be listed several times, but not without end. Work is in steps and in bytes of
// keys, memory in what the index takes; torch.save's own need 0.3 and 2 per byte.
constexpr uint64_t kWorkPerByte = 8;
constexpr uint64_t kFreeWork = 65'536;
constexpr uint64_t kIndexBytesPerByte = 3;
constexpr uint64_t kFreeIndexBytes = uint64_t{24} << 20;
// An entry of the index and of the search for duplicate names.
constexpr uint64_t kEntryBytes = 96;
constexpr uint64_t kBytesPerDimension = 16;  // Its size and stride.

class TensorWalk {
 public:
  TensorWalk(std::string_view file, const Pickle& pickle, uint64_t pickle_bytes,
             absl::FunctionRef<absl::Status(std::string_view, uint64_t)> take)
      : file_(file),
        pickle_(pickle),
        take_(take),
        work_left_(kFreeWork + kWorkPerByte * pickle_bytes),
        index_bytes_left_(kFreeIndexBytes + kIndexBytesPerByte * pickle_bytes),
        open_(pickle.Identities()),
        known_(pickle.Identities()),
        barren_(pickle.Identities()) {}

  absl::Status Run() {
    if (MayHoldTensors(pickle_.root()) && Visit(pickle_.root(), 0, false)) {
      while (!frames_.empty() && Step()) {
      }
    }
    return status_;
  }

 private:
  struct Frame {
    PickleValue container;
    Pickle::Cursor cursor;
    size_t prefix;       // Bytes of the path that lead here.
    uint64_t place = 0;  // In a list.
    uint64_t taken;      // Tensors before this one was entered.
    bool unnamed;        // Below a key that gives no name.
  };

  bool Fail(std::string_view why) {
    status_ = ModelError(file_, why, kWalkHint);
    return false;
  }

  bool Work(uint64_t amount) {
    if (amount > work_left_) {
      return Fail("the same parts occur in so many places that the names would have no end");
    }
    work_left_ -= amount;
    return true;
  }

  // False for what holds no tensor, as far as that is known.
  bool MayHoldTensors(const PickleValue& value) const {
    if (value.kind == PickleKind::kTensor) return true;
    const bool container = value.kind == PickleKind::kDict || value.kind == PickleKind::kList ||
                           value.kind == PickleKind::kTuple;
    // What is empty has no identity of its own.
    return container && pickle_.Items(value) != 0 && !barren_[pickle_.Identity(value)];
  }

  // path_, of `prefix` bytes, leads to `value`, which may hold tensors.
  bool Visit(const PickleValue& value, size_t prefix, bool unnamed) {
    if (value.kind == PickleKind::kTensor) return TakeTensor(value.bits, unnamed);
    const uint64_t identity = pickle_.Identity(value);
    if (open_[identity]) {
      return Fail(absl::StrCat("the value at ", Quoted(path_), " contains itself"));
    }
    if (frames_.size() == kMaxDepth) {
      return Fail(absl::StrCat("more than ", kMaxDepth, " containers in each other"));
    }
    if (value.kind == PickleKind::kDict && !known_[identity] && !CheckKeys(value)) return false;
    known_[identity] = true;
    open_[identity] = true;
    frames_.push_back({value, Pickle::Cursor(pickle_, value), prefix, 0, taken_, unnamed});
    return true;
  }

  bool Step() {
    Frame& frame = frames_.back();
    const PickleValue* item = frame.cursor.Next();
    if (item == nullptr) {
      const uint64_t identity = pickle_.Identity(frame.container);
      open_[identity] = false;
      barren_[identity] = taken_ == frame.taken;
      frames_.pop_back();
      return true;
    }
    const PickleValue* key = nullptr;
    if (frame.container.kind == PickleKind::kDict) {
      key = item;
      item = frame.cursor.Next();  // Items come in pairs.
    }
    const uint64_t place = frame.place++;
    if (!Work(1)) return false;
    if (!MayHoldTensors(*item)) return true;
    path_.resize(frame.prefix);
    if (frames_.size() > 1) path_ += '.';
    bool unnamed = frame.unnamed;
    if (key == nullptr) {
      absl::StrAppend(&path_, place);
    } else {
      unnamed = !AppendKey(*key) || unnamed;
    }
    return Work(path_.size() - frame.prefix) && Visit(*item, path_.size(), unnamed);
  }

  // A tuple or a number with a fraction may be a key too, but then not of a tensor.
  bool AppendKey(const PickleValue& key) {
    if (key.kind == PickleKind::kText) {
      path_ += pickle_.Text(key);
    } else if (key.kind == PickleKind::kInt) {
      absl::StrAppend(&path_, key.AsInt());
    } else if (key.kind == PickleKind::kLongInt) {
      path_ += DecimalDigits(pickle_.Text(key));
    } else {
      path_ += '?';
      return false;
    }
    return true;
  }

  bool TakeTensor(uint64_t tensor, bool unnamed) {
    ++taken_;
    if (unnamed) {
      return Fail(absl::StrCat("the tensor at ", Quoted(path_),
                               " is below a key that is neither text nor integer"));
    }
    const uint64_t bytes =
        path_.size() + kEntryBytes + kBytesPerDimension * pickle_.tensors()[tensor].size.size;
    if (bytes > index_bytes_left_) {
      return Fail("the index of all tensors would be far longer than the pickle");
    }
    index_bytes_left_ -= bytes;
    if (path_.find('\0') != std::string::npos) {
      return Fail(absl::StrCat("tensor ", Quoted(path_), " has a NUL in its name"));
    }
    if (!IsUtf8(path_)) {
      return Fail(absl::StrCat("tensor ", Quoted(path_), " has a name that is not UTF-8"));
    }
    status_ = take_(path_, tensor);
    return status_.ok();
  }

  // Keys by their places, which take less than the keys.
  static bool IsNumber(const PickleValue& key) {
    return key.kind == PickleKind::kInt || key.kind == PickleKind::kBool;  // True is 1 in Python.
  }
  struct KeyHash {
    const Pickle* pickle;
    size_t operator()(uint32_t place) const {
      const PickleValue& key = pickle->Item(place);
      return IsNumber(key) ? absl::HashOf(key.bits) : absl::HashOf(AsAbsl(pickle->Text(key)));
    }
  };
  struct SameKey {
    const Pickle* pickle;
    bool operator()(uint32_t a_place, uint32_t b_place) const {
      const PickleValue& a = pickle->Item(a_place);
      const PickleValue& b = pickle->Item(b_place);
      if (IsNumber(a) || IsNumber(b)) return IsNumber(a) && IsNumber(b) && a.bits == b.bits;
      return a.kind == b.kind && pickle->Text(a) == pickle->Text(b);
    }
  };

  // The last of two equal keys would win, and which one that is nobody can see in a list of names.
  bool CheckKeys(const PickleValue& dict) {
    absl::flat_hash_set<uint32_t, KeyHash, SameKey> keys(pickle_.Items(dict) / 2, KeyHash{&pickle_},
                                                         SameKey{&pickle_});
    Pickle::Cursor cursor(pickle_, dict);
    while (const PickleValue* key = cursor.Next()) {
      cursor.Next();
      const bool comparable =
          IsNumber(*key) || key->kind == PickleKind::kText || key->kind == PickleKind::kLongInt;
      if (!comparable || keys.insert(pickle_.Place(key)).second) continue;
      return Fail(key->kind == PickleKind::kText
                      ? absl::StrCat("duplicate key ", Quoted(pickle_.Text(*key)), " in one dict")
                      : absl::StrCat("duplicate key ",
                                     IsNumber(*key) ? absl::StrCat(key->AsInt())
                                                    : DecimalDigits(pickle_.Text(*key)),
                                     " in one dict"));
    }
    return true;
  }

  std::string_view file_;
  const Pickle& pickle_;
  absl::FunctionRef<absl::Status(std::string_view, uint64_t)> take_;
  uint64_t work_left_;
  uint64_t index_bytes_left_;
  std::vector<Frame> frames_;
  // Of each container, by its identity.
  std::vector<bool> open_;    // It is among the frames.
  std::vector<bool> known_;   // Its keys were checked.
  std::vector<bool> barren_;  // It was walked, and no tensor is in it.
  std::string path_;
  uint64_t taken_ = 0;
  absl::Status status_;
};

}  // namespace

absl::Status WalkTensors(
    std::string_view file, const Pickle& pickle, uint64_t pickle_bytes,
    absl::FunctionRef<absl::Status(std::string_view name, uint64_t tensor)> take) {
  return TensorWalk(file, pickle, pickle_bytes, take).Run();
}

}  // namespace modelhost
