#include "cli/bench/report.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/options.h"
#include "memory/plan.h"

namespace moebius {
namespace {

double peak_share(const BenchReport& r, const BenchLine& l) { return l.gflops_per_s() * 1e9 / r.ceilings.flops_per_s; }
double roofline_share(const BenchLine& l) { return l.roofline_ms / l.median_ms; }

using Ops = std::map<std::string, OpTotal>;

// Operations by falling time.
std::vector<std::pair<std::string, OpTotal>> by_time(const Ops& totals) {
  std::vector<std::pair<std::string, OpTotal>> ops(totals.begin(), totals.end());
  std::sort(ops.begin(), ops.end(), [](const auto& a, const auto& b) { return a.second.time_us > b.second.time_us; });
  return ops;
}

}  // namespace

void print_profile(const Ops& totals, const char* of, int64_t runs) {
  double total_us = 0;
  for (const auto& [name, op] : totals) total_us += op.time_us;
  fmt::print("{:<24} {:>7} {:>10} {:>10} {:>8} {:>7}\n", fmt::format("op, {}", of), "calls", "ms", "GFLOP/s", "GB/s",
             "share");
  for (const auto& [name, op] : by_time(totals)) {
    const double us = std::max(op.time_us, 1e-3);
    fmt::print("{:<24} {:>7} {:>10.2f} {:>10.1f} {:>8.1f} {:>6.1f}%\n", name, op.calls / runs,
               op.time_us / 1e3 / static_cast<double>(runs), op.cost.flops / us / 1e3, op.cost.bytes / us / 1e3,
               100 * op.time_us / total_us);
  }
}

nlohmann::ordered_json ops_json(const Ops& totals) {
  nlohmann::ordered_json ops = nlohmann::ordered_json::array();
  for (const auto& [name, op] : by_time(totals)) {
    ops.push_back({{"name", name},
                   {"calls", op.calls},
                   {"time_us", op.time_us},
                   {"flops", op.cost.flops},
                   {"bytes", op.cost.bytes}});
  }
  return ops;
}

namespace {

nlohmann::ordered_json line_json(const BenchReport& r, const BenchLine& l) {
  nlohmann::ordered_json json{{"name", l.name},
                              {"median_ms", l.median_ms},
                              {"min_ms", l.min_ms},
                              {"runs", l.runs},
                              {"gflops_per_s", l.gflops_per_s()},
                              {"gbytes_per_s", l.gbytes_per_s()},
                              {"share_of_peak", peak_share(r, l)}};
  if (l.roofline_ms > 0) json.update({{"roofline_ms", l.roofline_ms}, {"share_of_roofline", roofline_share(l)}});
  json.update({{"checksum", l.checksum},
               {"expected", l.expected},
               {"relative_error", l.largest_error()},
               {"relative_errors", l.errors}});
  if (!l.kernel.empty()) json["kernel"] = l.kernel;
  return json;
}

// Returns the workload's options, as an object and in words.
nlohmann::ordered_json case_json(const BenchOptions& o) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (o.name == "gemm") return json;
  json["shape"] = o.spec.shape;
  if (o.name == "attention")
    json.update({{"head_dim", o.spec.head_dim},
                 {"window", o.spec.mask.window},
                 {"documents", o.spec.mask.documents},
                 {"sequences", o.spec.sequences},
                 {"length", o.spec.length}});
  else
    json["routing"] = o.routing;
  if (o.name != "attention" && o.routing == "zipf") json["zipf_exponent"] = o.spec.routing.exponent;
  if (o.name != "attention") json["operands"] = o.operands;
  if (o.name == "moe-layer") json["first_micro_batch"] = o.spec.first_micro_batch;
  return json;
}

std::string sequences_text(const BenchSpec& spec) {
  std::string text;
  if (spec.sequences > 0) text += fmt::format(", sequences {}", spec.sequences);
  if (spec.length > 0) text += fmt::format(", length {}", spec.length);
  return text;
}

std::string case_text(const BenchOptions& o) {
  if (o.name == "gemm") return "";
  if (o.name == "attention")
    return fmt::format("{}{}{}, window {}, documents {}; ", o.spec.shape, sequences_text(o.spec),
                       o.spec.head_dim == 0 ? "" : fmt::format(", heads of {}", o.spec.head_dim),
                       o.spec.mask.window == 0 ? "none" : std::to_string(o.spec.mask.window), o.spec.mask.documents);
  return fmt::format("{}, routing {}{}, operands {}; ", o.spec.shape, o.routing,
                     o.routing == "zipf" ? fmt::format(" {}", o.spec.routing.exponent) : "", o.operands);
}

// The lines of a layer that was timed in bf16 and with a recipe, with the share of quantising its weights.
nlohmann::ordered_json recipe_times_json(const BenchReport& r) {
  nlohmann::ordered_json times = nlohmann::ordered_json::array();
  for (const RecipeTime& t : r.recipe_times)
    times.push_back({{"name", t.name},
                     {"bf16_ms", t.bf16_ms},
                     {"operands_ms", t.recipe_ms},
                     {"weights_ms", t.weights_ms},
                     {"total_ms", t.total_ms()},
                     {"ratio", t.ratio()}});
  return times;
}

void print_recipe_times(const BenchOptions& o, const BenchReport& r) {
  if (r.recipe_times.empty()) return;
  fmt::print("weights quantised once a step: {:.3f} ms; {} micro-batches per step: {:.3f} ms of each\n", r.weights_ms,
             o.spec.micro_batches, r.recipe_times.front().weights_ms);
  for (const RecipeTime& t : r.recipe_times)
    fmt::print("{}: bf16 {:.3f} ms; {} {:.3f} + {:.3f} = {:.3f} ms, {:.3f} times as long\n", t.name, t.bf16_ms,
               o.operands, t.recipe_ms, t.weights_ms, t.total_ms(), t.ratio());
}

void print_json_report(const BenchOptions& o, const BenchReport& r, const std::string& machine) {
  nlohmann::ordered_json lines = nlohmann::ordered_json::array();
  for (const BenchLine& l : r.lines) lines.push_back(line_json(r, l));
  nlohmann::ordered_json json{
      {"bench", o.name}, {"machine", machine}, {"device", o.device}, {"threads", o.spec.threads}};
  json.update(case_json(o));
  json.update({{"peak_gflops_per_s", r.ceilings.flops_per_s / 1e9},
               {"peak_gbytes_per_s", r.ceilings.bytes_per_s / 1e9},
               {"lines", lines}});
  if (r.kept_bytes > 0) json["kept_bytes"] = r.kept_bytes;
  json["under_load"] = o.spec.under_load;
  if (!r.recipe_times.empty())
    json.update({{"weights_ms", r.weights_ms},
                 {"micro_batches", o.spec.micro_batches},
                 {"recipe_times", recipe_times_json(r)}});
  if (r.profiled_runs > 0) json.update({{"profiled_runs", r.profiled_runs}, {"ops", ops_json(r.ops)}});
  print_json(json);
}

// Prints the step's speed as shares of the data sheet's rates and of the rates measured in the same run.
void print_shares(const StepBench& r) {
  if (r.datasheet_tflops > 0)
    fmt::print("{:.1f} % of the data sheet's {:.1f} TFLOP/s (MFU); ", 100 * r.mfu(), r.datasheet_tflops);
  fmt::print("{:.1f} % of the roofline: {:.1f} ms, each op at the matrix rate below or {:.0f} GB/s of a copy\n",
             100 * r.ratio_to_roofline(), r.roofline_s * 1e3, r.ceilings.bytes_per_s / 1e9);
}

std::string predicted_text(const StepBench& r) {
  if (r.predicted_bytes == 0) return "";
  return fmt::format(", predicted {} ({:+.1f} %)", bytes_text(r.predicted_bytes),
                     100.0 * (static_cast<double>(r.peak_bytes) / static_cast<double>(r.predicted_bytes) - 1));
}

void print_step_text(const BenchOptions& o, const StepBench& r) {
  fmt::print("{}: {} tokens per step, median of {} steps {:.1f} ms\n", o.recipe, r.tokens, r.steps, r.median_s * 1e3);
  fmt::print("{:.0f} tokens/s, {:.3f} model TFLOP/s\n", r.tokens_per_s, r.model_tflops);
  if (r.roofline_s > 0) print_shares(r);
  fmt::print("bf16 matrix rate: ");
  if (r.onednn_tflops > 0)
    fmt::print("oneDNN {:.3f} TFLOP/s, ratio {:.1f} %; ", r.onednn_tflops, 100 * r.ratio_to_onednn());
  fmt::print("our gemm {:.3f} TFLOP/s, ratio {:.1f} %\n", r.gemm_tflops, 100 * r.ratio_to_gemm());
  fmt::print("loss {:.4f} first, {:.4f} last; memory planned {}, peak {}{}\n", r.first_loss, r.last_loss,
             bytes_text(r.planned_bytes), bytes_text(r.peak_bytes), predicted_text(r));
  if (r.states_s > 0)
    fmt::print("states on the host: the update moved {:.2f} GB each way in {:.1f} ms, {:.1f} GB/s\n",
               static_cast<double>(r.states_bytes) / 1e9, r.states_s * 1e3,
               static_cast<double>(r.states_bytes) / 1e9 / r.states_s);
  if (!r.fallback_kernels.empty()) fmt::print("{}\n", r.fallback_kernels);
}

}  // namespace

