// Reads the pickle of a PyTorch checkpoint into plain values. Nothing is called or imported: a
// callable is a name of pickle_globals.h, and what it would make is worked out here.
//
// Memory is in proportion to the stream: whatever is kept is charged to a budget of 6 bytes per
// byte of the stream and 48 MiB, where torch.save needs 3 to 5. With room to grow that is at most
// 14 bytes per byte and 160 MiB of address space while reading, 8 and 64 MiB after. Nothing
// recurses; a value may contain itself, so who walks has to look out. Texts are lent by the stream.
// Errors: INVALID_ARGUMENT a damaged stream, UNIMPLEMENTED an opcode or a global that is refused by
// name; the text has the opcode and its offset. Immutable once read; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/format/pickle_globals.h"
#include "proto/abi/dtype.h"

namespace modelhost {

enum class PickleKind : uint8_t {
  kNone,
  kBool,
  kInt,      // Fits 64 bits.
  kLongInt,  // Does not: Text() has its bytes as in pickle_number.h, none too many.
  kFloat,
  kText,    // Also bytes: Python 2 wrote names so.
  kOpaque,  // Holds no tensor.
  kGlobal,
  kTuple,
  kList,  // And sets.
  kDict,
  kStorage,
  kTensor,
  kMark,  // On the stack only.
};

struct PickleValue {
  PickleKind kind = PickleKind::kNone;
  uint32_t size = 0;  // Bytes of a text, items of a tuple.
  uint64_t bits = 0;  // The number; or where the rest is.

  int64_t AsInt() const { return static_cast<int64_t>(bits); }
};

struct PickleStorage {
  PickleValue key;                     // A text.
  const PickleGlobal* type = nullptr;  // kStorage with a dtype, or kUntypedStorage.
  uint64_t count = 0;                  // Elements, or bytes of an untyped one.
};

// The same type and count.
bool IsSameDeclaration(const PickleStorage& a, const PickleStorage& b);

struct PickleTensor {
  uint64_t at = 0;  // The opcode that made it.
  uint32_t storage = 0;
  abi::DType dtype = abi::DType::kInvalid;
  int64_t offset = 0;
  PickleValue size;  // kTuple of kInt, as `stride`; their numbers are not checked.
  PickleValue stride;
  PickleValue metadata;  // kNone or kDict.
};

class Pickle {
 public:
  static absl::StatusOr<Pickle> Read(std::string_view file, std::span<const std::byte> stream);

  const PickleValue& root() const { return root_; }
  const std::vector<PickleStorage>& storages() const { return storages_; }
  const std::vector<PickleTensor>& tensors() const { return tensors_; }

  std::string_view Text(const PickleValue& text) const {
    return text_.substr(text.bits, text.size);
  }
  std::span<const PickleValue> Tuple(const PickleValue& tuple) const {
    return std::span(items_).subspan(tuple.bits, tuple.size);
  }

  // How many items a tuple, list or dict has; a dict has two per key.
  uint64_t Items(const PickleValue& container) const;
  // The same for two values that are the same tuple, list or dict with items, and below
  // Identities().
  uint64_t Identity(const PickleValue& container) const {
    return container.kind == PickleKind::kTuple ? container.bits : items_.size() + container.bits;
  }
  uint64_t Identities() const { return items_.size() + containers_.size(); }
  // Where in Item() an item of a cursor lies.
  uint32_t Place(const PickleValue* item) const {
    return static_cast<uint32_t>(item - items_.data());
  }
  const PickleValue& Item(uint32_t place) const { return items_[place]; }
  // The items of a tuple, list or dict (key, value, key, ...), in order.
  class Cursor {
   public:
    Cursor(const Pickle& pickle, const PickleValue& container);
    const PickleValue* Next();  // Null at the end.

   private:
    const Pickle* pickle_;
    uint64_t at_ = 0;
    uint64_t end_ = 0;
    uint32_t next_ = 0;  // 1 + number of the next run.
  };

 private:
  friend class PickleMachine;
  // Lists and dicts grow by runs of items; they never shrink.
  struct Run {
    uint64_t at;
    uint32_t count;
    uint32_t next;  // 1 + number of the next run, 0 = none.
  };
  struct Container {
    uint32_t first = 0;  // 1 + number of a run.
    uint32_t last = 0;
    uint32_t items = 0;
    bool ordered = false;  // An OrderedDict: may have attributes.
  };

  std::string_view text_;
  PickleValue root_;
  std::vector<PickleValue> items_;
  std::vector<Run> runs_;
  std::vector<Container> containers_;
  std::vector<PickleStorage> storages_;
  std::vector<PickleTensor> tensors_;
};

}  // namespace modelhost
