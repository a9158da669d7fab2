#include "daemon/format/pickle.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/byte_reader.h"
#include "daemon/format/pickle_number.h"
#include "daemon/format/pickle_opcodes.h"
#include "daemon/format/text.h"

namespace modelhost {
namespace {

constexpr std::string_view kPickleHint = "the file is damaged or made by hand: get it again";
constexpr std::string_view kGlobalHint =
    "only weights are read and nothing is called: load it in Python where it is trusted, and save "
    "its state_dict() with torch.save or as safetensors";
constexpr std::string_view kTensorHint =
    "load it in Python and save plain tensors with torch.save or as safetensors";

// As the header of safetensors: 500,000 tensors and more.
constexpr uint64_t kMaxStreamBytes = 100'000'000;
// torch writes 1000 items of a container at a time.
constexpr size_t kMaxStack = 1'000'000;
constexpr uint8_t kMaxProtocol = 5;
// What the values of a pickle may take. A state_dict takes 3 to 5 bytes per byte; lists of numbers,
// which training keeps beside one, take up to 16, and what is free is enough for millions of them.
constexpr uint64_t kValueBytesPerByte = 6;
constexpr uint64_t kFreeValueBytes = uint64_t{48} << 20;
// An entry of a hash table with what is left free.
constexpr uint64_t kSparseSlotBytes = 64;
constexpr uint64_t kStorageEntryBytes = 40;
// What readers keep beside each storage and tensor.
constexpr uint64_t kNoteBytes = 32;

// Python's decoder of pickles lets a lone surrogate pass.
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

}  // namespace

// One pass over the stream. The state of Python's own machine: a stack with marks, and a memo.
class PickleMachine {
 public:
  PickleMachine(std::string_view file, std::span<const std::byte> stream)
      : file_(file),
        in_(file, kPickleHint, stream),
        bytes_left_(kFreeValueBytes + kValueBytesPerByte * stream.size()) {
    out_.text_ = std::string_view(reinterpret_cast<const char*>(stream.data()), stream.size());
  }

