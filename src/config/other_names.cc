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
    kEpochs = "train.steps (there are no epochs: tokens of the data / (global_batch * seq_len) steps read it once)",
    kAccumulation = "train.global_batch (global_batch / (micro_batch * dp) micro-batches are accumulated)";

// Names in Hugging Face's trainers and config files, in Megatron and in DeepSpeed.
constexpr OtherName kOtherNames[] = {
    {"learning_rate", "optimizer.lr"},
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
};

}  // namespace

std::string other_name_hint(std::string_view key) {
  const std::string_view last = key.substr(key.rfind('.') + 1);
  const auto found =
      std::find_if(std::begin(kOtherNames), std::end(kOtherNames), [&](const OtherName& o) { return o.name == last; });
  return found == std::end(kOtherNames) ? "" : fmt::format("; that is {} here", found->ours);
}

}  // namespace moebius
