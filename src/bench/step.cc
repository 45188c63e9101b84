#include <algorithm>
#include <optional>

#include "bench/batch.h"
#include "bench/peak.h"
#include "bench/ranks.h"
#include "bench/timing.h"
#include "engine/engine.h"
#include "io/hash.h"
#include "ops/gemm/gemm.h"

namespace moebius {
namespace {

// Runs a whole step, waits until the device has finished it, and returns its loss.
double whole_step(Engine& engine, BatchSource& source, const RunSpec& run, int64_t step) {
  engine.step(source, step, run.optimizer.lr);
  const double loss = engine.loss();
  engine.end_of_step();
  Stream s = engine.stream();
  synchronize(s);
  return loss;
}

// The cost of every op of a step, from a dry run.
std::vector<Cost> costs_of_step(const RunSpec& run) {
  EngineSpec spec = training_engine_spec(run);
  spec.device = DeviceKind::null;
  Engine dry_run(spec);
  Trace trace;
  dry_run.set_trace(&trace);
  dry_run.step(1, run.optimizer.lr);
  dry_run.end_of_step();
  std::vector<Cost> costs;
  for (const TraceEvent& event : trace.events()) costs.push_back(event.cost);
  return costs;
}

void measure_gpu(StepBench& r, const RunSpec& run) {
  r.ceilings = BenchDevice(run.device, 1, 0).measure_ceilings(1.0);
  r.gemm_tflops = r.ceilings.flops_per_s / 1e12;
  r.datasheet_tflops = datasheet_tflops(Accelerator().info().name);
  r.roofline_s = roofline_ms(costs_of_step(run), r.ceilings) * 1e-3;
}

// The matrix rates to compare a step on the CPU with: bf16 products of the shape of bench_gemm.
class MatrixRate {
 public:
  explicit MatrixRate(int threads) : device_(DeviceKind::cpu, threads, 1), tensors_(device_.stream()) {
    const int64_t n = device_.matrix_size(1.0);
    product_ = {.c_MN = tensors_.zeros({n, n}, DType::bf16),
                .a = tensors_.normal({n, n}, DType::bf16, 1.0f),
                .b = tensors_.normal({n, n}, DType::bf16, 1.0f),
                .trans_b = true};
    gemm(device_.stream(), product_);
    if (onednn_multiplies(DType::bf16)) gemm_by_onednn(device_.stream(), product_);
  }
  void measure() {
    for (int i = 0; i < 3; ++i) {
      gemm_.push_back(tflops(gemm));
      if (onednn_multiplies(DType::bf16)) onednn_.push_back(tflops(gemm_by_onednn));
    }
  }
  double gemm_tflops() const { return median(gemm_); }
  double onednn_tflops() const { return onednn_.empty() ? 0 : median(onednn_); }  // 0: oneDNN has no bf16 here

 private:
  double tflops(void (*multiply)(Stream&, const Gemm&)) {
    const double ms = time_on_device(device_.stream(), [&] { multiply(device_.stream(), product_); });
    return cost(product_).flops / ms / 1e9;
  }
  BenchDevice device_;
  BenchTensors tensors_;
  Gemm product_;
  std::vector<double> gemm_, onednn_;
};

// Reads the master weights in pieces through host memory.
std::string hash_of_masters(Engine& engine) {
  constexpr int64_t kPiece = int64_t{64} << 20;
  engine.finish_update();
  Stream s = engine.stream();
  std::vector<std::byte> piece(kPiece);
  Hasher hasher;
  const ParamTable& params = engine.model().params();
  std::vector<float> values;
  for (const Param& p : params.all()) {
    const Tensor master = p.master();
    for (int64_t at = 0; p.has_remainder && at < p.owned.count; at += kPiece / 4) {
      values.resize(static_cast<size_t>(std::min(kPiece / 4, p.owned.count - at)));
      read_masters(s, p, at, values);
      hasher.update(values.data(), std::ssize(values) * size_of(DType::f32));
    }
    if (p.has_remainder) continue;
    for (int64_t at = 0; at < master.num_bytes(); at += kPiece) {
      const int64_t n = std::min(kPiece, master.num_bytes() - at);
      copy_to_host(s, piece.data(), static_cast<const char*>(master.data) + at, n);
      hasher.update(piece.data(), n);
    }
  }
  return to_hex(hasher.digest());
}

}  // namespace

StepBench bench_step(const RunSpec& run, const StepBenchOptions& options) {
  const auto [steps, profile, hash] = options;
  MOEBIUS_CHECK(usage, steps >= 1, "bench step: expected at least 1 step; got {}", steps);
  MOEBIUS_CHECK(usage, run.train.micro_batch > 0 && run.train.global_batch % run.train.micro_batch == 0,
                "bench step: expected a recipe with train.global_batch a multiple of train.micro_batch; got {} and {}",
                run.train.global_batch, run.train.micro_batch);
  StepBench r{.steps = steps, .tokens = run.train.global_batch * run.train.seq_len};
  const bool on_gpu = run.device == DeviceKind::cuda;
  if (on_gpu) measure_gpu(r, run);
  EngineSpec spec = training_engine_spec(run);
  spec.overlaps_update = true;
  Engine engine(spec);
  Stream s = engine.stream();
  engine.init_weights(s, run.seed);
  RandomSequences source(run);
  std::optional<MatrixRate> rate;
  if (!on_gpu) rate.emplace(engine.spec().threads);
  r.planned_bytes = on_gpu ? engine.plan().device_bytes() : engine.plan().total_bytes();
  if (on_gpu) r.predicted_bytes = engine.device_memory().total_bytes();
  const int64_t warm_up = warm_up_steps(run.device);
  for (int64_t step = 1; step <= warm_up; ++step) {
    const double loss = whole_step(engine, source, run, step);
    if (step == 1) r.first_loss = loss;
  }
  Trace trace;
  if (profile) engine.set_trace(&trace);
  std::vector<double> seconds;
  for (int64_t step = warm_up + 1; step <= warm_up + steps; ++step) {
    const double begin = now_us();
    r.last_loss = whole_step(engine, source, run, step);
    seconds.push_back((now_us() - begin) / 1e6);
    if (rate) rate->measure();
  }
  if (run.optimizer.offload) r.states_bytes = engine.plan().bytes(Life::host) - engine.plan().offloaded_bytes();
  if (on_gpu) r.states_s = engine.step_times().states_s;
  r.fallback_kernels = engine.fallback_kernels_text();
  engine.sample_peak_memory();
  r.peak_bytes = engine.peak_bytes();
  r.median_s = median(seconds);
  r.tokens_per_s = static_cast<double>(r.tokens) / r.median_s;
  r.model_tflops = r.tokens_per_s * run.model.train_flops_per_token(run.train.seq_len) / 1e12;
  if (rate) {
    r.gemm_tflops = rate->gemm_tflops();
    r.onednn_tflops = rate->onednn_tflops();
  }
  r.ops = trace.totals();
  if (hash) r.masters_hash = hash_of_masters(engine);
  return r;
}

}  // namespace moebius
