#include "bench/ranks.h"

#include <algorithm>

#include "bench/batch.h"

namespace moebius {
namespace {

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Runs a whole step, and returns its loss.
double whole_step(Engine& engine, BatchSource& source, const RunSpec& run, int64_t step) {
  engine.step(source, step, run.optimizer.lr);
  const double loss = engine.loss();
  engine.end_of_step();
  Stream s = engine.stream();
  synchronize(s);
  return loss;
}

double slowest(Group& world, double seconds, ThreadPool& pool) {
  std::vector<double> all(static_cast<size_t>(world.size()));
  Stream host(DeviceKind::cpu, pool);
  world.all_gather(host, tensor_of(all.data(), {world.size()}), tensor_of(&seconds, {1}));
  return *std::max_element(all.begin(), all.end());
}

}  // namespace

int64_t warm_up_steps(DeviceKind device) { return device == DeviceKind::cuda ? 3 : 1; }

RanksBench bench_step_of_ranks(const RunSpec& run, const RanksBenchSpec& bench, Transport& world) {
  const int64_t steps = bench.steps;
  MOEBIUS_CHECK(usage, steps >= 1, "bench step: expected at least 1 step; got {}", steps);
  EngineSpec spec = training_engine_spec(run, mesh_shape(run.parallel, world.size()));
  spec.world = &world;
  spec.dispatcher = run.parallel.dispatcher;  // as in a run, the engine tests the ranks' memory access
  Engine engine(spec);
  Stream s = engine.stream();
  engine.init_weights(s, run.seed);
  RanksBench r{.ranks = world.size(), .steps = steps, .tokens = run.train.global_batch * run.train.seq_len};
  r.links = engine.links_text();
  r.dispatcher = engine.dispatcher().name;
  r.planned_bytes = run.device == DeviceKind::cuda ? engine.plan().device_bytes() : engine.plan().total_bytes();
  RandomSequences source(run, engine.data_share());
  const int64_t warm_up = warm_up_steps(run.device);
  for (int64_t step = 1; step <= warm_up; ++step) {
    const double loss = whole_step(engine, source, run, step);
    if (step == 1) r.first_loss = loss;
  }
  Trace trace;
  if (bench.profile) engine.set_trace(&trace);
  Group& all = engine.mesh().group(Axis::world);
  std::vector<double> seconds;
  for (int64_t step = warm_up + 1; step <= warm_up + steps; ++step) {
    all.barrier();
    const CommCounters before = comm_counters(engine.mesh());
    const double begin = now_us();
    r.last_loss = whole_step(engine, source, run, step);
    const CommCounters comm = comm_since(engine.mesh(), before);
    seconds.push_back(slowest(all, (now_us() - begin) * 1e-6, s.pool()));
    const StepTimes& times = engine.step_times();
    r.of_last_step = gather_ranks(engine, {.passes_s = times.passes_s, .optimizer_s = times.optimizer_s}, comm, {});
  }
  r.ops = trace.totals();
  r.fallback_kernels = engine.fallback_kernels_text();
  engine.sample_peak_memory();
  r.peak_bytes = engine.peak_bytes();
  r.median_s = median(seconds);
  r.tokens_per_s = static_cast<double>(r.tokens) / r.median_s;
  return r;
}

}  // namespace moebius
