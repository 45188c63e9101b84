// The work and memory of one part of a stage: its own layers, declared and run once on the null device.
//
// A stage is its ends (embedding; final norm, head, loss and multi-token prediction) and its layers,
// and layers of one kind cost the same. So a few parts make up every stage of every layout. The layers themselves
// report what they allocate, compute and send, so the planner needs no list of its own.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/layout.h"
#include "core/trace.h"
#include "engine/engine_spec.h"
#include "model/params.h"
#include "parallel/optim/optimizer.h"
#include "plan/layout.h"

namespace moebius {

// The classes of kernels. Each class has its own rate on a machine.
enum class KernelClass : int {
  products,            // dense products, the loss among them
  experts,             // grouped products
  attention_forward,   //
  attention_backward,  //
  memory,              // all that is bound by bytes
};
inline constexpr int kNumKernelClasses = 5;
const char* name_of(KernelClass kind);
KernelClass kernel_class(const std::string& op);  // by the op's name in traces

// One op of a pass, or several calls of it. flops and bytes are the sums over all calls.
struct OpWork {
  std::string name;
  KernelClass kind = KernelClass::memory;
  int64_t calls = 0;
  Cost cost;
  int64_t kernels = 1;  // of a call on a GPU
};

enum class GroupCall : int { all_gather, reduce_scatter, all_reduce, all_to_all, send };
// The communication of a group: the bytes that this rank sends.
struct SentWork {
  Axis axis = Axis::world;
  GroupCall call = GroupCall::all_gather;
  int64_t calls = 0;
  double wire_bytes = 0;  // sum over all calls
  bool overlaps = false;  // started beside products that do not depend on it (model/attention/row_blocks.h)
};

// The work of a pass, in the order of its first calls.
struct PassWork {
  std::vector<OpWork> ops;
  std::vector<SentWork> sent;
  int64_t stack_bytes = 0;  // high-water mark of the step stack
  double flops() const;
};

// Consecutive matrices of one shape in a parameter, as Muon updates them.
struct MatrixWork {
  int64_t begin = 0, numel = 0;  // elements on this rank: before the first matrix, of each matrix
  int64_t count = 0;             // matrices
  PassWork each;                 // Newton-Schulz of a whole matrix, and the exchange of its shards
};

// A parameter of this rank; fields as in Param (model/params.h).
struct ParamSize {
  Axis axis = Axis::dp_cp;
  DType dtype = DType::bf16;
  int64_t numel = 0;
  int64_t copies_bytes = 0;  // bytes of quantised copies, and of the scales of quantised weights
  int64_t num_scales = 0;    // number of those scales
  ParamKind kind = ParamKind::matrix;
  bool has_grad = false;
  bool trainable = false;
  bool tied_copy = false;
  bool sums_apart = false;  // Param::sums_apart
  bool grad_stored_first = false;
  bool has_blocks = false;           // its states may be 8-bit codes (core/block_code.h)
  bool of_matrices = false;          // is_of_matrices() (parallel/optim/optimizer.h)
  bool fuses_grad = false;           // Param::fuses_grad
  UpdateScratch scratch;             // of its update
  std::vector<MatrixWork> matrices;  // set for Muon alone
};

// The memory for the rows of experts, which all MoE layers of a rank share (model/moe/expert_rows.h).
struct RowsWork {
  int64_t scratch_bytes = 0;
  int64_t spill_bytes = 0;    // host memory for the worst-case imbalance
  bool counts_ranks = false;  // the rank holds counts of all ranks of the world
  int64_t pages_of_pass = 0, h_columns = 0, low_columns = 0;
};

struct PartWork;
// The three parts of a composed part, whose passes take the time of the first two minus that of the third
// (plan/cost/composed_part.h).
struct SimplerParts {
  const PartWork *experts = nullptr, *attention = nullptr, *neither = nullptr;
};

struct PartWork {
  SimplerParts simpler;              // of a composed part, which has no passes below; otherwise nulls
  RecomputeSpec recompute;           // what its layer recomputes
  bool splits = false;               // other passes may come between its two backward passes
  PassWork forward, loss, backward;  // backward: both of its passes, which add to the gradients
  PassWork backward_weight;          // the second of them, if other passes may come between; else nothing
  PassWork first_backward;           // the same of a step's first micro-batch, which stores gradients
  PassWork copies;                   // quantising the weights, once a step
  OpWork leave;                      // additional work if the layer is the last one of a stage without the final norm
  int64_t saved_bytes = 0;           // of one micro-batch in flight, on the device
  // The tensors of a layer that memory.offload moves, in order: elements and their dtype.
  std::vector<std::pair<int64_t, DType>> offloaded;
  int64_t output_bytes = 0;  // held once, whatever the number of micro-batches in flight
  int64_t metrics_bytes = 0;
  int64_t logits = 0;             // with QK-clip: elements of MaxLogits::all()
  int64_t window_bytes = 0;       // with the direct dispatcher: all parts of a rank share one window
  RowsWork rows;                  // zeros without MoE layers
  std::vector<ParamSize> params;  // in the order of declaration
  double offloaded_bytes() const;
};

// The values that a part depends on (cost/part_key.h).
using PartKey = std::array<int64_t, 35>;
struct PartKeyHash {
  size_t operator()(const PartKey& key) const;
};

// The parts of a model, each run once for each set of values that it depends on. Threads may share a library.
class PartLibrary {
 public:
  // Returns the part of a stage. policy: policy_of(spec). splits: other passes may come between its two
  // backward passes.
  // REQUIRES: spec is resolved.
  const PartWork& part(const EngineSpec& spec, const StageSpec& stage, size_t policy, bool splits);
  // Does the same for callers that need only times and parameters. The part may then be composed of simpler parts, and
  // has no memory.
  const PartWork& timed_part(const EngineSpec& spec, const StageSpec& stage, size_t policy, bool splits);
  // Returns the index of the run's policies. Equal policies have the same index.
  size_t policy_of(const EngineSpec& spec);
  // The use of the pipelines of all layouts.
  const PipelineUse& pipeline(const PipelineSpec& spec, int64_t num_ranks, int64_t pp_rank);
  // Returns the bytes of `count` micro-batches in Life::batch.
  int64_t batch_bytes(const BatchShape& shape, int64_t count);
  size_t num_runs() const { return parts_.size(); }

