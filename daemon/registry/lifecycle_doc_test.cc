// The diagram and the tables of docs/lifecycle.md are made from the tables of version_state.cc.
// This test fails when the page differs; with MODELHOST_UPDATE_DOCS=1 in the environment it writes
// them.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "daemon/registry/lifecycle_policy.h"
#include "daemon/registry/version_state.h"

namespace modelhost {
namespace {

constexpr char kPage[] = MODELHOST_SOURCE_DIR "/docs/lifecycle.md";

std::string Begin(const std::string& name) {
  return absl::StrCat("<!-- made from version_state.cc: ", name, " -->\n");
}
constexpr char kEnd[] = "<!-- end -->\n";

std::string Diagram() {
  std::string out =
      "```mermaid\nstateDiagram-v2\n  [*] --> STAGED: published, or found by a scan\n";
  for (const Transition& row : Transitions()) {
    // A colon would end the text of an arrow.
    std::string trigger(row.trigger);
    for (size_t at = 0; (at = trigger.find(": ", at)) != std::string::npos;) {
      trigger.replace(at, 2, ", ");
    }
    absl::StrAppend(&out, "  ", PhaseName(row.from), " --> ", PhaseName(row.to), ": ", trigger,
                    "\n");
  }
  for (const Phase phase : Phases()) {
    if (AtRest(phase)) absl::StrAppend(&out, "  ", PhaseName(phase), " --> [*]: deleted\n");
  }
  return out + "```\n";
}

std::string PhaseTable() {
  std::string out = "| phase | host bytes | what it means | what to do |\n|---|---|---|---|\n";
  for (const PhaseRule& rule : PhaseRules()) {
    absl::StrAppend(&out, "| `", PhaseName(rule.phase), "` | ",
                    rule.must_have_bytes  ? "yes"
                    : rule.may_have_bytes ? "some"
                                          : "none",
                    " | ", rule.meaning, " | ", rule.advice, " |\n");
  }
  return out;
}

std::string HealthTable() {
  std::string out =
      "| health | only while resident | what it means | what to do |\n|---|---|---|---|\n";
  for (const HealthRule& rule : HealthRules()) {
    absl::StrAppend(&out, "| `", HealthStateName(rule.state), "` | ", rule.of_bytes ? "yes" : "no",
                    " | ", rule.meaning, " | ", rule.advice, " |\n");
  }
  return out;
}

// From each health, who may say that it is which other.
std::string HealthChanges() {
  std::string out =
      "| from | load | health check | verification | scan | unload |\n|---|---|---|---|---|---|\n";
  using enum HealthCause;
  for (const HealthRule& rule : HealthRules()) {
    absl::StrAppend(&out, "| `", HealthStateName(rule.state), "` |");
    for (const HealthCause cause : {kLoad, kHealthCheck, kVerify, kScan, kFree}) {
      std::string to;
      for (const HealthTransition& row : HealthTransitions()) {
        if (row.from != rule.state || row.cause != cause) continue;
        absl::StrAppend(&to, to.empty() ? "" : ", ", HealthStateName(row.to));
      }
      absl::StrAppend(&out, " ", to.empty() ? "-" : to, " |");
    }
    out += "\n";
  }
  return out;
}

std::string ResidencyTable() {
  std::string out = "| in phase | from | to | when |\n|---|---|---|---|\n";
  const auto name = [](bool bytes) { return bytes ? "MAPPED, WARM or PINNED" : "NONE"; };
  for (const ResidencyRule& row : ResidencyRules()) {
    absl::StrAppend(&out, "| `", PhaseName(row.phase), "` | ", name(row.had_bytes), " | ",
                    name(row.has_bytes), " | ", row.trigger, " |\n");
  }
  return out;
}

std::string DeviceTable() {
  std::string out = "| in phase | from | to | when |\n|---|---|---|---|\n";
  for (const DeviceRule& row : DeviceRules()) {
    absl::StrAppend(&out, "| `", PhaseName(row.phase), "` | ", DeviceResidencyName(row.from), " | ",
                    DeviceResidencyName(row.to), " | ", row.trigger, " |\n");
  }
  return out;
}

std::map<std::string, std::string> Blocks() {
  return {{"diagram", Diagram()},          {"phases", PhaseTable()},
          {"health", HealthTable()},       {"health changes", HealthChanges()},
          {"residency", ResidencyTable()}, {"device", DeviceTable()}};
}

std::string Read() {
  std::ifstream file(kPage);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(LifecyclePage, ShowsTheTablesAsTheyAre) {
  std::string page = Read();
  ASSERT_FALSE(page.empty()) << kPage;
  const bool update = std::getenv("MODELHOST_UPDATE_DOCS") != nullptr;
  const auto blocks = Blocks();
  for (const auto& [name, block] : blocks) {
    const size_t begin = page.find(Begin(name));
    ASSERT_NE(begin, std::string::npos) << kPage << " has no block \"" << name << "\"";
    const size_t from = begin + Begin(name).size();
    const size_t end = page.find(kEnd, from);
    ASSERT_NE(end, std::string::npos) << kPage << ": block \"" << name << "\" has no end";
    if (update) {
      page.replace(from, end - from, block);
    } else {
      EXPECT_EQ(page.substr(from, end - from), block)
          << "block \"" << name << "\" (MODELHOST_UPDATE_DOCS=1 writes it)";
    }
  }
  if (update) std::ofstream(kPage) << page;
}

}  // namespace
}  // namespace modelhost
