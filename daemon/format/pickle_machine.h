// The machine that reads a pickle: pickle.cc has its opcodes, stack and memo, pickle_calls.cc what
// the names and calls of a checkpoint come to. Only for those two files.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/pickle.h"
#include "daemon/format/pickle_globals.h"
#include "daemon/format/text.h"

namespace modelhost {

// Python's decoder of pickles lets a lone surrogate pass.
bool IsPythonText(std::string_view text);

// One pass over the stream. The state of Python's own machine: a stack with marks, and a memo.
class PickleMachine {
 public:
  PickleMachine(std::string_view file, std::span<const std::byte> stream)
      : file_(file),
        in_(file, kPickleHint, stream),
        bytes_left_(kFreeValueBytes + kValueBytesPerByte * stream.size()) {
    out_.text_ = std::string_view(reinterpret_cast<const char*>(stream.data()), stream.size());
  }

  absl::StatusOr<Pickle> Run();

 private:
  static constexpr std::string_view kPickleHint =
      "the file is damaged or made by hand: get it again";
  static constexpr std::string_view kTensorHint =
      "load it in Python and save plain tensors with torch.save or as safetensors";
  // torch writes 1000 items of a container at a time.
  static constexpr size_t kMaxStack = 1'000'000;
  // What the values of a pickle may take. A state_dict takes 3 to 5 bytes per byte; lists of
  // numbers, which training keeps beside one, take up to 16, and what is free is enough for
  // millions of them.
  static constexpr uint64_t kValueBytesPerByte = 6;
  static constexpr uint64_t kFreeValueBytes = uint64_t{48} << 20;

  bool Fail(std::string_view why, std::string_view hint = kPickleHint,
            absl::StatusCode code = absl::StatusCode::kInvalidArgument);
  bool Refuse(std::string_view why, std::string_view hint) {
    return Fail(why, hint, absl::StatusCode::kUnimplemented);
  }

  // What torch.save writes of each tensor takes 130 bytes and up, and makes 15 items and 7 slots of
  // the memo: growing step by step would touch twice the memory.
  void Reserve();

  bool Step();

  // The stack.

  bool Push(const PickleValue& value) {
    if (stack_.size() >= kMaxStack) {
      return Fail(absl::StrCat("more than ", kMaxStack, " values on the stack"));
    }
    stack_.push_back(value);
    return true;
  }
  // The last `count` values, none of them in front of the last mark.
  bool Need(size_t count) {
    const size_t floor = marks_.empty() ? 0 : marks_.back() + size_t{1};
    if (stack_.size() - floor >= count) return true;
    return Fail(
        absl::StrCat("needs ", count, " values on the stack, which has ", stack_.size() - floor));
  }
  bool Pop(PickleValue* value) {
    if (!Need(1)) return false;
    *value = stack_.back();
    stack_.pop_back();
    return true;
  }
  bool CountToMark(size_t* count);
  void DropMark() {
    stack_.pop_back();
    marks_.pop_back();
  }
  // Moves the last values to the items.
  bool MoveToItems(size_t count);

  // Memory.

  bool Charge(uint64_t bytes) {
    if (bytes > bytes_left_) {
      return Fail(absl::StrCat("more values than a pickle of ", in_.size(), " bytes is given"),
                  "save the weights alone, as torch.save(model.state_dict(), FILE) does");
    }
    bytes_left_ -= bytes;
    return true;
  }
  // By quarters: of large vectors, twice as much would be most of the memory.
  template <typename T>
  static void MakeRoom(std::vector<T>& vector, size_t more = 1) {
    const size_t size = vector.size();
    if (vector.capacity() - size < more) vector.reserve(size + std::max(more, size / 4 + 16));
  }
  template <typename T>
  bool Keep(std::vector<T>& vector, const T& value, uint64_t beside = 0) {
    if (!Charge(sizeof(T) + beside)) return false;
    MakeRoom(vector);
    vector.push_back(value);
    return true;
  }

