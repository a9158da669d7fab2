#include "client/modelctl/index_render.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/modelctl/glob.h"
#include "daemon/format/text.h"
#include "proto/abi/dtype.h"

namespace modelhost::modelctl {
namespace {

// Output goes to the stream in pieces: 100,000 tensors are 20 MB of JSON.
class Sink {
 public:
  explicit Sink(std::ostream& out) : out_(out) {}
  Sink(const Sink&) = delete;
  Sink& operator=(const Sink&) = delete;
  ~Sink() { out_ << text_; }

  std::string& text() {
    if (text_.size() > kPiece) {
      out_ << text_;
      text_.clear();
    }
    return text_;
  }

 private:
  static constexpr size_t kPiece = 64 << 10;
  std::ostream& out_;
  std::string text_;
};

void Key(std::string_view key, std::string* out) {
  AppendJsonString(key, out);
  *out += ':';
}

template <typename Range, typename Append>
void List(const Range& range, std::string* out, Append append) {
  *out += '[';
  bool first = true;
  for (const auto& item : range) {
    if (!std::exchange(first, false)) *out += ',';
    append(item);
  }
  *out += ']';
}

void Texts(const std::vector<std::string>& texts, std::string* out) {
  List(texts, out, [out](const std::string& text) { AppendJsonString(text, out); });
}

void Metadata(const std::vector<MetadataItem>& items, std::string* out) {
  *out += '{';
  bool first = true;
  for (const MetadataItem& item : items) {
    if (!std::exchange(first, false)) *out += ',';
    Key(item.key, out);
    AppendJsonString(item.value, out);
  }
  *out += '}';
}

void TensorJson(const NamedIndex& from, const TensorInfo& tensor, bool component,
                std::string* out) {
  *out += '{';
  Key("name", out);
  AppendJsonString(tensor.name, out);
  if (component) {
    *out += ",\"component\":";
    AppendJsonString(from.name, out);
  }
  absl::StrAppend(out, ",\"dtype\":\"", AsAbsl(abi::DTypeName(tensor.dtype)), "\",\"shape\":");
  // A count is never negative; see TensorInfo::shape.
  List(tensor.shape, out, [out](int64_t dim) { absl::StrAppend(out, static_cast<uint64_t>(dim)); });
  *out += ",\"file\":";
  AppendJsonString(from.index.files()[tensor.file], out);
  absl::StrAppend(out, ",\"offset\":", tensor.offset, ",\"nbytes\":", tensor.nbytes,
                  ",\"mappable\":", tensor.mappable ? "true" : "false");
  if (!tensor.strides.empty()) {
    *out += ",\"strides\":";
    List(tensor.strides, out, [out](int64_t stride) { absl::StrAppend(out, stride); });
  }
  if (!tensor.mappable) {
    *out += ",\"reason\":";
    AppendJsonString(tensor.reason, out);
  }
  *out += '}';
}

bool Wanted(const IndexView& view, const TensorInfo& tensor) {
  return view.filter_glob.empty() || GlobMatches(view.filter_glob, tensor.name);
}

std::string CommonFormat(const std::vector<NamedIndex>& indexes) {
  for (const NamedIndex& one : indexes) {
    if (one.index.format() != indexes.front().index.format()) return "mixed";
  }
  return indexes.front().index.format();
}

void WriteJson(const std::vector<NamedIndex>& indexes, const IndexView& view, Sink& sink) {
  std::string& head = sink.text();
  head += "{\"apiVersion\":\"modelhost/v1\",\"kind\":\"Index\",\"format\":";
  AppendJsonString(CommonFormat(indexes), &head);
  head += ",\"files\":";
  std::vector<std::string> files;
  std::vector<std::string> warnings;
  for (const NamedIndex& one : indexes) {
    files.insert(files.end(), one.index.files().begin(), one.index.files().end());
    warnings.insert(warnings.end(), one.index.warnings().begin(), one.index.warnings().end());
  }
  Texts(files, &head);
  if (view.components) {
    head += ",\"components\":";
    List(indexes, &head, [&head](const NamedIndex& one) {
      head += "{\"name\":";
      AppendJsonString(one.name, &head);
      head += ",\"format\":";
      AppendJsonString(one.index.format(), &head);
      head += ",\"file\":";
      AppendJsonString(one.main_file, &head);
      head += ",\"files\":";
      Texts(one.index.files(), &head);
      absl::StrAppend(&head, ",\"tensorCount\":", one.index.size(), ",\"metadata\":");
      Metadata(one.index.metadata(), &head);
      head += '}';
    });
  }
  head += ",\"tensors\":[";
  bool first = true;
  for (const NamedIndex& one : indexes) {
    for (size_t i = 0; i < one.index.size(); ++i) {
      const TensorInfo tensor = one.index.at(i);
      if (!Wanted(view, tensor)) continue;
      std::string& text = sink.text();
      if (!std::exchange(first, false)) text += ',';
      TensorJson(one, tensor, view.components, &text);
    }
  }
  std::string& tail = sink.text();
  tail += "],\"metadata\":";
  // In a folder the metadata of each weight set stands with its component.
  Metadata(view.components ? std::vector<MetadataItem>() : indexes.front().index.metadata(), &tail);
  if (!view.requirements.empty()) {
    tail += ",\"requires\":{";
    bool first_key = true;
    for (const auto& [key, value] : view.requirements) {
      if (!std::exchange(first_key, false)) tail += ',';
      Key(key, &tail);
      AppendJsonString(value, &tail);
    }
    tail += '}';
  }
  tail += ",\"warnings\":";
  Texts(warnings, &tail);
  tail += "}\n";
}

std::string Size(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  size_t unit = 0;
  auto value = static_cast<double>(bytes);
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? absl::StrCat(bytes, " B") : absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string ShapeText(std::span<const int64_t> shape) {
  std::string out;
  List(shape, &out, [&out](int64_t dim) { absl::StrAppend(&out, static_cast<uint64_t>(dim)); });
  return out;
}

// Columns padded to their widest cell; the last one is not.
void WriteColumns(const std::vector<std::vector<std::string>>& rows, Sink& sink) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows) {
    std::string& text = sink.text();
    for (size_t i = 0; i < row.size(); ++i) {
      text += row[i];
      if (i + 1 < row.size()) text.append(widths[i] - row[i].size() + 2, ' ');
    }
    text += '\n';
  }
}

// "packed as varints 12, deflated 1": the most frequent ones.
std::string ReasonsText(const std::map<std::string_view, uint64_t>& reasons) {
  constexpr size_t kShown = 3;
  std::vector<std::pair<uint64_t, std::string_view>> sorted;
  for (const auto& [reason, uses] : reasons) sorted.emplace_back(uses, reason);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::string out;
  for (size_t i = 0; i < std::min(kShown, sorted.size()); ++i) {
    absl::StrAppend(&out, i == 0 ? "" : ", ", OneLine(sorted[i].second), " ", sorted[i].first);
  }
  if (sorted.size() > kShown) out += ", ...";
  return out;
}

void WriteSummary(const NamedIndex& one, const IndexView& view, std::string_view title,
                  Sink& sink) {
  const TensorIndex& index = one.index;
  std::map<std::string_view, uint64_t> dtypes;
  uint64_t bytes = 0;
  uint64_t count = 0;
  uint64_t strided = 0;
  uint64_t unmappable = 0;
  std::map<std::string_view, uint64_t> reasons;
  for (size_t i = 0; i < index.size(); ++i) {
    const TensorInfo tensor = index.at(i);
    if (!Wanted(view, tensor)) continue;
    ++dtypes[abi::DTypeName(tensor.dtype)];
    bytes += tensor.nbytes;
    ++count;
    if (!tensor.strides.empty()) ++strided;
    if (tensor.mappable) continue;
    ++unmappable;
    ++reasons[tensor.reason];
  }
  std::string kinds;
  for (const auto& [dtype, uses] : dtypes) {
    absl::StrAppend(&kinds, kinds.empty() ? "" : ", ", AsAbsl(dtype), " ", uses);
  }
  std::vector<std::vector<std::string>> rows;
  rows.push_back({"FILE", OneLine(title)});
  if (view.components) rows.push_back({"COMPONENT", OneLine(one.name)});
  rows.push_back({"FORMAT", index.format()});
  if (index.files().size() > 1) rows.push_back({"FILES", absl::StrCat(index.files().size())});
  rows.push_back(
      {"TENSORS", kinds.empty() ? absl::StrCat(count) : absl::StrCat(count, "  (", kinds, ")")});
  rows.push_back({"BYTES", Size(bytes)});
  if (strided > 0) rows.push_back({"STRIDED", absl::StrCat(strided)});
  if (unmappable > 0) {
    rows.push_back({"UNMAPPABLE", absl::StrCat(unmappable, "  (", ReasonsText(reasons), ")")});
  }
  if (view.output == IndexOutput::kWide) {
    for (const MetadataItem& item : index.metadata()) {
      constexpr size_t kShown = 100;
      const bool cut = item.value.size() > kShown;
      rows.push_back(
          {"METADATA", absl::StrCat(OneLine(item.key), " = ", OneLine(item.value.substr(0, kShown)),
                                    cut ? "..." : "")});
    }
  } else if (!index.metadata().empty()) {
    rows.push_back({"METADATA", absl::StrCat(index.metadata().size(), " keys")});
  }
  for (const auto& [key, value] : view.requirements) {
    rows.push_back({"REQUIRES", OneLine(absl::StrCat(key, "=", value))});
  }
  for (const std::string& warning : index.warnings()) {
    rows.push_back({"WARNING", OneLine(warning)});
  }
  WriteColumns(rows, sink);
}

void WriteTensors(const NamedIndex& one, const IndexView& view, Sink& sink) {
  const bool wide = view.output == IndexOutput::kWide;
  bool strided = wide;  // Whoever has strided tensors must see that they are.
  bool noted = false;
  for (size_t i = 0; i < one.index.size(); ++i) {
    const TensorInfo tensor = one.index.at(i);
    if (!Wanted(view, tensor)) continue;
    strided = strided || !tensor.strides.empty();
    noted = noted || !tensor.mappable;
  }
  std::vector<std::vector<std::string>> rows;
  rows.push_back({"NAME", "DTYPE", "SHAPE", "SIZE"});
  const auto head = [&rows](bool shown, const char* column) {
    if (shown) rows[0].push_back(column);
  };
  head(wide, "OFFSET");
  head(wide, "ALIGN");
  head(strided, "STRIDES");
  head(wide, "FILE");
  head(noted, "NOTE");
  for (size_t i = 0; i < one.index.size(); ++i) {
    const TensorInfo tensor = one.index.at(i);
    if (!Wanted(view, tensor)) continue;
    std::vector<std::string> row = {OneLine(tensor.name), std::string(abi::DTypeName(tensor.dtype)),
                                    ShapeText(tensor.shape), Size(tensor.nbytes)};
    if (wide) {
      row.push_back(absl::StrCat(tensor.offset));
      // What the bytes' place promises; above a page it says nothing more.
      row.push_back(absl::StrCat(uint64_t{1} << std::min(std::countr_zero(tensor.offset), 12)));
    }
    if (strided) row.push_back(tensor.strides.empty() ? "-" : ShapeText(tensor.strides));
    if (wide) row.push_back(OneLine(one.index.files()[tensor.file]));
    if (!tensor.mappable) row.push_back(absl::StrCat("not mappable: ", OneLine(tensor.reason)));
    rows.push_back(std::move(row));
  }
  WriteColumns(rows, sink);
}

}  // namespace

