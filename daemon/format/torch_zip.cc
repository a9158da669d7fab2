#include "daemon/format/torch_zip.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/format/name_table.h"
#include "daemon/format/pickle.h"
#include "daemon/format/text.h"
#include "daemon/format/torch_walk.h"
#include "daemon/format/zip_directory.h"

namespace modelhost {
namespace {

constexpr std::string_view kTorchHint =
    "the file is damaged or not written by torch.save: get it again";
constexpr std::string_view kSaveAgainHint =
    "load it in Python with weights_only=True and torch.save its state_dict() again, or save it as "
    "safetensors";
constexpr std::string_view kScriptHint =
    "torch.jit.load it in Python and torch.save its state_dict(), or save that as safetensors";
constexpr std::string_view kData = "data/";
// As torch itself.
constexpr size_t kMaxRank = 64;
constexpr uint64_t kMinVersion = 1;
constexpr uint64_t kMaxVersion = 10;

class TorchReader {
 public:
  TorchReader(const std::string& name, std::span<const std::byte> bytes, uint32_t file,
              TensorIndex& index)
      : name_(name), bytes_(bytes), file_(file), index_(index) {}

  absl::Status Run() {
    absl::StatusOr<ZipDirectory> zip = ZipDirectory::Read(name_, bytes_);
    if (!zip.ok()) return zip.status();
    members_ = (*std::move(zip)).members();
    if (!FindRoot() || !CheckKind() || !CheckVersion() || !CheckByteOrder()) return status_;
    const ZipMember* data = Find("data.pkl");
    if (data == nullptr) {
      Fail("the archive has no data.pkl: it was not written by torch.save");
      return status_;
    }
    if (data->deflated) {
      Refuse(absl::StrCat("member ", Quoted(data->name), " is compressed"), kSaveAgainHint);
      return status_;
    }
    if (!HasGoodCrc(bytes_, *data)) {
      Fail(absl::StrCat("member ", Quoted(data->name),
                        " does not have the CRC-32 that the "
                        "directory gives it"));
      return status_;
    }
    pickle_file_ = absl::StrCat(name_, ": ", AsAbsl(data->name));
    absl::StatusOr<Pickle> pickle = Pickle::Read(pickle_file_, StoredBytes(bytes_, *data));
    if (!pickle.ok()) return pickle.status();
    pickle_ = &*pickle;
    if (!CheckStorages() || !CheckViews()) return status_;
    return AddTensors(data->bytes);
  }

 private:
  // A storage of the pickle and the member that holds it.
  struct Place {
    const PickleStorage* storage = nullptr;
    const ZipMember* member = nullptr;
  };
  struct View {
    uint64_t offset = 0;  // In bytes, in the member.
    uint64_t bytes = 0;
    bool row_major = true;
    // What is still to be done to the values; see SetLazyBits.
    bool conjugate = false;
    bool negate = false;
    bool unknown = false;
  };

  bool Fail(std::string_view why, std::string_view hint = kTorchHint,
            absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    status_ = ModelError(name_, why, hint, code);
    return false;
  }
  bool Refuse(std::string_view why, std::string_view hint) {
    return Fail(why, hint, absl::StatusCode::kUnimplemented);
  }
  bool FailTensor(const PickleTensor& tensor, std::string_view why) {
    status_ = ModelError(pickle_file_,
                         absl::StrCat("the tensor made at byte ", tensor.at, " ", AsAbsl(why)),
                         kTorchHint);
    return false;
  }

  // The archive.

  bool FindRoot() {
    if (members_.empty()) return Fail("a ZIP archive without members", kSaveAgainHint);
    for (const ZipMember& member : members_) {
      if (absl::EndsWithIgnoreCase(AsAbsl(member.name), ".npy")) {
        return Refuse(absl::StrCat("a ZIP archive with ", Quoted(member.name),
                                   ": NumPy's .npz, not a PyTorch checkpoint"),
                      "load it in Python and save it as safetensors");
      }
    }
    const std::string_view first = members_.front().name;
    const size_t slash = first.find('/');
    if (slash == std::string_view::npos) {
      return Fail(absl::StrCat("member ", Quoted(first),
                               " is not in a folder: the archive was not written by torch.save"));
    }
    root_ = first.substr(0, slash + 1);
    numbers_.reserve(members_.size());
    size_t total = 0;
    for (const ZipMember& member : members_) total += member.name.size();
    lower_names_.reserve(total);  // Pieces of it are the keys.
    for (size_t i = 0; i < members_.size(); ++i) {
      const ZipMember& member = members_[i];
      if (!member.name.starts_with(root_)) {
        return Fail(absl::StrCat("member ", Quoted(member.name), " is not in the folder ",
                                 Quoted(root_), " of the others"));
      }
      const size_t at = lower_names_.size();
      for (const char c : member.name.substr(root_.size())) {
        lower_names_ += absl::ascii_tolower(static_cast<unsigned char>(c));
      }
      numbers_.emplace(absl::string_view(lower_names_).substr(at), i);
    }
    return true;
  }

