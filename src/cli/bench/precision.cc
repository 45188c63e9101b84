#include "cli/bench/precision.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "cli/options.h"
#include "core/dtype.h"

namespace moebius {
namespace {

nlohmann::ordered_json passes_json(const PassTimes& t) {
  return {{"forward_ms", t.forward_ms},
          {"backward_input_ms", t.backward_input_ms},
          {"backward_weight_ms", t.backward_weight_ms},
          {"total_ms", t.total_ms()}};
}

nlohmann::ordered_json line_json(const PrecisionLine& line, int64_t micro_batches) {
  nlohmann::ordered_json json{{"name", line.name},   {"shape", line.shape},  {"rows", line.rows},
                              {"count", line.count}, {"kept", line.is_kept}, {"plain", passes_json(line.plain)}};
  if (line.is_kept) return json;
  json.update({{"quantised", passes_json(line.quantised)},
               {"weights_ms", line.weights_ms},
               {"ratio", line.ratio(micro_batches)},
               {"loses", line.ratio(micro_batches) > 1}});
  return json;
}

// "0.123 / 0.101": without and with the recipe.
std::string pair_text(double plain_ms, double quantised_ms) {
  return fmt::format("{:.3f} / {:.3f}", plain_ms, quantised_ms);
}

std::string ratio_text(double ratio) {
  return ratio > 1 ? fmt::format("{:.3f}  loses", ratio) : fmt::format("{:.3f}", ratio);
}

void print_line(const PrecisionLine& line, int64_t micro_batches) {
  const std::string name = fmt::format("{} {} x {}", line.name, line.shape, line.count);
  if (line.is_kept) {
    fmt::print("{:<64} {:.3f} ms; precision.keep names it\n", name, line.plain.total_ms());
    return;
  }
  const PassTimes &p = line.plain, &q = line.quantised;
  fmt::print("{:<64} {:>19} {:>19} {:>19} {:>9.3f}  {}\n", name, pair_text(p.forward_ms, q.forward_ms),
             pair_text(p.backward_input_ms, q.backward_input_ms), pair_text(p.backward_weight_ms, q.backward_weight_ms),
             line.weights_ms, ratio_text(line.ratio(micro_batches)));
}

}  // namespace

void print_precision(const BenchOptions& o, const RunSpec& run, const PrecisionBench& bench) {
  const std::string machine = bench_machine(run.device, o.spec.threads);
  if (o.json) {
    nlohmann::ordered_json lines = nlohmann::ordered_json::array();
    for (const PrecisionLine& line : bench.lines) lines.push_back(line_json(line, bench.micro_batches));
    return print_json({{"bench", "precision"},
                       {"machine", machine},
                       {"device", o.device},
                       {"threads", o.spec.threads},
                       {"recipe", o.recipe},
                       {"precision_recipe", name_of(bench.recipe)},
                       {"compute", name_of(run.precision.compute)},
                       {"rows", bench.rows},
                       {"micro_batches", bench.micro_batches},
                       {"ratio", bench.ratio()},
                       {"lines", lines}});
  }
  fmt::print("{}\n{}: {} rows per micro-batch, {} micro-batches per step; {} / {}, median ms\n", machine, o.recipe,
             bench.rows, bench.micro_batches, name_of(run.precision.compute), name_of(bench.recipe));
  fmt::print("{:<64} {:>19} {:>19} {:>19} {:>9}  {}\n", "per micro-batch", "forward", "backward_input",
             "backward_weight", "weights", "ratio");
  for (const PrecisionLine& line : bench.lines) print_line(line, bench.micro_batches);
  fmt::print("all of them, by their counts: {:.3f} times as long as in {}{}\n", bench.ratio(),
             name_of(run.precision.compute), bench.ratio() > 1 ? "; the recipe loses" : "");
}

}  // namespace moebius
