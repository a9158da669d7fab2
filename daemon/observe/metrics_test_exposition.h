// Reads Prometheus' text format as a scraper would, and complains as promtool would.
#pragma once

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace modelhost {

class Exposition {
 public:
  explicit Exposition(const std::vector<prometheus::MetricFamily>& families)
      : Exposition(prometheus::TextSerializer().Serialize(families)) {}

  explicit Exposition(const std::string& text) {
    for (absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
      if (absl::ConsumePrefix(&line, "# HELP ")) {
        const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(' ', 1));
        help_[parts[0]] = parts.size() > 1 ? parts[1] : "";
      } else if (absl::ConsumePrefix(&line, "# TYPE ")) {
        const std::vector<std::string> parts = absl::StrSplit(line, ' ');
        if (!types_.emplace(parts[0], parts[1]).second) {
          problems_.push_back(absl::StrCat(parts[0], ": two TYPE lines"));
        }
      } else {
        AddSample(std::string(line));
      }
    }
    for (const auto& [name, type] : types_) CheckFamily(name, type);
  }

  // Series as "name{a=\"b\",c=\"d\"}", labels in the order of the text; NaN when it is not there.
  double Value(const std::string& series) const {
    const auto it = samples_.find(series);
    return it == samples_.end() ? std::nan("") : it->second;
  }
  bool Has(const std::string& series) const { return samples_.contains(series); }
  // "gauge", "counter", "histogram", or "" for none of that name.
  std::string Type(const std::string& family) const {
    const auto it = types_.find(family);
    return it == types_.end() ? "" : it->second;
  }
  std::set<std::string> families() const {
    std::set<std::string> names;
    for (const auto& [name, type] : types_) names.insert(name);
    return names;
  }
  // The `le` bounds of a histogram's first series.
  std::vector<std::string> Bounds(const std::string& histogram) const {
    std::vector<std::string> bounds;
    for (const std::string& series : order_) {
      if (!absl::StartsWith(series, histogram + "_bucket{")) continue;
      const size_t at = series.find("le=\"") + 4;
      bounds.push_back(series.substr(at, series.find('"', at) - at));
      if (bounds.back() == "+Inf") break;
    }
    return bounds;
  }
  // All series that begin with this text.
  std::vector<std::string> SeriesOf(const std::string& prefix) const {
    std::vector<std::string> found;
    for (const std::string& series : order_) {
      if (absl::StartsWith(series, prefix)) found.push_back(series);
    }
    return found;
  }
  // What is wrong with it; empty for a good one.
  const std::vector<std::string>& problems() const { return problems_; }

 private:
  void AddSample(const std::string& line) {
    const size_t space = line.rfind(' ');
    const std::string series = line.substr(0, space);
    const std::string text = line.substr(space + 1);
    double value = 0;
    if (text == "+Inf") {
      value = INFINITY;
    } else if (!absl::SimpleAtod(text, &value)) {
      problems_.push_back(absl::StrCat(series, ": not a number: ", text));
    }
    if (!samples_.emplace(series, value).second) {
      problems_.push_back(absl::StrCat(series, ": twice"));
    }
    order_.push_back(series);
    const std::string name = series.substr(0, series.find('{'));
    bool typed = types_.contains(name);
    for (const char* suffix : {"_bucket", "_sum", "_count"}) {
      std::string base = name;
      if (absl::EndsWith(name, suffix)) base.resize(name.size() - std::string(suffix).size());
      typed = typed || (types_.contains(base) && types_[base] == "histogram");
    }
    if (!typed) problems_.push_back(absl::StrCat(series, ": no TYPE before it"));
  }

  void CheckFamily(const std::string& name, const std::string& type) {
    const auto complain = [&](const char* what) {
      problems_.push_back(absl::StrCat(name, ": ", what));
    };
    if (help_[name].empty()) complain("no help");
    if ((type == "counter") != absl::EndsWith(name, "_total")) complain("_total is for counters");
    for (const char* unit : {"_ms", "_us", "_milliseconds", "_minutes", "_kb", "_mb", "_kib",
                             "_mib", "_percent", "_millis"}) {
      if (absl::StrContains(name, unit)) complain("not a base unit");
    }
    for (const char* suffix : {"_bucket", "_count", "_sum"}) {
      if (absl::EndsWith(name, suffix)) complain("a reserved ending");
    }
    if (type != "histogram") return;
    double before = 0;
    bool ended = true;
    for (const std::string& series : order_) {
      if (!absl::StartsWith(series, name + "_bucket{")) continue;
      if (ended) before = 0;
      const double count = samples_[series];
      if (count < before) complain("buckets are not cumulative");
      before = count;
      ended = absl::StrContains(series, "le=\"+Inf\"");
    }
    if (!ended) complain("no +Inf bucket");
  }

  std::map<std::string, std::string> help_;
  std::map<std::string, std::string> types_;
  std::map<std::string, double> samples_;
  std::vector<std::string> order_;
  std::vector<std::string> problems_;
};

}  // namespace modelhost
