#include "config/other_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace moebius {

namespace {

struct OtherName {
  std::string_view name, ours;
};

constexpr std::string_view
    kSequenceParallel = "on wherever parallel.tp is above 1",
    kNoLowPrecision = "precision.compute (\"bf16\" or \"f32\"), which holds for the whole model",
    kEpochs = "train.steps (there are no epochs: tokens of the data / (global_batch * seq_len) steps read it once)",
    kShardedWeights = "parallel.fsdp for weights, parallel.shard_gradients for gradients",
    kShards = "parallel.fsdp_shard, the ranks that share a layer; groups of as many ranks have copies",
    kAccumulation = "train.global_batch (global_batch / (micro_batch * dp) micro-batches are accumulated)";

// Names in Hugging Face's trainers and config files, in Megatron, in torchtitan and in DeepSpeed.
constexpr OtherName kOtherNames[] = {
    {"learning_rate", "optimizer.lr"},
    {"lr", "optimizer.lr"},
    {"max_lr", "optimizer.lr"},
    {"epochs", kEpochs},
    {"num_epochs", kEpochs},
    {"num_train_epochs", kEpochs},
    {"max_steps", "train.steps"},
    {"train_iters", "train.steps"},
    {"gradient_accumulation", kAccumulation},
    {"gradient_accumulation_steps", kAccumulation},
    {"batch_size", "train.global_batch, and of a rank at a time train.micro_batch"},
    {"global_batch_size", "train.global_batch"},
    {"micro_batch_size", "train.micro_batch"},
    {"per_device_train_batch_size", "train.micro_batch"},
    {"max_seq_length", "train.seq_len"},
    {"max_length", "train.seq_len"},
    {"seq_length", "train.seq_len"},
    {"sequence_length", "train.seq_len"},
    {"block_size", "train.seq_len"},
    {"bf16", "precision.compute = \"bf16\""},
    {"fp16", "precision.compute (\"bf16\" or \"f32\")"},
    {"fp32", "precision.compute = \"f32\""},
    {"dtype", "precision.compute"},
    {"torch_dtype", "precision.compute"},
    {"mixed_precision", "precision.compute"},
    {"gradient_checkpointing", "memory.recompute = [\"layer\"]"},
    {"activation_checkpointing", "memory.recompute"},
    {"warmup_ratio", "optimizer.warmup_steps"},
    {"lr_warmup_iters", "optimizer.warmup_steps"},
    {"lr_scheduler_type", "optimizer.schedule"},
    {"lr_decay_style", "optimizer.schedule"},
    {"max_grad_norm", "optimizer.clip"},
    {"clip_grad", "optimizer.clip"},
    {"gradient_clipping", "optimizer.clip"},
    {"qk_clip_threshold", "optimizer.qk_clip"},
    {"adam_beta1", "optimizer.beta1"},
    {"adam_beta2", "optimizer.beta2"},
    {"adam_epsilon", "optimizer.eps"},
    {"output_dir", "run.dir"},
    {"save_steps", "checkpoint.every"},
    {"save_interval", "checkpoint.every"},
    {"save_total_limit", "checkpoint.keep"},
    {"logging_steps", "log.every"},
    {"eval_steps", "train.eval_every"},
    {"model_name_or_path", "model.hf, and for the weights model.init_from"},
    {"num_layers", "model.num_hidden_layers"},
    {"n_layers", "model.num_hidden_layers"},
    {"num_heads", "model.num_attention_heads"},
    {"top_k", "model.num_experts_per_tok"},
    {"router_aux_loss_coef", "moe.aux_coeff, with moe.balance = \"aux\""},
    {"moe_aux_loss_coeff", "moe.aux_coeff, with moe.balance = \"aux\""},
    {"tensor_parallel", "parallel.tp"},
    {"tensor_model_parallel_size", "parallel.tp"},
    {"pipeline_model_parallel_size", "parallel.pp"},
    {"context_parallel_size", "parallel.cp"},
    {"expert_model_parallel_size", "parallel.ep"},
    {"expert_tensor_parallel_size", "parallel.etp"},
    {"virtual_pipeline_model_parallel_size", "parallel.vpp"},
    {"num_virtual_stages_per_pipeline_rank", "parallel.vpp"},
    {"pipeline_model_parallel_layout", "parallel.layout"},
    {"expert_parallel", "parallel.ep"},
    {"pipeline_parallel", "parallel.pp"},
    {"context_parallel", "parallel.cp"},
    {"data_parallel", "what tp, cp and pp leave of the number of ranks"},
    {"sp", kSequenceParallel},
    {"sequence_parallel", kSequenceParallel},
    {"use_distributed_optimizer", "always on: masters and moments are spread over the ranks of dp"},
    {"overlap_grad_reduce", "parallel.overlap"},
    {"use_megatron_fsdp", kShardedWeights},
    {"fully_shard", kShardedWeights},
    {"data_parallel_sharding_strategy", kShardedWeights},
    {"outer_dp_sharding_strategy", kShards},
    {"data_parallel_replicate_degree", kShards},
    {"data_parallel_shard_degree", kShards},
    {"zero_hpz_partition_size", kShards},
    {"zero_stage", kShardedWeights},
    {"token_dispatcher_type", "parallel.dispatcher"},
    {"moe_token_dispatcher_type", "parallel.dispatcher"},
    {"overlap_dispatch_backward_with_experts_wgrad", "parallel.expert_overlap"},
    {"moe_shared_expert_overlap", "parallel.expert_overlap"},
    {"cp_comm_type", "parallel.cp_comm"},
    {"hierarchical_context_parallel_sizes", "parallel.cp_inner, the first of them"},
    {"router_topk", "model.num_experts_per_tok"},
    {"moe_router_topk", "model.num_experts_per_tok"},
    {"topk", "model.num_experts_per_tok"},
    {"router_load_balancing_type", "moe.balance"},
    {"moe_router_load_balancing_type", "moe.balance"},
    {"router_bias_rate", "moe.bias_rate"},
    {"router_bias_update_rate", "moe.bias_rate"},
    {"moe_router_bias_update_rate", "moe.bias_rate"},
    {"moe_router_score_function", "model.scoring_func"},
    {"moe_router_dtype", "moe.router_dtype"},
    {"moe_z_loss_coeff", "moe.z_coeff"},
    {"moe_input_jitter_eps", "moe.jitter"},
    {"moe_expert_capacity_factor", "moe.capacity_factor"},
    {"moe_ffn_hidden_size", "model.moe_intermediate_size"},
    {"moe_shared_expert_intermediate_size", "model.shared_expert_intermediate_size"},
    {"ffn_hidden_size", "model.intermediate_size"},
    {"num_query_groups", "model.num_key_value_heads"},
    {"kv_channels", "model.head_dim"},
    {"rotary_base", "model.rope_theta"},
    {"norm_epsilon", "model.rms_norm_eps"},
    {"init_method_std", "model.initializer_range"},
    {"recompute_granularity", "memory.recompute, with \"layer\" for full recomputation"},
    {"recompute_modules", "memory.recompute"},
    {"fine_grained_activation_offloading", "memory.offload"},
    {"offload_modules", "memory.offload"},
    {"activation_offload_fraction", "memory.offload_fraction"},
    {"lora_rank", "lora.rank"},
    {"lora_r", "lora.rank"},
    {"lora_alpha", "lora.alpha"},
    {"lora_dropout", "lora.dropout"},
    {"lora_target_modules", "lora.targets"},
    {"target_modules", "lora.targets"},
    {"fp8", kNoLowPrecision},
    {"fp8_recipe", kNoLowPrecision},
    {"data_path", "data.train"},
    {"train_data_path", "data.train"},
    {"valid_data_path", "data.valid"},
    {"tokenizer_model", "data.tokenizer"},
    {"tokenizer_type", "data.tokenizer"},
    {"eval_interval", "train.eval_every"},
    {"eval_iters", "train.eval_batches"},
    {"log_interval", "log.every"},
    {"tensorboard_dir", "log.tensorboard (the files are in run.dir)"},
    {"wandb", "log.tensorboard (the only tracker; metrics.jsonl has the same figures)"},
    {"wandb_project", "log.tensorboard (the only tracker; metrics.jsonl has the same figures)"},
    {"no_save_optim", "not there: a checkpoint always has the optimizer's state"},
    // Names that say something only together with their section.
    {"lora.r", "lora.rank"},
    {"precision.recipe", kNoLowPrecision},
    {"data.path", "data.train"},
};

}  // namespace

std::string other_name_hint(std::string_view key) {
  std::string name(key);
  std::replace(name.begin(), name.end(), '-', '_');  // a flag of a command line
  if (const size_t begin = name.find_first_not_of('_'); begin != name.npos) name.erase(0, begin);
  const std::string_view last = std::string_view(name).substr(name.rfind('.') + 1);
  const auto found = std::find_if(std::begin(kOtherNames), std::end(kOtherNames),
                                  [&](const OtherName& o) { return o.name == name || o.name == last; });
  return found == std::end(kOtherNames) ? "" : fmt::format("; here that is {}", found->ours);
}

}  // namespace moebius
