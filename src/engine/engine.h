// An Engine is a model with everything that it needs to run: threads or a GPU, mesh, memory plan, optimizer. On the
// null device it runs nothing, and counts work and memory. Several engines may be in one process: ranks may be threads.
//
// All ranks must call methods that run passes together, in the same order.
//
// A training step:
//   engine.load_batch(source, step);
//   engine.step(step, lr);
//   engine.loss();
//   engine.end_of_step();
// The host copies each micro-batch to the device, and the sums of the step back. All other work is device work, which
// a GPU captures once (engine/step_graphs.h) and replays. It never waits, allocates, or depends on the contents of
// memory, and the graphs do not grow with the number of micro-batches.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/gpu/gpu_links.h"
#include "device/accelerator.h"
#include "device/out_of_memory.h"
#include "engine/batch_buffers.h"
#include "engine/batch_source.h"
#include "engine/device_draws.h"
#include "engine/device_memory.h"
#include "engine/engine_memory.h"
#include "engine/engine_spec.h"
#include "engine/host_mirror.h"
#include "engine/step_clock.h"
#include "engine/step_graphs.h"
#include "model/model.h"
#include "parallel/optim/grad_norm.h"
#include "parallel/optim/optimizer.h"
#include "parallel/optim/pending_update.h"
#include "parallel/optim/qk_clipping.h"
#include "parallel/pipeline/pipeline.h"
#include "parallel/sharding/tied_embedding.h"

namespace moebius {

class Engine {
 public:
  // Declares all tensors, measures the step stack by a dry run on the null device, and allocates (not on the null
  // device). Throws Error{usage} with the memory plan when the plan does not fit the available memory.
  explicit Engine(const EngineSpec& spec);
  ~Engine();
  Engine(const Engine&) = delete;

  // --- a training step ---
  // Fills the micro-batches of a step in host memory. step: 1-based.
  void load_batch(BatchSource& source, int64_t step);
  // Runs forward and backward of every loaded micro-batch, the reduction of gradients, and the optimizer. When it
  // returns, the sums of the step can be read.
  void step(int64_t step, double lr);
  // load_batch() and step() in one call. Each micro-batch is loaded just before it is launched, on a GPU while the one
  // before it is computed.
  void step(BatchSource& source, int64_t step, double lr);
  // Returns the token cross-entropy of the last step (or, after read_metrics(), of the passes since end_of_step()): the
  // mean over the targets of the global batch.
  double loss() const;
  // Returns the mean loss of multi-token prediction, averaged over its depths; 0 without it.
  double mtp_loss() const;
  // Called after the metrics of a step were read. Updates the state of routers, and clears sums and gradients.
  void end_of_step();
  const StepTimes& step_times() const { return clock_.times(); }  // of the last step()
  // Completes the update of the last step, which may be pending (EngineSpec::overlaps_update). The next step() does it
  // too, overlapped with its first passes, and all other passes do it before they start. Call it before anything else
  // reads or writes weights, gradients or optimizer states. All ranks call it together.
  void finish_update();

  // --- parts of a step, eager, for evaluation and diagnosis ---
  // Runs the forward pass of micro-batch m, which is in batch(m), and adds to the loss sum.
  void forward(int64_t m = 0);
  // Also runs the backward pass. The first call after end_of_step() stores gradients, and later calls add to them.
  void forward_backward(int64_t m = 0);
  // Runs body(Step&) with micro-batch m, on the engine's stream and step stack.
  template <class Body>
  void run(Body&& body, int64_t m = 0) {
    finish_update();
    Stream s = stream();
    batches_->upload(s, m, 1);
    synchronize(s);  // from here on the caller may fill the next batch
    Step step{s, plan_.stack(), batches_->on_device(m)};
    with_memory_advice([&] { body(step); });
  }