void print_report(const BenchOptions& o, const BenchReport& r) {
  const std::string machine = bench_machine(o.spec.device, o.spec.threads);
  if (o.json) return print_json_report(o, r, machine);
  fmt::print("{}\n{}bf16 matrix rate {:.1f} GFLOP/s, copy {:.1f} GB/s", machine, case_text(o),
             r.ceilings.flops_per_s / 1e9, r.ceilings.bytes_per_s / 1e9);
  if (r.kept_bytes > 0) fmt::print("; kept for backward {}", bytes_text(r.kept_bytes));
  if (o.spec.under_load) fmt::print("; under load");
  size_t width = 24;
  for (const BenchLine& l : r.lines) width = std::max(width, l.name.size());
  fmt::print("\n{:<{}} {:>10} {:>10} {:>10} {:>8} {:>7} {:>9}  {:>12} {:>12} {:>9}\n", o.name, width, "median ms",
             "min ms", "GFLOP/s", "GB/s", "of peak", "roofline", "checksum", "expected", "rel. off");
  for (const BenchLine& l : r.lines) {
    fmt::print("{:<{}} {:>10.3f} {:>10.3f} {:>10.1f} {:>8.1f} {:>6.1f}% {:>9}  {:>12.5g} {:>12.5g} {:>9.1e}\n", l.name,
               width, l.median_ms, l.min_ms, l.gflops_per_s(), l.gbytes_per_s(), 100 * peak_share(r, l),
               l.roofline_ms > 0 ? fmt::format("{:.1f}%", 100 * roofline_share(l)) : "-", l.checksum, l.expected,
               l.largest_error());
  }
  for (const BenchLine& l : r.lines) {
    if (!l.kernel.empty()) fmt::print("{:<24} {}\n", l.name, l.kernel);
  }
  print_recipe_times(o, r);
  if (r.profiled_runs > 0) print_profile(r.ops, "fwd_bwd", r.profiled_runs);
}