  absl::StatusOr<Pickle> Run() {
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

 private:
  bool Fail(std::string_view why, std::string_view hint = kPickleHint,
            absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    if (status_.ok()) {
      status_ = ModelError(
          file_,
          absl::StrCat("at byte ", op_at_, ": ", AsAbsl(PickleOpcodeName(op_)), ": ", AsAbsl(why)),
          hint, code);
    }
    return false;
  }
  bool Refuse(std::string_view why, std::string_view hint) {
    return Fail(why, hint, absl::StatusCode::kUnimplemented);
  }

  // What torch.save writes of each tensor takes 130 bytes and up, and makes 15 items and 7 slots of
  // the memo: growing step by step would touch twice the memory.
  void Reserve() {
    constexpr uint64_t kMostBytes = 16'000'000;
    const uint64_t bytes = std::min(in_.size(), kMostBytes);
    out_.items_.reserve(bytes / 8);
    memo_.reserve(bytes / 16);
    out_.tensors_.reserve(bytes / 128);
    out_.storages_.reserve(bytes / 128);
    storage_numbers_.reserve(bytes / 256);
  }

  bool Step() {
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
  bool CountToMark(size_t* count) {
    if (marks_.empty()) return Fail("no mark on the stack");
    *count = stack_.size() - marks_.back() - 1;
    return true;
  }
  void DropMark() {
    stack_.pop_back();
    marks_.pop_back();
  }
  // Moves the last values to the items.
  bool MoveToItems(size_t count) {
    if (!Charge(count * sizeof(PickleValue))) return false;
    const auto from = stack_.end() - static_cast<ptrdiff_t>(count);
    MakeRoom(out_.items_, count);
    out_.items_.insert(out_.items_.end(), from, stack_.end());
    stack_.erase(from, stack_.end());
    return true;
  }

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

  bool Long() {
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

  bool PushTuple(size_t count, bool marked = false) {
    if (!Need(count)) return false;
    const PickleValue tuple{PickleKind::kTuple, static_cast<uint32_t>(count), out_.items_.size()};
    if (!MoveToItems(count)) return false;
    if (marked) DropMark();
    return Push(tuple);
  }

  bool PushContainer(PickleKind kind, bool ordered = false) {
    const PickleValue value{kind, 0, out_.containers_.size()};
    return Keep(out_.containers_, {0, 0, 0, ordered}) && Push(value);
  }

  bool ExtendToMark(PickleKind kind) {
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

  bool Extend(PickleKind kind, size_t count) {
    if (!Need(count + 1)) return false;
    const PickleValue container = stack_[stack_.size() - count - 1];
    if (container.kind != kind) return FailContainer(kind);
    return AddRun(container, count);
  }

  bool FailContainer(PickleKind kind) {
    return Fail(kind == PickleKind::kDict ? "what gets the items is no dict"
                                          : "what gets the items is no list");
  }

  // Moves the last `count` values of the stack into a list or dict.
  bool AddRun(const PickleValue& value, size_t count) {
    const uint64_t at = out_.items_.size();
    return MoveToItems(count) &&
           AppendRun(out_.containers_[value.bits], at, static_cast<uint32_t>(count));
  }
  bool AppendRun(Pickle::Container& container, uint64_t at, uint32_t count) {
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
  bool Memoize(uint64_t slot) {
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

  // Names and calls.

  bool PushGlobal(std::string_view module, std::string_view name) {
    const PickleGlobal* global = FindPickleGlobal(module, name);
    if (global == nullptr) {
      return Refuse(
          absl::StrCat("the global ", Quoted(absl::StrCat(AsAbsl(module), ".", AsAbsl(name))),
                       " is not one that weights need"),
          kGlobalHint);
    }
    return Keep(globals_, global) && Push({PickleKind::kGlobal, 0, globals_.size() - 1});
  }

  bool Global() {
    const auto in_line = [](uint8_t c) { return c != '\n'; };
    const std::string_view module = in_.TakeWhile(in_line);
    if (!in_.Take('\n')) return in_.Fail("the pickle ends inside the name of a module");
    const std::string_view name = in_.TakeWhile(in_line);
    if (!in_.Take('\n')) return in_.Fail("the pickle ends inside a name");
    return PushGlobal(module, name);
  }

  bool StackGlobal() {
    PickleValue module, name;
    if (!Pop(&name) || !Pop(&module)) return false;
    if (module.kind != PickleKind::kText || name.kind != PickleKind::kText) {
      return Fail("a module and a name that are no texts");
    }
    return PushGlobal(out_.Text(module), out_.Text(name));
  }

  // REDUCE and NEWOBJ: what the callable would make of its arguments.
  bool Reduce() {
    PickleValue callable, args;
    if (!Pop(&args) || !Pop(&callable)) return false;
    if (callable.kind != PickleKind::kGlobal) return Fail("what is called is no global");
    if (args.kind != PickleKind::kTuple) return Fail("the arguments are no tuple");
    const PickleGlobal& global = *globals_[callable.bits];
    if (static_cast<PickleOp>(op_) == PickleOp::kNewObj &&
        global.role != GlobalRole::kOrderedDict && global.role != GlobalRole::kCounter &&
        global.role != GlobalRole::kSet && global.role != GlobalRole::kParameter) {
      return FailCall(global, "cannot be made by NEWOBJ");
    }
    return Call(global, out_.Tuple(args));
  }

  bool FailCall(const PickleGlobal& global, std::string_view why) {
    return Fail(absl::StrCat(AsAbsl(global.module), ".", AsAbsl(global.name), " ", AsAbsl(why)));
  }
  bool RefuseCall(const PickleGlobal& global, std::string_view why) {
    return Refuse(absl::StrCat(AsAbsl(global.module), ".", AsAbsl(global.name), " ", AsAbsl(why)),
                  kTensorHint);
  }

  // `args` lies among the items: what lets them grow has copied it before. Calls itself once at
  // most.
  bool Call(const PickleGlobal& global, std::span<const PickleValue> args) {
    const auto count = [&](size_t least, size_t most) {
      return (args.size() >= least && args.size() <= most) ||
             FailCall(global, absl::StrCat("has ", args.size(), " arguments"));
    };
    switch (global.role) {
      case GlobalRole::kOrderedDict:
      case GlobalRole::kCounter:
        return count(0, 1) && MakeDict(global, args);
      case GlobalRole::kSet:
        return count(0, 1) && MakeSet(global, args);
      case GlobalRole::kSize:
        if (!count(0, 1)) return false;
        if (args.empty()) return PushTuple(0);
        if (args[0].kind != PickleKind::kTuple) return FailCall(global, "needs a tuple");
        return Push(args[0]);
      case GlobalRole::kOpaque:
        return Push({PickleKind::kOpaque});
      case GlobalRole::kParameter:
        return count(1, 2) && PassTensor(global, args);
      case GlobalRole::kRebuildParameter:
        return count(3, 3) && PassTensor(global, args);
      case GlobalRole::kRebuildParameterState:
        return count(4, 4) && PassTensor(global, args);
      case GlobalRole::kRebuildTensor:
        return count(4, 4) && MakeTensor(global, args);
      case GlobalRole::kRebuildTensorV2:
        return count(6, 7) && MakeTensor(global, args);
      case GlobalRole::kRebuildTensorV3:
        return count(7, 8) && MakeTensor(global, args);
      case GlobalRole::kRebuildFromType: {
        if (!count(4, 4)) return false;
        if (args[0].kind != PickleKind::kGlobal || args[2].kind != PickleKind::kTuple) {
          return FailCall(global, "needs a function and its arguments");
        }
        const PickleGlobal* type =
            args[1].kind == PickleKind::kGlobal ? globals_[args[1].bits] : nullptr;
        if (type == nullptr ||
            (type->role != GlobalRole::kTensorClass && type->role != GlobalRole::kParameter)) {
          return FailCall(global, "needs a class of tensors");
        }
        const PickleGlobal& inner = *globals_[args[0].bits];
        switch (inner.role) {
          case GlobalRole::kRebuildTensor:
          case GlobalRole::kRebuildTensorV2:
          case GlobalRole::kRebuildTensorV3:
          case GlobalRole::kRebuildParameter:
          case GlobalRole::kRebuildParameterState:
          case GlobalRole::kOtherTensor:
            return Call(inner, out_.Tuple(args[2]));
          default:
            return FailCall(global, "needs a function that makes a tensor");
        }
      }
      case GlobalRole::kOtherTensor:
        return RefuseCall(global, "makes a tensor that is no plain range of stored values");
      case GlobalRole::kTensorClass:
      case GlobalRole::kConstant:
      case GlobalRole::kDType:
      case GlobalRole::kStorage:
      case GlobalRole::kUntypedStorage:
        break;
    }
    return FailCall(global, "is not called in a checkpoint");
  }

  bool PassTensor(const PickleGlobal& global, std::span<const PickleValue> args) {
    if (args[0].kind != PickleKind::kTensor) return FailCall(global, "needs a tensor");
    return Push(args[0]);
  }

  // Copies cost; a stream that is honest copies what it has written just before.
  bool PayForCopy(size_t items) {
    copied_ += items;
    if (copied_ > in_.size()) return Fail("copies more items than the pickle has bytes");
    return Charge(items * sizeof(PickleValue));
  }

  bool MakeDict(const PickleGlobal& global, std::span<const PickleValue> args) {
    std::vector<PickleValue> copy;
    if (!args.empty()) {
      Pickle::Cursor cursor(out_, args[0]);
      const bool dict = args[0].kind == PickleKind::kDict;
      if (!dict && args[0].kind != PickleKind::kList)
        return FailCall(global, "needs a dict or list");
      const uint64_t items = out_.Items(args[0]) * (dict ? 1 : 2);
      if (!PayForCopy(items)) return false;
      copy.reserve(items);
      while (const PickleValue* item = cursor.Next()) {
        if (dict) {
          copy.push_back(*item);
          continue;
        }
        Pickle::Cursor pair(out_, *item);
        const PickleValue* key = pair.Next();
        const PickleValue* value = key == nullptr ? nullptr : pair.Next();
        if (value == nullptr || pair.Next() != nullptr) return FailCall(global, "needs pairs");
        copy.push_back(*key);
        copy.push_back(*value);
      }
    }
    return PushContainer(PickleKind::kDict, global.role == GlobalRole::kOrderedDict) &&
           PutItems(copy);
  }

  bool MakeSet(const PickleGlobal& global, std::span<const PickleValue> args) {
    std::vector<PickleValue> copy;
    if (!args.empty()) {
      if (args[0].kind != PickleKind::kList && args[0].kind != PickleKind::kTuple) {
        return FailCall(global, "needs a list");
      }
      Pickle::Cursor cursor(out_, args[0]);
      if (!PayForCopy(out_.Items(args[0]))) return false;
      copy.reserve(out_.Items(args[0]));
      while (const PickleValue* item = cursor.Next()) copy.push_back(*item);
    }
    return PushContainer(PickleKind::kList) && PutItems(copy);
  }

  // Into the container on top of the stack.
  bool PutItems(const std::vector<PickleValue>& items) {
    if (!Charge(items.size() * sizeof(PickleValue))) return false;
    const uint64_t at = out_.items_.size();
    MakeRoom(out_.items_, items.size());
    out_.items_.insert(out_.items_.end(), items.begin(), items.end());
    return AppendRun(out_.containers_[stack_.back().bits], at, static_cast<uint32_t>(items.size()));
  }

  bool MakeTensor(const PickleGlobal& global, std::span<const PickleValue> args) {
    if (args[0].kind != PickleKind::kStorage) return FailCall(global, "needs a storage");
    PickleTensor tensor;
    tensor.at = op_at_;
    tensor.storage = static_cast<uint32_t>(args[0].bits);
    tensor.offset = args[1].AsInt();
    tensor.size = args[2];
    tensor.stride = args[3];
    if (args[1].kind != PickleKind::kInt || tensor.size.kind != PickleKind::kTuple ||
        tensor.stride.kind != PickleKind::kTuple) {
      return FailCall(global, "needs an offset, a tuple of sizes and a tuple of strides");
    }
    const PickleGlobal& type = *out_.storages_[tensor.storage].type;
    tensor.dtype = type.dtype;
    const PickleGlobal* named = &type;
    if (global.role == GlobalRole::kRebuildTensorV3) {
      if (args[6].kind != PickleKind::kGlobal ||
          globals_[args[6].bits]->role != GlobalRole::kDType) {
        return FailCall(global, "needs a dtype");
      }
      named = globals_[args[6].bits];
      tensor.dtype = named->dtype;
    }
    if (tensor.dtype == abi::DType::kInvalid) {
      return RefuseCall(*named, "has no counterpart among the types that are served");
    }
    const size_t metadata = global.role == GlobalRole::kRebuildTensorV3 ? 7 : 6;
    if (args.size() > metadata) tensor.metadata = args[metadata];
    if (tensor.metadata.kind != PickleKind::kNone && tensor.metadata.kind != PickleKind::kDict) {
      return FailCall(global, "has metadata that is no dict");
    }
    return Keep(out_.tensors_, tensor, kNoteBytes) &&
           Push({PickleKind::kTensor, 0, out_.tensors_.size() - 1});
  }

  // Sets attributes. An OrderedDict has them (the versions of a state_dict); they hold no weights.
  bool Build() {
    PickleValue state;
    if (!Pop(&state) || !Need(1)) return false;
    const PickleValue& object = stack_.back();
    if (object.kind != PickleKind::kDict || !out_.containers_[object.bits].ordered) {
      return Fail("only an OrderedDict may have attributes");
    }
    if (state.kind != PickleKind::kDict) return Fail("the attributes are no dict");
    return true;
  }

  bool PersistentId() {
    PickleValue id;
    if (!Pop(&id)) return false;
    if (id.kind != PickleKind::kTuple || id.size != 5) {
      return Fail("a persistent id that is no tuple of 5");
    }
    const std::span<const PickleValue> parts = out_.Tuple(id);
    if (parts[0].kind != PickleKind::kText || out_.Text(parts[0]) != "storage") {
      return Fail("a persistent id that is no storage");
    }
    PickleStorage storage;
    if (parts[1].kind == PickleKind::kGlobal) storage.type = globals_[parts[1].bits];
    if (storage.type == nullptr || (storage.type->role != GlobalRole::kStorage &&
                                    storage.type->role != GlobalRole::kUntypedStorage)) {
      return Fail("a storage without a class of storages");
    }
    storage.key = parts[2];
    if (storage.key.kind != PickleKind::kText || parts[3].kind != PickleKind::kText) {
      return Fail("a storage whose key or location is no text");
    }
    if (parts[4].kind != PickleKind::kInt || parts[4].AsInt() < 0) {
      return Fail("a storage whose element count is no number from 0");
    }
    storage.count = parts[4].bits;
    // A tuple from the memo may be a persistent id over and over; its long key is looked at once.
    const auto [at, added] = storage_numbers_.try_emplace(
        storage.key.bits, static_cast<uint32_t>(out_.storages_.size()));
    if (added || !IsSameDeclaration(out_.storages_[at->second], storage)) {
      at->second = static_cast<uint32_t>(out_.storages_.size());
      if (!Keep(out_.storages_, storage, kNoteBytes + kStorageEntryBytes)) return false;
    }
    return Push({PickleKind::kStorage, 0, at->second});
  }

  // The frame of the stream.

  bool Protocol() {
    uint8_t version = 0;
    if (!in_.Little("a protocol", &version)) return false;
    if (op_at_ != 0) return Fail("not at the start");
    if (version < 2 || version > kMaxProtocol) {
      return Refuse(absl::StrCat("protocol ", version, "; 2 to ", kMaxProtocol, " are read"),
                    kTensorHint);
    }
    return true;
  }

  // Frames only help who reads from a socket.
  bool Frame() {
    uint64_t size = 0;
    if (!in_.Little("a frame's size", &size)) return false;
    return size <= in_.remaining() ||
           Fail(absl::StrCat("a frame of ", size, " bytes, with ", in_.remaining(), " left"));
  }

  bool Stop() {
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
