// The training of a model: data, batch, optimizer, load balancing, checkpoints, logs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moebius {

struct DatasetSpec {
  std::string prefix;  // PREFIX.bin / PREFIX.idx
  double weight = 1.0;
  bool operator==(const DatasetSpec&) const = default;
};

struct DataSpec {
  std::vector<DatasetSpec> train;
  std::vector<DatasetSpec> valid;
  std::string tokenizer = "bytes";
  bool separate_documents = false;  // attention and positions restart at document borders
  bool pack_documents = false;      // samples consist of whole documents, and padding
  bool order_by_cost = false;       // sorts the sequences of a step by the squares of their documents' lengths
  bool operator==(const DataSpec&) const = default;
};

struct LoopSpec {  // [train]
  int64_t steps = 0;
  int64_t global_batch = 0;  // sequences
  int64_t micro_batch = 0;   // sequences
  int64_t seq_len = 0;
  int64_t eval_every = 0;           // steps; 0: only at the end
  int64_t eval_batches = 0;         // micro-batches that an evaluation reads of each dataset; 0: all
  std::vector<std::string> freeze;  // patterns (* and ?) of parameters that are not trained
  double mtp_coeff = 0.1;           // weight of multi-token prediction's mean loss; 0: its modules are not trained
  bool operator==(const LoopSpec&) const = default;
};

enum class LrSchedule { constant, cosine, linear, wsd };

// muon updates the matrices of layers; other parameters are updated by adamw.
enum class OptimizerKind { adamw, sgd, muon };

// The format of an optimizer's state. bf16 and 8-bit blocks are rounded stochastically. Only matrices whose rows are
// whole blocks are stored in 8-bit blocks (core/block_code.h); everything else stays in f32.
enum class StateFormat { f32, bf16, blocks_8bit };

// The format of gradients summed over the micro-batches of a step. With bf16, the sums for bf16 weights of layers are
// rounded after each micro-batch, and one layer at a time has f32 gradients.
enum class GradFormat { f32, bf16 };

// The format of the masters of bf16 weights:
//   f32              a copy in f32
//   bf16_remainder   16 more bits for each weight, which together are an exact f32
//   bf16_stochastic  the weights themselves, rounded stochastically
enum class MasterFormat { f32, bf16_remainder, bf16_stochastic };

struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::adamw;
  StateFormat state = StateFormat::f32;
  MasterFormat master = MasterFormat::f32;  // other than f32: with a bf16 computation only
  GradFormat grad = GradFormat::f32;        // the same
  bool offload = false;                     // masters and state are in host memory
  // GiB of device memory for a part of them; used only with offload. Without a value plan/memory/state_buffer.h chooses
  // it; without a choice it is 0.
  std::optional<double> offload_buffer;
  bool offload_grad = false;  // bf16 sums of gradients are in host memory too
  bool fuse_grad = false;     // products of experts add to bf16 sums of gradients themselves; changes no bit
  double lr = 0.0;
  double min_lr = 0.0;
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;  // wsd: length of the final decay; 0: a tenth of the steps
  LrSchedule schedule = LrSchedule::cosine;
  double weight_decay = 0.1;                     // decoupled; matrices only (norm weights and biases are not decayed)
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;  // adamw, and muon for what it leaves to adamw
  double momentum = 0.9;                         // sgd and muon; 0: sgd has no state
  double clip = 1.0;                             // global gradient norm; 0: no clipping
  double qk_clip = 0.0;                          // largest attention logit of a head; 0: heads are not clipped

  // The learning rate of step t (the first is 1) of a run of N = num_steps, with w = warmup_steps:
  //   t <= w     lr t / w
  //   constant   lr
  //   cosine     min_lr + (lr - min_lr) (1 + cos(pi p)) / 2,  p = min(1, (t - w) / (N - w))
  //   linear     lr + (min_lr - lr) p
  //   wsd        lr until s = max(w, N - d), then linear to min_lr with p = min(1, (t - s) / (N - s));
  //              d = decay_steps, or max(1, N / 10) when that is 0
  // The last step has exactly min_lr, except with constant.
  double lr_at(int64_t step, int64_t num_steps) const;
  bool operator==(const OptimizerSpec&) const = default;
};

enum class DropPolicy { probs, position };

struct BalanceSpec {  // [moe]
  // Methods of load balancing. Any of them can be combined, except sinkhorn.
  // docs/design/numerics.md defines them.
  bool aux = false, seq_aux = false, global_aux = false, bias = false, sinkhorn = false;
  double aux_coeff = 0.0;  // coefficient of every auxiliary loss that is on; above 0 if and only if one is
  double z_coeff = 0.0;
  double bias_rate = 1e-3;
  double capacity_factor = 0.0;  // 0: dropless
  double rank_rows_factor = 0;   // > 0: planned rows of a rank's experts over the even share (all-to-all only)
  DropPolicy drop_policy = DropPolicy::probs;
  double jitter = 0.0;         // router input times U(1 - jitter, 1 + jitter), training only
  bool router_f32 = true;      // router_dtype = "f32"; false: the compute dtype
  bool force_balance = false;  // round-robin experts, for benchmarks
  bool operator==(const BalanceSpec&) const = default;
};

struct CheckpointSpec {
  int64_t every = 0;  // steps; 0: only at the end and on SIGTERM
  int64_t keep = 2;   // the number of complete checkpoints to keep, the newest; 0: all
  bool async_save = true;
  bool resume = true;
  bool operator==(const CheckpointSpec&) const = default;
};

struct LogSpec {
  int64_t every = 1;
  bool tensorboard = true;
  bool precision = false;  // logs how the operands of each layer were quantised
  std::string trace;       // the file for a Chrome trace of one step; empty: none
  bool operator==(const LogSpec&) const = default;
};

}  // namespace moebius
