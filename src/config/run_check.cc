// Checks the relations between the values of a run. The rules of the table check the range
// of each value.
#include "config/run_check.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <numeric>
#include <set>
#include <string_view>
#include <system_error>

#include "config/check/batch_split_check.h"
#include "config/check/context_parallel_check.h"
#include "config/check/expert_rows_bound.h"
#include "config/check/fuse_grad_check.h"
#include "config/check/offload_check.h"
#include "config/check/qk_clip_check.h"
#include "config/check/run_check_keys.h"
#include "config/check/sharding_check.h"
#include "config/check/tensor_scales_check.h"
#include "config/check/zb_h1_check.h"
#include "config/dispatcher_choice.h"
#include "config/recipe/table.h"
#include "config/stage_layout.h"
#include "core/error.h"

namespace moebius {

using nlohmann::json;

namespace {

// One error names all required keys that a recipe lacks, and those that `train` will
// need too.
void check_required(const RunSpec& s) {
  std::string missing, more;
  const auto add = [](std::string& to, const std::string& key) { to += (to.empty() ? "" : ", ") + key; };
  for (const RecipeKey& key : recipe_table()) {
    const auto from = s.provenance.find(key.name);
    const bool said = from != s.provenance.end() && from->second != "default";
    if (key.required && !said && !key.rule.accepts(key.write(s))) add(missing, key.name);
  }
  if (s.dir.empty()) add(more, "run.dir");
  if (s.data.train.empty()) add(more, "data.train");
  MOEBIUS_CHECK(usage, missing.empty(), "the recipe lacks {}; give them in it, or with --set SECTION.KEY=VALUE{}",
                missing, more.empty() ? "" : fmt::format(" (and, to train, {})", more));
}

void check_ranges(const RunSpec& s) {
  for (const RecipeKey& key : recipe_table()) {
    if (section_of(key.name) == "model") continue;  // ModelSpec::check
    const json value = key.write(s);
    MOEBIUS_CHECK(usage, value.is_null() || key.rule.accepts(value), "{} must be {}; got {}{}", key.name,
                  key.rule.expects, shown(value), origin(s, key.name));
  }
}

void check_mtp(const RunSpec& s) {
  if (s.model.num_mtp_layers == 0)
    refuse_idle(s, "train.mtp_coeff",
                "the model has no multi-token prediction (model.num_nextn_predict_layers); remove it");
}

void check_valid_weights(const RunSpec& s) {
  for (const DatasetSpec& d : s.data.valid) {
    MOEBIUS_CHECK(usage, d.weight == 1,
                  "data.valid gives \"{}\" a weight of {}, but an evaluation reads each dataset once; remove the "
                  "weight (data.train has weights){}",
                  d.prefix, d.weight, origin(s, "data.valid"));
  }
}

// Refuses keys of [moe] that would change nothing.
void check_idle_moe_keys(const RunSpec& s) {
  if (s.model.num_moe_layers() == 0) {
    for (const char* key : {"moe.balance", "moe.aux_coeff", "moe.z_coeff", "moe.bias_rate", "moe.capacity_factor",
                            "moe.drop_policy", "moe.jitter", "moe.router_dtype", "moe.force_balance"})
      refuse_idle(s, key, "the model has no MoE layer (model.num_experts, model.moe_layer_freq); remove it");
  }
  if (!s.moe.bias) refuse_idle(s, "moe.bias_rate", "moe.balance has no \"bias\"; add it, or remove bias_rate");
  if (s.moe.capacity_factor == 0)
    refuse_idle(s, "moe.drop_policy", "without moe.capacity_factor nothing is dropped; set it, or remove drop_policy");
}

void check_datasets(const RunSpec& s, const char* key, const std::vector<DatasetSpec>& datasets) {
  std::set<std::string> seen;
  for (const DatasetSpec& d : datasets) {
    MOEBIUS_CHECK(usage, seen.insert(d.prefix).second, "{} names \"{}\" twice; give it once, with a weight{}", key,
                  d.prefix, origin(s, key));
  }
}

// Returns "; the nearest are 6 and 9": the batches nearest to train.global_batch. Virtual stages take micro-batches in
// groups of pp. Empty where no batch is large enough.
std::string nearest_batches(const RunSpec& s, int64_t together) {
  const int64_t group = s.parallel.vpp > 1 ? s.parallel.pp : 1;
  if (together > kMaxCount / group) return "";
  return "; the nearest " + nearest_multiples(s.train.global_batch, together * group, kMaxCount);
}

void check_batches(const RunSpec& s, int64_t world_size) {
  const int64_t dp = s.parallel.dp(world_size), together = s.train.micro_batch * dp;
  MOEBIUS_CHECK(usage, s.train.global_batch % together == 0,
                "train.global_batch must be divisible by micro_batch * dp = {} * {} = {}; got {}{}{}",
                s.train.micro_batch, dp, together, s.train.global_batch, nearest_batches(s, together),
                origin(s, "train.global_batch"));
  if (!s.data.separate_documents) {
    refuse_idle(s, "data.order_by_cost",
                "without data.separate_documents every sequence costs the same; set that, or remove it");
    refuse_idle(s, "data.pack_documents",
                "without data.separate_documents a token sees the documents before its own; set that, or remove it");
  }
  MOEBIUS_CHECK(usage, s.train.seq_len <= s.model.max_position_embeddings,
                "train.seq_len must be at most model.max_position_embeddings = {}; got {}; a longer context needs "
                "model.max_position_embeddings and, for a trained model, model.rope_scaling or rope_theta{}",
                s.model.max_position_embeddings, s.train.seq_len, origin(s, "train.seq_len"));
  // Ranks that share experts send the index of each token with its row, as i32 (model/layers/tokens_of_rows.h).
  MOEBIUS_CHECK(usage,
                s.precision.recipe != PrecisionRecipe::nvfp4 || s.train.global_batch <= INT32_MAX / s.train.seq_len,
                "precision.recipe = \"nvfp4\" rounds by the index of a token in the global batch: "
                "train.global_batch * seq_len must be at most {}; got {} * {}; lower train.global_batch{}",
                INT32_MAX, s.train.global_batch, s.train.seq_len, origin(s, "train.global_batch"));
}

void check_schedule(const RunSpec& s) {
  const OptimizerSpec& o = s.optimizer;
  MOEBIUS_CHECK(usage, o.min_lr <= o.lr, "optimizer.min_lr must be at most lr = {}; got {}{}", o.lr, o.min_lr,
                origin(s, "optimizer.min_lr"));
  MOEBIUS_CHECK(usage, o.schedule != LrSchedule::constant || o.min_lr == 0,
                "optimizer.min_lr = {} has no meaning in schedule \"constant\"; remove it or choose another{}",
                o.min_lr, origin(s, "optimizer.min_lr"));
  MOEBIUS_CHECK(usage, o.schedule == LrSchedule::wsd || o.decay_steps == 0,
                "optimizer.decay_steps = {} has a meaning in schedule \"wsd\" only; remove it or choose wsd{}",
                o.decay_steps, origin(s, "optimizer.decay_steps"));
  MOEBIUS_CHECK(
      usage, o.schedule != LrSchedule::wsd || o.decay_steps > 0 || s.train.steps >= 20,
      "optimizer.schedule \"wsd\" needs decay_steps here: a tenth of train.steps = {} is one step, which would "
      "be a jump; set optimizer.decay_steps{}",
      s.train.steps, origin(s, "optimizer.schedule"));
  MOEBIUS_CHECK(
      usage, o.warmup_steps + o.decay_steps <= s.train.steps,
      "optimizer.warmup_steps + decay_steps = {} + {} must be at most train.steps = {}; lower them or train longer{}",
      o.warmup_steps, o.decay_steps, s.train.steps, origin(s, "optimizer.warmup_steps"));
}

void check_grad(const RunSpec& s) {
  const OptimizerSpec& o = s.optimizer;
  if (s.precision.compute == DType::f32)
    refuse_idle(s, "optimizer.grad",
                "precision.compute is \"f32\", and gradients of f32 weights are f32; set \"bf16\", or remove it");
  if (o.grad == GradFormat::f32)
    for (const char* key : {"optimizer.offload_grad", "optimizer.fuse_grad"})
      refuse_idle(s, key, "optimizer.grad is \"f32\"; set \"bf16\", or remove it");
  MOEBIUS_CHECK(
      usage, !o.fuse_grad || !o.offload_grad,
      "optimizer.fuse_grad = true needs sums of gradients in the memory of the GPU; set optimizer.offload_grad "
      "= false, or remove fuse_grad{}",
      origin(s, "optimizer.fuse_grad"));
  if (s.model.num_moe_layers() == 0) refuse_idle(s, "optimizer.fuse_grad", "the model has no MoE layer; remove it");
  if (s.lora.is_on()) refuse_idle(s, "optimizer.fuse_grad", "with lora.rank no weights of experts train; remove it");
  if (!s.precision.has_plain_dw())
    refuse_idle(
        s, "optimizer.fuse_grad",
        "products with quantised operands write f32 gradients; set precision.weight_gradients = \"compute\", or "
        "remove it");
}

void check_muon(const RunSpec& s) {
  const OptimizerSpec& o = s.optimizer;
  if (o.kind != OptimizerKind::muon) return;
  MOEBIUS_CHECK(usage, o.momentum > 0,
                "optimizer.name = \"muon\" needs optimizer.momentum above 0; got 0; 0.95 is usual{}",
                origin(s, "optimizer.momentum"));
  MOEBIUS_CHECK(usage, o.grad == GradFormat::f32,
                "optimizer.name = \"muon\" makes its updates in the memory of f32 gradients; remove optimizer.grad, or "
                "choose \"adamw\"{}",
                origin(s, "optimizer.grad"));
  // Ranks of etp with unequal shards of these biases would own different elements of an expert's matrices.
  MOEBIUS_CHECK(usage, !s.model.expert_proj_bias || s.model.hidden_size % s.parallel.etp == 0,
                "optimizer.name = \"muon\" with biases of experts needs parallel.etp to divide model.hidden_size = {}; "
                "got {}; choose another degree, or \"adamw\"{}",
                s.model.hidden_size, s.parallel.etp, origin(s, "parallel.etp"));
}

void check_optimizer(const RunSpec& s) {
  const OptimizerSpec& o = s.optimizer;
  check_muon(s);
  if (o.kind == OptimizerKind::adamw)
    refuse_idle(s, "optimizer.momentum", "optimizer.name is \"adamw\"; choose \"sgd\" or \"muon\", or remove it");
  if (o.kind == OptimizerKind::sgd)
    for (const char* key : {"optimizer.beta1", "optimizer.beta2", "optimizer.eps"})
      refuse_idle(s, key, "optimizer.name is \"sgd\"; choose \"adamw\", or remove it");
  if (o.kind == OptimizerKind::sgd && o.momentum == 0)
    refuse_idle(s, "optimizer.state", "optimizer.momentum is 0, so there is no state; set momentum, or remove it");
  if (s.precision.compute == DType::f32)
    refuse_idle(s, "optimizer.master",
                "precision.compute is \"f32\", and f32 weights are their own masters; set \"bf16\", or remove it");
  MOEBIUS_CHECK(usage, o.offload || o.offload_buffer.value_or(0) == 0,
                "optimizer.offload_buffer = {} would do nothing: optimizer.offload is false; set it to true, or remove "
                "offload_buffer{}",
                *o.offload_buffer, origin(s, "optimizer.offload_buffer"));
  check_grad(s);
}

void check_sinkhorn(const RunSpec& s) {
  const BalanceSpec& b = s.moe;
  MOEBIUS_CHECK(usage, !b.sinkhorn || !(b.aux || b.seq_aux || b.global_aux || b.bias || b.force_balance),
                "moe.balance \"sinkhorn\" balances experts by itself; remove the other balances and force_balance{}",
                origin(s, "moe.balance"));
  MOEBIUS_CHECK(usage, !b.sinkhorn || s.model.n_group == 1,
                "moe.balance \"sinkhorn\" chooses among all experts: model.n_group must be 1; got {}; choose another "
                "balance, or a model without groups{}",
                s.model.n_group, origin(s, "moe.balance"));
  MOEBIUS_CHECK(usage, !b.sinkhorn || !s.model.expert_bias,
                "moe.balance \"sinkhorn\" chooses by the scores only: model.expert_bias must be false; choose another "
                "balance, or a model without the bias{}",
                origin(s, "moe.balance"));
}

void check_balance(const RunSpec& s) {
  const BalanceSpec& b = s.moe;
  const bool has_aux = b.aux || b.seq_aux || b.global_aux;
  check_sinkhorn(s);
  MOEBIUS_CHECK(
      usage, !b.force_balance || !(has_aux || b.bias),
      "moe.force_balance gives every expert the same load, so moe.balance has nothing to balance; remove one{}",
      origin(s, "moe.force_balance"));
  MOEBIUS_CHECK(usage, s.model.num_experts > 0 || !(has_aux || b.bias || b.sinkhorn),
                "moe.balance needs experts; the model has none: set balance = \"none\"{}", origin(s, "moe.balance"));
  MOEBIUS_CHECK(usage, !has_aux || b.aux_coeff > 0,
                "moe.balance has an auxiliary loss but aux_coeff is 0, so it would do nothing; set moe.aux_coeff{}",
                origin(s, "moe.balance"));
  MOEBIUS_CHECK(
      usage, has_aux || b.aux_coeff == 0,
      "moe.aux_coeff = {} needs \"aux\", \"seq_aux\" or \"global_aux\" in moe.balance; add one or remove it{}",
      b.aux_coeff, origin(s, "moe.aux_coeff"));
  MOEBIUS_CHECK(
      usage, !b.bias || s.model.expert_bias,
      "moe.balance \"bias\" needs a model with expert_bias; model_type \"{}\" has none: use another balance, or "
      "\"moebius\", which cannot be exported to Hugging Face{}",
      s.model.family, origin(s, "moe.balance"));
}

void check_recompute(const RunSpec& s) {
  const bool has_dense =
      std::find(s.model.moe_layers.begin(), s.model.moe_layers.end(), false) != s.model.moe_layers.end();
  const auto refuse = [&](bool named, const char* name, bool exists, const char* what) {
    MOEBIUS_CHECK(usage, !named || exists, "memory.recompute \"{}\" would do nothing: the model has no {}; remove it{}",
                  name, what, origin(s, "memory.recompute"));
  };
  const RecomputeSpec& all = s.memory.recompute;
  RecomputeSpec r = all;  // of any layer
  const int64_t last = s.model.num_layers_and_mtp() - 1;
  for (const RecomputeRange& range : all.ranges) {
    r.*range.what = true;
    MOEBIUS_CHECK(usage, range.last <= last,
                  "memory.recompute names layer {}, and the last one of the model is {}{}; correct the range{}",
                  range.last, last, s.model.num_mtp_layers > 0 ? ", with multi-token prediction" : "",
                  origin(s, "memory.recompute"));
  }
  MOEBIUS_CHECK(
      usage, !s.memory.automatic || s.memory.fit_bytes > 0,
      "memory.recompute = \"auto\" needs memory.fit, the memory that a rank may need, such as \"80GiB\"; set it{}",
      origin(s, "memory.recompute"));
  refuse(r.mla_up_proj, "mla_up_proj", s.model.kv_lora_rank > 0, "latent attention");
  refuse(r.mlp, "mlp", has_dense, "dense feed-forward layers");
  refuse(r.expert_up, "expert_up", s.model.num_experts > 0, "experts");
  refuse(r.shared_expert, "shared_expert", s.model.shared_intermediate_size > 0, "shared experts");
}

// Checks the keys about weights and rows in the recipe's format.
void check_held_in_recipe(const RunSpec& s) {
  const bool weights = s.precision.weights == PrecisionChoice::recipe,
             dispatch = s.precision.dispatch == PrecisionChoice::recipe,
             activations = s.precision.activations == PrecisionChoice::recipe;
  for (const char* key : {weights ? "precision.weights" : "", dispatch ? "precision.dispatch" : "",
                          activations ? "precision.activations" : ""}) {
    if (*key == 0) continue;
    MOEBIUS_CHECK(usage, s.precision.recipe == PrecisionRecipe::fp8_block,
                  "{} = \"recipe\" is for precision.recipe = \"fp8_block\", whose blocks have one scale in both "
                  "directions or along a row; got \"{}\"; set {} = \"compute\"{}",
                  key, name_of(s.precision.recipe), key, origin(s, key));
  }
  if (s.model.num_experts == 0)
    refuse_idle(s, "precision.dispatch", "the model has no experts to which rows are sent; remove it");
  if (!weights) return;
  MOEBIUS_CHECK(usage, s.optimizer.master == MasterFormat::f32,
                "precision.weights = \"recipe\" holds weights in 8 bits, which {} cannot be the masters of; set "
                "optimizer.master = \"f32\", or precision.weights = \"compute\"{}",
                s.optimizer.master == MasterFormat::bf16_remainder ? "remainders" : "bf16 weights",
                origin(s, "precision.weights"));
  if (s.lora.is_on())
    refuse_idle(s, "precision.weights",
                "with lora.rank above 0 the weights are frozen and have no masters; see lora.base, or remove it");
}

void check_precision(const RunSpec& s) {
  if (s.precision.recipe == PrecisionRecipe::none) {
    for (const char* key : {"precision.keep", "precision.weight_gradients", "precision.weights",
                            "precision.weight_copies", "precision.dispatch", "precision.activations", "log.precision"})
      refuse_idle(s, key, "precision.recipe is \"none\"; set a recipe, or remove it");
    return;
  }
  check_held_in_recipe(s);
  const bool has_kernels = s.precision.recipe == PrecisionRecipe::fp8_block;  // others may be emulated on a GPU
  MOEBIUS_CHECK(
      usage, s.device == DeviceKind::cpu || !has_kernels || s.precision.compute == DType::bf16,
      "precision.recipe = \"{}\" on a GPU needs precision.compute = \"bf16\"; got \"{}\"; change one of them{}",
      name_of(s.precision.recipe), name_of(s.precision.compute), origin(s, "precision.recipe"));
  MOEBIUS_CHECK(usage, !has_kernels || s.kernels == KernelChoice::automatic,
                "precision.recipe = \"{}\" has no portable kernels; set run.kernels = \"auto\" or precision.recipe = "
                "\"none\"{}",
                name_of(s.precision.recipe), origin(s, "precision.recipe"));
  check_tensor_scales(s);
}

// With adapters the model itself does not change: keys that would change it are refused.
void check_lora(const RunSpec& s) {
  if (!s.lora.is_on()) {
    for (const char* key : {"lora.targets", "lora.init_from", "lora.alpha", "lora.dropout", "lora.base"})
      refuse_idle(s, key, "lora.rank is 0, so there are no adapters; set lora.rank to at least 1, or remove it");
    return;
  }
  MOEBIUS_CHECK(usage, !s.lora.targets.empty(),
                "lora.targets must name the matrices that get adapters, as [\"q_proj\", \"v_proj\"]; got none{}",
                origin(s, "lora.targets"));
  if (s.lora.base != LoraBase::compute) {
    const char* base = s.lora.base == LoraBase::mxfp4 ? "mxfp4" : "fp8_block";
    MOEBIUS_CHECK(usage, !s.init_from.empty(),
                  "lora.base = \"{}\" keeps the weights of model.init_from in few bits; got none to read; set "
                  "model.init_from, or lora.base = \"compute\"{}",
                  base, origin(s, "lora.base"));
    MOEBIUS_CHECK(usage, s.precision.recipe == PrecisionRecipe::none,
                  "lora.base = \"{}\" multiplies in the dtype of the computation; got precision.recipe = \"{}\", "
                  "which quantises weights again; remove one of them{}",
                  base, name_of(s.precision.recipe), origin(s, "lora.base"));
  }
  refuse_idle(s, "train.freeze", "with lora.rank above 0 all but the adapters is frozen; remove it");
  MOEBIUS_CHECK(usage, !s.moe.bias,
                "moe.balance \"bias\" changes the model, which lora.rank = {} keeps as it is; choose another balance, "
                "and model.expert_bias = true where the model was trained with it{}",
                s.lora.rank, origin(s, "moe.balance"));
  MOEBIUS_CHECK(usage, s.num_mtp() == 0,
                "train.mtp_coeff = {} trains modules of multi-token prediction, which get no adapters; set it to 0{}",
                s.train.mtp_coeff, origin(s, "train.mtp_coeff"));
}

struct Size {
  const char* key;
  int64_t size;  // 0: the model has none
};

// Throws Error{usage} unless the degree divides the sizes. The error names the nearest degree that divides all of them,
// and into which `ranks` ranks can be grouped, `others` times the degree at a time.
void check_divides(const char* name, int64_t degree, const std::vector<Size>& sizes, int64_t ranks, int64_t others) {
  int64_t common = 0;
  for (const Size& each : sizes) common = std::gcd(common, each.size);
  for (const Size& each : sizes) {
    MOEBIUS_CHECK(usage, each.size % degree == 0,
                  "parallel.{} must divide {} = {}; got {}; the nearest for {} ranks is {}", name, each.key, each.size,
                  degree, ranks, nearest_divisor(std::gcd(common, ranks / others), degree));
  }
}

void check_layout(const RunSpec& s, int64_t ranks) {
  const ModelSpec& m = s.model;
  const ParallelSpec& p = s.parallel;
  std::vector<Size> of_tp{{"model.num_attention_heads", m.num_heads},
                          {"model.num_key_value_heads", m.num_kv_heads},
                          {"model.shared_expert_intermediate_size", m.shared_intermediate_size}};
  if (m.num_moe_layers() < m.num_layers) of_tp.push_back({"model.intermediate_size", m.intermediate_size});
  check_divides("tp", p.tp, of_tp, ranks, p.cp * p.pp);
  check_divides("ep", p.ep, {{"model.num_experts", m.num_experts}}, ranks, p.etp * p.pp);
  check_divides("etp", p.etp, {{"model.moe_intermediate_size", m.moe_intermediate_size}}, ranks, p.ep * p.pp);
  MOEBIUS_CHECK(usage, m.vocab_size >= p.tp, "parallel.tp must be at most model.vocab_size = {}; got {}", m.vocab_size,
                p.tp);
  check_context_parallel(s, ranks);
  check_rows_of_tp(s);
  if (p.ep * p.etp == 1) {
    for (const char* key :
         {"parallel.dispatcher", "parallel.expert_overlap", "moe.rank_rows_factor", "memory.expert_rows"}) {
      // Resolved recipes of earlier versions hold 1.25, the default at that time.
      if (std::string_view(key) == "memory.expert_rows" && s.memory.expert_rows == kAutoExpertRows) continue;
      refuse_idle(s, key, "parallel.ep and etp are 1, so each rank holds all experts; set parallel.ep, or remove it");
    }
  }
  const bool has_nodes = ranks % p.ranks_per_node == 0 && ranks > p.ranks_per_node;
  const bool has_nodes_of_rows = s.device == DeviceKind::cuda && p.overlap && p.tp * p.cp > p.ranks_per_node;
  if (!has_nodes && !has_nodes_of_rows) {
    refuse_idle(s, "parallel.ranks_per_node",
                fmt::format("the {} of the run are not on several whole nodes of {}; choose a smaller divisor of {}, "
                            "or remove it",
                            counted(ranks, "rank"), p.ranks_per_node, ranks));
  }
  MOEBIUS_CHECK(usage, p.sums == RankSums::ranks || s.device == DeviceKind::cuda,
                "parallel.sums = \"nccl\" adds memory of GPUs; got run.device = \"cpu\"; set run.device = \"cuda\", or "
                "remove it{}",
                origin(s, "parallel.sums"));
  MOEBIUS_CHECK(usage, s.moe.rank_rows_factor == 0 || p.dispatcher == DispatcherKind::alltoall,
                "moe.rank_rows_factor = {} bounds the rows of a rank, which only all-to-all can check; set "
                "parallel.dispatcher = \"alltoall\", or remove it{}",
                s.moe.rank_rows_factor, origin(s, "moe.rank_rows_factor"));
}

// Checks the stages, and that a step has whole groups of pp micro-batches, which take turns on
// the virtual stages.
void check_pipeline(const RunSpec& s, int64_t world_size) {
  const ParallelSpec& p = s.parallel;
  check_mtp_stage(stage_layout({.text = p.layout,
                                .num_ranks = p.pp,
                                .num_virtual = p.vpp,
                                .num_layers = s.model.num_layers,
                                .num_mtp = s.model.num_mtp_layers}));
  check_zb_h1(s);
  if (p.vpp == 1 || s.train.global_batch == 0) return;
  const int64_t dp = p.dp(world_size), M = s.train.global_batch / (s.train.micro_batch * dp);
  MOEBIUS_CHECK(usage, M % p.pp == 0,
                "parallel.vpp = {} needs a multiple of pp = {} micro-batches per step; got train.global_batch / "
                "(micro_batch * dp) = {} / ({} * {}) = {}; change them, or set vpp = 1{}",
                p.vpp, p.pp, s.train.global_batch, s.train.micro_batch, dp, M, origin(s, "parallel.vpp"));
}

// Checks single values, except those of the model.
void check_values(const RunSpec& s) {
  check_required(s);
  check_ranges(s);
}

// Checks the relations between the layout and the other values. A search calls this for each layout.
void check_relations_of_layout(const RunSpec& s, int64_t world_size) {
  s.parallel.check(world_size);
  check_layout(s, world_size);  // whether the layout fits the model, before whether the batch fits the layout
  check_batches(s, world_size);
  check_optimizer(s);
  check_recompute(s);
  check_offload(s);
  check_offload_weights(s, world_size);
  check_precision(s);
  check_fuse_grad(s);
  check_lora(s);
  check_batch_split(s);
  check_sharding(s);
  resolve_dispatcher(s);
  check_pipeline(s, world_size);
}

// Checks the relations between the values other than the layout.
void check_relations_of_policies(const RunSpec& s) {
  check_datasets(s, "data.train", s.data.train);
  check_datasets(s, "data.valid", s.data.valid);
  check_valid_weights(s);
  check_schedule(s);
  check_balance(s);
  check_mtp(s);
  check_idle_moe_keys(s);
  check_qk_clip(s);
}

}  // namespace

void RunSpec::check(int64_t world_size) const {
  check_values(*this);
  model.check();
  check_relations_of_layout(*this, world_size);
  check_relations_of_policies(*this);
}

void check_except_model(const RunSpec& run, int64_t world_size) {
  check_policies(run);
  check_layout_of(run, world_size);
}

void check_policies(const RunSpec& run) {
  check_values(run);
  check_relations_of_policies(run);
}

void check_layout_of(const RunSpec& run, int64_t world_size) { check_relations_of_layout(run, world_size); }

}  // namespace moebius
