// A model with everything that it needs to run: threads or GPU, mesh, memory, optimizer. The same
// object runs on a device, or on the null device, where it only counts. Two engines fit in one
// process: the ranks of a world may be threads.
//
// Every method that runs passes is called by all ranks together, in the same order.
//
// A training step is  load_batch, step, loss, end_of_step.  The host only copies each micro-batch
// to the device, and the sums of the step back. Everything else is device work, which a GPU
// captures once (engine/step_graphs.h) and replays. No part of this work waits, allocates or
// depends on the contents of memory. The graphs do not grow with the number of micro-batches.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/gpu/gpu_links.h"
#include "device/accelerator.h"
#include "device/out_of_memory.h"
#include "engine/batch_buffers.h"
#include "engine/batch_source.h"
#include "engine/device_memory.h"
#include "engine/engine_memory.h"
#include "engine/engine_spec.h"
#include "engine/host_mirror.h"
#include "engine/step_clock.h"
#include "engine/step_graphs.h"
#include "model/model.h"
#include "parallel/optim/grad_norm.h"
#include "parallel/optim/optimizer.h"
#include "parallel/pipeline/pipeline.h"
#include "parallel/sharding/tied_embedding.h"

namespace moebius {

class Engine {
 public:
  // Declares, measures the step stack by a dry run on the null device, then allocates. On the null
  // device nothing is allocated. Error{usage} with the plan when the machine does not have that
  // much memory available; the same when memory runs out later.
  explicit Engine(const EngineSpec& spec);
  ~Engine();
  Engine(const Engine&) = delete;

  // --- a training step ---
  // Fills the micro-batches of a step (1-based) in host memory.
  void load_batch(BatchSource& source, int64_t step);
  // Forward and backward of every micro-batch that is loaded, then reduction and update. When it
  // returns, the sums of the step can be read.
  void step(int64_t step, double lr);
  // Loads and runs a step. Each micro-batch is loaded just before it is launched, on a GPU while
  // the one before it is computed.
  void step(BatchSource& source, int64_t step, double lr);
  // The token cross-entropy of the last step, or of the passes since end_of_step() once
  // read_metrics() has read them. It is the mean over the targets of the global batch.
  double loss() const;
  // The same for multi-token prediction: the mean over its depths of the mean loss of each. It is 0
  // without multi-token prediction.
  double mtp_loss() const;
  // Called once the metrics of a step were read. Updates the routers' state, and clears sums and gradients.
  void end_of_step();
  const StepTimes& step_times() const { return clock_.times(); }  // of the last step()

  // --- its parts, eager, for evaluation and diagnosis ---
  void forward(int64_t m = 0);  // runs micro-batch m, as batch(m) holds it; adds to the loss sum
  void forward_backward(
      int64_t m = 0);  // runs its backward pass too; after end_of_step() the first stores gradients, others add
  // Runs body(Step&) on the engine's stream and stack, for micro-batch m as batch(m) says.
  template <class Body>
  void run(Body&& body, int64_t m = 0) {
    Stream s = stream();
    batches_->upload(s, m, 1);
    synchronize(s);  // from here on the caller may fill the next batch
    Step step{s, plan_.stack(), batches_->on_device(m)};
    with_memory_advice([&] { body(step); });
  }