  // As torch does: whatever the case of letters is in the archive. `name` has small letters.
  const ZipMember* Find(std::string_view name) const {
    const auto at = numbers_.find(AsAbsl(name));
    return at == numbers_.end() ? nullptr : &members_[at->second];
  }

  bool CheckKind() {
    const bool code = std::any_of(numbers_.begin(), numbers_.end(), [](const auto& entry) {
      return absl::StartsWith(entry.first, "code/");
    });
    if (code || Find("constants.pkl") != nullptr) {
      return Refuse("a TorchScript archive: a program, not a checkpoint", kScriptHint);
    }
    return true;
  }

  // The text of a short member.
  bool Read(const ZipMember& member, std::string_view* text) {
    constexpr uint64_t kMostBytes = 32;
    if (member.deflated || member.bytes > kMostBytes) {
      return Fail(absl::StrCat("member ", Quoted(member.name), " is no short text"));
    }
    const std::span<const std::byte> raw = StoredBytes(bytes_, member);
    *text = std::string_view(reinterpret_cast<const char*>(raw.data()), raw.size());
    return true;
  }

  bool CheckVersion() {
    const ZipMember* plain = Find("version");
    const ZipMember* dotted = Find(".data/version");
    if (plain == nullptr && dotted == nullptr) return Fail("the archive has no version record");
    if (plain != nullptr && dotted != nullptr) return Fail("the archive has two version records");
    std::string_view text;
    if (!Read(plain != nullptr ? *plain : *dotted, &text)) return false;
    std::string_view digits = text;
    if (digits.ends_with('\n')) digits.remove_suffix(1);
    const bool number = !digits.empty() && std::all_of(digits.begin(), digits.end(),
                                                       [](char c) { return c >= '0' && c <= '9'; });
    uint64_t version = 0;
    if (!number || !absl::SimpleAtoi(AsAbsl(digits), &version)) {
      return Fail(absl::StrCat("the version record is ", Quoted(text), ", not a number"));
    }
    if (version < kMinVersion || version > kMaxVersion) {
      return Refuse(absl::StrCat("version ", version, " of the archive; ", kMinVersion, " to ",
                                 kMaxVersion, " are read"),
                    kSaveAgainHint);
    }
    return true;
  }

  bool CheckByteOrder() {
    const ZipMember* member = Find("byteorder");
    if (member == nullptr) return true;  // From before 2.1: always little-endian.
    std::string_view order;
    if (!Read(*member, &order)) return false;
    if (order == "little") return true;
    if (order == "big") {
      return Refuse("its values are big-endian", "save it again on a little-endian machine");
    }
    return Fail(absl::StrCat("the byteorder record is ", Quoted(order)));
  }

  // The pickle.

  bool CheckStorages() {
    places_.reserve(pickle_->storages().size());
    first_of_member_.resize(members_.size());
    std::string record;
    for (const PickleStorage& storage : pickle_->storages()) {
      const std::string_view key = pickle_->Text(storage.key);
      if (key.empty() || key == "." || key == ".." ||
          key.find_first_of(std::string_view("/\\\0", 3)) != std::string_view::npos) {
        return Fail(absl::StrCat("the storage key ", Quoted(key), " is no plain name"));
      }
      record.assign(kData).append(key);
      absl::AsciiStrToLower(&record);
      const ZipMember* member = Find(record);
      if (member == nullptr) {
        return Fail(absl::StrCat("storage ", Quoted(key), " has no member ", Quoted(record)));
      }
      const PickleStorage*& first = first_of_member_[static_cast<size_t>(member - members_.data())];
      if (first == nullptr) {
        first = &storage;
        if (!CheckStorageSize(storage, *member)) return false;
      } else if (!IsSameDeclaration(*first, storage)) {
        // torch would take the first for both.
        return Fail(absl::StrCat("storage ", Quoted(key), " is declared as ", first->count, " of ",
                                 AsAbsl(first->type->name), " and as ", storage.count, " of ",
                                 AsAbsl(storage.type->name)));
      }
      places_.push_back({&storage, member});
    }
    return true;
  }

