// A TensorIndex for people and for programs: JSON, JSON lines, names, tables.
//
// Any bytes in names give valid output: JSON strings are escaped and valid UTF-8, text has no
// control characters. The JSON keys are promises to users.
#pragma once

#include <map>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/format/tensor_index.h"

namespace modelhost::modelctl {

enum class IndexOutput { kTable, kWide, kJson, kJsonl, kName };

// One weight set with its name: what a path named, or one of those in a folder.
struct NamedIndex {
  std::string name;
  std::string main_file;
  TensorIndex index;
};

struct IndexView {
  IndexOutput output = IndexOutput::kTable;
  bool tensors = false;     // Tables list the tensors, not only their sum.
  std::string filter_glob;  // Only tensors whose names match; empty = all.
  // Of a folder: JSON gets "components", and every tensor its "component".
  bool components = false;
  // Of a version: what it is bound to.
  std::map<std::string, std::string> requirements = {};
};

// `indexes` is what `title` (a path or a model) holds; at least one.
void WriteIndex(std::string_view title, const std::vector<NamedIndex>& indexes,
                const IndexView& view, std::ostream& out);

// `text` on one line of a terminal: control characters and broken UTF-8 as \xNN.
std::string OneLine(std::string_view text);

}  // namespace modelhost::modelctl
