#include "plan/print.h"

#include <fmt/format.h>

#include <cmath>

#include "config/check/hopper_notes.h"
#include "ops/attention/attention_scratch.h"

namespace moebius {
namespace {

// A step with a larger share of launches has kernels that do not fill a GPU, which the planner has no model of. The
// limit is an estimate: the worst prediction of a measured step, the demo's model, is far above it.
constexpr double kFewLaunches = 0.25;

std::string duration_text(double s) {
  if (s >= 2 * 86400) return fmt::format("{:.1f} days", s / 86400);
  if (s < 60) return fmt::format("{:.1f} seconds", s);
  return s >= 3600 ? fmt::format("{:.1f} hours", s / 3600) : fmt::format("{:.1f} minutes", s / 60);
}

double rank_hours(const Prediction& p) { return p.run_s / 3600 * static_cast<double>(p.ranks); }

std::string run_text(const Prediction& p, const RunSpec& run, const Assumptions& assume) {
  if (p.run_s <= 0) return "run        how long it takes: set train.steps, or --assume tokens=N\n";
  const double tokens = p.tokens * p.run_s / p.step_s;
  const std::string what = assume.tokens > 0 ? "assumed" : fmt::format("of train.steps = {}", run.train.steps);
  return fmt::format("run        {:.4g} tokens ({}): {}, {} {}-hours\n", tokens, what, duration_text(p.run_s),
                     quantity_text(rank_hours(p)), p.is_gpu ? "GPU" : "rank");
}

// Prints the actions of the schedule. Neighbours whose times are the same share a line.
std::string stages_text(const Prediction& p) {
  std::string text = fmt::format("  {:<15} {:>11} {:>12} {:>12}\n", "stage", "forward", "backward", "not hidden");
  const auto same = [](const StageWork& a, const StageWork& b) {
    return a.forward.total() == b.forward.total() && a.backward.total() == b.backward.total();
  };
  for (size_t first = 0; first < p.stages.size();) {
    size_t last = first;
    while (last + 1 < p.stages.size() && same(p.stages[first], p.stages[last + 1])) ++last;
    const StageWork& s = p.stages[first];
    text += fmt::format("  {:<15} {:>11} {:>12} {:>12}\n",
                        first == last ? fmt::format("{}", first) : fmt::format("{} to {}", first, last),
                        seconds_text(s.forward.total()), seconds_text(s.backward.total()),
                        seconds_text(s.forward.exposed() + s.backward.exposed()));
    first = last + 1;
  }
  if (p.num_pp_ranks > 1)
    text += fmt::format("  stage s is on pp rank s mod {}; a message between two takes {}\n", p.num_pp_ranks,
                        seconds_text(p.transfer_s));
  return text;
}

std::string phases_text(const Prediction& p) {
  std::string text = "phases of the slowest rank\n";
  for (const auto& [name, s] : p.phases)
    text += fmt::format("  {:<15} {:>11}  {:>5.1f} %\n", name, seconds_text(s), 100 * s / p.step_s);
  text += "its passes, by class of kernels\n";
  for (const auto& [name, s] : p.kernels)
    if (s > 0) text += fmt::format("  {:<18} {:>8}  {:>5.1f} %\n", name, seconds_text(s), 100 * s / p.step_s);
  text += "one micro-batch, by stage\n" + stages_text(p);
  if (p.axes.empty()) return text;
  text += fmt::format("groups of the slowest rank, {:.0f} messages per step\n  {:<9} {:>11} {:>12} {:>12}\n",
                      p.messages, "axis", "sent", "exposed", "hidden");
  for (const auto& [name, a] : p.axes)
    text += fmt::format("  {:<9} {:>11} {:>12} {:>12}\n", name, bytes_text(std::llround(a.bytes)),
                        seconds_text(a.exposed_s), seconds_text(a.hidden_s));
  return text + fmt::format(
                    "start-up over TCP: {}; rank 0 has {:.0f} messages and sends {}, another rank has at most {:.0f}\n",
                    seconds_text(p.start_up.seconds), p.start_up.messages_rank_0,
                    bytes_text(std::llround(p.start_up.table_bytes)), p.start_up.messages_rank);
}

std::string files_text(const Prediction& p) {
  const FileWork& f = p.files;
  return fmt::format(
      "files      {} of tokens per step; {} per checkpoint, written in {}, read in {}; a save stops training for {}, {} {}\n",
      bytes_text(std::llround(f.data_bytes)), bytes_text(std::llround(f.checkpoint_bytes)), seconds_text(f.save_s),
      seconds_text(f.load_s), seconds_text(f.stall_s), f.saves, f.saves == 1 ? "save" : "saves");
}

std::string imbalance_text(const Prediction& p) {
  if (p.imbalance == 1) return "imbalance  none: the experts of every rank have the same number of rows\n";
  return fmt::format("imbalance  the experts of the busiest rank have {:.2f} times the mean of rows, which costs {}\n",
                     p.imbalance, seconds_text(p.imbalance_s));
}

// Names the parts of the run that are not predicted, and the GPU that it needs.
std::string not_predicted_text(const Prediction& p, const RunSpec& run) {
  std::string text;
  if (p.is_gpu && p.launch_s > kFewLaunches * p.step_s)
    text += fmt::format(
        "  small kernels: {:.0f} % of the step is between kernels; a kernel that does not fill the GPU takes longer than "
        "predicted, so the whole step may too\n",
        100 * p.launch_s / p.step_s);
  if (run.parallel.dynamic_cp && run.parallel.cp > 1)
    text +=
        "  parallel.dynamic_cp: every micro-batch is predicted with all cp ranks; its graphs' memory is not counted\n";
  for (const std::string& note : hopper_notes(run)) text += "  " + note + "\n";
  return text;
}

std::string assumed_text(const Prediction& p, const RunSpec& run, const PlanMachine& machine,
                         const Assumptions& assume) {
  std::string text = "assumed\n  " + to_string(assume) + "\n" + not_predicted_text(p, run);
  // A run may refuse direct where the ranks are on several hosts; the reason says so.
  const DispatcherKind asked = run.parallel.dispatcher;
  const bool is_shown = asked == DispatcherKind::automatic || asked == DispatcherKind::direct;
  if (is_shown && run.parallel.ep * run.parallel.etp > 1 && assume.system == PlanSystem::moebius) {
    const DispatcherChoice choice = dispatcher_on(run_on(run, machine), p.ranks, machine);
    text += fmt::format("  dispatcher {}: {}\n", choice.name, choice.reason);
  }
  if (!p.is_gpu)
    text += fmt::format("  {} threads per rank, {:.0f} ranks per host\n", p.threads,
                        machine.of_rank(p.threads).domain_ranks);
  else
    text += fmt::format("  {}\n", planned_cudnn_text({.choice = run.kernels}));
  for (const std::string& figure : machine.assumed_figures()) text += "  machine: " + figure + "\n";
  return text;
}

std::string memory_table(const Prediction& p) {
  std::string text = fmt::format("  {:<9}", "pp rank");
  for (int i = 0; i < kNumLives; ++i) text += fmt::format(" {:>10}", name_of(static_cast<Life>(i)));
  text += fmt::format(" {:>10} {:>10}\n", "other", "total");
  for (const RankMemory& m : p.memory) {
    text += fmt::format("  {:<9}", m.pp_rank);
    for (const int64_t bytes : m.life) text += fmt::format(" {:>10}", bytes_text(bytes));
    text += fmt::format(" {:>10} {:>10}\n", bytes_text(m.unplanned_bytes), bytes_text(m.total()));
  }
  return text;
}

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

std::string seconds_text(double s) { return s >= 1 ? fmt::format("{:.3f} s", s) : fmt::format("{:.2f} ms", 1e3 * s); }

std::string quantity_text(double x) { return x >= 100 ? fmt::format("{:.0f}", x) : fmt::format("{:.3g}", x); }

std::string rate_text(double rate) { return rate >= 10 ? fmt::format("{:.1f}", rate) : fmt::format("{:.4g}", rate); }

std::string mesh_text(const MeshShape& m) {
  return fmt::format("tp {}, cp {}, dp {}, pp {}, etp {}, ep {}, edp {}", m.tp, m.cp, m.dp, m.pp, m.etp, m.ep, m.edp);
}

std::string plan_text(const Prediction& p, const RunSpec& run, const PlanMachine& machine, const Assumptions& assume) {
  std::string text = fmt::format("machine    {}, {} {}: {}\n", machine.name, p.ranks, p.ranks == 1 ? "rank" : "ranks",
                                 mesh_text(p.mesh));
  text += fmt::format("step       {}: {:.0f} tokens in {} micro-batches per rank\n", seconds_text(p.step_s), p.tokens,
                      p.num_micro_batches);
  text += fmt::format("rate       {:.1f} tokens/s per rank, {} model TFLOP/s per rank, MFU {:.1f} %\n",
                      p.tokens_per_s_per_gpu, rate_text(p.model_tflops_per_gpu), 100 * p.mfu);
  text += run_text(p, run, assume);
  text += fmt::format("memory     {} on pp rank {}, of {}: {}\n", bytes_text(p.fullest_rank().total()),
                      p.fullest_rank().pp_rank, bytes_text(std::llround(p.memory_bytes)),
                      p.fits() ? "fits" : "does not fit");
  if (p.host_bytes > 0)
    text += fmt::format("host       {} of the rank that needs the most, of {}: {}\n",
                        bytes_text(std::llround(p.host_bytes)), bytes_text(std::llround(p.host_memory_bytes)),
                        p.host_fits() ? "fits" : "does not fit");
  text += fmt::format("bubble     {:.1f} % of the passes\n", 100 * p.bubble);
  if (run.model.num_moe_layers() > 0) text += imbalance_text(p);
  text += files_text(p);
  return text + phases_text(p) + "memory by life\n" + memory_table(p) + assumed_text(p, run, machine, assume);
}

namespace {

nlohmann::ordered_json stage_json(const StageWork& stage) {
  return {{"forward_s", stage.forward.total()},
          {"backward_s", stage.backward.total()},
          {"backward_weight_s", stage.backward_weight.total()},
          {"forward_exposed_s", stage.forward.exposed()},
          {"backward_exposed_s", stage.backward.exposed()}};
}

}  // namespace

nlohmann::ordered_json plan_json(const Prediction& p, const PlanMachine& machine, const Assumptions& assume) {
  nlohmann::ordered_json json{{"machine", machine.name},
                              {"ranks", p.ranks},
                              {"assumed", to_string(assume)},
                              {"mesh",
                               {{"tp", p.mesh.tp},
                                {"cp", p.mesh.cp},
                                {"dp", p.mesh.dp},
                                {"pp", p.mesh.pp},
                                {"etp", p.mesh.etp},
                                {"ep", p.mesh.ep},
                                {"edp", p.mesh.edp}}},
                              {"micro_batches", p.num_micro_batches},
                              {"tokens", p.tokens},
                              {"step_time_s", p.step_s},
                              {"tokens_per_s_per_gpu", p.tokens_per_s_per_gpu},
                              {"model_tflops_per_gpu", p.model_tflops_per_gpu},
                              {"mfu", p.mfu},
                              {"memory_peak_bytes", p.fullest_rank().total()},
                              {"memory_bytes_of_rank", p.memory_bytes},
                              {"memory_fits", p.fits()},
                              {"memory_cudnn", p.assumes_cudnn},
                              {"host_bytes", p.host_bytes},
                              {"host_memory_bytes_of_rank", p.host_memory_bytes},
                              {"host_fits", p.host_fits()},
                              {"phases", p.phases},
                              {"bubble", p.bubble},
                              {"imbalance", p.imbalance},
                              {"imbalance_s", p.imbalance_s},
                              {"kernels", p.kernels},
                              {"launch_s", p.launch_s},
                              {"messages", p.messages},
                              {"start_up",
                               {{"seconds", p.start_up.seconds},
                                {"messages_rank_0", p.start_up.messages_rank_0},
                                {"messages_rank", p.start_up.messages_rank},
                                {"table_bytes", p.start_up.table_bytes}}},
                              {"files",
                               {{"data_bytes_of_step", p.files.data_bytes},
                                {"checkpoint_bytes", p.files.checkpoint_bytes},
                                {"save_s", p.files.save_s},
                                {"load_s", p.files.load_s},
                                {"stall_s", p.files.stall_s},
                                {"saves", p.files.saves}}}};
  json["assumed_figures"] = machine.assumed_figures();
  json["stages"] = nlohmann::ordered_json::array();
  for (size_t i = 0; i < p.stages.size(); ++i) json["stages"].push_back(stage_json(p.stages[i]));
  json["axes"] = nlohmann::ordered_json::object();
  for (const auto& [name, a] : p.axes)
    json["axes"][name] = {{"bytes", a.bytes}, {"exposed_s", a.exposed_s}, {"hidden_s", a.hidden_s}};
  json["memory"] = nlohmann::ordered_json::array();
  for (const RankMemory& m : p.memory) {
    nlohmann::ordered_json rank{{"pp_rank", m.pp_rank}};
    for (int i = 0; i < kNumLives; ++i) rank[std::string(name_of(static_cast<Life>(i)))] = m.life[i];
    rank["beside"] = m.unplanned_bytes;
    rank["spill"] = m.spill_bytes;
    rank["total"] = m.total();
    json["memory"].push_back(rank);
  }
  if (p.run_s > 0) {
    json["run_hours"] = p.run_s / 3600;
    json["days"] = p.run_s / 86400;
    json["gpu_hours"] = rank_hours(p);
  }
  return json;
}

nlohmann::ordered_json search_json(const SearchResult& result, const PlanMachine& machine, const Assumptions& assume) {
  nlohmann::ordered_json json = plan_json(result.layouts.at(0).prediction, machine, assume);
  json["legal_layouts"] = result.num_possible;
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
