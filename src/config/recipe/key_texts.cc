#include "config/recipe/reference.h"

namespace moebius {

namespace {

constexpr std::string_view kRequired = "required", kNone = "none";

std::vector<KeyText> run_texts() {
  return {
      {"run.dir",
       "The folder of the run: checkpoints, metrics, the resolved recipe. A run that is started there again goes on.",
       "required by `train`"},
      {"run.seed", "Weights, the order of the data and jitter follow from it and from the step."},
      {"run.device", "Where the model is computed: on this machine's CPUs, or on one NVIDIA Hopper GPU a rank."},
      {"run.threads", "CPU threads of a rank; 0: its share of the CPUs that it may use. The bits do not depend on it."},
      {"run.graph", "On a GPU the step is recorded once (a CUDA graph) and replayed; the same bits."},
  };
}

std::vector<KeyText> model_origin_texts() {
  return {
      {"model.hf",
       "A Hugging Face folder whose `config.json` gives the model. Its weights are taken where `model.init_from` names "
       "it too; without that they are random.",
       kNone},
      {"model.config", "The text of a whole `config.json`; a resolved recipe holds its model this way.", kNone},
      {"model.init_from",
       "Where the weights come from: a Hugging Face folder, an imported checkpoint, a run's folder or one of its "
       "checkpoints. Without it they are random.",
       kNone},
      {"model.model_type",
       "The family, which says what the other keys may be. `moebius` has every key, and is no family of Hugging "
       "Face: its models cannot be exported."},
  };
}

std::vector<KeyText> model_shape_texts() {
  return {
      {"model.vocab_size", "Ids of the tokenizer, the end of a document included (257 for `bytes`).", kRequired},
      {"model.hidden_size", "Width of the residual stream.", kRequired},
      {"model.num_hidden_layers", "Layers.", kRequired},
      {"model.intermediate_size", "Width of dense feed-forward layers; of an expert in mixtral, olmoe and gpt_oss."},
      {"model.max_position_embeddings", "The longest sequence.", kRequired},
      {"model.rms_norm_eps", "Added to the mean square in every norm."},
      {"model.tie_word_embeddings", "The output layer's weights are the embedding's."},
      {"model.initializer_range", "Standard deviation of random weights."},
      {"model.hidden_act", "The activation of feed-forward layers: `silu`, gated, is the only one."},
      {"model.num_nextn_predict_layers", "Modules of multi-token prediction behind the last layer (DeepSeek-V3)."},
      {"model.num_mtp_layers", "Another spelling of `num_nextn_predict_layers`.", kNone},
  };
}

std::vector<KeyText> attention_texts() {
  return {
      {"model.num_attention_heads", "Query heads.", kRequired},
      {"model.num_key_value_heads", "Key and value heads; fewer than query heads is grouped-query attention.",
       "`num_attention_heads`"},
      {"model.head_dim", "Width of a head. On a GPU at most 256; 64 and 128 have the fast kernels.",
       "`hidden_size / num_attention_heads`"},
      {"model.kv_lora_rank",
       "Above 0: latent attention (DeepSeek), whose keys and values come from a vector of this width.", "`0`"},
      {"model.q_lora_rank", "Latent attention: width of the queries' latent vector; 0: none.", "`0`"},
      {"model.qk_nope_head_dim", "Latent attention: columns of a query or key that do not rotate.", kNone},
      {"model.qk_rope_head_dim", "Latent attention: columns of a query or key that rotate.", kNone},
      {"model.v_head_dim", "Latent attention: width of a value.", kNone},
      {"model.rope_interleave", "Latent attention: pairs (2i, 2i + 1) rotate, not (i, i + d/2).", "`false`"},
      {"model.rope_theta", "Base of the rotary frequencies."},
      {"model.rope_scaling",
       "How rotary frequencies are stretched: a table with `rope_type` of `linear`, `llama3` or `yarn` and "
       "its numbers, as in a config.json.",
       kNone},
      {"model.rope_parameters", "Another spelling of `rope_theta` and `rope_scaling` (transformers 5).", kNone},
      {"model.qkv_bias", "Biases on the projections of q, k and v."},
      {"model.attention_bias", "Biases on the projections of q, k, v and o."},
      {"model.qk_norm", "RMSNorm on q and k before they rotate."},
      {"model.clip_qkv", "q, k and v are cut at this distance from 0 (olmoe).", kNone},
      {"model.attention_sinks", "One more logit for each head in attention's softmax, without a value (gpt_oss)."},
      {"model.attention_dropout", "Must be 0: attention drops nothing.", "`0`"},
      {"model.sliding_window", "A token sees this many tokens, itself included; 0: all before it."},
      {"model.use_sliding_window", "false switches `sliding_window` off.", kNone},
      {"model.max_window_layers", "The window is in the layers from this one on.", kNone},
      {"model.layer_types", "For each layer `full_attention` or `sliding_attention`.", kNone},
  };
}

std::vector<KeyText> expert_texts() {
  return {
      {"model.num_experts", "Experts of an MoE layer; 0: the model is dense."},
      {"model.num_local_experts", "Another spelling of `num_experts` (mixtral, gpt_oss).", kNone},
      {"model.n_routed_experts", "Another spelling of `num_experts` (DeepSeek).", kNone},
      {"model.num_experts_per_tok", "Experts that a token goes to (top-k).", "required with experts"},
      {"model.moe_intermediate_size", "Width of an expert.", "required with experts"},
      {"model.shared_expert_intermediate_size", "Width of the expert that every token goes to; 0: there is none."},
      {"model.n_shared_experts", "The same in multiples of `moe_intermediate_size` (DeepSeek).", kNone},
      {"model.shared_expert_gate", "The shared expert's output is weighted by a sigmoid of the token (qwen2_moe)."},
      {"model.scoring_func", "What makes scores of the router's logits."},
      {"model.norm_topk_prob", "The weights of a token's experts are divided by their sum."},
      {"model.routed_scaling_factor", "The weights of a token's experts are multiplied by this."},
      {"model.n_group", "Group-limited routing: groups that the experts are in; 1: no groups."},
      {"model.topk_group", "Group-limited routing: groups that a token may choose from."},
      {"model.group_score",
       "What ranks a group: its best expert, the sum of its best two, or of its best top-k / `topk_group`."},
      {"model.topk_method",
       "DeepSeek's name for how experts are chosen: with or without groups, with a correction bias.", kNone},
      {"model.expert_bias",
       "A bias for each expert that counts in the choice alone; `moe.balance = \"bias\"` moves it."},
      {"model.router_bias", "A bias on the router's logits (gpt_oss)."},
      {"model.mlp_bias", "Biases on gate, up and down of the experts (`moebius`); false elsewhere."},
      {"model.swiglu_limit", "Above 0: gpt_oss' clamped activation, clamped here; 0: silu(gate) up."},
      {"model.moe_layer_freq", "Every how many layers one is an MoE layer, or 0 and 1 for each layer."},
      {"model.first_k_dense_replace", "The first layers, this many, are dense.", "`0`"},
      {"model.decoder_sparse_step", "Layer i is an MoE layer where i + 1 is a multiple of this.", "`1`"},
      {"model.mlp_only_layers", "Layers that are dense, by number from 0.", "`[]`"},
  };
}

std::vector<KeyText> data_texts() {
  return {
      {"data.train",
       "The datasets of `moebius data build` to train on: "
       "the PREFIX of each (of PREFIX.bin and PREFIX.idx), with weights a blend of them.",
       "required by `train`"},
      {"data.valid", "The datasets of evaluations, without weights."},
      {"data.tokenizer",
       "What the ids of the datasets mean: `bytes`, or a folder with a `tokenizer.json`. A dataset of another "
       "tokenizer is refused.",
       "the folder of `model.hf` where it has a `tokenizer.json`, else `\"bytes\"`"},
      {"data.separate_documents",
       "Attention and positions begin anew at each document; wanted for prompts and completions."},
  };
}

std::vector<KeyText> train_texts() {
  return {
      {"train.steps",
       "Optimizer steps of the whole run. One takes `global_batch * seq_len` tokens; "
       "there are no epochs: data that ends is read again in a new order.",
       kRequired},
      {"train.global_batch",
       "Sequences of a step, on all ranks: `global_batch / (micro_batch * dp)` micro-batches are accumulated.",
       kRequired},
      {"train.micro_batch",
       "Sequences that a rank computes at a time: memory for activations grows with it, the maths does not change.",
       kRequired},
      {"train.seq_len", "Tokens of a sequence, at most `model.max_position_embeddings`.", kRequired},
      {"train.eval_every", "Steps between evaluations on `data.valid`; 0: only after the last step."},
      {"train.eval_batches", "Micro-batches that an evaluation reads of each dataset; 0: all."},
      {"train.freeze",
       "Patterns (`*`, `?`, `[0-3]`) of names of parameters that stay as they are and cost no gradients or moments; "
       "`moebius checkpoint ls` prints names."},
      {"train.mtp_coeff", "Weight of multi-token prediction's mean loss; 0: its modules stay as they are."},
  };
}

std::vector<KeyText> optimizer_texts() {
  return {
      {"optimizer.name", "AdamW, with f32 master weights and moments."},
      {"optimizer.lr", "The learning rate after the warm-up.", kRequired},
      {"optimizer.min_lr", "The learning rate of the last step, where the schedule falls."},
      {"optimizer.warmup_steps", "Steps of linear rise from 0 to `lr`."},
      {"optimizer.decay_steps", "`wsd`: steps of the linear fall at the end; 0: a tenth of the steps."},
      {"optimizer.schedule",
       "The learning rate behind the warm-up: as it is, falling over all steps like a cosine or a line, or "
       "falling at the end alone (`wsd`)."},
      {"optimizer.weight_decay", "Decoupled, of matrices; norm weights and biases are not decayed."},
      {"optimizer.beta1", "Decay of Adam's first moment."},
      {"optimizer.beta2", "Decay of Adam's second moment."},
      {"optimizer.eps", "Added to the root of the second moment."},
      {"optimizer.clip", "The global norm that gradients are scaled down to; 0: no clipping."},
  };
}

std::vector<KeyText> moe_texts() {
  return {
      {"moe.balance",
       "What evens out the load of experts: losses, a bias, Sinkhorn's routing ([numerics.md](numerics.md)). "
       "`router_aux_loss_coef` of a config.json has no effect."},
      {"moe.aux_coeff", "Weight of each auxiliary loss in `balance`; above 0 exactly when there is one."},
      {"moe.z_coeff", "Weight of the router's z-loss; 0: none."},
      {"moe.bias_rate", "`bias`: how far an expert's bias moves in a step."},
      {"moe.capacity_factor",
       "Above 0: an expert takes at most this times its even share of tokens and drops the rest; 0: none are dropped."},
      {"moe.rank_rows_factor",
       "All-to-all dispatch: rows planned for the experts of a rank, over the even share; a step that needs "
       "more ends the run; 0: room for all."},
      {"moe.drop_policy", "Which tokens an expert drops: those of the smallest weights, or the last."},
      {"moe.jitter",
       "The router's input is multiplied by random numbers from 1 - jitter to 1 + jitter while training."},
      {"moe.router_dtype", "What the router computes in; `compute`: as all else (`precision.compute`)."},
      {"moe.force_balance", "Experts are taken in turn, whatever the router says: for benchmarks."},
  };
}

std::vector<KeyText> parallel_texts() {
  return {
      {"parallel.tp",
       "Tensor parallelism: ranks that share each matrix of attention, "
       "dense and shared-expert layers, and the sequence between them."},
      {"parallel.cp", "Context parallelism: ranks that share a sequence in attention."},
      {"parallel.cp_comm", "How ranks of cp bring queries and keys together."},
      {"parallel.pp", "Pipeline parallelism: stages that the layers are cut into."},
      {"parallel.vpp", "Stages of each rank of the pipeline (interleaved 1F1B)."},
      {"parallel.ep", "Expert parallelism: ranks that the experts of a layer are spread over."},
      {"parallel.etp", "Expert tensor parallelism: ranks that share each expert."},
      {"parallel.layout",
       "Which layers a stage has, as in `Et*3|(tt|)*29m|L`: E embedding, "
       "t layer, m multi-token prediction, L loss; empty: even."},
      {"parallel.schedule", "The order of a pipeline's passes."},
      {"parallel.dispatcher",
       "How tokens come to experts of other ranks; `auto`: all-gather where ep is at most top-k, else all-to-all."},
      {"parallel.overlap", "Communication goes on behind computation; the same bits."},
  };
}

std::vector<KeyText> other_texts() {
  return {
      {"precision.compute", "What forward and backward compute in; masters, gradients and moments are f32."},
      {"memory.recompute", "What backward makes again instead of keeping it ([memory.md](memory.md)); the same bits."},
      {"checkpoint.every", "Steps between checkpoints; 0: only at the end and on SIGTERM, so that a crash loses all."},
      {"checkpoint.keep", "Newest checkpoints that are kept; 0: all."},
      {"checkpoint.async",
       "The steps go on while a checkpoint is written, from a copy of 12 bytes a parameter in host memory."},
      {"checkpoint.resume",
       "Go on from the newest checkpoint of `run.dir`; false: start over there, and move its "
       "checkpoints to `checkpoints/old-N`."},
      {"log.every", "Steps between lines of the log; `metrics.jsonl` has every step."},
      {"log.tensorboard", "Write TensorBoard's files to `run.dir`/tensorboard."},
      {"log.trace", "A file for a Chrome trace of the second step.", kNone},
  };
}

}  // namespace

const std::vector<KeyText>& key_texts() {
  static const std::vector<KeyText> all = [] {
    std::vector<KeyText> texts;
    for (auto make : {run_texts, model_origin_texts, model_shape_texts, attention_texts, expert_texts, data_texts,
                      train_texts, optimizer_texts, moe_texts, parallel_texts, other_texts}) {
      const std::vector<KeyText> part = make();
      texts.insert(texts.end(), part.begin(), part.end());
    }
    return texts;
  }();
  return all;
}

}  // namespace moebius
