// A model with everything it needs to run: threads or GPU, mesh, memory, optimizer. The same object on a device, or on
// the null device where it only counts. Two engines fit in one process: the ranks of a world may be threads.
//
// On several ranks every method that runs passes is called by all of them, in the same order.
//
// The host's side of a step is a copy of each micro-batch in, and of the step's sums out. All else is device work,
// which a GPU records once (CUDA graphs of a micro-batch, and of the optimizer) and replays: nothing in it waits,
// allocates or depends on what is in memory, and what is recorded does not grow with the number of micro-batches.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "comm/gpu/gpu_links.h"
#include "config/run_spec.h"
#include "device/accelerator.h"
#include "device/out_of_memory.h"
#include "engine/device_memory.h"
#include "model/model.h"
#include "parallel/optim/optimizer.h"
#include "parallel/pipeline/pipeline.h"
#include "parallel/sharding/tied_embedding.h"

namespace moebius {

struct EngineSpec {
  ModelSpec model;
  BalanceSpec balance;
  PrecisionSpec precision;
  ModelUse use = ModelUse::inference;
  BatchShape shape;                        // of a micro-batch on this rank: 1 / cp of each sequence
  int64_t num_micro_batches = 1;           // of a step
  int64_t max_positions = 0;               // 0: of the whole sequence
  int64_t cache_tokens = 0;                // > 0: key/value caches for generation
  std::optional<OptimizerSpec> optimizer;  // with ModelUse::training
  RecomputeSpec recompute;                 // what backward makes again instead of keeping it
  std::vector<std::string> freeze;         // patterns of parameters that are not trained (model/params.h)
  MeshShape mesh;
  PipelineSpec pipeline;  // with mesh.pp > 1; its micro-batches are those of a step
  // The world whose rank this engine is, of mesh.world(). None: the only rank, or on the null device the first of
  // a mesh that is counted.
  Transport* world = nullptr;
  DispatcherKind dispatcher = DispatcherKind::automatic;  // of the MoE layers; Engine::spec() has the one that runs
  bool overlap = true;                               // communication runs behind compute where it can; the same bits
  int64_t bucket_numel = GradBuckets::kBucketNumel;  // of gradients that are reduced together
  DeviceKind device = DeviceKind::cpu;
  DeviceKind target = DeviceKind::cpu;  // that a null device stands for
  bool graph = true;                    // a GPU's training step: recorded and replayed, or launched op by op
  bool fusion = true;                   // of the dense layers (model/layers/mlp.h)
  int threads = 1;
  uint64_t seed = 0;
};

// What a rank takes of a global batch: micro-batch m * dp + dp_rank is its m-th, and of each sequence it has the tokens
// of its context rank (model/attention/token_runs.h).
struct DataShare {
  int64_t dp_rank = 0, dp = 1, cp_rank = 0, cp = 1;
};

// The mesh of a run on so many ranks: dp and edp are what is left.
MeshShape mesh_shape(const ParallelSpec& parallel, int64_t world_size);
// The engine that trains this run on a mesh.
EngineSpec training_engine_spec(const RunSpec& run, const MeshShape& mesh = {});

class Engine {
 public:
  using Fill = std::function<void(MicroBatch& batch, int64_t m)>;

  // Declares, measures the step stack by a dry run on the null device, then allocates. On the null device nothing is
  // allocated. Error{usage} with the plan when the machine has not that much memory available, here and wherever memory
  // runs out later.
  explicit Engine(const EngineSpec& spec);
  ~Engine();
  Engine(const Engine&) = delete;

  DataShare data_share() const {
    const RankPlace& at = mesh_.place();
    return {.dp_rank = at.dp, .dp = mesh_.shape().dp, .cp_rank = at.cp, .cp = mesh_.shape().cp};
  }

  Stream stream();
  void set_trace(Trace* trace) { trace_ = trace; }               // a traced step is launched op by op
  MicroBatch& batch(int64_t m = 0) { return host_batches_[m]; }  // host memory, filled by the caller before each pass
  const MicroBatch& batch(int64_t m = 0) const { return host_batches_[m]; }
  Model& model() { return *model_; }
  const Model& model() const { return *model_; }
  Optimizer& optimizer() { return *optimizer_; }
  std::vector<KvCache>& caches() { return caches_; }
  const MemoryPlan& plan() const { return plan_; }
  int64_t stack_high_water() { return plan_.stack().high_water(); }
  const EngineSpec& spec() const { return spec_; }
  const Mesh& mesh() const { return mesh_; }
  // How ranks exchange memory of GPUs and whether their steps are recorded, for the run's log; empty elsewhere.
  std::string links_text() const;
  // Ops of the steps so far that a GPU runs by slower kernels than it has, and why; empty when there are none.
  std::string fallback_kernels_text() const;

  // Runs body(Step&) on the engine's stream and stack, for micro-batch m as batch(m) says.
  template <class Body>
  void run(Body&& body, int64_t m = 0) {
    Stream s = stream();
    upload(s, m);
    synchronize(s);  // from here on the caller may fill the next batch
    Step step{s, plan_.stack(), device_batch(m)};
    with_memory_advice([&] { body(step); });
  }
  void forward_backward(int64_t m = 0);  // one micro-batch of training, all stages of it
  void forward(int64_t m = 0);           // its forward pass alone: adds to the loss sum
  // A whole step: every micro-batch, then the optimizer. The sums of the step can be read when it returns.
  void train_step(int64_t train_step, double lr);
  // The same, and each micro-batch is filled just before it is launched: on a GPU behind the work of the one before.
  void train_step(int64_t train_step, double lr, const Fill& fill);
  // Of the last train_step(): what fill took of the host, and the two halves; of a GPU by its own clock, from the start
  // of the first micro-batch on, with what it waits for later fills.
  double fill_seconds() const { return fill_s_; }
  double passes_seconds() const { return passes_s_; }
  double optimizer_seconds() const { return optimizer_s_; }
  void optimizer_step(int64_t train_step, double lr);  // its second half: reduces, clips, updates
  // Once the metrics of a step were read: routers' state moves on, sums and gradients are cleared.
  void end_of_step();

