#include "bench/timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <thread>

#include "device/gpu_limits.h"
#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"

namespace moebius {
namespace {

// A GPU at its power limit lowers its clocks after some tenths of a second of heavy work. So a line begins after a
// rest, and each round of runs is followed by a rest as long as the round.
constexpr std::chrono::duration<double, std::milli> kFirstRest(300);

void rest(Stream& s, std::chrono::duration<double, std::milli> time) {
  synchronize(s);
  std::this_thread::sleep_for(time);
}

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void TimedRuns::fill(BenchLine& line, size_t body) const {
  line.median_ms = median(ms[body]);
  line.min_ms = *std::min_element(ms[body].begin(), ms[body].end());
  line.runs = static_cast<int64_t>(ms[body].size());
}

Tensor BenchTensors::zeros(Shape shape, DType dtype) {
  const Buffer& buffer = buffers_.emplace_back(s_.device(), shape.numel() * size_of(dtype));
  return {.data = buffer.data(), .shape = shape, .dtype = dtype, .device = s_.device()};
}

Tensor BenchTensors::normal(Shape shape, DType dtype, float std) {
  const Tensor t = zeros(shape, dtype);
  fill_normal(s_, {.x = t, .rng = Rng(1, RngSite::bench, 0, static_cast<uint32_t>(buffers_.size())), .std = std});
  return t;
}

Tensor BenchTensors::ints(Shape shape, const std::vector<int32_t>& values) {
  const Tensor t = zeros(shape, DType::i32);
  copy_to_device(s_, t.data, values.data(), t.num_bytes());
  return t;
}

BenchDevice::BenchDevice(DeviceKind device, int threads, int64_t runs, KernelChoice kernels)
    : pool_(threads), runs_(runs) {
  if (device == DeviceKind::cuda) {
    gpu_ = std::make_unique<Accelerator>();
    set_kernel_choice(*gpu_, kernels);
    stream_ = std::make_unique<Stream>(*gpu_, pool_);
  } else {
    stream_ = std::make_unique<Stream>(device, pool_);
  }
  tensors_ = std::make_unique<BenchTensors>(*stream_);
  if (gpu_) flush_ = tensors_->bytes(256 << 20);
}

double BenchDevice::time_once(const std::function<void()>& body) {
  if (gpu_) fill_zero(*stream_, flush_);
  return time_on_device(*stream_, body);
}

int64_t BenchDevice::runs_for(double first_ms) const {
  if (runs_ > 0) return runs_;
  return gpu_ ? std::clamp<int64_t>(static_cast<int64_t>(1500 / first_ms), 10, 30) : 7;
}

int64_t BenchDevice::time(BenchLine& line, const std::function<void()>& body) {
  const TimedRuns timed = time_in_turns({body});
  timed.fill(line, 0);
  return timed.calls;
}

TimedRuns BenchDevice::time_in_turns(const std::vector<std::function<void()>>& bodies) {
  TimedRuns timed{.ms = std::vector<std::vector<double>>(bodies.size()), .calls = 1};
  for (const auto& body : bodies) body();  // first touch of memory, loading of code, kernels compiled on demand
  const bool rests = gpu_ && !under_load_;
  if (gpu_ && under_load_) timed.calls += warm(bodies);
  if (rests) rest(*stream_, kFirstRest);
  const auto run_all = [&] {
    std::chrono::duration<double, std::milli> round(0);
    for (size_t i = 0; i < bodies.size(); ++i) {
      timed.ms[i].push_back(time_once(bodies[i]));
      round += std::chrono::duration<double, std::milli>(timed.ms[i].back());
    }
    ++timed.calls;
    if (rests) rest(*stream_, round);
  };
  run_all();
  const int64_t runs = runs_for(timed.ms[0][0]);
  for (int64_t run = 1; run < runs; ++run) run_all();
  return timed;
}

int64_t BenchDevice::warm(const std::vector<std::function<void()>>& bodies) {
  int64_t calls = 0;
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < std::chrono::seconds(1)) {
    for (int i = 0; i < 8; ++i) {
      for (const auto& body : bodies) body();
    }
    calls += 8;
    synchronize(*stream_);
  }
  return calls;
}

std::map<std::string, OpTotal> BenchDevice::profile(int64_t runs, const std::function<void(Stream&)>& body) {
  Trace trace;
  Stream traced = gpu_ ? Stream(*gpu_, pool_, &trace) : Stream(stream_->device(), pool_, &trace);
  for (int64_t i = 0; i < runs; ++i) {
    if (gpu_) fill_zero(*stream_, flush_);
    body(traced);
  }
  synchronize(traced);
  return trace.totals();
}

Ceilings BenchDevice::measure_ceilings(double scale) {
  BenchTensors tensors(*stream_);
  const int64_t n = matrix_size(scale), m = scaled(is_gpu() ? 1 << 28 : 1 << 24, scale);
  const Gemm product{.c_MN = tensors.zeros({n, n}, DType::bf16),
                     .a = tensors.normal({n, n}, DType::bf16, 1.0f),
                     .b = tensors.normal({n, n}, DType::bf16, 1.0f),
                     .trans_b = true};
  const Tensor from = tensors.normal({m}, DType::f32, 1.0f), to = tensors.zeros({m}, DType::f32);
  BenchLine multiplied, copied;
  time(multiplied, [&] { gemm(*stream_, product); });
  time(copied, [&] { copy(*stream_, to, from); });
  return {.flops_per_s = cost(product).flops / multiplied.median_ms * 1e3,
          .bytes_per_s = static_cast<double>(from.num_bytes() + to.num_bytes()) / copied.median_ms * 1e3};
}

double roofline_ms(const std::vector<Cost>& ops, const Ceilings& ceilings) {
  double seconds = 0;
  for (const Cost& op : ops) seconds += std::max(op.flops / ceilings.flops_per_s, op.bytes / ceilings.bytes_per_s);
  return seconds * 1e3;
}

std::vector<Cost> costs_of(DeviceKind target, ThreadPool& pool, const std::function<void(Stream&)>& body) {
  Trace trace;
  Stream s(DeviceKind::null, pool, &trace, target);
  body(s);
  std::vector<Cost> costs;
  for (const TraceEvent& event : trace.events()) costs.push_back(event.cost);
  return costs;
}

}  // namespace moebius