  // Of the plain types that checkpoints have.
  static uint64_t ElementBytes(abi::DType dtype) { return abi::FindDType(dtype)->bits / 8; }

  bool CheckStorageSize(const PickleStorage& storage, const ZipMember& member) {
    // A quantized storage only backs tensors that are refused.
    const bool sized = storage.type->dtype != abi::DType::kInvalid;
    const uint64_t element = sized ? ElementBytes(storage.type->dtype) : 1;
    const bool known = sized || storage.type->role == GlobalRole::kUntypedStorage;
    uint64_t bytes = 0;
    if (known &&
        (__builtin_mul_overflow(storage.count, element, &bytes) || bytes != member.bytes)) {
      return Fail(absl::StrCat("storage ", Quoted(pickle_->Text(storage.key)), " is declared as ",
                               storage.count, " of ", AsAbsl(storage.type->name), " with ", element,
                               " bytes each, but its member has ", member.bytes, " bytes"));
    }
    return true;
  }

  bool CheckViews() {
    views_.reserve(pickle_->tensors().size());
    for (const PickleTensor& tensor : pickle_->tensors()) {
      View view;
      if (!CheckView(tensor, &view) || !SetLazyBits(tensor, &view)) return false;
      views_.push_back(view);
    }
    return true;
  }

  bool CheckView(const PickleTensor& tensor, View* view) {
    const std::span<const PickleValue> sizes = pickle_->Tuple(tensor.size);
    const std::span<const PickleValue> strides = pickle_->Tuple(tensor.stride);
    const uint64_t element = ElementBytes(tensor.dtype);
    const uint64_t stored = places_[tensor.storage].member->bytes;
    if (sizes.size() != strides.size()) {
      return FailTensor(
          tensor, absl::StrCat("has ", sizes.size(), " sizes and ", strides.size(), " strides"));
    }
    if (sizes.size() > kMaxRank) {
      return FailTensor(tensor,
                        absl::StrCat("has ", sizes.size(), " dimensions; the limit is ", kMaxRank));
    }
    bool fits = tensor.offset >= 0;
    bool empty = false;
    uint64_t elements = 1;
    uint64_t last = 0;  // The element that lies furthest from the first.
    uint64_t dense = 1;
    for (size_t i = sizes.size(); i > 0; --i) {
      const PickleValue& size = sizes[i - 1];
      const PickleValue& stride = strides[i - 1];
      if (size.kind != PickleKind::kInt || stride.kind != PickleKind::kInt || size.AsInt() < 0 ||
          stride.AsInt() < 0) {
        return FailTensor(tensor, "has a size or stride that is no number from 0");
      }
      if (size.bits == 0) {
        empty = true;
        continue;
      }
      uint64_t reach = 0;
      fits = fits && !__builtin_mul_overflow(size.bits - 1, stride.bits, &reach) &&
             !__builtin_add_overflow(last, reach, &last) &&
             !__builtin_mul_overflow(elements, size.bits, &elements);
      if (size.bits > 1 && stride.bits != dense) view->row_major = false;
      dense = elements;
    }
    if (tensor.offset < 0) return FailTensor(tensor, "has a negative offset");
    const auto first = static_cast<uint64_t>(tensor.offset);
    if (empty) {
      // No element: torch lets its offset be anything.
      view->row_major = true;
      uint64_t offset = 0;
      if (!__builtin_mul_overflow(first, element, &offset)) view->offset = std::min(offset, stored);
      return true;
    }
    uint64_t end = 0;
    uint64_t whole = 0;
    fits = fits && !__builtin_add_overflow(first, last, &end) && end < stored / element;
    if (!fits) {
      return FailTensor(
          tensor, absl::StrCat("reaches beyond its storage ",
                               Quoted(pickle_->Text(places_[tensor.storage].storage->key)), " of ",
                               stored / element, " elements"));
    }
    // Expanded tensors (stride 0) may have more elements than there are bytes.
    if (__builtin_mul_overflow(elements, element, &whole) || whole > INT64_MAX) {
      return FailTensor(tensor, "has more bytes than 63 bits can count");
    }
    view->offset = first * element;
    view->bytes = (last + 1) * element;
    return true;
  }

