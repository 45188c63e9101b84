// Named workloads, timed on a device: after warm-up the median of several runs, with elements of what was computed
// compared with what plain loops in double give for them (bench/check.h). Elements that are off are
// Error{numerics}: a wrong kernel has no speed.
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
  Cost cost;                             // of one run
  double roofline_ms = 0;                // the least time at the ceilings measured beside: ops one after the other
  double checksum = 0, expected = 0;     // sums over sampled outputs
  std::map<std::string, double> errors;  // of the sampled outputs, relative, by the name of the result: "dx"
  double largest_error() const;
  double gflops_per_s() const { return cost.flops / (median_ms * 1e6); }
  double gbytes_per_s() const { return cost.bytes / (median_ms * 1e6); }
};

// What the device reached in the same run: our gemm in bf16, and our copy (bytes read and bytes written).
struct Ceilings {
  double flops_per_s = 0, bytes_per_s = 0;
};

struct BenchReport {
  std::vector<BenchLine> lines;
  Ceilings ceilings;
  int64_t kept_bytes = 0;  // moe-layer: held from forward to backward: x, the pre-activations, logits and the route
  std::map<std::string, OpTotal> ops;  // moe-layer with profile: of profiled_runs forward and backward passes
  int64_t profiled_runs = 0;
};

// Which keys a query of bench_attention sees besides being causal.
struct BenchMask {
  int64_t window = 0;     // the last so many; 0: all
  int64_t documents = 1;  // of one length in each sequence, which they divide
};

struct BenchSpec {
  DeviceKind device = DeviceKind::cpu;
  int threads = 1;
  int64_t runs = 0;    // 0: 7 on the CPU; on a GPU what takes 1.5 s, at least 10 and at most 30
  double scale = 1.0;  // of the sizes, for tests: 1/16 makes every workload tiny
  std::string shape = "bench-cpu";
  BenchRouting routing;
  BenchMask mask;        // attention
  bool profile = false;  // moe-layer: every op by itself as well
};

// Matrix rates in bf16 and f32: our gemm, [2048, 2048] x [2048, 2048]^T on the CPU and 8192 on a GPU; on the CPU also
// one call of oneDNN with as many threads.
BenchReport bench_gemm(const BenchSpec& spec);
// Causal attention of the shape's heads, bf16; operations are those of the keys seen.
BenchReport bench_attention(const BenchSpec& spec);
// Each op of the experts, bf16.
BenchReport bench_experts(const BenchSpec& spec);
// A whole MoE layer, bf16, gradients added in f32. Its lines:
//   moe_layer_fwd, _fwd_bwd                 from given logits: softmax, top-k and the index count; where no
//                                           router could choose the route it is given whole
//   moe_layer_fwd_router, _fwd_bwd_router   the router's product, and its backward, too
BenchReport bench_moe_layer(const BenchSpec& spec);

struct StepBench {
  int64_t steps = 0, tokens = 0;  // timed; tokens of one step
  double median_s = 0;  // from the filling of the first micro-batch until all the device's work of the step has ended
  double tokens_per_s = 0;
  double model_tflops = 0;  // by ModelSpec::train_flops_per_token
  // bf16, medians: our gemm, and on the CPU oneDNN alone (0 where it has no bf16). On the CPU products after each step,
  // on a GPU before the first, when there is memory for them.
  double gemm_tflops = 0, onednn_tflops = 0;
  // Of a GPU: the data sheet's bf16 products (0: not known), and the least time of the step's ops one after the other
  // at the rates of our gemm and our copy, measured before the first step.
  double datasheet_tflops = 0, roofline_s = 0;
  Ceilings ceilings;
  double first_loss = 0, last_loss = 0;  // the first is log(vocabulary) but for the noise of the initial weights
  int64_t planned_bytes = 0, predicted_bytes = 0, peak_bytes = 0;  // predicted: of a GPU, before the plan is bound
  std::map<std::string, OpTotal> ops;                              // of all timed steps, with profile
  std::string fallback_kernels;  // which ops of the steps have slower kernels, as Engine says it
  std::string masters_hash;      // XXH3-128 of the master weights after the last step, when asked for
  double mfu() const { return model_tflops / datasheet_tflops; }
  double ratio_to_roofline() const { return roofline_s / median_s; }
  double ratio_to_gemm() const { return model_tflops / gemm_tflops; }
  double ratio_to_onednn() const { return model_tflops / onednn_tflops; }
};

struct StepBenchOptions {
  int64_t steps = 3;     // timed
  bool profile = false;  // every op by itself
  bool hash = false;     // of the master weights: two runs of the same steps on the same machine give the same
};
// Whole training steps of the run, optimizer and gradient accumulation included, on random tokens.
StepBench bench_step(const RunSpec& run, const StepBenchOptions& options);

}  // namespace moebius
