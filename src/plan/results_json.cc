#include "plan/results_json.h"

#include "plan/print.h"

namespace moebius {
namespace {

nlohmann::ordered_json point_json(const Sweep& sweep, const SweptPoint& p) {
  nlohmann::ordered_json point;
  for (size_t k = 0; k < sweep.keys.size(); ++k) point["set"][sweep.keys[k].key] = p.values[k];
  if (!p.prediction) {
    point["refused"] = p.refused;
    return point;
  }
  point["step_time_s"] = p.prediction->step_s;
  point["tokens_per_s_per_gpu"] = p.prediction->tokens_per_s_per_gpu;
  point["model_tflops_per_gpu"] = p.prediction->model_tflops_per_gpu;
  point["memory_peak_bytes"] = p.prediction->fullest_rank().total();
  point["memory_fits"] = p.prediction->fits();
  point["host_fits"] = p.prediction->host_fits();
  point["ranks"] = p.prediction->ranks;
  point["days"] = p.prediction->run_s / 86400;
  if (sweep.is_search) point["best"] = p.set;
  return point;
}

}  // namespace

nlohmann::ordered_json search_json(const SearchResult& result, const PlanMachine& machine, const Assumptions& assume) {
  nlohmann::ordered_json json = plan_json(result.layouts.at(0).prediction, machine, assume);
  json["legal_layouts"] = result.num_legal;
  json["too_large_layouts"] = result.num_too_large;
  json["slower_layouts"] = result.num_slower;
  json["refused_layouts"] = result.num_refused;
  json["layouts"] = nlohmann::ordered_json::array();
  for (const FoundLayout& l : result.layouts) {
    json["layouts"].push_back(plan_json(l.prediction, machine, assume));
    json["layouts"].back()["set"] = l.set;
    json["layouts"].back()["why_worse"] = l.why_worse;
  }
  return json;
}

nlohmann::ordered_json sweep_json(const Sweep& sweep) {
  nlohmann::ordered_json json{{"points", nlohmann::ordered_json::array()}};
  for (const SweptPoint& p : sweep.points) json["points"].push_back(point_json(sweep, p));
  return json;
}

nlohmann::ordered_json fit_json(const FitResult& result) {
  nlohmann::ordered_json json{{"rows", nlohmann::ordered_json::array()}};
  for (const FittedRow& r : result.rows) {
    nlohmann::ordered_json row{{"name", r.row->name},
                               {"machine", r.row->machine},
                               {"measured", r.row->measured},
                               {"predicted", r.after},
                               {"error", FittedRow::error(r.after, r.row->measured)}};
    if (r.left_out > 0) row["left_out_error"] = FittedRow::error(r.left_out, r.row->measured);
    json["rows"].push_back(row);
  }
  return json;
}

}  // namespace moebius
