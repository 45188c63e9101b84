#include "config/recipe/table.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "config/hf/keys.h"
#include "config/recipe/text.h"
#include "config/testing.h"

namespace moebius {
namespace {

// Returns whether it is a key of Hugging Face's config.json.
bool is_hf(const std::string& key) { return key.starts_with("model.") && find_hf_key(key.substr(6)); }

// The test lists all keys, so that no key is added by accident.
TEST(RecipeKeys, EqualTheListOfAllKeys) {
  const std::string keys =
      "checkpoint.async checkpoint.every checkpoint.keep checkpoint.resume "
      "data.order_by_cost data.pack_documents data.separate_documents data.tokenizer data.train data.valid "
      "log.every log.precision log.tensorboard log.trace "
      "lora.alpha lora.base lora.dropout lora.init_from lora.rank lora.targets "
      "memory.expert_rows memory.fit memory.offload memory.offload_fraction memory.recompute "
      "model.attention_bias model.attention_dropout model.attention_sinks model.clip_qkv model.config "
      "model.decoder_sparse_step "
      "model.expert_bias model.first_k_dense_replace model.group_score model.head_dim model.hf "
      "model.hidden_act model.hidden_size model.init_from model.initializer_range model.intermediate_size "
      "model.kv_lora_rank model.layer_types model.max_position_embeddings model.max_window_layers model.mlp_bias "
      "model.mlp_only_layers "
      "model.model_type model.moe_intermediate_size "
      "model.moe_layer_freq model.n_group model.n_routed_experts model.n_shared_experts "
      "model.norm_topk_prob model.num_attention_heads model.num_experts model.num_experts_per_tok "
      "model.num_hidden_layers model.num_key_value_heads model.num_local_experts model.num_mtp_layers "
      "model.num_nextn_predict_layers model.q_lora_rank "
      "model.qk_nope_head_dim "
      "model.qk_norm model.qk_rope_head_dim model.qkv_bias "
      "model.rms_norm_eps model.rope_interleave model.rope_parameters model.rope_scaling model.rope_theta "
      "model.routed_scaling_factor model.router_bias model.scoring_func model.shared_expert_gate "
      "model.shared_expert_intermediate_size model.sliding_window model.swiglu_limit model.tie_word_embeddings "
      "model.topk_group model.topk_method model.use_sliding_window model.v_head_dim model.vocab_size "
      "moe.aux_coeff moe.balance moe.bias_rate moe.capacity_factor moe.drop_policy moe.force_balance "
      "moe.jitter moe.rank_rows_factor moe.router_dtype moe.z_coeff "
      "optimizer.beta1 optimizer.beta2 optimizer.clip optimizer.decay_steps optimizer.eps optimizer.fuse_grad optimizer.grad optimizer.lr "
      "optimizer.master optimizer.min_lr optimizer.momentum optimizer.name optimizer.offload optimizer.offload_buffer optimizer.offload_grad optimizer.qk_clip "
      "optimizer.schedule optimizer.state "
      "optimizer.warmup_steps optimizer.weight_decay "
      "parallel.cp parallel.cp_comm parallel.cp_comm_window parallel.cp_inner "
      "parallel.dispatcher parallel.dynamic_cp parallel.ep parallel.etp parallel.expert_overlap "
      "parallel.fsdp parallel.fsdp_shard parallel.layout "
      "parallel.overlap parallel.pp parallel.ranks_per_node parallel.schedule parallel.shard_gradients "
      "parallel.sums parallel.tp parallel.vpp "
      "precision.activations precision.compute precision.dispatch precision.keep precision.recipe precision.weight_copies "
      "precision.weight_gradients "
      "precision.weights "
      "run.device run.dir run.graph run.kernels run.seed run.threads "
      "train.eval_batches train.eval_every train.freeze train.global_batch train.micro_batch train.mtp_coeff "
      "train.seq_len train.steps";
  EXPECT_EQ(fmt::format("{}", fmt::join(recipe_keys(), " ")), keys);
}

// The keys of a config.json are Hugging Face's, a table of their own.
TEST(RecipeKeys, MoebiusHasAtMostAHundredKeys) {
  const std::vector<std::string> all = recipe_keys();
  const auto ours = std::count_if(all.begin(), all.end(), [](const std::string& key) { return !is_hf(key); });
  EXPECT_EQ(ours + std::ssize(hf_keys()), std::ssize(all));
  EXPECT_LE(ours, 100);
}

TEST(RecipeKeys, EveryKeyOfMoebiusHasAnEffect) {
  const std::vector<std::string> tried = {"true",
                                          "false",
                                          "1",
                                          "2",
                                          "4",
                                          "0.25",
                                          "0.5",
                                          "\"cpu\"",
                                          "\"cuda\"",
                                          "[]",
                                          "[\"p\"]",
                                          "\"p\"",
                                          "\"q\"",
                                          "\"none\"",
                                          "\"aux\"",
                                          "\"f32\"",
                                          "\"bf16\"",
                                          "\"compute\"",
                                          "\"recipe\"",
                                          "\"mxfp8\"",
                                          "\"mxfp4\"",
                                          "\"probs\"",
                                          "\"position\"",
                                          "\"auto\"",
                                          "\"ring\"",
                                          "\"layer\"",
                                          "\"allgather\"",
                                          "\"1f1b\"",
                                          "\"zb_h1\"",
                                          "\"nccl\"",
                                          "\"ranks\"",
                                          "\"adamw\"",
                                          "\"sgd\"",
                                          "\"linear\"",
                                          "\"cosine\"",
                                          "\"portable\"",
                                          "\"bf16_remainder\"",
                                          "[\"norm\"]",
                                          "80GiB",
                                          "79.5GB",
                                          "\"{}\"",
                                          "\"{\\\"a\\\": 1}\""};
  for (const RecipeKey& key : recipe_table()) {
    if (is_hf(key.name)) continue;
    std::set<std::string> resolved;
    for (const std::string& text : tried) {
      const RecipeEntry entry = read_override(key.name + "=" + text);
      RunSpec spec;
      if (!key.rule.accepts(entry.value)) continue;
      key.read(spec, entry.value);
      resolved.insert(spec.model.source ? spec.model.source->dump() : key.write(spec).dump());
    }
    EXPECT_GT(resolved.size(), 1u) << key.name;
  }
}

TEST(RetiredKeys, AreReadWithTheirOneValueAndNotWritten) {
  const std::string old = "[run]\ndeterministic = true\n" + kModel + kRest + "[memory]\nrecompute = []\n";
  const RunSpec spec = parse_run_spec(old, "r.toml", {});
  EXPECT_EQ(without_provenance(spec), without_provenance(parse()));
  EXPECT_EQ(train_identity(spec), train_identity(parse()));
  for (const RetiredKey& key : retired_keys()) EXPECT_FALSE(spec.provenance.contains(key.name)) << key.name;
  EXPECT_EQ(to_toml(spec, false), to_toml(parse(), false));
  EXPECT_NO_THROW(parse({"run.deterministic=true"}));
}

TEST(RetiredKeys, AnotherValueIsRefused) {
  EXPECT_EQ(parse_error({"run.deterministic=false"}),
            "--set: run.deterministic is no longer a key, since every run is deterministic; got false; remove it");
}

}  // namespace
}  // namespace moebius