std::optional<double> printed_buffer(const RunSpec& run) {
  if (!run.optimizer.offload) return {};
  return run.optimizer.offload_buffer.value_or(0);
}

void print_step(const BenchOptions& o, const RunSpec& run, const std::string& memory, const StepBench& r) {
  const std::string machine = bench_machine(run.device, o.spec.threads);
  if (!o.json) {
    fmt::print("{}\n", machine);
    if (!memory.empty()) fmt::print("{}\n", memory);
    print_step_text(o, r);
    if (o.hash) fmt::print("master weights: XXH3 {}\n", r.masters_hash);
    if (o.profile) print_profile(r.ops, "per step", r.steps);
    return;
  }
  nlohmann::ordered_json object{{"bench", "step"},
                                {"machine", machine},
                                {"device", o.device},
                                {"threads", o.spec.threads},
                                {"recipe", o.recipe},
                                {"steps", r.steps},
                                {"tokens_per_step", r.tokens},
                                {"median_s", r.median_s},
                                {"median_ms", r.median_s * 1e3},
                                {"tokens_per_s", r.tokens_per_s},
                                {"model_tflops", r.model_tflops},
                                {"gemm_bf16_tflops", r.gemm_tflops},
                                {"ratio_to_gemm", r.ratio_to_gemm()},
                                {"first_loss", r.first_loss},
                                {"last_loss", r.last_loss},
                                {"planned_bytes", r.planned_bytes},
                                {"peak_bytes", r.peak_bytes}};
  if (!r.fallback_kernels.empty()) object["fallback_kernels"] = r.fallback_kernels;
  if (!memory.empty()) object["memory_fit"] = memory;
  if (const auto gib = printed_buffer(run)) object["offload_buffer"] = *gib;
  if (r.states_s > 0) object.update({{"states_bytes", r.states_bytes}, {"states_s", r.states_s}});
  if (o.hash) object["masters_xxh3"] = r.masters_hash;
  if (r.onednn_tflops > 0)
    object.update({{"onednn_bf16_tflops", r.onednn_tflops}, {"ratio_to_onednn", r.ratio_to_onednn()}});
  if (r.roofline_s > 0)
    object.update({{"predicted_bytes", r.predicted_bytes},
                   {"peak_gflops_per_s", r.ceilings.flops_per_s / 1e9},
                   {"peak_gbytes_per_s", r.ceilings.bytes_per_s / 1e9},
                   {"share_of_peak", r.ratio_to_gemm()},
                   {"roofline_ms", r.roofline_s * 1e3},
                   {"share_of_roofline", r.ratio_to_roofline()}});
  if (r.datasheet_tflops > 0)
    object.update({{"datasheet_bf16_tflops", r.datasheet_tflops}, {"share_of_datasheet", r.mfu()}});
  if (o.profile) object["ops"] = ops_json(r.ops);
  print_json(object);
}

}  // namespace moebius
