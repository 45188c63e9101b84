// Named workloads, timed: after warm-up the median of several runs, with a checksum of what was computed beside the
// value that plain loops in double give for it. A checksum that is off is Error{numerics}: a wrong kernel has no speed.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "config/run_spec.h"
#include "core/trace.h"

namespace moebius {

struct BenchLine {
  std::string name;
  double median_ms = 0, min_ms = 0;
  int64_t runs = 0;
  Cost cost;                          // of one run
  double checksum = 0, expected = 0;  // sums over sampled outputs
  double gflops_per_s() const { return cost.flops / (median_ms * 1e6); }
  double gbytes_per_s() const { return cost.bytes / (median_ms * 1e6); }
};

struct BenchSpec {
  int threads = 1;
  int64_t runs = 7;
  double scale = 1.0;  // of the sizes, for tests: 1/16 makes every workload tiny
};

// Matrix rates, [2048, 2048] x [2048, 2048]^T in bf16 and f32: our gemm, and one call of oneDNN with as many threads.
std::vector<BenchLine> bench_gemm(const BenchSpec& spec);
// The shapes of recipes/bench_cpu.toml: 8 sequences of 512 tokens, width 512, 8 query and 4 kv heads of 64, 16 experts
// of 1024, top-2; bf16.
std::vector<BenchLine> bench_attention(const BenchSpec& spec);
std::vector<BenchLine> bench_experts(const BenchSpec& spec);
std::vector<BenchLine> bench_moe_layer(const BenchSpec& spec);

struct StepBench {
  int64_t steps = 0, tokens = 0;  // timed; tokens of one step
  double median_s = 0;
  double tokens_per_s = 0;
  double model_tflops = 0;               // by ModelSpec::train_flops_per_token
  // bf16, medians of products after each step: our gemm, and oneDNN alone.
  double gemm_tflops = 0, onednn_tflops = 0;
  double first_loss = 0, last_loss = 0;  // the first is log(vocabulary) but for the noise of the initial weights
  int64_t planned_bytes = 0, peak_rss_bytes = 0;
  std::map<std::string, OpTotal> ops;  // of all timed steps, with profile
  double ratio_to_gemm() const { return model_tflops / gemm_tflops; }
  double ratio_to_onednn() const { return model_tflops / onednn_tflops; }
};

// Whole training steps of the run, optimizer and gradient accumulation included, on random tokens.
StepBench bench_step(const RunSpec& run, int64_t steps, bool profile);

}  // namespace moebius
