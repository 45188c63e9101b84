#include "train/metrics.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <numeric>

#include "model/attention/max_logits.h"
#include "model/moe/expert_rows.h"
#include "model/quantize_stats.h"

namespace moebius {
namespace {

double max_over_mean(const std::vector<int64_t>& load) {
  const double sum = std::accumulate(load.begin(), load.end(), 0.0);
  const double max = static_cast<double>(*std::max_element(load.begin(), load.end()));
  return sum > 0 ? max * static_cast<double>(load.size()) / sum : 0;
}

MoeLayerReport read_layer(const Engine& engine, const Model::MoeLayer& at, double tokens) {
  const double z_coeff = engine.spec().balance.z_coeff;
  const RouterMetrics m = at.moe->router().metrics();
  const int64_t* load = engine.on_host(m.load_E).ptr<int64_t>();
  MoeLayerReport report{.layer = at.layer, .load = std::vector<int64_t>(load, load + m.load_E.numel())};
  report.load_max_over_mean = max_over_mean(report.load);
  report.aux_loss = *engine.on_host(m.aux_1).ptr<double>();
  report.z_loss = z_coeff * *engine.on_host(m.z_1).ptr<double>() / tokens;
  report.entropy = *engine.on_host(m.entropy_1).ptr<double>() / tokens;
  report.dropped = *engine.on_host(m.dropped_1).ptr<int64_t>();
  return report;
}

// Gathers the reports of all layers. A pipeline stage has the values of its own layers, to which the other
// stages add zeros.
void gather_layers(Engine& engine, std::vector<MoeLayerReport>& layers) {
  Group& stages = engine.mesh().group(Axis::pp);
  if (stages.size() == 1) return;
  const int64_t L = engine.spec().model.num_layers_and_mtp(), E = engine.spec().model.num_experts, columns = 5 + E;
  std::vector<double> table(L * columns);
  for (const MoeLayerReport& layer : layers) {
    double* row = table.data() + layer.layer * columns;
    row[0] = 1;
    row[1] = layer.aux_loss;
    row[2] = layer.z_loss;
    row[3] = layer.entropy;
    row[4] = static_cast<double>(layer.dropped);
    std::copy(layer.load.begin(), layer.load.end(), row + 5);
  }
  Stream s(DeviceKind::cpu, engine.stream().pool());
  stages.all_reduce_sum(s, tensor_of(table.data(), {L * columns}));
  layers.clear();
  for (int64_t i = 0; i < L; ++i) {
    const double* row = table.data() + i * columns;
    if (row[0] == 0) continue;
    layers.push_back({.layer = i,
                      .load = std::vector<int64_t>(row + 5, row + columns),
                      .aux_loss = row[1],
                      .z_loss = row[2],
                      .entropy = row[3],
                      .dropped = static_cast<int64_t>(row[4])});
    layers.back().load_max_over_mean = max_over_mean(layers.back().load);
  }
}

std::optional<StepReport::ExpertRowsReport> read_expert_rows(const Engine& engine) {
  const ExpertRows* rows = engine.model().expert_rows();
  if (!rows || rows->counts_W3().empty()) return {};
  const double* counts = engine.on_host(rows->counts_W3()).ptr<double>();
  StepReport::ExpertRowsReport report;
  for (int64_t rank = 0; rank < rows->counts_W3().dim(0); ++rank, counts += 3) {
    report.spilled_rows += static_cast<int64_t>(counts[0]);
    report.peak_over_budget = std::max(report.peak_over_budget, counts[1]);
    report.spill_time_s = std::max(report.spill_time_s, 1e-9 * counts[2]);
  }
  return report;
}

// The sums are over all ranks: each adds up the counts of the layers that it has, in the order of the ranks.
std::vector<StepReport::PrecisionReport> read_precision(Engine& engine) {
  const QuantizeStats* stats = engine.model().quantize_stats();
  if (!stats) return {};
  const int64_t L = engine.model().spec().num_layers_and_mtp();
  Group& world = engine.mesh().group(Axis::world);
  std::vector<double> mine(L * 5), all(world.size() * L * 5);
  for (const QuantizeStats::Layer& each : stats->layers())
    std::copy_n(engine.on_host(each.sums_5).ptr<double>(), 5, mine.data() + each.layer * 5);
  Stream s(DeviceKind::cpu, engine.stream().pool());
  world.all_gather(s, tensor_of(all.data(), {world.size() * L, 5}), tensor_of(mine.data(), {L, 5}));
  std::vector<StepReport::PrecisionReport> layers;
  for (int64_t i = 0; i < L; ++i) {
    StepReport::PrecisionReport layer{.layer = i};
    for (int64_t rank = 0; rank < world.size(); ++rank) {
      const double* of_rank = all.data() + (rank * L + i) * 5;
      if (of_rank[0] == 0) continue;
      layer.elements += of_rank[0];
      layer.saturated += of_rank[1];
      layer.zeroed += of_rank[2];
      layer.scale_min = layer.scale_min == 0 ? of_rank[3] : std::min(layer.scale_min, of_rank[3]);
      layer.scale_max = std::max(layer.scale_max, of_rank[4]);
    }
    if (layer.elements == 0) continue;
    layer.saturated /= layer.elements;
    layer.zeroed /= layer.elements;
    layers.push_back(layer);
  }
  return layers;
}

// Each rank has the heads of its stages and of its tp rank.
std::optional<StepReport::QkClipReport> read_qk_clip(Engine& engine) {
  const MaxLogits* logits = engine.model().max_logits();
  if (!logits) return {};
  std::array<double, 2> mine{};
  for (const MaxLogits::Layer& layer : logits->layers()) {
    const float* max_H = engine.on_host(layer.padded_P).ptr<float>();
    for (int64_t h = 0; h < layer.heads; ++h) {
      mine[0] += max_H[h] > static_cast<float>(engine.spec().optimizer->qk_clip);
      mine[1] = std::max(mine[1], static_cast<double>(max_H[h]));
    }
  }
  Group& ranks = engine.mesh().group(Axis::tp_pp);
  std::vector<double> all(static_cast<size_t>(2 * ranks.size()));
  Stream s(DeviceKind::cpu, engine.stream().pool());
  ranks.all_gather(s, tensor_of(all.data(), {ranks.size(), 2}), tensor_of(mine.data(), {1, 2}));
  StepReport::QkClipReport report;
  for (size_t i = 0; i < all.size(); i += 2) {
    report.clipped_heads += static_cast<int64_t>(all[i]);
    report.max_logit = std::max(report.max_logit, all[i + 1]);
  }
  return report;
}

void add_up_layers(StepReport& r) {
  for (const MoeLayerReport& layer : r.layers) {
    r.aux_loss += layer.aux_loss;
    r.z_loss += layer.z_loss;
    r.dropped_tokens += layer.dropped;
    r.expert_load_max_over_mean += layer.load_max_over_mean;
  }
  if (!r.layers.empty()) r.expert_load_max_over_mean /= static_cast<double>(r.layers.size());
}

double model_tflops_per_rank(const Engine& engine, const StepReport& r) {
  const MeshShape& mesh = engine.mesh().shape();
  const double flops = engine.model().spec().train_flops_per_token(engine.spec().shape.seq * mesh.cp) * r.tokens;
  return flops / r.step_time_s / 1e12 / static_cast<double>(mesh.world());
}

}  // namespace

StepReport read_step(Engine& engine, double step_time_s) {
  const StepScalars& scalars = engine.batch().scalars;
  StepReport r{.step = scalars.step(),
               .loss = engine.loss(),
               .mtp_loss = engine.mtp_loss(),
               .grad_norm = *engine.on_host(engine.grad_norm()).ptr<float>(),
               .lr = scalars.lr(),
               .tokens = scalars.total_tokens,
               .step_time_s = step_time_s};
  for (const auto& at : engine.model().moe_layers()) r.layers.push_back(read_layer(engine, at, r.tokens));
  gather_layers(engine, r.layers);
  r.expert_rows = read_expert_rows(engine);
  r.precision = read_precision(engine);
  r.qk_clip = read_qk_clip(engine);
  add_up_layers(r);
  r.model_tflops_per_rank = model_tflops_per_rank(engine, r);
  r.memory_peak_bytes = engine.peak_bytes();
  if (const ActivationOffload* offload = engine.model().offload()) r.offload_bytes = offload->bytes_to_host();
  return r;
}

nlohmann::ordered_json to_json(const StepReport& r) {
  nlohmann::ordered_json json{{"kind", "train"},
                              {"step", r.step},
                              {"loss", r.loss},
                              {"aux_loss", r.aux_loss},
                              {"z_loss", r.z_loss},
                              {"grad_norm", r.grad_norm},
                              {"lr", r.lr},
                              {"tokens", static_cast<int64_t>(r.tokens)},
                              {"step_time_s", r.step_time_s},
                              {"tokens_per_s", r.tokens / r.step_time_s},
                              {"model_tflops_per_rank", r.model_tflops_per_rank},
                              {"expert_load_max_over_mean", r.expert_load_max_over_mean},
                              {"dropped_tokens", r.dropped_tokens},
                              {"memory_peak_bytes", r.memory_peak_bytes}};
  if (r.mtp_loss > 0) json["mtp_loss"] = r.mtp_loss;
  if (r.offload_bytes) json["offload_bytes"] = *r.offload_bytes;
  if (r.expert_rows) {
    json["spilled_rows"] = r.expert_rows->spilled_rows;
    json["spill_time_s"] = r.expert_rows->spill_time_s;
    json["expert_rows_peak_over_budget"] = r.expert_rows->peak_over_budget;
  }
  if (!r.precision.empty()) {
    auto& precision = json["precision"] = nlohmann::ordered_json::object();
    for (const StepReport::PrecisionReport& layer : r.precision)
      precision[std::to_string(layer.layer)] = {{"saturated", layer.saturated},
                                                {"zeroed", layer.zeroed},
                                                {"scale_min", layer.scale_min},
                                                {"scale_max", layer.scale_max}};
  }
  if (r.qk_clip) {
    json["qk_clipped_heads"] = r.qk_clip->clipped_heads;
    json["max_attention_logit"] = r.qk_clip->max_logit;
  }
  auto layers = nlohmann::ordered_json::array();
  for (const MoeLayerReport& layer : r.layers) {
    layers.push_back({{"layer", layer.layer},
                      {"load_max_over_mean", layer.load_max_over_mean},
                      {"aux_loss", layer.aux_loss},
                      {"z_loss", layer.z_loss},
                      {"entropy", layer.entropy},
                      {"dropped", layer.dropped},
                      {"load", layer.load}});
  }
  json["moe"] = layers;
  return json;
}

}  // namespace moebius
