#include "plan/print.h"

#include <fmt/format.h>

#include <cmath>

namespace moebius {
namespace {

// The cost of training on a number of tokens.
struct Budget {
  double days = 0, gpu_hours = 0;
};
Budget budget_of(const Prediction& p, const Assumptions& assume) {
  const double seconds = assume.tokens / (p.tokens_per_s_per_gpu * static_cast<double>(p.ranks));
  return {.days = seconds / 86400, .gpu_hours = seconds / 3600 * static_cast<double>(p.ranks)};
}

std::string seconds_text(double s) { return s >= 1 ? fmt::format("{:.3f} s", s) : fmt::format("{:.2f} ms", 1e3 * s); }

bool fits(const Prediction& p, const PlanMachine& machine) {
  return static_cast<double>(p.fullest_rank().total()) <= machine.memory_bytes();
}

std::string memory_table(const Prediction& p) {
  std::string text = fmt::format("  {:<9}", "pp rank");
  for (int i = 0; i < kNumLives; ++i) text += fmt::format(" {:>10}", name_of(static_cast<Life>(i)));
  text += fmt::format(" {:>10} {:>10}\n", "beside", "total");
  for (const RankMemory& m : p.memory) {
    text += fmt::format("  {:<9}", m.pp_rank);
    for (const int64_t bytes : m.life) text += fmt::format(" {:>10}", bytes_text(bytes));
    text += fmt::format(" {:>10} {:>10}\n", bytes_text(m.beside_bytes), bytes_text(m.total()));
  }
  return text;
}

}  // namespace

std::string mesh_text(const MeshShape& m) {
  return fmt::format("tp {}, cp {}, dp {}, pp {}, etp {}, ep {}, edp {}", m.tp, m.cp, m.dp, m.pp, m.etp, m.ep, m.edp);
}

std::string plan_text(const Prediction& p, const RunSpec& run, const PlanMachine& machine, const Assumptions& assume) {
  std::string text = fmt::format("machine    {}, {} ranks: {}\n", machine.name, p.ranks, mesh_text(p.mesh));
  text += fmt::format("assumed    {}\n", to_string(assume));
  text += fmt::format("step       {}: {:.0f} tokens in {} micro-batches a rank\n", seconds_text(p.step_s), p.tokens,
                      p.num_micro_batches);
  text += fmt::format("rate       {:.1f} tokens/s a rank, {:.1f} model TFLOP/s a rank, MFU {:.1f} %\n",
                      p.tokens_per_s_per_gpu, p.model_tflops_per_gpu, 100 * p.mfu);
  if (assume.tokens > 0) {
    const Budget b = budget_of(p, assume);
    text +=
        fmt::format("budget     {:.3g} tokens: {:.1f} days, {:.0f} rank-hours\n", assume.tokens, b.days, b.gpu_hours);
  } else if (run.train.steps > 0) {
    text += fmt::format("run        {} steps: {:.1f} hours\n", run.train.steps,
                        p.step_s * static_cast<double>(run.train.steps) / 3600);
  }
  text += fmt::format("bubble     {:.1f} % of the passes; busiest rank's experts {:.2f} times the mean\n",
                      100 * p.bubble, p.imbalance);
  text += "phases of the slowest rank\n";
  for (const auto& [name, s] : p.phases)
    text += fmt::format("  {:<15} {:>11}  {:>5.1f} %\n", name, seconds_text(s), 100 * s / p.step_s);
  if (!p.axes.empty()) text += fmt::format("  {:<9} {:>11} {:>12} {:>12}\n", "axis", "sent", "exposed", "hidden");
  for (const auto& [name, a] : p.axes)
    text += fmt::format("  {:<9} {:>11} {:>12} {:>12}\n", name, bytes_text(std::llround(a.bytes)),
                        seconds_text(a.exposed_s), seconds_text(a.hidden_s));
  text += fmt::format("memory     {} on pp rank {}, of {}: {}\n", bytes_text(p.fullest_rank().total()),
                      p.fullest_rank().pp_rank, bytes_text(std::llround(machine.memory_bytes())),
                      fits(p, machine) ? "fits" : "does not fit");
  return text + memory_table(p);
}

nlohmann::ordered_json plan_json(const Prediction& p, const RunSpec& run, const PlanMachine& machine,
                                 const Assumptions& assume) {
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
                              {"memory_fits", fits(p, machine)},
                              {"phases", p.phases},
                              {"bubble", p.bubble},
                              {"imbalance", p.imbalance},
                              {"start_up_messages", p.start_up_messages}};
  json["axes"] = nlohmann::ordered_json::object();
  for (const auto& [name, a] : p.axes)
    json["axes"][name] = {{"bytes", a.bytes}, {"exposed_s", a.exposed_s}, {"hidden_s", a.hidden_s}};
  json["memory"] = nlohmann::ordered_json::array();
  for (const RankMemory& m : p.memory) {
    nlohmann::ordered_json rank{{"pp_rank", m.pp_rank}};
    for (int i = 0; i < kNumLives; ++i) rank[std::string(name_of(static_cast<Life>(i)))] = m.life[i];
    rank["beside"] = m.beside_bytes;
    rank["total"] = m.total();
    json["memory"].push_back(rank);
  }
  if (run.train.steps > 0) json["run_hours"] = p.step_s * static_cast<double>(run.train.steps) / 3600;
  if (assume.tokens > 0) {
    const Budget b = budget_of(p, assume);
    json["days"] = b.days;
    json["gpu_hours"] = b.gpu_hours;
  }
  return json;
}

}  // namespace moebius
