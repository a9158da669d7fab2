#include "client/modelctl/import.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <new>
#include <optional>
#include <string_view>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/modelctl/gguf_writer.h"
#include "client/modelctl/import_metadata.h"
#include "client/modelctl/index_render.h"
#include "client/modelctl/model_source.h"
#include "client/modelctl/output_file.h"
#include "client/modelctl/q8_0.h"
#include "client/modelctl/recoder.h"
#include "client/modelctl/safetensors_writer.h"
#include "client/modelctl/source_reach.h"
#include "client/modelctl/strided_gather.h"
#include "client/modelctl/tensor_reader.h"
#include "client/modelctl/value_check.h"
#include "daemon/format/text.h"

namespace modelhost::modelctl {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kPieceBytes = 4 << 20;
// A conversion has a piece as doubles twice.
constexpr uint64_t kPieceValues = 256 << 10;
static_assert(kPieceValues % kQ8BlockValues == 0);
// A comparison of a view has 16 bytes for each.
constexpr uint64_t kCheckedUnits = 1 << 20;
static_assert(kCheckedUnits % kQ8BlockValues == 0);

// The finished file, which may have no name yet, as the readers want it.
class OneFile : public FileSource, public RangeSource {
 public:
  OneFile(std::string name, const OutputFile& out, std::span<const std::byte> bytes)
      : name_(std::move(name)), out_(out), bytes_(bytes) {}
  absl::StatusOr<std::span<const std::byte>> Open(const std::string& name) override {
    if (name == name_) return bytes_;
    return absl::NotFoundError(absl::StrCat(name, ": not a part of the file written"));
  }

  absl::StatusOr<uint64_t> SizeOf(const std::string&) override { return out_.size(); }
  absl::Status ReadAt(const std::string&, uint64_t offset, std::span<std::byte> to) override {
    return out_.ReadAt(offset, to);
  }

 private:
  std::string name_;
  const OutputFile& out_;
  std::span<const std::byte> bytes_;
};

// What tells a file apart from itself after a change.
struct FileStamp {
  dev_t device = 0;
  ino_t inode = 0;
  off_t bytes = 0;
  timespec modified{};

  static std::optional<FileStamp> Of(const std::string& path) {
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) return std::nullopt;
    return FileStamp{info.st_dev, info.st_ino, info.st_size, info.st_mtim};
  }
  bool SameFile(const FileStamp& other) const {
    return device == other.device && inode == other.inode;
  }
  bool operator==(const FileStamp& other) const {
    return SameFile(other) && bytes == other.bytes && modified.tv_sec == other.modified.tv_sec &&
           modified.tv_nsec == other.modified.tv_nsec;
  }
};

class Importer {
 public:
  Importer(const ImportOptions& options, const ImportWatch& watch)
      : options_(options), choices_(options.choices), watch_(watch) {}

  ImportEnd Run() {
    absl::Status status = Target();
    if (status.ok()) status = Source();
    if (status.ok()) status = Plan();
    if (status.ok()) status = Produce();
    ImportEnd end;
    if (status.ok()) {
      end.report = std::move(report_);
      return end;
    }
    end.code = usage_ ? ExitCode::kUsage : OfflineExitCode(status);
    end.error = OneLine(AsStd(status.message()));
    return end;
  }

 private:
  // What another command line would put right.
  absl::Status UsageError(const std::string& text) {
    usage_ = true;
    return absl::InvalidArgumentError(text);
  }

