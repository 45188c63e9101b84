// The memory of the rows of a rank's experts, with several ranks. The routing decides how many rows there are.
//
// With even routing a rank's experts get T K ETP rows of a layer, the even share; at most they get max_expert_rows().
// With a budget f (memory.expert_rows) a rank plans device memory for
//   f times the even share    of each pass in flight that saves rows for its backward, in one pool for all of them
//   2 f times the even share  of the current layer
// For rows beyond that:
//   Saved rows are in pages of the pool (ops/stash/stash.h). Rows without a page are recomputed in backward, from the
//   tokens, which the backward pass sends to the experts anyway.
//   Rows of the running layer are in tensors of the worst-case size, whose end is in host memory
//   (device/spill_buffer.h).
// So no row is dropped, the budget changes no bit, and the host reads no counts.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "config/dispatcher_choice.h"
#include "config/model_spec.h"
#include "config/stage_layout.h"
#include "config/train_spec.h"
#include "memory/plan.h"
#include "model/step.h"
#include "ops/stash/stash.h"

namespace moebius {

// Returns the even share of rows, for T tokens on each rank.
int64_t even_expert_rows(const MeshShape& mesh, const ModelSpec& model, int64_t T);
// Returns the maximum number of rows of a rank's experts for T tokens on each rank, or the bound that rows_factor
// (moe.rank_rows_factor) sets, if it is above 0.
int64_t max_expert_rows(const MeshShape& mesh, int64_t num_experts, int64_t top_k, int64_t T, double rows_factor);
// Returns the number of MoE layers that a stage computes in training. num_mtp: depths of multi-token prediction.
int64_t moe_layers_of(const ModelSpec& model, const StageSpec& stage, int64_t num_mtp);
// Returns how many of these layers save the rows of experts for backward, instead of recomputing them.
int64_t moe_layers_that_keep(const ModelSpec& model, const StageSpec& stage, int64_t num_mtp,
                             const RecomputeSpec& recompute);

struct ExpertRowsSpec {
  double budget = 0;       // memory.expert_rows
  int64_t max_tokens = 1;  // T
  int64_t chunk = 0;  // tokens that the experts process at a time, a divisor of T (model/moe/chunked_experts.h); 0: T
  DispatcherKind dispatcher = DispatcherKind::allgather;
  double rows_factor = 0;  // moe.rank_rows_factor
  DType dtype = DType::f32;
  // The maximum number of passes between forward and backward at a time. A pass is that of a micro-batch through an MoE
  // layer that keeps rows.
  int64_t passes_in_flight = 1;
  bool has_layers = true;  // this rank has MoE layers
};

class ExpertRows {
 public:
  ExpertRows(const ModelSpec& model, const Mesh& mesh, const ExpertRowsSpec& spec);
  ExpertRows(const ExpertRows&) = delete;

  // Called by the constructors of layers, with the columns of A x of the adapters of W1 and W2.
  // in_8_bits: the layer saves h in 8 bits (model/layers/pre_activation.h).
  void add_layer(int64_t w1_columns, int64_t w2_columns, bool in_8_bits);
  // Called once, after the layers are constructed. The plan must outlive this.
  void declare(MemoryPlan& plan);
  // Called once, after the plan is bound: marks all pages free.
  void init_state(Stream& s) const;

  // The tensors of the current layer, [max rows, *], which all MoE layers share.
  struct Scratch {
    Tensor h, dh;          // pre-activations, and the derivatives w.r.t. them
    Tensor act;            // activations; in backward multiplied by the weights of their rows
    Tensor y;              // outputs; in backward the derivatives w.r.t. the rows of x
    Tensor low, dlow1;     // used by W1's adapter
    Tensor dlow2, g;       // used by W2's adapter
    Tensor tokens, grads;  // all-to-all: rows of x and of dy as they arrived
    Tensor sent;           // all-to-all: rows that are returned
  };
  const Scratch& scratch() const { return scratch_; }