  DataShare data_share() const;
  MicroBatch& batch(int64_t m = 0) { return batches_->host(m); }  // in host memory
  const MicroBatch& batch(int64_t m = 0) const { return batches_->host(m); }
  Stream stream();
  void set_trace(Trace* trace) { trace_ = trace; }  // a traced step is eager
  Model& model() { return *model_; }
  const Model& model() const { return *model_; }
  Optimizer& optimizer() { return *optimizer_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  const Tensor& grad_norm() const { return grad_norm_->norm(); }  // f32 [1] of the last step, before clipping
  // Gives every rank the weights of their owners. It is called after masters were loaded and after
  // ParamTable::sync(), by all ranks together.
  void gather_weights(Stream& s);
  std::vector<KvCache>& caches() { return caches_; }
  const MemoryPlan& plan() const { return plan_; }
  const EngineSpec& spec() const { return spec_; }
  const Mesh& mesh() const { return mesh_; }
  // The dispatcher of the MoE layers, and why.
  const DispatcherChoice& dispatcher() const { return dispatcher_; }
  // Says how ranks exchange GPU memory and whether their steps are CUDA graphs, for the run's log; empty
  // on CPUs.
  std::string links_text() const;
  // Ops of the steps so far for which a GPU used fallback kernels, and why; empty when there are none.
  std::string fallback_kernels_text() const;

  // A tensor of Life::metrics as it was after the last step() or read_metrics(), in host memory.
  Tensor on_host(const Tensor& t) const { return gpu_ ? metrics_.at(t) : t; }
  void read_metrics();
  // Logits of rows [begin, end) of the last forward pass, f32 [end - begin, V] in
  // host memory. depth: Stage::logits.
  void read_logits(float* logits, int64_t begin, int64_t end, int64_t depth = 0);
  // Generation, with caches. Computes the tokens of batch(), which are the next ones of these
  // sequences; the tokens before them are cached already. The counts of the runs sum to a multiple of
  // tp. Every data rank computes the same.
  // One GPU captures passes of one token for each sequence as CUDA graphs, unless attention is latent.
  void forward_cached(std::span<const CachedRun> runs);
  // Writes the logits after num_rows of these rows, from row `first` on, f32 [num_rows, V] in host
  // memory. num_tokens: of all runs. In a pipeline the last stage writes them and the others do not.
  void read_row_logits(float* logits, int64_t first, int64_t num_rows, int64_t num_tokens);

  // Returns PeakMemory::bytes(). A GPU is sampled after each of the first steps, which load kernels
  // and capture graphs, and by sample_peak_memory(). Call that after other work that loads kernels.
  int64_t peak_bytes();
  void sample_peak_memory() { peak_.sample(); }
  // The prediction of peak_bytes() for a GPU, made before anything was allocated. On the null
  // device it is for the GPU that the device counts for.
  DeviceMemory device_memory() const {
    return moebius::device_memory(plan_, plan_.bytes(Life::stack), runs_cudnn(spec_));
  }
  // The same for all ranks that share this rank's GPU. The code of kernels is counted once per
  // process. All ranks of the world call it together.
  DeviceMemory shared_device_memory();
  // Returns whether messages between GPUs are staged through pinned host memory. No prediction counts
  // that memory.
  bool stages_messages() const { return links_ && !links_->can_capture(); }
  // Rethrows OutOfMemory of body with advice and the memory table.
  template <class Body>
  void with_memory_advice(Body&& body) const {
    try {
      body();
    } catch (const OutOfMemory& e) {
      MOEBIUS_FAIL(usage, "{}; {}\n{}", e.what(), memory_advice(memory_use(spec_), plan_, INT64_MAX), plan_.table());
    }
  }
  int64_t pinned_bytes() const;  // host memory that a GPU copies a step's batches and sums through

 private:
  friend struct EngineTestAccess;  // engine/engine_testing.h

  // Micro-batches that pass the pipeline together.
  struct Round {
    int64_t first = 0, count = 1;
  };

  void choose_dispatcher(DispatcherKind asked);
  void make_model();
  void make_optimizer();
  void warm_up();
  void launch_step(Stream& s, BatchSource& source, int64_t step);
  void load_batch(Stream& s, BatchSource& source, const Round& round);
  void forward_backward(Stream& s, const Round& round);
  void quantise_weights(Stream& s);
  void reduce(Stream& s);
  void update(Stream& s, StepStack& stack, const Tensor& lr_and_step_2);
  void reduce_loss(Stream& s);
  void clear_sums(Stream& s);
  void dry_run(Step& step);
  void dry_run_cached(Step& step);
  void run_cached(Step& step, std::span<const CachedRun> runs);
  int64_t measure_stack();
  void allocate(int64_t stack_bytes);

  EngineSpec spec_;
  DispatcherChoice dispatcher_;
  ThreadPool pool_;
  std::unique_ptr<GpuRanks> gpu_ranks_;  // only with several ranks on GPUs
  std::unique_ptr<Accelerator> gpu_;     // outlives all that is on it
  std::unique_ptr<GpuLinks> links_;      // between the ranks
  Trace* trace_ = nullptr;
  std::unique_ptr<Transport> dry_run_world_;
  Mesh mesh_;
  MemoryPlan plan_;
  PeakMemory peak_;
  std::unique_ptr<BatchBuffers> batches_;
  HostMirror metrics_;  // only with a GPU
  StepGraphs graphs_;
  bool has_gradients_ = false;  // since the last end_of_step()
  int64_t num_steps_ = 0;
  StepClock clock_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Pipeline> pipeline_;
  std::unique_ptr<TiedEmbedding> tied_embedding_;
  // In training.
  std::unique_ptr<Sharding> sharding_;
  std::unique_ptr<GradNorm> grad_norm_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<KvCache> caches_;
};

}  // namespace moebius