  absl::Status Target() {
    if (absl::EndsWith(options_.out, ".safetensors")) {
      choices_.target = ImportTarget::kSafetensors;
      report_.target_format = "safetensors";
    } else if (absl::EndsWith(options_.out, ".gguf")) {
      choices_.target = ImportTarget::kGguf;
      report_.target_format = "gguf";
    } else {
      return UsageError(absl::StrCat(options_.out,
                                     ": neither .safetensors nor .gguf, and the "
                                     "name decides what is written"));
    }
    if (choices_.quantize_q8 && choices_.target != ImportTarget::kGguf) {
      return UsageError(absl::StrCat(options_.out,
                                     ": safetensors has no Q8_0 (give --out a name "
                                     "that ends in .gguf)"));
    }
    GgufKeys tried;
    for (const AddedKey& added : options_.metadata) {
      if (choices_.target == ImportTarget::kGguf && IsReservedGgufKey(added.key)) {
        return UsageError(absl::StrCat("--meta ", added.key, ": the writer decides this key"));
      }
      if (!tried.SetValue(added.key, added.type, added.value)) {
        return UsageError(
            absl::StrCat("--meta ", added.key, ": ", Quoted(added.value), " is not of its type"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Source() {
    absl::StatusOr<ModelSource> source = OpenModelSource(options_.source);
    if (!source.ok()) return source.status();
    source_ = *std::move(source);
    if (source_.models.size() > 1) {
      std::vector<std::string> names;
      for (const SourceModel& model : source_.models) names.push_back(model.named.main_file);
      return UsageError(absl::StrCat(options_.source, ": ", names.size(),
                                     " models, and one is imported at a time (name one of: ",
                                     absl::StrJoin(names, ", "), ")"));
    }
    for (const std::string& name : index().files()) {
      const std::optional<FileStamp> stamp = FileStamp::Of(files().PathOf(name));
      if (!stamp.has_value()) {
        return StatusOfError(ErrnoError(errno, files().PathOf(name)), "");
      }
      stamps_.push_back(*stamp);
    }
    for (const std::string& warning : index().warnings()) watch_.note(warning);
    report_.source_format = index().format();
    return CheckPlace();
  }

  // The target may lie beside the source, but be neither it nor in it.
  absl::Status CheckPlace() {
    const std::optional<FileStamp> there = FileStamp::Of(options_.out);
    for (size_t i = 0; there.has_value() && i < stamps_.size(); ++i) {
      if (!stamps_[i].SameFile(*there)) continue;
      return UsageError(absl::StrCat(options_.out, ": is a file of the source, ",
                                     index().files()[i], " (choose another name)"));
    }
    if (source_.folder) {
      std::error_code error;
      const fs::path parent = fs::path(options_.out).parent_path();
      const fs::path real = fs::canonical(parent.empty() ? "." : parent, error);
      const std::string folder = real.string() + "/";
      for (const std::string& given : {options_.source, source_.path}) {
        if (error || !SourceReach(given).Holds(folder)) continue;
        return UsageError(absl::StrCat(options_.out, ": lies in the source ", given,
                                       " (choose a folder outside it)"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Plan() {
    absl::StatusOr<ImportPlan> plan = PlanImport(index(), choices_);
    if (!plan.ok()) {
      usage_ = plan.status().code() == absl::StatusCode::kInvalidArgument;
      return absl::Status(plan.status().code(),
                          absl::StrCat(options_.source, ": ", plan.status().message()));
    }
    for (const std::string& note : plan->notes) watch_.note(note);
    report_.tensors = std::move(plan->tensors);
    report_.errors.resize(report_.tensors.size());
    for (const PlannedTensor& planned : report_.tensors) {
      // Broadcast views can be of any size on paper.
      if (__builtin_add_overflow(total_, planned.nbytes, &total_)) {
        return absl::ResourceExhaustedError(absl::StrCat(
            options_.source, ": its tensors take more bytes than 64 bits count (--exclude some)"));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Produce() {
    absl::StatusOr<std::string> head = Head();
    if (!head.ok()) return head.status();
    absl::StatusOr<OutputFile> out = OutputFile::Create(options_.out, options_.replace);
    if (!out.ok()) return out.status();
    // From here on nothing of the source is mapped: one that is cut is an error, and no signal.
    files().Unmap();
    absl::Status status = out->CheckSpace(Due(head->size()));
    if (status.ok()) status = out->Append(std::as_bytes(std::span<const char>(*head)));
    *head = std::string();  // Of 100,000 tensors it is 10 MB.
    for (size_t i = 0; status.ok() && i < report_.tensors.size(); ++i) status = Write(i, *out);
    if (status.ok()) status = out->Sync();
    if (status.ok() && options_.verify) status = Verify(*out);
    // A source that changed explains more than a result that does not fit it, or a range that is
    // not there.
    if (status.ok() || absl::IsDataLoss(status) || absl::IsAborted(status) ||
        absl::IsInvalidArgument(status)) {
      if (absl::Status changed = CheckUnchanged(); !changed.ok()) status = changed;
    }
    // The last moment at which a wish to stop leaves nothing behind.
    if (status.ok()) status = Progress(options_.verify ? "verify" : "write", total_);
    if (status.ok()) status = out->Commit();
    report_.bytes = out->size();
    return status;
  }

  // Bytes of the file, as many as 64 bits count.
  uint64_t Due(uint64_t head) const {
    const uint64_t padding =
        choices_.target == ImportTarget::kGguf ? report_.tensors.size() * kGgufAlignment : 0;
    uint64_t due = 0;
    return __builtin_add_overflow(total_, head + padding, &due) ? UINT64_MAX : due;
  }

  absl::StatusOr<std::string> Head() {
    const MetadataSource from{index(), files(), options_.metadata, watch_.note};
    std::vector<OutputTensor> outputs;
    outputs.reserve(report_.tensors.size());
    for (const PlannedTensor& planned : report_.tensors) {
      outputs.push_back(
          {planned.name, planned.to, index().at(planned.source).shape, planned.nbytes});
    }
    if (choices_.target == ImportTarget::kSafetensors) {
      return SafetensorsHead(outputs, SafetensorsMetadata(from));
    }
    absl::StatusOr<GgufKeys> keys = GgufMetadata(from, choices_);
    if (!keys.ok()) return keys.status();
    return GgufHead(*keys, outputs);
  }

  absl::Status Write(size_t i, OutputFile& out) {
    const PlannedTensor& planned = report_.tensors[i];
    absl::StatusOr<TensorReader> reader = TensorReader::Open(index(), planned.source, files());
    if (!reader.ok()) return reader.status();
    Recoder recoder(planned);
    uint64_t wrote = 0;
    for (uint64_t at = 0; at < reader->units();) {
      const uint64_t count = PieceOf(planned, *reader, at);
      const absl::StatusOr<std::span<const std::byte>> values = reader->Read(at, count);
      if (!values.ok()) return values.status();
      std::span<const std::byte> piece;
      if (!recoder.Apply(*values, &piece)) return CannotQuantize(planned);
      if (absl::Status status = out.Append(piece); !status.ok()) return status;
      at += count;
      wrote += piece.size();
      if (absl::Status status = Progress("write", done_ + wrote); !status.ok()) return status;
    }
    done_ += wrote;
    if (choices_.target == ImportTarget::kGguf) {
      const uint64_t over = wrote % kGgufAlignment;
      if (absl::Status status = out.AppendZeros(over == 0 ? 0 : kGgufAlignment - over);
          !status.ok()) {
        return status;
      }
    }
    report_.errors[i].overflowed = recoder.overflowed();
    if (recoder.overflowed() > 0) {
      watch_.note(absl::StrCat("tensor ", Quoted(planned.name), ": ", recoder.overflowed(),
                               recoder.overflowed() == 1 ? " value is" : " values are", " beyond ",
                               AsAbsl(abi::DTypeName(planned.to)), " and became infinite"));
    }
    return absl::OkStatus();
  }

  static uint64_t PieceOf(const PlannedTensor& planned, const TensorReader& reader, uint64_t at) {
    const uint64_t most =
        planned.recode == Recode::kCopy ? kPieceBytes / reader.unit_bytes() : kPieceValues;
    return std::min(most, reader.units() - at);
  }

  absl::Status CannotQuantize(const PlannedTensor& planned) const {
    return absl::InvalidArgumentError(absl::StrCat(
        options_.source, ": tensor ", Quoted(planned.name),
        " has a value that Q8_0 cannot hold, not finite or too large (import it without "
        "--quantize, or --exclude it)"));
  }

  // The whole file again, as a reader that knows nothing of the plan sees it.
  absl::Status Verify(const OutputFile& out) {
    absl::StatusOr<ReadOnlyMapping> mapping = out.Map();
    if (!mapping.ok()) return mapping.status();
    const std::string name = fs::path(options_.out).filename().string();
    OneFile file(name, out, mapping->bytes());
    absl::StatusOr<TensorIndex> written = ReadModel(name, file);
    *mapping = ReadOnlyMapping();  // The index is all that is needed of it.
    if (!written.ok()) return Broken(AsStd(written.status().message()));
    if (written->size() != report_.tensors.size()) return Broken("it has other tensors");
    done_ = 0;
    for (size_t i = 0; i < report_.tensors.size(); ++i) {
      // Readers list tensors as the file does, and the file has the plan's order.
      if (written->at(i).name != report_.tensors[i].name) {
        return Broken(
            absl::StrCat("tensor ", Quoted(report_.tensors[i].name), " is not in its place"));
      }
      if (absl::Status status = Compare(i, *written, file); !status.ok()) return status;
    }
    report_.verified = true;
    return absl::OkStatus();
  }

  absl::Status Broken(std::string_view why) const {
    return absl::DataLossError(absl::StrCat(options_.out, ": what was written does not verify: ",
                                            AsAbsl(why), " (nothing was kept; check the disk)"));
  }

  absl::Status Compare(size_t i, const TensorIndex& written, RangeSource& file) {
    const PlannedTensor& planned = report_.tensors[i];
    const TensorInfo expected = index().at(planned.source);
    const TensorInfo found = written.at(i);
    const std::string what = absl::StrCat("tensor ", Quoted(planned.name));
    if (found.dtype != planned.to || !std::equal(found.shape.begin(), found.shape.end(),
                                                 expected.shape.begin(), expected.shape.end())) {
      return Broken(what + " has another type or shape");
    }
    absl::StatusOr<TensorReader> source = TensorReader::Open(index(), planned.source, files());
    if (!source.ok()) return source.status();
    absl::StatusOr<TensorReader> target = TensorReader::Open(written, i, file);
    if (!target.ok()) return Broken(AsStd(target.status().message()));
    Recoder recoder(planned);
    std::vector<std::byte> collected;
    uint64_t bytes = 0;  // Compared so far, in the target.
    for (uint64_t unit = 0; unit < source->units();) {
      const uint64_t count = std::min(PieceOf(planned, *source, unit), kCheckedUnits);
      std::span<const std::byte> values;
      if (expected.strides.empty()) {
        const absl::StatusOr<std::span<const std::byte>> read = source->Read(unit, count);
        if (!read.ok()) return read.status();
        values = *read;
      } else {
        // Not by the code that has put them in order.
        collected.resize(count * source->unit_bytes());
        const std::string& name = index().files()[expected.file];
        const absl::Status status = CollectByIndex(
            files(),
            {name, expected.offset, source->unit_bytes(), expected.shape, expected.strides}, unit,
            collected);
        if (!status.ok()) return status;
        values = collected;
      }
      std::span<const std::byte> piece;
      if (!recoder.Apply(values, &piece)) return CannotQuantize(planned);
      const size_t size = target->unit_bytes();
      const absl::StatusOr<std::span<const std::byte>> there =
          target->Read(bytes / size, piece.size() / size);
      if (!there.ok()) return Broken(AsStd(there.status().message()));
      const auto [mine, other] = std::mismatch(piece.begin(), piece.end(), there->begin());
      if (mine != piece.end()) {
        return Broken(
            absl::StrCat(what, " differs from byte ", bytes + (mine - piece.begin()), " on"));
      }
      if (const std::optional<size_t> wrong = FirstWrong(planned, values, *there)) {
        return Broken(absl::StrCat(what, ": element ", unit + *wrong,
                                   " is farther from the source's than rounding explains"));
      }
      recoder.Measure();
      bytes += piece.size();
      unit += count;
      if (absl::Status status = Progress("verify", done_ + bytes); !status.ok()) return status;
    }
    done_ += bytes;
    Report(i, recoder);
    return absl::OkStatus();
  }

  // By arithmetic of its own, so that a fault of the conversion is not repeated here.
  static std::optional<size_t> FirstWrong(const PlannedTensor& planned,
                                          std::span<const std::byte> source,
                                          std::span<const std::byte> target) {
    switch (planned.recode) {
      case Recode::kCopy:
        return std::nullopt;
      case Recode::kConvert:
        return FirstWrongFloat(planned.from, source, planned.to, target);
      case Recode::kQ8:
        return FirstWrongQ8(planned.from, source, target);
    }
    return std::nullopt;
  }

  void Report(size_t i, const Recoder& recoder) {
    ImportErrors& errors = report_.errors[i];
    errors.absolute = recoder.absolute_error();
    errors.relative = recoder.relative_error();
    if (errors.absolute > report_.absolute_error) {
      report_.absolute_error = errors.absolute;
      report_.worst_tensor = report_.tensors[i].name;
    }
    report_.relative_error = std::max(report_.relative_error, errors.relative);
  }

  absl::Status CheckUnchanged() const {
    for (size_t i = 0; i < stamps_.size(); ++i) {
      const std::string path = files().PathOf(index().files()[i]);
      if (FileStamp::Of(path) == stamps_[i]) continue;
      return absl::AbortedError(absl::StrCat(
          path, ": changed while it was imported, and nothing was written (import it again)"));
    }
    return absl::OkStatus();
  }

  absl::Status Progress(const char* phase, uint64_t done) const {
    if (watch_.progress(phase, done, total_)) return absl::OkStatus();
    return absl::CancelledError(
        absl::StrCat("import ", options_.source, ": interrupted; nothing was written"));
  }

  const TensorIndex& index() const { return source_.models[0].named.index; }
  OfflineFiles& files() const { return *source_.models[0].files; }

  const ImportOptions& options_;
  ImportChoices choices_;
  const ImportWatch& watch_;
  ModelSource source_;
  std::vector<FileStamp> stamps_;  // For each of index().files().
  uint64_t total_ = 0;
  uint64_t done_ = 0;
  bool usage_ = false;  // A failure is the command line's.
  ImportReport report_;
};

}  // namespace

ImportEnd RunImport(const ImportOptions& options, const ImportWatch& watch) {
  try {
    return Importer(options, watch).Run();
  } catch (const std::bad_alloc&) {
    ImportEnd end;
    end.code = ExitCode::kResources;
    end.error = OneLine(options.source + ": not enough memory (raise the limit of this process)");
    return end;
  }
}

}  // namespace modelhost::modelctl