  // The pages of a pass between its forward and its backward.
  struct Held {
    Tensor page_Q, held_3;
    bool keeps = false;  // backward does not recompute all rows of this layer
    bool in_8_bits = false;
  };
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Held& held, bool in_8_bits) const;
  // Keeps h and low of the scratch, as far as there are pages. It does nothing where backward recomputes all rows.
  void stash(Step& step, const Held& held, const Tensor& offsets_e1) const;
  // Restores the kept rows, and frees their pages. Then join() waits for the rows that compute() reads, which may still
  // be in flight. compute(step, offsets) computes the rows of each expert between `offsets`: all rows that were not
  // kept, often none. Only the time of compute() is counted. With in_8_bits all rows of h are rounded.
  template <class Join, class Compute>
  void unstash(Step& step, const Held& held, const Tensor& offsets_e1, Join&& join, Compute&& compute) const {
    if (!held.keeps) {
      join();
      compute(step, offsets_e1);
      pack(step.stream, held, offsets_e1);
      return unpack(step.stream, held, offsets_e1);
    }
    StackScope scope(step.stack);
    bring_back(step.stream, held);
    join();
    const Spilled spilled = begin_spill(step, held, offsets_e1);
    // Usually there are no such rows, so they are not counted as work.
    Stream uncounted = without_trace(step.stream);
    Step quiet{uncounted, step.stack, step.batch};
    compute(quiet, spilled.offsets_e1);
    pack(uncounted, held, spilled.offsets_e1);
    end_spill(step.stream, {.counts_3 = counts_here(), .since_1 = spilled.since_1});
    unpack(step.stream, held, offsets_e1);
  }

  // Counts of a step on each of the W ranks of the world, f64 [W, 3] of Life::metrics:
  //   [r, 0]  rows without a page
  //   [r, 1]  the maximum rows that passes kept, or would have kept, at a time, divided by the rows of the pool
  //   [r, 2]  nanoseconds of recomputing rows
  // Empty where no rows are kept.
  const Tensor& counts_W3() const { return counts_W3_; }
  void reduce_counts(Stream& s) const;  // gives every rank the counts of all ranks
  void end_of_step(Stream& s) const;    // called after the counts were read; clears them

  int64_t pages_of_pass() const { return pages_of_chunk_ * chunks_; }
  // Columns of a row in the pool: those of h, the most of a layer, and those of scale A x, the most of an adapter.
  int64_t h_columns() const { return keeps_ ? h_columns_ : 0; }
  int64_t low_columns() const { return keeps_ ? low1_ : 0; }
  int64_t stash_columns() const { return h_columns() + low_columns(); }

 private:
  struct Spilled {
    Tensor offsets_e1, since_1;
  };
  // Calls copy(tensor of the scratch, its first column in the pool) for each tensor that outlives the layer.
  template <class Copy>
  void for_each_kept(const Held& held, Copy&& copy) const;
  // With in_8_bits, packed_h() is h in 8 bits, in the memory of dh, which other passes do not use yet. pack() writes
  // it, and unpack() reads it; without in_8_bits they do nothing.
  Tensor packed_h() const;
  void pack(Stream& s, const Held& held, const Tensor& offsets_e1) const;
  void unpack(Stream& s, const Held& held, const Tensor& offsets_e1) const;
  int64_t expected_rows() const;                       // rows kept by a pass, with balanced routing
  void bring_back(Stream& s, const Held& held) const;  // copies the kept rows into the scratch
  // Frees the pages of a pass. The time of the spill begins here.
  Spilled begin_spill(Step& step, const Held& held, const Tensor& offsets_e1) const;
  Tensor counts_here() const;
  static Stream without_trace(const Stream& s);

  int64_t D_, F_, R_, near_rows_, pages_of_chunk_, chunks_, passes_;
  DType dtype_;
  bool is_all_to_all_, has_layers_;
  std::vector<int64_t> moe_layers_;  // indices of the model's MoE layers
  bool keeps_ = true;                // some of these layers keep rows; the same on all ranks
  int64_t low1_ = 0, low2_ = 0;
  int64_t h_columns_ = 0;  // columns of h in the pool: the maximum over the layers
  Scratch scratch_;
  Group& world_;
  Tensor pool_SM_, free_P_, state_2_, counts_W3_;
  int64_t even_rows_;  // of a chunk
};

// Returns the bytes of Life::rows for a pool of num_pages pages, whose rows have num_columns columns.
int64_t stash_bytes(int64_t num_pages, int64_t num_columns, DType dtype);
// Returns the bytes of Life::metrics for the counts of a world.
int64_t stash_counts_bytes(int64_t num_ranks);

// Throws Error{usage} where memory.offload names the rows that a budget keeps in its pool: a copy would have to move
// the worst case. REQUIRES a budget.
void check_offload_of_rows(const OffloadSpec& offload);

// Returns the object that the MoE layers of a model share. It is null without a budget, in a model without such layers,
// if a rank has all experts, and if the budget reaches the worst case. All ranks of a model get the same.
std::unique_ptr<ExpertRows> make_expert_rows(const ModelSpec& model, const Mesh& mesh, const ExpertRowsSpec& spec);

}  // namespace moebius