  // The loss sum of this rank's tokens becomes that of all; train_step() has done it.
  void reduce_loss(Stream& s);

  // A tensor of Life::metrics as it was after the last train_step() or read_metrics(), in host memory.
  Tensor on_host(const Tensor& t) const;
  void read_metrics();
  // Logits of rows [begin, end) of the last forward pass, f32 [end - begin, V] in host memory. depth: Stage::logits.
  void read_logits(float* logits, int64_t begin, int64_t end, int64_t depth = 0);
  // Generation, with caches: the next T tokens of batch(), a multiple of tp, at positions [first, first + T) of the
  // sequence; those before are cached already. Every data rank computes the same.
  void forward_cached(int64_t first, int64_t num_tokens);
  // The logits after one of them, f32 [V] in host memory; of a pipeline on the last stage, others leave them alone.
  void read_row_logits(float* logits, int64_t row, int64_t num_tokens);
  // The most memory that this process has held: of the GPU beside its context and NCCL's (of one that ranks share, all
  // of theirs since this began), or of the host when there is none. A GPU is asked in the first steps, which load
  // kernels and record, and by sample_peak_memory(): after what else loads any.
  int64_t peak_bytes();
  void sample_peak_memory();
  // What was predicted of it for a GPU, or the one that a null device stands for, before anything was allocated.
  DeviceMemory device_memory() const { return moebius::device_memory(plan_, plan_.bytes(Life::stack), runs_cudnn()); }
  // The same for all ranks that share this rank's GPU, with the code of kernels counted once a process. All ranks of the
  // world call it together.
  DeviceMemory shared_device_memory();
  // Whether messages between GPUs are staged through pinned host memory, which no prediction counts.
  bool stages_messages() const { return links_ && !links_->records(); }
  // Memory that runs out in body is told with what would help, and the table of what was planned.
  template <class Body>
  void with_memory_advice(Body&& body) const {
    try {
      body();
    } catch (const OutOfMemory& e) {
      MOEBIUS_FAIL(usage, "{}; {}\n{}", e.what(), memory_advice(memory_use(), plan_, INT64_MAX), plan_.table());
    }
  }
  int64_t pinned_bytes() const;  // host memory that a GPU copies a step's batches and sums through

 private:
  // A part of a step that is launched, then recorded, then replayed.
  struct StepPart {
    CudaGraph recording;
    NcclTraffic traffic;
    int64_t launches = 0;
  };

  MemoryUse memory_use() const;
  void make_model();
  void check_gpu_memory(int64_t stack_bytes);
  void warm_up();
  void schedule(int64_t train_step, double lr);
  void fill_batch(const Fill& fill, int64_t m);
  bool runs_cudnn() const;
  void mirror_on_host();
  void put_scales(int64_t m);
  void upload(Stream& s, int64_t m);
  void check_total_tokens(double total_tokens);
  const MicroBatch& device_batch(int64_t m);
  void forward(Step& step);
  void forward_cached(Step& step, int64_t first, int64_t num_tokens);
  void forward_backward(Step& step);
  void all_passes(Stream& s, const Fill& fill);
  void passes(StepPart& part, bool first, int64_t last_micro_batches, const std::function<void(Stream&)>& body);
  void optimizer_pass(Stream& s, int64_t train_step, double lr);
  void clear_sums(Stream& s);
  bool records() const;
  bool replay(StepPart& part, const std::function<void(Stream&)>& body);
  void run_step(Step& step);
  int64_t measure_stack();
  void allocate(int64_t stack_bytes);
  EngineSpec spec_;
  ThreadPool pool_;
  std::unique_ptr<GpuRanks> gpu_ranks_;  // with several ranks on GPUs
  std::unique_ptr<Accelerator> gpu_;     // outlives all that is on it
  std::unique_ptr<GpuLinks> links_;      // of the ranks
  Trace* trace_ = nullptr;
  std::unique_ptr<Transport> dry_run_world_;  // of a mesh that is counted
  Mesh mesh_;
  MemoryPlan plan_;
  std::deque<MicroBatch> batches_, host_batches_;  // on the device; the same in host memory
  Tensor schedule_2_;                              // f64: learning rate and step, for a recorded optimizer
  std::vector<HostBuffer> inputs_;                 // Life::batch, for each micro-batch in turn; unused on the CPU
  double total_tokens_ = 0;                        // of the global batch, once a step that is recorded was given them
  HostBuffer metrics_;                             // and Life::metrics
  std::array<StepPart, 4> passes_;                 // with overlap by whether a step's first, and its last
  StepPart update_, end_;
  int64_t num_steps_ = 0;
  double fill_s_ = 0, passes_s_ = 0, optimizer_s_ = 0;
  GpuEvent began_, passed_, updated_;  // of a step, on a GPU
  int64_t other_bytes_ = 0;            // of the GPU, held by others before this engine
  int64_t peak_bytes_ = 0;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Pipeline> pipeline_;  // none on one stage
  std::unique_ptr<TiedEmbedding> tied_embedding_;
  std::unique_ptr<Optimizer> optimizer_;
  std::vector<KvCache> caches_;
};

}  // namespace moebius
