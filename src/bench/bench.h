// Named workloads, timed on a device. The time is the median of several runs after warm-up.
// Some elements of each result are compared with plain loops in double (bench/check.h).
// Wrong elements are Error{numerics}: the speed of a wrong kernel is not reported.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bench/shapes.h"
#include "config/run_spec.h"
#include "core/trace.h"

namespace moebius {

struct BenchLine {
  std::string name;
  double median_ms = 0, min_ms = 0;
  int64_t runs = 0;
  Cost cost;                             // cost of one run
  double roofline_ms = 0;                // lower bound of the time at the ceilings below, with ops in sequence
  double checksum = 0, expected = 0;     // sums over sampled outputs
  std::map<std::string, double> errors;  // relative errors of sampled outputs, by the result's name: "dx"
  std::string kernel;  // products on a GPU: the desc, and the config or the algorithm that was chosen for it
  double largest_error() const;
  double gflops_per_s() const { return cost.flops / (median_ms * 1e6); }
  double gbytes_per_s() const { return cost.bytes / (median_ms * 1e6); }
};

// The rates that the device reached in the same run: our gemm in bf16, and our copy (bytes read and
// bytes written).
struct Ceilings {
  double flops_per_s = 0, bytes_per_s = 0;
};

// The time of a micro-batch through a layer, in bf16 and with a recipe.
struct RecipeTime {
  std::string name;  // of the line in bf16
  double bf16_ms = 0, recipe_ms = 0;
  double weights_ms = 0;  // its share of quantising the weights, which a step does once
  double total_ms() const { return recipe_ms + weights_ms; }
  double ratio() const { return total_ms() / bf16_ms; }
};

struct BenchReport {
  std::vector<BenchLine> lines;
  double weights_ms = 0;                 // moe-layer with a recipe: quantising the weights, once a step
  std::vector<RecipeTime> recipe_times;  // moe-layer with a recipe: of the forward and backward passes
  Ceilings ceilings;
  int64_t kept_bytes = 0;              // moe-layer: kept from forward to backward: x, pre-activations, logits, route
  std::map<std::string, OpTotal> ops;  // moe-layer with profile: of profiled_runs forward and backward passes
  int64_t profiled_runs = 0;
};

// The keys that a query of bench_attention attends to. The mask is always causal too.
struct BenchMask {
  int64_t window = 0;     // attends only to the last `window` keys; 0: to all
  int64_t documents = 1;  // documents of equal length in each sequence; a divisor of its length
};

struct BenchSpec {
  DeviceKind device = DeviceKind::cpu;
  int threads = 1;
  int64_t runs = 0;    // 0: 7 on the CPU; on a GPU 10 to 30, for about 1.5 s
  double scale = 1.0;  // scales the sizes, for tests: 1/16 makes every workload tiny
  std::string shape = "bench-cpu";
  BenchRouting routing;
  // For experts: fp8_block or fp8_tensor multiplies operands that were quantised before, and times weight gradients
  // that are stored, too.
  // For moe-layer: times the layer in bf16 and quantised by this recipe, in turns.
  PrecisionRecipe operands = PrecisionRecipe::none;
  int64_t micro_batches = 4;  // for moe-layer with a recipe: micro-batches that share one quantising of the weights
  BenchMask mask;             // used by attention
  int64_t sequences = 0;      // for attention; 0: those of the shape
  int64_t length = 0;         // for attention: tokens of a sequence; 0: those of the shape
  bool paths = false;         // for attention: also times each path of the Hopper kernels (AttentionBwdPath)
  bool profile = false;       // for moe-layer: times every op separately too
  // For moe-layer: the backward pass stores the weights' gradients, as in the first micro-batch of a
  // step, instead of adding to them.
  bool first_micro_batch = false;
  KernelChoice kernels = KernelChoice::automatic;  // kernels that a GPU uses
  int64_t head_dim = 0;                            // for attention: the width of every head; 0: the shape's
  // True: a GPU is timed after a second of the same work, at the clocks that its power limit allows in a long run.
  // False: it rests before the first run, and after each run for as long as it took.
  bool under_load = false;
};

// Measures matrix rates in bf16 and f32 with our gemm. It is [2048, 2048] x [2048, 2048]^T on the
// CPU, and 8192 on a GPU.
// On the CPU it also measures one call of oneDNN with the same number of threads.
BenchReport bench_gemm(const BenchSpec& spec);
// Measures causal attention with the shape's heads in bf16. Only operations on keys that a query
// attends to are counted. If our own kernels and cuDNN's both support the shape, each has a line, and
// `kernel` says which of them a run uses (ops/attention/attention_choice.h). Throws Error{usage} for `paths` where the
// Hopper kernels do not support the shape.
BenchReport bench_attention(const BenchSpec& spec);
// Measures each op of the experts in bf16.
BenchReport bench_experts(const BenchSpec& spec);
// Measures a whole MoE layer in bf16, with gradients in f32. Its lines are:
//   moe_layer_fwd, _fwd_bwd                 from given logits: softmax, top-k and the index count; from
//                                           a given route where no router could choose it
//   moe_layer_fwd_router, _fwd_bwd_router   with the router's product, and its backward
// With operands each is followed by the line of the recipe, whose name ends in _fp8_block or _fp8_tensor. Activations
// and gradients are quantised in its passes. It has no roofline, because the ceilings are those of bf16.
// Throws Error{usage} for micro_batches below 1. REQUIRES for operands: experts without biases, with SwiGLU.
BenchReport bench_moe_layer(const BenchSpec& spec);

struct StepBench {
  int64_t steps = 0, tokens = 0;  // timed steps; tokens of one step
  double median_s = 0;            // from filling the first micro-batch until the device has finished the step
  double tokens_per_s = 0;
  double model_tflops = 0;  // by ModelSpec::train_flops_per_token
  // Median rates in bf16: our gemm, and on the CPU oneDNN separately (0 where it has no bf16).
  // They are measured after each step on the CPU, and before the first step on a GPU
  // if memory allows.
  double gemm_tflops = 0, onednn_tflops = 0;
  // On a GPU: the data sheet's rate of bf16 products (0: not known), and the least time of the
  // step's ops one after the other.
  // That time assumes the rates of our gemm and our copy, measured before the first step.
  double datasheet_tflops = 0, roofline_s = 0;
  Ceilings ceilings;
  double first_loss = 0, last_loss = 0;  // the first is log(vocabulary), up to the noise of the initial weights
  // Memory of the GPU, or else of the host. predicted: on a GPU, before the plan is bound.
  int64_t planned_bytes = 0, predicted_bytes = 0, peak_bytes = 0;
  std::map<std::string, OpTotal> ops;  // totals over all timed steps, with profile
  std::string fallback_kernels;        // the ops that use fallback kernels, as Engine reports them
  std::string masters_hash;            // XXH3-128 of the master weights after the last step, if `hash`
  // With optimizer.offload: bytes of masters and moments that an update moves each way, and on a GPU the time that
  // this took in the last step.
  int64_t states_bytes = 0;
  double states_s = 0;
  double mfu() const { return model_tflops / datasheet_tflops; }
  double ratio_to_roofline() const { return roofline_s / median_s; }
  double ratio_to_gemm() const { return model_tflops / gemm_tflops; }
  double ratio_to_onednn() const { return model_tflops / onednn_tflops; }
};

struct StepBenchOptions {
  int64_t steps = 3;     // timed steps
  bool profile = false;  // times every op separately
  bool hash = false;     // hashes the master weights; equal runs on one machine have equal hashes
};
// Measures whole training steps of the run on random tokens, with optimizer
// and gradient accumulation.
StepBench bench_step(const RunSpec& run, const StepBenchOptions& options);

}  // namespace moebius
