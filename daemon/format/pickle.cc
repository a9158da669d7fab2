#include "daemon/format/pickle.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/format/pickle_machine.h"
#include "daemon/format/pickle_number.h"
#include "daemon/format/pickle_opcodes.h"

namespace modelhost {
namespace {

// As the header of safetensors: 500,000 tensors and more.
constexpr uint64_t kMaxStreamBytes = 100'000'000;
constexpr uint8_t kMaxProtocol = 5;
// An entry of a hash table with what is left free.
constexpr uint64_t kSparseSlotBytes = 64;

}  // namespace

bool IsPythonText(std::string_view text) {
  if (IsUtf8(text)) return true;
  while (!text.empty()) {
    size_t bytes = Utf8CharBytes(text);
    if (bytes == 0 && text.size() >= 3 && text[0] == '\xed' && (text[1] & 0xe0) == 0xa0 &&
        (text[2] & 0xc0) == 0x80) {
      bytes = 3;
    }
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

absl::StatusOr<Pickle> PickleMachine::Run() {
  if (in_.size() == 0) return ModelError(file_, "the pickle is empty", kPickleHint);
  if (in_.size() > kMaxStreamBytes) {
    return ModelError(
        file_,
        absl::StrCat("the pickle has ", in_.size(), " bytes; the limit is ", kMaxStreamBytes),
        kTensorHint);
  }
  Reserve();
  while (!stopped_ && Step()) {
  }
  if (!in_.ok()) return in_.status();
  if (!status_.ok()) return status_;
  return std::move(out_);
}

bool PickleMachine::Fail(std::string_view why, std::string_view hint, absl::StatusCode code) {
  if (status_.ok()) {
    status_ = ModelError(
        file_,
        absl::StrCat("at byte ", op_at_, ": ", AsAbsl(PickleOpcodeName(op_)), ": ", AsAbsl(why)),
        hint, code);
  }
  return false;
}

void PickleMachine::Reserve() {
  constexpr uint64_t kMostBytes = 16'000'000;
  const uint64_t bytes = std::min(in_.size(), kMostBytes);
  out_.items_.reserve(bytes / 8);
  memo_.reserve(bytes / 16);
  out_.tensors_.reserve(bytes / 128);
  out_.storages_.reserve(bytes / 128);
  storage_numbers_.reserve(bytes / 256);
}

bool PickleMachine::Step() {
  op_at_ = in_.offset();
  uint8_t op = 0;
  if (in_.remaining() == 0) return in_.Fail("the pickle ends before STOP");
  if (!in_.Little("an opcode", &op)) return false;
  op_ = op;
  switch (static_cast<PickleOp>(op)) {
    case PickleOp::kProto:
      return Protocol();
    case PickleOp::kFrame:
      return Frame();
    case PickleOp::kStop:
      return Stop();
    case PickleOp::kMark:
      marks_.push_back(static_cast<uint32_t>(stack_.size()));
      return Push({PickleKind::kMark});
    case PickleOp::kNone:
      return Push({PickleKind::kNone});
    case PickleOp::kNewTrue:
      return Push({PickleKind::kBool, 0, 1});
    case PickleOp::kNewFalse:
      return Push({PickleKind::kBool, 0, 0});
    case PickleOp::kBinInt:
      return Number<uint32_t>([](uint32_t raw) { return int64_t{static_cast<int32_t>(raw)}; });
    case PickleOp::kBinInt1:
      return Number<uint8_t>([](uint8_t raw) { return int64_t{raw}; });
    case PickleOp::kBinInt2:
      return Number<uint16_t>([](uint16_t raw) { return int64_t{raw}; });
    case PickleOp::kLong1:
      return Long();
    case PickleOp::kBinFloat: {
      std::string_view raw;  // Big-endian, and only ever skipped.
      return in_.Text("a number", 8, &raw) && Push({PickleKind::kFloat});
    }
    case PickleOp::kShortBinString:
    case PickleOp::kShortBinBytes:
      return String<uint8_t>(false);
    case PickleOp::kBinBytes:
      return String<uint32_t>(false);
    case PickleOp::kShortBinUnicode:
      return String<uint8_t>(true);
    case PickleOp::kBinUnicode:
      return String<uint32_t>(true);
    case PickleOp::kEmptyTuple:
      return PushTuple(0);
    case PickleOp::kTuple1:
      return PushTuple(1);
    case PickleOp::kTuple2:
      return PushTuple(2);
    case PickleOp::kTuple3:
      return PushTuple(3);
    case PickleOp::kTuple: {
      size_t count = 0;
      return CountToMark(&count) && PushTuple(count, true);
    }
    case PickleOp::kEmptyList:
    case PickleOp::kEmptySet:
      return PushContainer(PickleKind::kList);
    case PickleOp::kEmptyDict:
      return PushContainer(PickleKind::kDict);
    case PickleOp::kAppend:
      return Extend(PickleKind::kList, 1);
    case PickleOp::kAppends:
    case PickleOp::kAddItems:
      return ExtendToMark(PickleKind::kList);
    case PickleOp::kSetItem:
      return Extend(PickleKind::kDict, 2);
    case PickleOp::kSetItems:
      return ExtendToMark(PickleKind::kDict);
    case PickleOp::kBinGet:
      return Get<uint8_t>();
    case PickleOp::kLongBinGet:
      return Get<uint32_t>();
    case PickleOp::kBinPut:
      return Put<uint8_t>();
    case PickleOp::kLongBinPut:
      return Put<uint32_t>();
    case PickleOp::kMemoize:
      return Memoize(memo_.size() + sparse_memo_.size());
    case PickleOp::kGlobal:
      return Global();
    case PickleOp::kStackGlobal:
      return StackGlobal();
    case PickleOp::kReduce:
    case PickleOp::kNewObj:
      return Reduce();
    case PickleOp::kBuild:
      return Build();
    case PickleOp::kBinPersId:
      return PersistentId();
  }
  return Refuse(absl::StrCat("this opcode is not read: 0x", absl::Hex(op)), kTensorHint);
}

bool PickleMachine::CountToMark(size_t* count) {
  if (marks_.empty()) return Fail("no mark on the stack");
  *count = stack_.size() - marks_.back() - 1;
  return true;
}

bool PickleMachine::MoveToItems(size_t count) {
  if (!Charge(count * sizeof(PickleValue))) return false;
  const auto from = stack_.end() - static_cast<ptrdiff_t>(count);
  MakeRoom(out_.items_, count);
  out_.items_.insert(out_.items_.end(), from, stack_.end());
  stack_.erase(from, stack_.end());
  return true;
}

bool PickleMachine::Long() {
  uint8_t size = 0;
  std::string_view raw;
  if (!in_.Little("a length", &size)) return false;
  const uint64_t at = in_.offset();
  if (!in_.Text("a number", size, &raw)) return false;
  raw = TrimSignBytes(raw);
  if (raw.size() > sizeof(int64_t)) {
    return Push({PickleKind::kLongInt, static_cast<uint32_t>(raw.size()), at});
  }
  uint64_t value =
      !raw.empty() && (static_cast<uint8_t>(raw.back()) & 0x80) != 0 ? ~uint64_t{0} : 0;
  for (size_t i = raw.size(); i > 0; --i) value = value << 8 | static_cast<uint8_t>(raw[i - 1]);
  return Push({PickleKind::kInt, 0, value});
}

bool PickleMachine::PushTuple(size_t count, bool marked) {
  if (!Need(count)) return false;
  const PickleValue tuple{PickleKind::kTuple, static_cast<uint32_t>(count), out_.items_.size()};
  if (!MoveToItems(count)) return false;
  if (marked) DropMark();
  return Push(tuple);
}

bool PickleMachine::PushContainer(PickleKind kind, bool ordered) {
  const PickleValue value{kind, 0, out_.containers_.size()};
  return Keep(out_.containers_, {0, 0, 0, ordered}) && Push(value);
}

bool PickleMachine::ExtendToMark(PickleKind kind) {
  size_t count = 0;
  if (!CountToMark(&count)) return false;
  if (kind == PickleKind::kDict && count % 2 != 0) {
    return Fail(absl::StrCat("an odd number of keys and values: ", count));
  }
  const size_t mark = stack_.size() - count - 1;
  if (mark == 0) return Fail("no container in front of the mark");
  const PickleValue container = stack_[mark - 1];
  if (container.kind != kind) return FailContainer(kind);
  if (!AddRun(container, count)) return false;
  DropMark();
  return true;
}

bool PickleMachine::Extend(PickleKind kind, size_t count) {
  if (!Need(count + 1)) return false;
  const PickleValue container = stack_[stack_.size() - count - 1];
  if (container.kind != kind) return FailContainer(kind);
  return AddRun(container, count);
}

bool PickleMachine::FailContainer(PickleKind kind) {
  return Fail(kind == PickleKind::kDict ? "what gets the items is no dict"
                                        : "what gets the items is no list");
}

bool PickleMachine::AddRun(const PickleValue& value, size_t count) {
  const uint64_t at = out_.items_.size();
  return MoveToItems(count) &&
         AppendRun(out_.containers_[value.bits], at, static_cast<uint32_t>(count));
}

bool PickleMachine::AppendRun(Pickle::Container& container, uint64_t at, uint32_t count) {
  if (count == 0) return true;
  container.items += count;
  if (container.last != 0) {
    Pickle::Run& last = out_.runs_[container.last - 1];
    if (last.at + last.count == at) {
      last.count += count;
      return true;
    }
  }
  if (!Keep(out_.runs_, {at, count, 0})) return false;
  const auto number = static_cast<uint32_t>(out_.runs_.size());
  if (container.last != 0) out_.runs_[container.last - 1].next = number;
  if (container.first == 0) container.first = number;
  container.last = number;
  return true;
}

bool PickleMachine::Memoize(uint64_t slot) {
  if (!Need(1)) return false;
  const PickleValue value = stack_.back();
  if (slot < memo_.size()) {
    memo_[slot] = value;
  } else if (slot == memo_.size() && !sparse_memo_.contains(slot)) {
    return Keep(memo_, value);
  } else {
    const auto [at, added] = sparse_memo_.insert_or_assign(slot, value);
    return !added || Charge(kSparseSlotBytes);
  }
  return true;
}

bool PickleMachine::Protocol() {
  uint8_t version = 0;
  if (!in_.Little("a protocol", &version)) return false;
  if (op_at_ != 0) return Fail("not at the start");
  if (version < 2 || version > kMaxProtocol) {
    return Refuse(absl::StrCat("protocol ", version, "; 2 to ", kMaxProtocol, " are read"),
                  kTensorHint);
  }
  return true;
}

bool PickleMachine::Frame() {
  uint64_t size = 0;
  if (!in_.Little("a frame's size", &size)) return false;
  return size <= in_.remaining() ||
         Fail(absl::StrCat("a frame of ", size, " bytes, with ", in_.remaining(), " left"));
}

bool PickleMachine::Stop() {
  if (stack_.size() != 1 || !marks_.empty()) {
    return Fail(absl::StrCat(stack_.size(), " values on the stack instead of one"));
  }
  if (in_.remaining() != 0) {
    return Fail(absl::StrCat(in_.remaining(), " bytes behind the end of the pickle"));
  }
  out_.root_ = stack_.back();
  stopped_ = true;
  return true;
}

Pickle::Cursor::Cursor(const Pickle& pickle, const PickleValue& container) : pickle_(&pickle) {
  if (container.kind == PickleKind::kTuple) {
    at_ = container.bits;
    end_ = at_ + container.size;
  } else if (container.kind == PickleKind::kList || container.kind == PickleKind::kDict) {
    next_ = pickle.containers_[container.bits].first;
  }
}

uint64_t Pickle::Items(const PickleValue& container) const {
  return container.kind == PickleKind::kTuple ? container.size : containers_[container.bits].items;
}

const PickleValue* Pickle::Cursor::Next() {
  while (at_ == end_) {
    if (next_ == 0) return nullptr;
    const Run& run = pickle_->runs_[next_ - 1];
    at_ = run.at;
    end_ = run.at + run.count;
    next_ = run.next;
  }
  return &pickle_->items_[at_++];
}

bool IsSameDeclaration(const PickleStorage& a, const PickleStorage& b) {
  return a.type->role == b.type->role && a.type->dtype == b.type->dtype && a.count == b.count;
}

absl::StatusOr<Pickle> Pickle::Read(std::string_view file, std::span<const std::byte> stream) {
  return PickleMachine(file, stream).Run();
}

}  // namespace modelhost