 private:
  // The policies of a run that its parts depend on, besides the layout.
  struct Policy {
    ModelSpec model;
    BalanceSpec balance;
    PrecisionSpec precision;
    std::vector<std::string> freeze;
    LoraSpec lora;
    bool measures_precision = false;
  };
  ThreadPool& pool(int threads);
  // Returns the part of this key in `known`. If there is none, it calls make() and keeps the result.
  using Parts = std::unordered_map<PartKey, std::unique_ptr<PartWork>, PartKeyHash>;
  template <class Make>
  const PartWork& known_or_new(Parts& known, const PartKey& key, Make&& make);

  std::mutex mutex_;  // protects all members below; it is not held while a part is run
  std::vector<Policy> policies_;
  std::map<int, ThreadPool> pools_;  // by their threads: scratch of the CPU's kernels depends on them
  Parts parts_, composed_;
  // By the fields of a shape that its batch depends on: the bytes of one micro-batch, and of each further one.
  std::map<std::array<int64_t, 7>, std::pair<int64_t, int64_t>> batches_;
  PipelineUses pipelines_;
};

// The parts of one layout, looked up once. The references must outlive it.
class LayoutParts {
 public:
  LayoutParts(PartLibrary& library, const EngineSpec& spec);
  const EngineSpec& spec() const { return spec_; }
  // Uses PartLibrary::timed_part() from now on.
  void use_times_only() { times_only_ = true; }
  // Returns the part of a layer. Layers of one kind share it; memory.offload may apply to some of them.
  const PartWork& layer(int64_t layer);
  // Returns the part of a stage's ends: its embedding, norm, loss, and modules of multi-token prediction.
  const PartWork& ends(const StageSpec& stage);
  // Returns the lowest layer whose backward passes are computed; layers below share what they save (model/stage.h).
  int64_t first_backward() const { return first_backward_; }
  const PipelineUse& pipeline(int64_t pp_rank) { return library_.pipeline(spec_.pipeline, spec_.mesh.pp, pp_rank); }
  int64_t batch_bytes(int64_t count) { return library_.batch_bytes(spec_.shape, count); }

 private:
  void find_lowest_trained();
  void choose_offloaded();
  void find_split_stages();
  const PartWork& part_of(const EngineSpec& spec, const StageSpec& stage, bool splits);
  PartLibrary& library_;
  const EngineSpec& spec_;
  bool times_only_ = false;
  const size_t policy_;
  const bool names_layers_;  // layers of a kind may differ
  std::optional<EngineSpec> on_device_,
      on_host_;  // layers that memory.offload is not for, and layers that it is for; none: spec_
  int64_t first_backward_ = 0;
  std::vector<bool> is_offloaded_;  // [layer]
  std::vector<bool> splits_;        // [layer]: other passes may come between its two backward passes
  std::vector<StageSpec> split_stages_;
  std::vector<const PartWork*> layers_;  // [layer]; null: not looked up yet
  struct Ends {
    StageSpec stage;
    bool splits = false;
    const PartWork* part = nullptr;
  };
  std::vector<Ends> ends_;
};

}  // namespace moebius
