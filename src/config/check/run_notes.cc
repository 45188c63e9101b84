#include "config/check/run_notes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "config/check/expert_rows_bound.h"
#include "config/hf/keys.h"

namespace moebius {
namespace {

// Parameters of layers that the same ranks have.
struct HeldAlike {
  std::string what, ranks;  // "experts", "edp"
  int64_t num_ranks = 1;
};

std::vector<HeldAlike> params_of_layers(const RunSpec& run, int64_t num_ranks) {
  const ParallelSpec& p = run.parallel;
  const int64_t dp_cp = p.dp(num_ranks) * p.cp;
  std::vector<HeldAlike> all;
  if (p.tp == 1) {
    all.push_back({"all but experts", "dp * cp", dp_cp});
  } else {
    all.push_back({"matrices of attention and of dense MLPs", "dp * cp", dp_cp});
    all.push_back({"norms and routers", "tp * dp * cp", p.tp * dp_cp});
  }
  if (run.model.num_moe_layers() > 0) all.push_back({"experts", "edp", p.edp(num_ranks)});
  return all;
}

// names_parts: whether it also names the parameters that stay whole where others are sharded.
void add_sharding(std::vector<RunNote>& notes, const char* key, const char* of_layers, const RunSpec& run,
                  int64_t num_ranks, bool names_parts = true) {
  const std::vector<HeldAlike> params = params_of_layers(run, num_ranks);
  std::vector<std::string> whole, equations;
  for (const HeldAlike& p : params) {
    equations.push_back(fmt::format("{} = {}", p.ranks, p.num_ranks));
    if (p.num_ranks == 1) whole.push_back(fmt::format("{} ({} = 1)", p.what, p.ranks));
  }
  if (whole.empty()) return;
  if (whole.size() == params.size())
    notes.push_back({fmt::format("{} = true shards nothing: no two ranks hold the same {} of a layer ({}); remove it, "
                                 "or use more ranks",
                                 key, of_layers, fmt::join(equations, ", ")),
                     /*is_warning=*/true});
  else if (names_parts)
    notes.push_back({fmt::format("{} = true leaves {} of these whole on each rank, since no other rank holds them: {}",
                                 key, of_layers, fmt::join(whole, ", "))});
}

void add_offload(std::vector<RunNote>& notes, const RunSpec& run) {
  const bool recomputes_rows = run.memory.recompute.covers(&RecomputeSpec::expert_up);
  if (!run.memory.offload.tensors.layer || recomputes_rows || !pools_expert_rows(run)) return;
  notes.push_back(
      {fmt::format("memory.offload \"layer\" leaves the rows of experts on the device: several ranks share "
                   "the experts, so their rows are in the pool of memory.expert_rows = {}; 0 plans and "
                   "moves the worst case",
                   expert_rows_budget(run))});
}

void add_yarn(std::vector<RunNote>& notes, const RunSpec& run) {
  const RopeScaling& s = run.model.rope_scaling;
  if (s.type != RopeType::yarn) return;
  if (run.provenance.contains(kYarnFactor))
    notes.push_back(
        {fmt::format("model.rope_scaling has no factor, so YaRN takes max_position_embeddings / "
                     "original_max_position_embeddings = {} / {} = {}",
                     run.model.max_position_embeddings, s.original_positions, s.factor)});
  const int64_t stretched = std::llround(s.factor * static_cast<double>(s.original_positions));
  if (run.train.seq_len > stretched)
    notes.push_back(
        {fmt::format("train.seq_len = {} is longer than the {} positions to which model.rope_scaling "
                     "stretches the model: factor * original_max_position_embeddings = {} * {}",
                     run.train.seq_len, stretched, s.factor, s.original_positions)});
}

// The note is of a recipe's own model: the config.json of a hub may have a window that is switched off.
void add_window(std::vector<RunNote>& notes, const RunSpec& run) {
  const auto from = run.provenance.find("model.sliding_window");
  if (from == run.provenance.end() || from->second == "default" || !run.model_hf.empty()) return;
  if (run.model.sliding_window > 0 || run.model.family == "moebius") return;
  const std::string& family = run.model.family;
  const bool by_layer = has_hf_key(family, "max_window_layers"), is_switched = has_hf_key(family, "use_sliding_window");
  notes.push_back(
      {fmt::format("model.sliding_window has no effect: no layer of this \"{}\" has a window; {}{}, or "
                   "remove model.sliding_window",
                   family, is_switched ? "set model.use_sliding_window = true" : "let model.layer_types name some",
                   by_layer ? " (model.max_window_layers or model.layer_types say in which layers)" : ""),
       /*is_warning=*/true});
}

}  // namespace

std::vector<RunNote> run_notes(const RunSpec& run, int64_t num_ranks) {
  std::vector<RunNote> notes;
  if (run.parallel.fsdp) add_sharding(notes, "parallel.fsdp", "weights", run, num_ranks);
  // Then only adapters have gradients, and they are on other ranks than their matrices.
  if (run.parallel.shard_gradients)
    add_sharding(notes, "parallel.shard_gradients", "gradients", run, num_ranks, !run.lora.is_on());
  add_offload(notes, run);
  add_yarn(notes, run);
  add_window(notes, run);
  return notes;
}

}  // namespace moebius
