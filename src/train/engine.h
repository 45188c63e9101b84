// A model with everything it needs to run: threads, mesh, memory, optimizer. The same object on a device, or on the
// null device where it only counts. Two engines fit in one process.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "config/run_spec.h"
#include "model/model.h"
#include "parallel/optimizer.h"

namespace moebius {

struct EngineSpec {
  ModelSpec model;
  BalanceSpec balance;
  PrecisionSpec precision;
  ModelUse use = ModelUse::inference;
  BatchShape shape;                        // of a micro-batch
  int64_t max_positions = 0;               // 0: shape.seq
  int64_t cache_tokens = 0;                // > 0: key/value caches for generation
  std::optional<OptimizerSpec> optimizer;  // with ModelUse::training
  MeshShape mesh;
  DeviceKind device = DeviceKind::cpu;
  int threads = 1;
  uint64_t seed = 0;
};

// The engine that trains this run.
EngineSpec training_engine_spec(const RunSpec& run);

class Engine {
 public:
  // Declares, measures the step stack by a dry run on the null device, then allocates. On the null device nothing is
  // allocated. Error{usage} with the plan when the machine has not that much memory available.
  explicit Engine(const EngineSpec& spec);
  Engine(const Engine&) = delete;

  Stream stream() { return Stream(spec_.device, pool_, trace_); }
  void set_trace(Trace* trace) { trace_ = trace; }
  MicroBatch& batch() { return batch_; }  // filled by the caller before each pass
  Model& model() { return *model_; }
  Optimizer& optimizer() { return *optimizer_; }
  std::vector<KvCache>& caches() { return caches_; }
  const MemoryPlan& plan() const { return plan_; }
  int64_t stack_high_water() { return plan_.stack().high_water(); }
  const EngineSpec& spec() const { return spec_; }
  const Mesh& mesh() const { return mesh_; }

  // Runs body(Step&) on the engine's stream and stack.
  template <class Body>
  void run(Body&& body) {
    Stream s = stream();
    Step step{s, plan_.stack(), batch_};
    body(step);
  }
  void forward_backward();                             // one micro-batch of training
  void optimizer_step(int64_t train_step, double lr);  // reduces, clips, updates
  // Once the metrics of a step were read: routers' state moves on, sums and gradients are cleared.
  void end_of_step();

 private:
  void run_step(Step& step);
  int64_t measure_stack();

  EngineSpec spec_;
  ThreadPool pool_;
  Trace* trace_ = nullptr;
  Mesh mesh_;
  MemoryPlan plan_;
  MicroBatch batch_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<KvCache> caches_;
};

}  // namespace moebius