  // Scalars.

  template <typename Raw, typename Convert>
  bool Number(Convert convert) {
    Raw raw = 0;
    return in_.Little("a number", &raw) &&
           Push({PickleKind::kInt, 0, static_cast<uint64_t>(convert(raw))});
  }

  bool Long();

  template <typename Size>
  bool String(bool text) {
    Size size = 0;
    std::string_view raw;
    if (!in_.Little("a length", &size)) return false;
    const uint64_t at = in_.offset();
    if (!in_.Text("a text", size, &raw)) return false;
    if (text && !IsPythonText(raw)) return Fail("a text that is not UTF-8");
    return Push({PickleKind::kText, static_cast<uint32_t>(size), at});
  }

  // Containers.

  bool PushTuple(size_t count, bool marked = false);

  bool PushContainer(PickleKind kind, bool ordered = false);

  bool ExtendToMark(PickleKind kind);

  bool Extend(PickleKind kind, size_t count);

  bool FailContainer(PickleKind kind);

  // Moves the last `count` values of the stack into a list or dict.
  bool AddRun(const PickleValue& value, size_t count);
  bool AppendRun(Pickle::Container& container, uint64_t at, uint32_t count);

  // The memo. Writers count up from 0; any other slot goes into the table.

  template <typename Slot>
  bool Get() {
    Slot slot = 0;
    if (!in_.Little("a memo slot", &slot)) return false;
    if (slot < memo_.size()) return Push(memo_[slot]);
    const auto at = sparse_memo_.find(slot);
    if (at == sparse_memo_.end()) return Fail(absl::StrCat("memo slot ", slot, " is not set"));
    return Push(at->second);
  }
  template <typename Slot>
  bool Put() {
    Slot slot = 0;
    return in_.Little("a memo slot", &slot) && Memoize(slot);
  }
  bool Memoize(uint64_t slot);

  // Names and calls.

  bool PushGlobal(std::string_view module, std::string_view name);

  bool Global();

  bool StackGlobal();

  // REDUCE and NEWOBJ: what the callable would make of its arguments.
  bool Reduce();

  bool FailCall(const PickleGlobal& global, std::string_view why);
  bool RefuseCall(const PickleGlobal& global, std::string_view why);

  // `args` lies among the items: what lets them grow has copied it before. Calls itself once at
  // most.
  bool Call(const PickleGlobal& global, std::span<const PickleValue> args);

  bool PassTensor(const PickleGlobal& global, std::span<const PickleValue> args);

  // Copies cost; a stream that is honest copies what it has written just before.
  bool PayForCopy(size_t items);

  bool MakeDict(const PickleGlobal& global, std::span<const PickleValue> args);

  bool MakeSet(const PickleGlobal& global, std::span<const PickleValue> args);

  // Into the container on top of the stack.
  bool PutItems(const std::vector<PickleValue>& items);

  bool MakeTensor(const PickleGlobal& global, std::span<const PickleValue> args);

  // Sets attributes. An OrderedDict has them (the versions of a state_dict); they hold no weights.
  bool Build();

  bool PersistentId();

  // The frame of the stream.

  bool Protocol();

  // Frames only help who reads from a socket.
  bool Frame();

  bool Stop();

  std::string_view file_;
  ByteReader in_;
  Pickle out_;
  std::vector<PickleValue> stack_;
  std::vector<uint32_t> marks_;  // Where the marks are in the stack.
  std::vector<PickleValue> memo_;
  absl::flat_hash_map<uint64_t, PickleValue> sparse_memo_;
  std::vector<const PickleGlobal*> globals_;
  absl::flat_hash_map<uint64_t, uint32_t> storage_numbers_;  // The last one, by place of its key.
  uint64_t bytes_left_;
  uint64_t copied_ = 0;
  uint64_t op_at_ = 0;
  uint8_t op_ = 0;
  bool stopped_ = false;
  absl::Status status_;
};

}  // namespace modelhost