  // The bytes of a lazy view are not its values until someone works them out.
  bool SetLazyBits(const PickleTensor& tensor, View* view) {
    constexpr int kMostItems = 8;
    if (tensor.metadata.kind != PickleKind::kDict) return true;
    Pickle::Cursor cursor(*pickle_, tensor.metadata);
    int items = 0;
    while (const PickleValue* key = cursor.Next()) {
      const PickleValue* value = cursor.Next();
      if (++items > kMostItems) return FailTensor(tensor, "has too much metadata");
      if (value->kind == PickleKind::kBool && value->bits == 0) continue;
      const std::string_view bit =
          key->kind == PickleKind::kText ? pickle_->Text(*key) : std::string_view();
      (bit == "conj" ? view->conjugate : bit == "neg" ? view->negate : view->unknown) = true;
    }
    return true;
  }

  // Short and few: a tensor may be in many places. Empty for values that are as stored.
  static std::string_view ReasonOf(const View& view) {
    if (view.unknown) return "the values are not as stored: the metadata has an unknown key";
    if (view.conjugate && view.negate) return "the values are not as stored: conj and neg are set";
    if (view.conjugate) return "the values are not as stored: conj is set";
    if (view.negate) return "the values are not as stored: neg is set";
    return {};
  }

  absl::Status AddTensors(uint64_t pickle_bytes) {
    const size_t first = index_.size();
    index_.Reserve(pickle_->tensors().size(), 0, 0);
    absl::Status status = WalkTensors(
        pickle_file_, *pickle_, pickle_bytes,
        [this](std::string_view name, uint64_t tensor) { return AddTensor(name, tensor); });
    if (!status.ok()) return status;
    std::vector<std::string_view> names;
    names.reserve(index_.size() - first);
    for (size_t i = first; i < index_.size(); ++i) names.push_back(index_.at(i).name);
    if (const auto pair = NameTable(std::move(names)).Duplicate()) {
      Fail(absl::StrCat("two tensors have the name ", Quoted(index_.at(first + pair->first).name)),
           "give the keys of its dicts names that stay different when joined by dots");
    }
    return status_;
  }

  absl::Status AddTensor(std::string_view name, uint64_t number) {
    const PickleTensor& tensor = pickle_->tensors()[number];
    const ZipMember& member = *places_[tensor.storage].member;
    const View& view = views_[number];
    const std::span<const PickleValue> sizes = pickle_->Tuple(tensor.size);
    const std::span<const PickleValue> strides = pickle_->Tuple(tensor.stride);
    std::array<int64_t, kMaxRank> shape;
    std::array<int64_t, kMaxRank> steps;
    for (size_t i = 0; i < sizes.size(); ++i) {
      shape[i] = sizes[i].AsInt();
      steps[i] = strides[i].AsInt();
    }
    TensorInfo info;
    info.name = name;
    info.dtype = tensor.dtype;
    info.shape = std::span<const int64_t>(shape).first(sizes.size());
    if (!view.row_major) info.strides = std::span<const int64_t>(steps).first(sizes.size());
    info.file = file_;
    info.offset = member.data_at + view.offset;
    info.nbytes = view.bytes;
    info.reason = ReasonOf(view);
    if (member.deflated) {
      info.reason = "its member of the archive is compressed";
      info.offset = member.data_at;
      info.nbytes = member.stored_bytes;
    }
    info.mappable = info.reason.empty();
    index_.Add(info);
    return absl::OkStatus();
  }

  const std::string& name_;
  std::span<const std::byte> bytes_;
  const uint32_t file_;
  TensorIndex& index_;
  std::vector<ZipMember> members_;
  std::string_view root_;                                   // With its slash.
  std::string lower_names_;                                 // Of all members, below the root.
  absl::flat_hash_map<absl::string_view, size_t> numbers_;  // By the name in lower_names_.
  std::string pickle_file_;                                 // For errors.
  const Pickle* pickle_ = nullptr;
  std::vector<Place> places_;                          // Of each storage of the pickle.
  std::vector<const PickleStorage*> first_of_member_;  // By number of the member.
  std::vector<View> views_;                            // Of each tensor of the pickle.
  absl::Status status_;
};

}  // namespace

absl::Status ReadTorchZip(const std::string& name, std::span<const std::byte> bytes, uint32_t file,
                          TensorIndex& index) {
  return TorchReader(name, bytes, file, index).Run();
}

}  // namespace modelhost
