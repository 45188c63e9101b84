#include "config/recipe/reference.h"

namespace moebius {

namespace {

constexpr std::string_view kRequired = "required", kNone = "none";

std::vector<KeyText> run_texts() {
  return {
      {"run.dir",
       "The folder of the run: checkpoints, metrics and the resolved recipe. A run that is started there "
       "again resumes.",
       "required by `train`"},
      {"run.seed",
       "The seed of random weights, data order, router jitter and dropout. All of them are functions of it and of the "
       "step."},
      {"run.device",
       "The device that computes the model: the CPUs of this machine, or its NVIDIA GPUs, which the ranks of a "
       "machine get round-robin."},
      {"run.threads",
       "CPU threads of a rank. 0 gives the rank its share of the CPUs that it may use. Results are bitwise identical "
       "for all values."},
      {"run.graph",
       "On a GPU a step is captured as CUDA graphs and replayed. Results are bitwise identical for all values."},
      {"run.kernels",
       "The kernels that a GPU runs. `auto` chooses the fastest that support the GPU and the shape. `portable` "
       "excludes those for Hopper and cuDNN's attention, so that a Hopper GPU runs kernels that every GPU from compute "
       "capability 8.0 on has. "
       "Sums are then added in another order."},
  };
}

std::vector<KeyText> model_origin_texts() {
  return {
      {"model.hf",
       "A Hugging Face folder whose `config.json` gives the model. Its weights are read only if "
       "`model.init_from` names it too; else weights are random.",
       kNone},
      {"model.config", "The text of a whole `config.json`. A resolved recipe holds its model this way.", kNone},
      {"model.init_from",
       "The source of the weights: a Hugging Face folder, an imported checkpoint, a run's folder or one of "
       "its checkpoints. Without it weights are random.",
       kNone},
      {"model.model_type",
       "The family, which decides what the other keys may be. `moebius` has every key. It is not a Hugging "
       "Face family, so its models cannot be exported."},
  };
}

std::vector<KeyText> model_shape_texts() {
  return {
      {"model.vocab_size", "Number of ids of the tokenizer, including the end of a document (257 for `bytes`).",
       kRequired},
      {"model.hidden_size", "Width of the residual stream.", kRequired},
      {"model.num_hidden_layers", "Number of layers.", kRequired},
      {"model.intermediate_size",
       "Width of dense feed-forward layers. In mixtral, olmoe and gpt_oss it is the width of an expert."},
      {"model.max_position_embeddings", "Length of the longest sequence.", kRequired},
      {"model.rms_norm_eps", "Epsilon that every norm adds to the mean square."},
      {"model.tie_word_embeddings", "The output layer shares the embedding's weights."},
      {"model.initializer_range", "Standard deviation of random weights."},
      {"model.hidden_act", "Activation of feed-forward layers. It must be `silu`, which is used gated (SwiGLU)."},
      {"model.num_nextn_predict_layers",
       "Number of modules of multi-token prediction after the last layer (DeepSeek-V3)."},
      {"model.num_mtp_layers", "Another spelling of `num_nextn_predict_layers`.", kNone},
  };
}

std::vector<KeyText> attention_texts() {
  return {
      {"model.num_attention_heads", "Number of query heads.", kRequired},
      {"model.num_key_value_heads",
       "Number of key and value heads. With fewer than query heads, attention is grouped-query.",
       "`num_attention_heads`"},
      {"model.head_dim", "Width of a head. GPUs support at most 256, and have Hopper kernels for 64 and 128.",
       "`hidden_size / num_attention_heads`"},
      {"model.kv_lora_rank",
       "Above 0 selects multi-head latent attention (MLA, DeepSeek): keys and values are computed from a latent "
       "vector of this width.",
       "`0`"},
      {"model.q_lora_rank", "Latent attention: width of the queries' latent vector. 0 means that queries have none.",
       "`0`"},
      {"model.qk_nope_head_dim",
       "Latent attention: width of the part of a query or key head that RoPE does not rotate.", kNone},
      {"model.qk_rope_head_dim", "Latent attention: width of the part of a query or key head that RoPE rotates.",
       kNone},
      {"model.v_head_dim", "Latent attention: width of a value head.", kNone},
      {"model.rope_interleave", "Latent attention: RoPE rotates the pairs (2i, 2i + 1) instead of (i, i + d/2).",
       "`false`"},
      {"model.rope_theta", "Base of the rotary frequencies."},
      {"model.rope_scaling",
       "Scaling of the rotary frequencies: a table with `rope_type` of `linear`, `llama3` or `yarn` and its "
       "numbers, as in a config.json.",
       kNone},
      {"model.rope_parameters", "Another spelling of `rope_theta` and `rope_scaling` (transformers 5).", kNone},
      {"model.qkv_bias", "The projections of q, k and v have biases."},
      {"model.attention_bias", "The projections of q, k, v and o have biases."},
      {"model.qk_norm", "RMSNorm is applied to q and k before RoPE."},
      {"model.clip_qkv", "q, k and v are clamped to the range from -`clip_qkv` to `clip_qkv` (olmoe).", kNone},
      {"model.attention_sinks",
       "Each head has an attention sink: one more logit in the softmax, without a value (gpt_oss)."},
      {"model.attention_dropout", "Must be 0: attention has no dropout.", "`0`"},
      {"model.sliding_window",
       "A token attends to itself and the tokens before it, this many in all. With 0 there is no limit."},
      {"model.use_sliding_window", "`false` turns `sliding_window` off.", kNone},
      {"model.max_window_layers", "Layers from this one on have the sliding window.", kNone},
      {"model.layer_types", "For each layer `full_attention` or `sliding_attention`.", kNone},
  };
}

std::vector<KeyText> expert_texts() {
  return {
      {"model.num_experts", "Number of experts of an MoE layer. With 0 the model is dense."},
      {"model.num_local_experts", "Another spelling of `num_experts` (mixtral, gpt_oss).", kNone},
      {"model.n_routed_experts", "Another spelling of `num_experts` (DeepSeek).", kNone},
      {"model.num_experts_per_tok", "Number of experts that a token is routed to (top-k).", "required with experts"},
      {"model.moe_intermediate_size", "Width of an expert.", "required with experts"},
      {"model.shared_expert_intermediate_size",
       "Width of the shared expert, which every token goes to. With 0 there is none."},
      {"model.n_shared_experts", "The width of the shared expert, in multiples of `moe_intermediate_size` (DeepSeek).",
       kNone},
      {"model.shared_expert_gate", "The shared expert's output is weighted by a sigmoid of the token (qwen2_moe)."},
      {"model.scoring_func", "The function that turns the router's logits into scores."},
      {"model.norm_topk_prob", "The weights of a token's experts are divided by their sum."},
      {"model.routed_scaling_factor", "The weights of a token's experts are multiplied by this."},
      {"model.n_group", "Group-limited routing: number of groups that the experts are in. With 1 there are no groups."},
      {"model.topk_group", "Group-limited routing: number of groups that a token may choose from."},
      {"model.group_score",
       "The score of a group: its best expert, the sum of its best two, or of its best top-k / `topk_group`."},
      {"model.topk_method",
       "DeepSeek's name for the choice of experts: with or without groups, with a correction bias.", kNone},
      {"model.expert_bias",
       "Each expert has a bias that is added to its score when experts are chosen, but not to its weight. "
       "`moe.balance = \"bias\"` updates it."},
      {"model.router_bias", "The router's logits have a bias (gpt_oss)."},
      {"model.mlp_bias", "Gate, up and down of the experts have biases (`moebius`). Other families need false."},
      {"model.swiglu_limit",
       "Above 0 selects gpt_oss' activation, clamped at this value. With 0 it is silu(gate) * up."},
      {"model.moe_layer_freq", "With N every N-th layer is an MoE layer. A list has a 0 or 1 for each layer."},
      {"model.first_k_dense_replace", "Number of first layers that are dense.", "`0`"},
      {"model.decoder_sparse_step", "Layer i is an MoE layer if i + 1 is a multiple of this.", "`1`"},
      {"model.mlp_only_layers", "Layers that are dense, by number from 0.", "`[]`"},
  };
}

std::vector<KeyText> data_texts() {
  return {
      {"data.train",
       "The datasets to train on. Each is the PREFIX of `moebius data build` (of PREFIX.bin and "
       "PREFIX.idx); several are blended by their weights.",
       "required by `train`"},
      {"data.valid", "The datasets to evaluate on, named as in `data.train` but without weights."},
      {"data.tokenizer",
       "The tokenizer of the datasets: `bytes`, or a folder with a `tokenizer.json`. A dataset of another "
       "tokenizer is refused.",
       "the folder of `model.hf` where it has a `tokenizer.json`, else `\"bytes\"`"},
      {"data.separate_documents",
       "Attention and positions restart at each document. Datasets of prompts and completions need it."},
      {"data.pack_documents",
       "Each sequence holds whole documents, in the order of the data, and is padded; padding has no loss. A document "
       "that is longer than a sequence is cut. Datasets of prompts and completions are always packed."},
      {"data.order_by_cost",
       "Sorts the sequences of a step by the sum of the squares of their documents' lengths, the largest first. The "
       "dp ranks then compute sequences of similar cost at a time. A step has the same sequences as without it."},
  };
}

std::vector<KeyText> train_texts() {
  return {
      {"train.steps",
       "Optimizer steps of the whole run. A step trains on `global_batch * seq_len` tokens. There are no epochs: when "
       "the data ends, it is read again in a new order.",
       kRequired},
      {"train.global_batch",
       "Sequences of a step, over all ranks. `global_batch / (micro_batch * dp)` micro-batches are "
       "accumulated.",
       kRequired},
      {"train.micro_batch",
       "Sequences that a rank computes at a time. The memory for activations grows with it. Gradients change only by "
       "rounding, except where a micro-batch is part of a definition: `aux`, `sinkhorn`, capacity, `force_balance`, "
       "quantised weight gradients.",
       kRequired},
      {"train.seq_len", "Tokens of a sequence, at most `model.max_position_embeddings`.", kRequired},
      {"train.eval_every",
       "Steps between evaluations on `data.valid`. With 0 there is one evaluation, after the last step."},
      {"train.eval_batches", "Micro-batches that an evaluation reads of each dataset. 0 reads all."},
      {"train.freeze",
       "Name patterns (`*`, `?`, `[0-3]`) of parameters that do not change. These have no gradients and no "
       "moments. `moebius checkpoint ls` prints names."},
      {"train.mtp_coeff", "Weight of the mean loss of multi-token prediction. With 0 its modules do not change."},
  };
}

std::vector<KeyText> optimizer_texts() {
  return {
      {"optimizer.name",
       "The optimizer: `adamw`; `sgd` with momentum; or `muon` for the matrices of layers and experts, with `adamw` "
       "for the rest ([numerics.md](../design/numerics.md#muon))."},
      {"optimizer.state",
       "How the moments of the optimizer are stored: `f32`; `bf16` with stochastic rounding; or `8bit`, codes of 8 "
       "bits with a scale for each 256 elements of a row. With `8bit`, vectors and matrices whose rows are not a "
       "multiple of 256 keep f32 moments. A run may resume with another choice."},
      {"optimizer.master",
       "How the master copies of bf16 weights are stored: `f32`; `bf16_remainder`, 16 additional bits per weight that "
       "complete it to an exact f32; or `bf16_stochastic`, no copy: the weights themselves are updated, with "
       "stochastic rounding. A run may resume with another choice."},
      {"optimizer.grad",
       "How gradients are summed over the micro-batches of a step: `f32`; or `bf16` for the bf16 weights of layers, "
       "rounded after each micro-batch."},
      {"optimizer.offload",
       "Keeps masters and moments in pinned host memory, from which they pass through the GPU during the update. On "
       "one rank, and on a pipeline of single ranks, the update overlaps with the first passes of the next step, "
       "except with Muon, `optimizer.qk_clip` and `precision.weights = \"recipe\"`. Results are bitwise identical for "
       "all values."},
      {"optimizer.offload_buffer",
       "Device memory in GiB for masters and moments with `optimizer.offload`: those of the first parameters of a forward "
       "pass, as many as fit, stay in it. They need no host memory, and the update moves only the rest. What the states "
       "do not need is not allocated. `auto` is the largest number with which a rank needs at most the limit. The "
       "limit is `memory.fit`, and never more than 95 % of the memory of the GPU where that is known, without what other "
       "programs and ranks hold "
       "([offload.md](../design/offload.md#masters-and-moments-on-the-host)). "
       "Without either, and on a CPU, it is 0. Results are bitwise identical for all values."},
      {"optimizer.offload_grad",
       "Keeps the sums of gradients in pinned host memory. It needs `optimizer.grad = \"bf16\"`."},
      {"optimizer.fuse_grad",
       "The products that compute the weight gradients of experts add them to the sums in bf16 themselves. On a GPU it "
       "saves a pass over the gradients of each layer and micro-batch, and the memory of the experts' f32 gradients. "
       "It needs `optimizer.grad = \"bf16\"`, and on a GPU the kernels of Hopper. It is refused with "
       "`optimizer.offload_grad` and `lora.rank`, and with a `precision.recipe` unless `precision.weight_gradients` is "
       "`compute`. Experts that compute a micro-batch in chunks keep f32 gradients. Results are bitwise identical for all values, except for the sign of zero."},
      {"optimizer.lr", "The learning rate after the warm-up.", kRequired},
      {"optimizer.min_lr", "The learning rate of the last step, for schedules that decay."},
      {"optimizer.warmup_steps", "Steps in which the learning rate rises linearly from 0 to `lr`."},
      {"optimizer.decay_steps", "`wsd`: steps of the linear decay at the end. 0 means a tenth of the steps."},
      {"optimizer.schedule",
       "The learning rate after the warm-up: constant; decaying over all steps (cosine or linear); or constant with a "
       "linear decay at the end (`wsd`)."},
      {"optimizer.weight_decay", "Decoupled weight decay of matrices. Norm weights and biases are not decayed."},
      {"optimizer.beta1", "`adamw`: decay of the first moment."},
      {"optimizer.beta2", "`adamw`: decay of the second moment."},
      {"optimizer.eps", "`adamw`: epsilon that is added to the root of the second moment."},
      {"optimizer.momentum",
       "`sgd` and `muon`: the factor by which the running sum of gradients is multiplied in each step; 0.95 is usual "
       "for `muon`. With 0 `sgd` has no state."},
      {"optimizer.clip", "The global norm to which larger gradients are scaled down. 0 turns clipping off."},
      {"optimizer.qk_clip",
       "The largest attention logit of a head: after each update, the projections of queries and keys of a head that "
       "had a larger one in the step are scaled down ([numerics.md](../design/numerics.md#qk-clip)); Kimi K2 has 100. "
       "0 turns it off."},
  };
}

std::vector<KeyText> moe_texts() {
  return {
      {"moe.balance",
       "How the load of experts is balanced: by auxiliary losses, by a bias of each expert, or by Sinkhorn routing "
       "([numerics.md](../design/numerics.md#balance-losses)). `router_aux_loss_coef` of a config.json has no effect."},
      {"moe.aux_coeff",
       "Weight of each auxiliary loss in `balance`. It must be above 0 if there is one, and 0 otherwise."},
      {"moe.z_coeff", "Weight of the router's z-loss. 0 turns it off."},
      {"moe.bias_rate", "`bias`: the amount that the bias of an expert changes by in a step, up or down."},
      {"moe.capacity_factor",
       "Above 0, an expert processes at most this multiple of its even share of a micro-batch's tokens and drops the "
       "rest, in training only. With 0 none are dropped."},
      {"moe.rank_rows_factor",
       "All-to-all dispatch: the rows planned for the experts of a rank, as a multiple of the even share of the "
       "tokens that they compute at a time. A step that needs more rows ends the run with an error. 0 plans for the "
       "worst case."},
      {"moe.drop_policy",
       "Which tokens an expert above its capacity drops: `probs`, those with the smallest weights, or `position`, the "
       "last."},
      {"moe.jitter", "In training the router's input is multiplied by random numbers from 1 - jitter to 1 + jitter."},
      {"moe.router_dtype", "The dtype that the router computes in. `compute` means that of `precision.compute`."},
      {"moe.force_balance",
       "Experts are assigned round-robin, and the router's choice is ignored. Use it for benchmarks."},
  };
}

std::vector<KeyText> parallel_texts() {
  return {
      {"parallel.tp",
       "Tensor parallelism: ranks that split the matrices of attention, dense MLPs and shared experts, and the "
       "vocabulary. Between these they split the tokens (sequence parallelism)."},
      {"parallel.cp", "Context parallelism: ranks that split the tokens of each sequence."},
      {"parallel.cp_comm",
       "How the ranks of cp exchange keys and values. `hierarchical` is `alltoall` among `cp_inner` neighbours, and "
       "`ring` between such groups ([parallelism.md](../design/parallelism.md#context-parallelism))."},
      {"parallel.cp_comm_window",
       "`cp_comm` for layers with a sliding window. Without a value it is that of `cp_comm`."},
      {"parallel.cp_inner",
       "`hierarchical`: the number of neighbouring ranks of cp that exchange by all-to-all, such as those of one "
       "machine."},
      {"parallel.dynamic_cp",
       "Each micro-batch chooses how many neighbouring ranks of cp share its sequences, a power of two. Documents "
       "stay whole, so short ones are not exchanged. The samples of a step are sorted by that number, which changes the "
       "loss only where it depends on the samples of a micro-batch, as with `moe.balance = \"aux\"`. It needs a `cp` "
       "that is a power of two, `data.separate_documents` and `data.pack_documents`. `cp_comm = \"hierarchical\"` and `lora.dropout` are refused with it."},
      {"parallel.pp", "Pipeline parallelism: ranks that split the layers of the model into stages."},
      {"parallel.vpp", "Virtual pipeline stages of each rank (interleaved 1F1B)."},
      {"parallel.ep", "Expert parallelism: ranks that the experts of a layer are spread over."},
      {"parallel.etp", "Expert tensor parallelism: ranks that split the matrices of each expert."},
      {"parallel.layout",
       "The layers of each stage, as in `Et*3|(tt|)*29m|L`: E embedding, t layer, m multi-token prediction, L loss. "
       "If it is empty, all stages have the same number of layers."},
      {"parallel.schedule",
       "The order of a pipeline's passes ([parallelism.md](../design/parallelism.md#pipeline-schedules)). `1f1b` is "
       "interleaved where `vpp` is above 1. `zb_h1` computes gradients of weights later, so ranks wait less while the "
       "pipeline fills and drains, and most of them need more memory. It needs `vpp = 1`, `optimizer.grad = \"f32\"`, "
       "and neither `fsdp` nor `shard_gradients`. Results are bitwise identical for all values."},
      {"parallel.dispatcher",
       "How tokens reach experts on other ranks "
       "([expert-parallelism.md](../design/expert-parallelism.md#dispatchers)). `allgather` gives all tokens to all "
       "ranks. `alltoall` sends a token to the ranks of its experts; on a GPU it needs `run.graph = false`. `direct` "
       "writes to the memory of the other ranks, which must be on one machine. `two_level` sends a token once to each "
       "node (`ranks_per_node`) and writes to memory inside it; on a GPU with `run.graph` each message has the size of "
       "all tokens of a rank. In training, `auto` chooses `direct` if the ranks that share experts can access each "
       "other's memory; else, if those of each node can, the fastest by predicted times (`--machine`). Otherwise it "
       "chooses `allgather` on a GPU with `run.graph`, and elsewhere `allgather` if ep is at most top-k, else "
       "`alltoall`. `two_level` gives bitwise the results of `allgather`, and so does `direct` on one node."},
      {"parallel.ranks_per_node",
       "The number of consecutive ranks that form a node, at most 8. Sums over the ranks of several nodes are added "
       "inside each node first ([levels](../design/parallelism.md#groups)). With `dispatcher = \"two_level\"` the "
       "ranks of a node must be on one machine. On GPUs exchanges of `tp` and `cp` overlap where their ranks are on "
       "several nodes (`overlap`)."},
      {"parallel.expert_overlap",
       "What an MoE layer computes while its rows are exchanged: nothing (`none`), other work of the same "
       "layer (`layer`), or also products of some of the rows (`batch_split`, "
       "[expert-parallelism.md](../design/expert-parallelism.md#overlap-with-the-exchange-of-rows)). `batch_split` "
       "needs `dispatcher = \"direct\"`, rows and products that are not quantised, no adapters, and in bf16 on GPUs "
       "Hopper's kernels, with columns in multiples of 8. Results are bitwise identical for all values."},
      {"parallel.sums",
       "How ranks with GPUs add their tensors. `ranks` adds in the order of the ranks, in "
       "[levels](../design/parallelism.md#groups) with more than 8 ranks or several nodes, with the bits of every "
       "other transport. `nccl` calls NCCL's own collectives, which choose their own order."},
      {"parallel.fsdp",
       "Shards the weights of each layer over the ranks that hold the same weights; a pass gathers a layer before it "
       "computes it ([sharding.md](../design/sharding.md)). Results are bitwise identical "
       "for all values."},
      {"parallel.fsdp_shard",
       "With `parallel.fsdp`, the number of consecutive ranks over which the weights of a layer are sharded, such as "
       "the ranks of a node that hold the same weights; 0 means all of them. Other groups of the same size hold copies "
       "of the shards, so that only the first gather of a layer in a step leaves the group "
       "([sharding.md](../design/sharding.md#shards-in-a-node-copies-across)). It must divide each larger number of "
       "ranks that hold the same weights. Results are bitwise identical for all values."},
      {"parallel.shard_gradients",
       "Shards the sums of each layer's gradients over the same ranks, which sum them after every micro-batch "
       "([sharding.md](../design/sharding.md)). With one micro-batch per rank and step, "
       "results are bitwise identical; with more, sums are added in another order."},
      {"parallel.overlap",
       "Messages of the pipeline, of gradients and of weights overlap with computation, and in backward some exchanges "
       "of `tp` and `cp` on CPUs and between nodes ([parallelism.md](../design/parallelism.md#overlap-of-tp-and-cp)). "
       "Results are bitwise identical for all values."},
  };
}

std::vector<KeyText> other_texts() {
  return {
      {"precision.compute",
       "The dtype of forward and backward. Masters, gradients and moments are f32 unless `[optimizer]` stores them in "
       "fewer bits."},
      {"precision.recipe",
       "The format that the operands of matrix products are quantised to "
       "([quantised-products.md](../design/quantised-products.md)): those of attention projections, dense and shared "
       "MLPs, and experts. `none` computes in `precision.compute`. On GPUs `fp8_block` needs Hopper. "
       "`mxfp8` and `nvfp4` are emulated there: operands are quantised, and multiplied in `precision.compute`, which is "
       "slower than without a recipe. `fp8_tensor` runs on Hopper's FP8 kernels. `fp8_tensor` products that these do not "
       "take ([gpu.md](gpu.md#fp8-products)) are emulated too, and so are all on other GPUs; `config` and `train` name "
       "the products of both kinds."},
      {"precision.weight_gradients",
       "The operands of the products that give weight gradients: `recipe` quantises them as `precision.recipe` says; "
       "`compute` leaves them in `precision.compute`, so that they need no transposed quantised copies. `moebius "
       "bench precision` times both."},
      {"precision.weights",
       "How training stores the weights of quantised products: `compute` in `precision.compute`, with additional "
       "quantised copies; `recipe` in 8 bits only, in which ranks also exchange them. Masters are f32 and checkpoints "
       "the same. Results are bitwise identical for all values. `recipe` is for `fp8_block`."},
      {"precision.weight_copies",
       "Keeps quantised copies of the weights, made once a step: two for each weight, one byte per element each with "
       "`fp8_block`; with `precision.weights = \"recipe\"` one. `false` keeps none. Each pass then quantises the weights "
       "where it reads them, in memory that the layers share. Results are bitwise identical for all values. Sharded "
       "weights (`parallel.fsdp`) have no copies."},
      {"precision.dispatch",
       "The dtype in which rows are sent to their experts: `compute` in `precision.compute`; `recipe` in 8 bits with "
       "scales. With `recipe` every row is rounded before its experts use it, on one rank too, which changes results. "
       "Rows that return are in `precision.compute`. `recipe` is for `fp8_block`."},
      {"precision.activations",
       "How forward keeps the pre-activations of experts and of gated MLPs for backward: `compute` in "
       "`precision.compute`; `recipe` in 8 bits with scales, about half the bytes. With `recipe` backward computes the "
       "activations and their derivatives from rounded values, even where it recomputes them, which changes the "
       "gradients. Only layers whose products are all quantised do so (`precision.keep`). `recipe` is for `fp8_block`. "
       "With it, the default of `memory.recompute` is `norm`, unless `memory.offload` covers that."},
      {"precision.keep",
       "Patterns (`*`, `?`) of the names of parameters whose products are not quantised. Layouts that "
       "`fp8_tensor` or `nvfp4` refuses stay refused, whatever the patterns match."},
      {"memory.recompute",
       "The activations that backward recomputes instead of keeping them ([memory.md](../design/memory.md#recompute)), "
       "in all layers or, as in `layer:0-3,7`, in some. `auto` chooses the fastest of all sets with which a rank needs "
       "at most `memory.fit`. On a GPU it chooses `memory.offload` and `memory.offload_fraction` too, unless the recipe "
       "names one of them ([memory.md](../design/memory.md#to-fit-a-memory)). By default it is empty, but `norm` with "
       "`precision.activations = \"recipe\"`, unless `memory.offload` covers norms. Results are bitwise identical for all "
       "values."},
      {"memory.fit",
       "The most memory that a rank may need on its device. A run that needs more ends before it begins. With "
       "`memory.recompute = \"auto\"` it decides what is recomputed and offloaded. If it is empty, there is no limit."},
      {"memory.offload",
       "The activations that layers keep for backward in pinned host memory "
       "([offload.md](../design/offload.md#activations-on-the-host)): `layer_input`, and the names of "
       "`memory.recompute`; `layer` is all of them. `weights` keeps the weights of layers there "
       "([offload.md](../design/offload.md#weights-on-the-host)); ranks that hold the same weights need "
       "`parallel.fsdp` for it. The copies overlap with the forward and the backward pass. Any list, also an empty one, "
       "keeps `memory.recompute = \"auto\"` from choosing. Results are bitwise identical for all values."},
      {"memory.offload_fraction",
       "The share of the layers of each stage whose activations `memory.offload` moves. Their number is rounded up, "
       "and they are spread evenly from the first layer on."},
      {"memory.expert_rows",
       "The rows of experts for which a rank plans device memory where experts are on several ranks, as a multiple of "
       "the even share ([memory.md](../design/memory.md#rows-of-experts-on-several-ranks)). Rows beyond it are "
       "recomputed, or are in host memory while their layer runs. Results are bitwise identical for all values. 0 "
       "plans for the worst case. `auto` is 1.25 if rows then need at most three quarters of the memory of the worst "
       "case, as with many layers or a large ep. Otherwise it is 0, since a budget costs time."},
      {"lora.rank",
       "Rank of the low-rank adapters of the matrices that `lora.targets` names; the model itself is then frozen "
       "([fine-tune.md](../guide/fine-tune.md#adapters)). With 0 there are no adapters."},
      {"lora.alpha", "The term of an adapter is multiplied by `alpha` / `rank`."},
      {"lora.dropout",
       "The probability that an element of an adapter's input is dropped in training, as in PEFT. Each matrix has a "
       "mask of its own, and the draws do not depend on the layout."},
      {"lora.base",
       "How the frozen matrices of projections and experts are held: `compute` in the dtype of the computation, "
       "`fp8_block` in 8 bits with a scale for each block of 128 x 128, as read where `model.init_from` has them so, "
       "`mxfp4` with the 4-bit experts of gpt_oss as they were read "
       "([fine-tune.md](../guide/fine-tune.md#a-quantised-base))."},
      {"lora.targets",
       "Patterns (`*`, `?`, `[0-3]`) of the names of matrices, or of their ends after a dot: `q_proj`, `mlp.gate` (the "
       "router), `mlp.experts.*`. `moebius checkpoint ls` prints names. `mlp.experts.gate_up_proj` gives gate and up "
       "of an expert one A for both, as PEFT's `target_parameters` does."},
      {"lora.init_from",
       "Folder of an adapter in PEFT's format that training begins with. Without it A is random and B is 0."},
      {"checkpoint.every",
       "Steps between checkpoints. With 0 a run saves only at its end and on SIGTERM, so a crash loses everything."},
      {"checkpoint.keep", "How many of the newest checkpoints are kept; older ones are removed. 0 keeps all."},
      {"checkpoint.async",
       "Training continues while a checkpoint is written from a copy in host memory, of up to 12 bytes per parameter."},
      {"checkpoint.resume",
       "Resume from the newest checkpoint of `run.dir`. With false the run starts over there, and moves the old "
       "checkpoints to `checkpoints/old-N`."},
      {"log.every", "Steps between lines of progress in the log. `metrics.jsonl` has every step."},
      {"log.tensorboard", "Write TensorBoard's files to `run.dir`/tensorboard."},
      {"log.precision",
       "Write to `metrics.jsonl` what quantising does to the operands of each layer: the shares of saturated and "
       "zeroed elements, and the range of scales. It reads each operand once more."},
      {"log.trace", "The file for a Chrome trace of the second step after the start, or of the only one.", kNone},
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