std::string OneLine(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t bytes = Utf8CharBytes(text);
    const auto byte = static_cast<uint8_t>(text[0]);
    // U+0080 to U+009F are control characters too.
    const bool control = byte < 0x20 || byte == 0x7f ||
                         (bytes == 2 && byte == 0xc2 && static_cast<uint8_t>(text[1]) < 0xa0);
    if (bytes == 0 || control) {
      absl::StrAppend(&out, "\\x", absl::Hex(byte, absl::kZeroPad2));
      text.remove_prefix(1);
    } else {
      out += text.substr(0, bytes);
      text.remove_prefix(bytes);
    }
  }
  return out;
}

void WriteIndex(std::string_view title, const std::vector<NamedIndex>& indexes,
                const IndexView& view, std::ostream& out) {
  Sink sink(out);
  if (view.output == IndexOutput::kJson) return WriteJson(indexes, view, sink);
  bool first = true;
  for (const NamedIndex& one : indexes) {
    const TensorIndex& index = one.index;
    if (view.output == IndexOutput::kName || view.output == IndexOutput::kJsonl) {
      for (size_t i = 0; i < index.size(); ++i) {
        const TensorInfo tensor = index.at(i);
        if (!Wanted(view, tensor)) continue;
        std::string& text = sink.text();
        if (view.output == IndexOutput::kName) {
          text += OneLine(tensor.name);
        } else {
          TensorJson(one, tensor, view.components, &text);
        }
        text += '\n';
      }
      continue;
    }
    if (!std::exchange(first, false)) sink.text() += '\n';
    const std::string of_folder = absl::StrCat(AsAbsl(title), "/", one.main_file);
    WriteSummary(one, view, view.components ? std::string_view(of_folder) : title, sink);
    if (view.tensors) {
      sink.text() += '\n';
      WriteTensors(one, view, sink);
    }
  }
}

}  // namespace modelhost::modelctl
