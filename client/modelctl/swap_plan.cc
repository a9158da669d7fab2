#include "client/modelctl/swap_plan.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/modelctl/exit_code.h"
#include "client/modelctl/json.h"
#include "client/modelctl/render.h"

namespace modelhost::modelctl {
namespace {

std::string BytesOrNothing(uint64_t bytes) { return bytes == 0 ? "" : FormatBytes(bytes); }

void WritePool(JsonWriter& json, const v1::PoolPlan& pool) {
  const auto limited = [&](const char* key, uint64_t bytes) {
    json.Key(key);
    pool.unlimited() ? json.Null() : json.Uint(bytes);
  };
  json.BeginObject();
  json.Field("name", pool.name());
  json.Field("decides", pool.decides());
  json.Field("needBytes", uint64_t{pool.need_bytes()});
  limited("limitBytes", pool.limit_bytes());
  limited("freeBytes", pool.free_bytes());
  json.Field("comesBytes", uint64_t{pool.comes_bytes()});
  json.Field("peakBytes", uint64_t{pool.peak_bytes()});
  json.Field("fits", pool.fits());
  json.EndObject();
}

void WritePlan(JsonWriter& json, const v1::SwapPlan& plan) {
  json.Key("rows");
  json.BeginArray();
  for (const v1::SwapPlanRow& row : plan.rows()) {
    json.BeginObject();
    json.Field("model", row.model());
    json.Field("from", uint64_t{row.from()});
    json.Field("to", uint64_t{row.to()});
    json.Field("toState", row.to_phase());
    json.Field("needBytes", uint64_t{row.need_bytes()});
    json.Field("sharedBytes", uint64_t{row.shared_bytes()});
    json.Field("oldLeavesFirst", row.old_leaves_first());
    json.EndObject();
  }
  json.EndArray();
  json.Field("needBytes", uint64_t{plan.need_bytes()});
  json.Key("freeBytes");
  plan.unlimited() ? json.Null() : json.Uint(plan.free_bytes());
  json.Key("pools");
  json.BeginArray();
  for (const v1::PoolPlan& pool : plan.pools()) WritePool(json, pool);
  json.EndArray();
  json.Key("evict");
  json.BeginArray();
  for (const v1::SwapTarget& victim : plan.evict()) {
    json.BeginObject();
    json.Field("model", victim.model());
    json.Field("version", uint64_t{victim.version()});
    json.EndObject();
  }
  json.EndArray();
  json.Field("strategy", plan.strategy());
  json.Field("downtime", plan.downtime());
  json.Field("waits", plan.waits());
  json.Field("fits", plan.fits());
}

// Of a daemon that says no more than that.
Exit DoesNotFit(const v1::SwapPlan& plan, const std::string& what) {
  if (plan.has_refused()) return FromFailure(plan.refused().code(), plan.refused().message(), what);
  return Fail(ExitCode::kResources,
              absl::StrCat(what, ": needs ", FormatBytes(plan.need_bytes()), ", and ",
                           FormatBytes(plan.free_bytes()),
                           " of the host budget are free (unload a version, or raise "
                           "memory.host_budget)"));
}

}  // namespace

Exit PrintSwapPlan(Context& context, const v1::SwapPlan& plan, const std::string& what) {
  if (!plan.fits()) return DoesNotFit(plan, what);
  if (context.json()) {
    JsonWriter json(context.json_style());
    json.BeginDocument("SwapPlan");
    WritePlan(json, plan);
    json.EndObject();
    context.Print(std::move(json).Take());
    return Exit::Ok();
  }
  const bool shares = std::any_of(plan.rows().begin(), plan.rows().end(),
                                  [](const auto& row) { return row.shared_bytes() > 0; });
  std::vector<Table::Column> columns = {{"MODEL"},
                                        {"FROM", Align::kRight},
                                        {"TO", Align::kRight},
                                        {"STATE"},
                                        {"NEED", Align::kRight}};
  if (shares) columns.push_back({"SHARED", Align::kRight});
  Table rows(columns);
  for (const v1::SwapPlanRow& row : plan.rows()) {
    std::vector<Cell> cells = {row.model(), row.from() == 0 ? "none" : absl::StrCat(row.from()),
                               absl::StrCat(row.to()), Cell(row.to_phase(), TintOf(row.to_phase())),
                               BytesOrNothing(row.need_bytes())};
    if (shares) cells.push_back(BytesOrNothing(row.shared_bytes()));
    rows.Add(std::move(cells));
  }
  context.Print(rows.Render(context.colour()));
  if (plan.pools_size() > 0) {
    Table pools({{"POOL"},
                 {"NEED", Align::kRight},
                 {"FREE", Align::kRight},
                 {"COMES", Align::kRight},
                 {"PEAK", Align::kRight},
                 {"LIMIT", Align::kRight}});
    for (const v1::PoolPlan& pool : plan.pools()) {
      pools.Add({pool.name(), FormatBytes(pool.need_bytes()),
                 pool.unlimited() ? "no limit" : FormatBytes(pool.free_bytes()),
                 BytesOrNothing(pool.comes_bytes()), FormatBytes(pool.peak_bytes()),
                 pool.unlimited() ? "no limit" : FormatBytes(pool.limit_bytes())});
    }
    context.Print(pools.Render(context.colour()));
  }
  std::vector<std::string> evicted;
  for (const v1::SwapTarget& victim : plan.evict()) {
    evicted.push_back(absl::StrCat(victim.model(), "@", victim.version()));
  }
  if (!evicted.empty()) {
    context.PrintLine(absl::StrCat("evicts ", absl::StrJoin(evicted, ", ")));
  }
  if (plan.waits()) context.PrintLine("waits for versions that are leaving");
  if (plan.downtime())
    context.PrintLine("DOWNTIME: the old version leaves before the new one loads");
  context.PrintLine(
      absl::StrCat("needs ", FormatBytes(plan.need_bytes()), " of ",
                   plan.unlimited() ? "an unlimited budget"
                                    : absl::StrCat(FormatBytes(plan.free_bytes()), " free"),
                   plan.strategy().empty() ? "" : absl::StrCat("; strategy ", plan.strategy()),
                   "; nothing was changed"));
  return Exit::Ok();
}

}  // namespace modelhost::modelctl
