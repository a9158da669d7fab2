// What the names and calls in a checkpoint's pickle come to.
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/format/pickle_machine.h"

namespace modelhost {
namespace {

constexpr std::string_view kGlobalHint =
    "only weights are read and nothing is called: load it in Python where it is trusted, and save "
    "its state_dict() with torch.save or as safetensors";
constexpr uint64_t kStorageEntryBytes = 40;
// What readers keep beside each storage and tensor.
constexpr uint64_t kNoteBytes = 32;

}  // namespace

bool PickleMachine::PushGlobal(std::string_view module, std::string_view name) {
  const PickleGlobal* global = FindPickleGlobal(module, name);
  if (global == nullptr) {
    return Refuse(
        absl::StrCat("the global ", Quoted(absl::StrCat(AsAbsl(module), ".", AsAbsl(name))),
                     " is not one that weights need"),
        kGlobalHint);
  }
  return Keep(globals_, global) && Push({PickleKind::kGlobal, 0, globals_.size() - 1});
}

bool PickleMachine::Global() {
  const auto in_line = [](uint8_t c) { return c != '\n'; };
  const std::string_view module = in_.TakeWhile(in_line);
  if (!in_.Take('\n')) return in_.Fail("the pickle ends inside the name of a module");
  const std::string_view name = in_.TakeWhile(in_line);
  if (!in_.Take('\n')) return in_.Fail("the pickle ends inside a name");
  return PushGlobal(module, name);
}

bool PickleMachine::StackGlobal() {
  PickleValue module, name;
  if (!Pop(&name) || !Pop(&module)) return false;
  if (module.kind != PickleKind::kText || name.kind != PickleKind::kText) {
    return Fail("a module and a name that are no texts");
  }
  return PushGlobal(out_.Text(module), out_.Text(name));
}

bool PickleMachine::Reduce() {
  PickleValue callable, args;
  if (!Pop(&args) || !Pop(&callable)) return false;
  if (callable.kind != PickleKind::kGlobal) return Fail("what is called is no global");
  if (args.kind != PickleKind::kTuple) return Fail("the arguments are no tuple");
  const PickleGlobal& global = *globals_[callable.bits];
  if (static_cast<PickleOp>(op_) == PickleOp::kNewObj && global.role != GlobalRole::kOrderedDict &&
      global.role != GlobalRole::kCounter && global.role != GlobalRole::kSet &&
      global.role != GlobalRole::kParameter) {
    return FailCall(global, "cannot be made by NEWOBJ");
  }
  return Call(global, out_.Tuple(args));
}

bool PickleMachine::FailCall(const PickleGlobal& global, std::string_view why) {
  return Fail(absl::StrCat(AsAbsl(global.module), ".", AsAbsl(global.name), " ", AsAbsl(why)));
}

bool PickleMachine::RefuseCall(const PickleGlobal& global, std::string_view why) {
  return Refuse(absl::StrCat(AsAbsl(global.module), ".", AsAbsl(global.name), " ", AsAbsl(why)),
                kTensorHint);
}

bool PickleMachine::Call(const PickleGlobal& global, std::span<const PickleValue> args) {
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

bool PickleMachine::PassTensor(const PickleGlobal& global, std::span<const PickleValue> args) {
  if (args[0].kind != PickleKind::kTensor) return FailCall(global, "needs a tensor");
  return Push(args[0]);
}

bool PickleMachine::PayForCopy(size_t items) {
  copied_ += items;
  if (copied_ > in_.size()) return Fail("copies more items than the pickle has bytes");
  return Charge(items * sizeof(PickleValue));
}

bool PickleMachine::MakeDict(const PickleGlobal& global, std::span<const PickleValue> args) {
  std::vector<PickleValue> copy;
  if (!args.empty()) {
    Pickle::Cursor cursor(out_, args[0]);
    const bool dict = args[0].kind == PickleKind::kDict;
    if (!dict && args[0].kind != PickleKind::kList) return FailCall(global, "needs a dict or list");
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

bool PickleMachine::MakeSet(const PickleGlobal& global, std::span<const PickleValue> args) {
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

bool PickleMachine::PutItems(const std::vector<PickleValue>& items) {
  if (!Charge(items.size() * sizeof(PickleValue))) return false;
  const uint64_t at = out_.items_.size();
  MakeRoom(out_.items_, items.size());
  out_.items_.insert(out_.items_.end(), items.begin(), items.end());
  return AppendRun(out_.containers_[stack_.back().bits], at, static_cast<uint32_t>(items.size()));
}

bool PickleMachine::MakeTensor(const PickleGlobal& global, std::span<const PickleValue> args) {
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
    if (args[6].kind != PickleKind::kGlobal || globals_[args[6].bits]->role != GlobalRole::kDType) {
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

bool PickleMachine::Build() {
  PickleValue state;
  if (!Pop(&state) || !Need(1)) return false;
  const PickleValue& object = stack_.back();
  if (object.kind != PickleKind::kDict || !out_.containers_[object.bits].ordered) {
    return Fail("only an OrderedDict may have attributes");
  }
  if (state.kind != PickleKind::kDict) return Fail("the attributes are no dict");
  return true;
}

bool PickleMachine::PersistentId() {
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
  const auto [at, added] =
      storage_numbers_.try_emplace(storage.key.bits, static_cast<uint32_t>(out_.storages_.size()));
  if (added || !IsSameDeclaration(out_.storages_[at->second], storage)) {
    at->second = static_cast<uint32_t>(out_.storages_.size());
    if (!Keep(out_.storages_, storage, kNoteBytes + kStorageEntryBytes)) return false;
  }
  return Push({PickleKind::kStorage, 0, at->second});
}

}  // namespace modelhost