  DataShare data_share() const;
  MicroBatch& batch(int64_t m = 0) { return batches_->host(m); }  // micro-batch m in host memory
  const MicroBatch& batch(int64_t m = 0) const { return batches_->host(m); }
  Stream stream();
  void set_trace(Trace* trace) { trace_ = trace; }  // a traced step is eager
  Model& model() { return *model_; }
  const Model& model() const { return *model_; }
  Optimizer& optimizer() { return *optimizer_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  const Tensor& grad_norm() const { return grad_norm_->norm(); }  // f32 [1] of the last step, before clipping
  // Draws all weights from the seed, and quantises those that are stored in 8 bits. All ranks call it together.
  void init_weights(Stream& s, uint64_t seed);
  // Sends the weights of their owners to all ranks. Call it after masters were loaded, and after ParamTable::sync();
  // all ranks call it together.
  void gather_weights(Stream& s);
  std::vector<KvCache>& caches() { return caches_; }
  const MemoryPlan& plan() const { return plan_; }
  const EngineSpec& spec() const { return spec_; }
  const Mesh& mesh() const { return mesh_; }
  // The dispatcher of the MoE layers, with the reason for the choice.
  const DispatcherChoice& dispatcher() const { return dispatcher_; }
  // Describes, for the log, how ranks exchange GPU memory and whether steps are captured as CUDA graphs; empty on CPUs.
  std::string links_text() const;
  // Lists the ops for which a GPU has used fallback kernels so far, with the reasons; empty if there are none.
  std::string fallback_kernels_text() const;

  // Returns a tensor of Life::metrics in host memory, as of the last step() or read_metrics().
  Tensor on_host(const Tensor& t) const { return gpu_ ? metrics_.at(t) : t; }
  void read_metrics();
  // Writes the logits of rows [begin, end) of the last forward pass to host memory, f32 [end - begin, V].
  // depth: as in Stage::logits.
  void read_logits(float* logits, int64_t begin, int64_t end, int64_t depth = 0);
  // Generation. Computes the tokens in batch(), which continue the cached sequences of `runs`. The counts of the runs
  // must sum to a multiple of tp. Every dp rank computes the same. With one GPU, passes of one token per sequence are
  // captured as CUDA graphs, unless attention is latent.
  void forward_cached(std::span<const CachedRun> runs);
  // Returns whether draw_cached() can be called: on one GPU.
  bool draws_on_device() const;
  // Computes one token of each sequence and draws the next ones on the GPU, by ops/draw/draw.h. Returns before the GPU
  // has ended. Pass 0 computes the tokens in batch(); each later pass of a series has the same sequences, one position
  // on, and computes what the pass before it drew. `rule` is that of pass 0. Before a pass is launched, the last but
  // one must have been waited for.
  void draw_cached(std::span<const CachedRun> runs, int64_t pass, const DrawRule& rule);
  const DeviceDraws& draws() const { return draws_; }  // the ids
  // Writes the logits of num_rows rows of the last forward_cached(), from row `first` on, to host memory: f32
  // [num_rows, V]. num_tokens: of all its runs. In a pipeline only the ranks of the last stage write them.
  void read_row_logits(float* logits, int64_t first, int64_t num_rows, int64_t num_tokens);

  // Returns the peak memory (PeakMemory::bytes()). A GPU's memory is sampled after each of the first steps, which load
  // kernels and capture graphs, and by sample_peak_memory(), to be called after other work that loads kernels.
  int64_t peak_bytes();
  void sample_peak_memory() { peak_.sample(); }
  // Predicts peak_bytes() for a GPU. On the null device the prediction is for the device that it counts for.
  DeviceMemory device_memory() const {
    return moebius::device_memory(plan_, plan_.bytes(Life::stack), runs_cudnn(spec_));
  }
  // Predicts the sum over the ranks that share this rank's GPU; the code of kernels counts once per process. All ranks
  // of the world call it together.
  DeviceMemory shared_device_memory();
  // Returns whether messages between GPUs are staged through pinned host memory, which no prediction includes.
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
  int64_t pinned_bytes() const;  // pinned host memory for the copies of batches and sums

 private:
  friend struct EngineTestAccess;  // engine/engine_testing.h

  // The micro-batches [first, first + count), whose passes run together: all of a step in a pipeline, else one.
  struct Round {
    int64_t first = 0, count = 1;
  };
  static constexpr int64_t kLogitRows = 64;  // rows whose logits are computed at once

  void choose_dispatcher(DispatcherKind asked);
  void make_model();
  void make_optimizer();
  void warm_up();
  void launch_step(Stream& s, BatchSource& source, int64_t step);
  void load_batch(Stream& s, BatchSource& source, const Round& round);
  void forward_backward(Stream& s, const Round& round);
  void quantise_weights(Stream& s);
  void reduce(Stream& s);
  OptimizerStepArgs measure_gradients(Stream& s, StepStack& stack, const Tensor& lr_and_step_2);
  void update(Stream& s, StepStack& stack, const Tensor& lr_and_step_2);
  void read_clock(bool had_pending);
  void reduce_loss(Stream& s);
  void clear_sums(Stream& s);
  void close_heap_gaps();
  void dry_run(Step& step);
  void declare_generation();
  bool captures_tokens() const;
  void dry_run_cached(Step& step);
  void run_cached(Step& step, std::span<const CachedRun> runs);
  int64_t measure_stack();
  void allocate(int64_t stack_bytes);

  EngineSpec spec_;
  DispatcherChoice dispatcher_;
  ThreadPool pool_;
  std::unique_ptr<GpuRanks> gpu_ranks_;  // only with several ranks on GPUs
  std::unique_ptr<Accelerator> gpu_;     // outlives all that is on it
  std::unique_ptr<GpuLinks> links_;      // copies between the ranks' GPUs
  Trace* trace_ = nullptr;
  std::unique_ptr<Transport> dry_run_world_;
  Mesh mesh_;
  MemoryPlan plan_;
  PeakMemory peak_;
  HeapGaps heap_gaps_;
  std::unique_ptr<BatchBuffers> batches_;
  HostMirror metrics_;  // only with a GPU
  StepGraphs graphs_;
  bool has_gradients_ = false;  // true if a backward pass ran since the last end_of_step()
  int64_t num_steps_ = 0;
  StepClock clock_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Pipeline> pipeline_;
  std::unique_ptr<TiedEmbedding> tied_embedding_;
  // In training.
  std::unique_ptr<Sharding> sharding_;
  std::unique_ptr<GradNorm> grad_norm_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<QkClipping> qk_clipping_;  // null without optimizer.qk_clip
  std::unique_ptr<PendingUpdate> pending_;   // null if no update is ever pending
  bool is_pending_ = false;
  // In generation.
  std::vector<KvCache> caches_;
  DeviceDraws draws_;
};

}  // namespace moebius
