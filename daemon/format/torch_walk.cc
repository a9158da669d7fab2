#include "daemon/format/torch_walk.h"

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

constexpr std::string_view kWalkHint =
    "save a state_dict with plain names with torch.save, or as safetensors";
// Python's own pickler gives up before that.
constexpr size_t kMaxDepth = 1000;
// Shared parts may be listed several times, but not without end.
constexpr uint64_t kNameBytesPerByte = 8;
constexpr uint64_t kStepsPerByte = 4;
constexpr uint64_t kFreeBytes = 65'536;

class TensorWalk {
 public:
  TensorWalk(std::string_view file, const Pickle& pickle, uint64_t pickle_bytes,
             absl::FunctionRef<absl::Status(std::string_view, uint64_t)> take)
      : file_(file),
        pickle_(pickle),
        take_(take),
        name_bytes_left_(kFreeBytes + kNameBytesPerByte * pickle_bytes),
        steps_left_(kFreeBytes + kStepsPerByte * pickle_bytes) {}

  absl::Status Run() {
    if (Visit(pickle_.root(), 0, false)) {
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

  static bool IsContainer(const PickleValue& value) {
    return value.kind == PickleKind::kDict || value.kind == PickleKind::kList ||
           value.kind == PickleKind::kTuple;
  }
  // The same for two values that are the same list, dict or tuple.
  static uint64_t Identity(const PickleValue& value) {
    const uint64_t tuple = value.kind == PickleKind::kTuple ? 1 : 0;
    return value.bits << 1 | tuple;
  }

  // path_, of `prefix` bytes, leads to `value`.
  bool Visit(const PickleValue& value, size_t prefix, bool unnamed) {
    if (steps_left_-- == 0) {
      return Fail("the same parts occur in so many places that the names would have no end");
    }
    if (value.kind == PickleKind::kTensor) return TakeTensor(value.bits, unnamed);
    // An empty tuple has no identity: its place is that of the next one.
    if (!IsContainer(value) || (value.kind == PickleKind::kTuple && value.size == 0)) return true;
    const auto [state, added] = states_.try_emplace(Identity(value), State::kOpen);
    if (!added) {
      if (state->second == State::kBarren) return true;
      if (state->second == State::kOpen) {
        return Fail(absl::StrCat("the value at ", Quoted(path_), " contains itself"));
      }
      state->second = State::kOpen;
    }
    if (frames_.size() == kMaxDepth) {
      return Fail(absl::StrCat("more than ", kMaxDepth, " containers in each other"));
    }
    if (value.kind == PickleKind::kDict && !CheckKeys(value)) return false;
    frames_.push_back({value, Pickle::Cursor(pickle_, value), prefix, 0, taken_, unnamed});
    return true;
  }

  bool Step() {
    Frame& frame = frames_.back();
    const PickleValue* item = frame.cursor.Next();
    if (item == nullptr) {
      states_[Identity(frame.container)] =
          taken_ == frame.taken ? State::kBarren : State::kFruitful;
      frames_.pop_back();
      return true;
    }
    path_.resize(frame.prefix);
    if (frames_.size() > 1) path_ += '.';
    bool unnamed = frame.unnamed;
    if (frame.container.kind == PickleKind::kDict) {
      const PickleValue* value = frame.cursor.Next();  // Items come in pairs.
      unnamed = !AppendKey(*item) || unnamed;
      item = value;
    } else {
      absl::StrAppend(&path_, frame.place++);
    }
    return Visit(*item, path_.size(), unnamed);
  }

  // A tuple or a number with a fraction may be a key too, but then not of a tensor.
  bool AppendKey(const PickleValue& key) {
    if (key.kind == PickleKind::kText) {
      path_ += pickle_.Text(key);
    } else if (key.kind == PickleKind::kInt) {
      absl::StrAppend(&path_, key.AsInt());
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
    if (path_.size() > name_bytes_left_) {
      return Fail("the names of all tensors together are far longer than the pickle");
    }
    name_bytes_left_ -= path_.size();
    if (path_.find('\0') != std::string::npos) {
      return Fail(absl::StrCat("tensor ", Quoted(path_), " has a NUL in its name"));
    }
    if (!IsUtf8(path_)) {
      return Fail(absl::StrCat("tensor ", Quoted(path_), " has a name that is not UTF-8"));
    }
    status_ = take_(path_, tensor);
    return status_.ok();
  }

  // The last of two equal keys would win, and which one that is nobody can see in a list of names.
  bool CheckKeys(const PickleValue& dict) {
    absl::flat_hash_set<absl::string_view> texts;
    absl::flat_hash_set<int64_t> numbers;
    texts.reserve(pickle_.Items(dict) / 2);
    Pickle::Cursor cursor(pickle_, dict);
    while (const PickleValue* key = cursor.Next()) {
      cursor.Next();
      bool added = true;
      if (key->kind == PickleKind::kText) {
        added = texts.insert(AsAbsl(pickle_.Text(*key))).second;
      } else if (key->kind == PickleKind::kInt || key->kind == PickleKind::kBool) {
        added = numbers.insert(key->AsInt()).second;  // True is 1 in Python.
      }
      if (added) continue;
      return Fail(key->kind == PickleKind::kText
                      ? absl::StrCat("duplicate key ", Quoted(pickle_.Text(*key)), " in one dict")
                      : absl::StrCat("duplicate key ", key->AsInt(), " in one dict"));
    }
    return true;
  }

  enum class State : uint8_t { kOpen, kBarren, kFruitful };

  std::string_view file_;
  const Pickle& pickle_;
  absl::FunctionRef<absl::Status(std::string_view, uint64_t)> take_;
  uint64_t name_bytes_left_;
  uint64_t steps_left_;
  std::vector<Frame> frames_;
  absl::flat_hash_map<uint64_t, State> states_;
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
