// Parameters. A parameter is one allocation, made of parts: named global tensors, with the names of Hugging Face.
// Checkpoints, import, export and initialisation work on parts; ops and the optimizer work on whole parameters.
#pragma once

#include <deque>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "comm/layout.h"
#include "comm/shard.h"
#include "config/train_spec.h"
#include "memory/plan.h"
#include "model/residency.h"
#include "model/step.h"

namespace moebius {

enum class ModelUse {
  inference,  // weights only; layers share one set of saved tensors
  gradients,  // also gradients, and saved tensors of every layer
  training,   // also master weights and optimizer state
};

struct ParamPart {
  std::string name;    // global name, "model.layers.0.mlp.experts.3.up_proj.weight"
  Shape shape;         // global shape
  int64_t offset = 0;  // index in the parameter of its first element; it has local_shape() elements
  Shard shard;
  Shape local_shape() const;
};

enum class ParamInit { normal, uniform, ones, zeros };  // normal and uniform have the standard deviation init_std

// The role of a parameter in the model. Optimizers group parameters by it
// (parallel/optim/param_groups.h).
enum class ParamKind {
  matrix,     // a projection: of attention, a dense MLP, a shared expert, multi-token prediction
  embedding,  // the table of the embedding, also used by the head if the model ties the two
  head,       // the table of the head, if it is not tied
  experts,    // the matrices of the routed experts of a layer, one after another
  router,     // the matrix of a router
  norm,       // the weight of a norm
  bias,       // a bias
  sink,       // attention sinks
  adapter,    // a low-rank matrix of an adapter (model/lora/adapter.h)
  state,      // changed by training without a gradient: expert biases, load of the last step
};

// The declaration of a parameter by its layer.
struct ParamSpec {
  std::string name;  // "model.layers.0.mlp.experts.w1"
  Shape shape;
  DType dtype = DType::f32;      // dtype of the computation
  std::vector<ParamPart> parts;  // empty: the parameter itself, under its name
  ParamInit init = ParamInit::normal;
  float init_std = 0.02f;
  ParamKind kind = ParamKind::matrix;
  // False: training does not update it by a gradient, but checkpoints have it. It is f32 state, or frozen.
  bool trainable = true;
  // True: a copy of the embedding, for the head of another pipeline stage. It is trained like any parameter, but only
  // the embedding of the first stage counts in the gradient norm and is saved.
  bool tied_copy = false;
  // True: if trained, the weights are held in f8_e4m3 with square_blocks scales (core/quantized.h), with f32 masters.
  // Products read them as they are, and there are no weights in `dtype`.
  bool is_quantised = false;
  // True: the first micro-batch of a step stores the gradient (MicroBatch::first_of_step), and the others add to it.
  // REQUIRES: the layer writes the whole gradient, once per micro-batch.
  // False: every micro-batch adds to the gradient, and the end of a step clears it.
  bool grad_stored_first = false;
  // The ranks that have the same elements and different shares of their gradient. The gradient is summed over these
  // ranks, and the optimizer is sharded over them:
  //   dp_cp     parameters that tp splits
  //   tp_cp_dp  parameters that are whole on every tp rank and see its own tokens (norms, the router)
  //   edp       experts
  // So the shards of a stage contain each element of the model once.
  Axis grad_axis = Axis::dp_cp;
};

// The place of a parameter's owned elements in a buffer that several parameters share.
struct OwnedPiece {
  const Tensor* of = nullptr;  // the buffer, [N]; null: there is none
  int64_t first = 0;           // index in the buffer of the first owned element
};

struct Param {
  ParamSpec spec;
  int layer = -1;  // the index of the ParamTable::layer() call that declared it; -1: none
  Tensor w;        // the weights that ops read: spec.dtype, or f8_e4m3 with scales
  Tensor scales;   // f32, only if the weights are held quantised
  Tensor dw;       // f32, the gradient that ops write; only with has_grad and without fuses_grad()
  // The sum of the gradient over micro-batches in bf16, if gradients are summed in bf16; else empty. dw then has the
  // gradient of one micro-batch, until ParamTable::sum_gradients(), in memory that all layers share. With
  // shards_gradient() this is dw rounded, of one micro-batch too.
  Tensor grad_sum;
  bool has_grad = false;
  bool has_master = false;  // the f32 master has memory of its own
  // True: w has the masters, rounded to spec.dtype and then quantised (ParamSpec::is_quantised). A Sharding does this
  // in weights_changed(), since ranks that own parts of one block share its scale.
  bool is_quantised() const { return !scales.empty(); }
  bool has_remainder = false;  // the f32 master is stored as the bf16 weight and 16 more bits
  bool frozen = false;         // training leaves it unchanged
  // The elements that this rank updates and saves: all of them, unless a Sharding divides the parameter among the ranks
  // of grad_axis. Every rank owns all of a parameter that is not trained, unless its weights are sharded.
  ElementRange owned;
  // With parallel.fsdp: the owned weights, the only ones that this rank keeps. w has memory from ready() until another
  // layer reuses it.
  OwnedPiece kept_weights;
  // With parallel.shard_gradients: the owned sums of gradients. grad() has the gradient of one micro-batch, from
  // begin_gradient() until another layer reuses its memory.
  OwnedPiece kept_gradient;
  bool shards_weights() const { return kept_weights.of != nullptr; }
  bool shards_gradient() const { return kept_gradient.of != nullptr; }
  // With optimizer.offload: master and moments are in device memory all the same (parallel/optim/kept_states.h).
  bool keeps_states = false;
  Tensor master_n;     // f32 [owned.count], only with has_master
  Tensor remainder_n;  // u16 [owned.count], only with has_remainder (ops/optimizer/rounding.h)
  // Returns the values that the optimizer updates, [owned.count]: f32 in training, bf16 with stochastic rounding, else
  // w's dtype. With has_remainder they are the high halves, and those in remainder_n are the low ones.
  Tensor master() const;
  // The gradient, summed over the micro-batches of a step. REQUIRES: !shards_gradient().
  const Tensor& grad() const { return sums_apart() ? grad_sum : dw; }
  bool sums_apart() const { return !grad_sum.empty(); }
  // With optimizer.fuse_grad: products add to grad_sum themselves, and there is no dw.
  bool fuses_grad() const { return sums_apart() && dw.empty(); }
  // Returns what products write: the gradient of a micro-batch, or the sum.
  const Tensor& product_grad() const { return fuses_grad() ? grad_sum : dw; }
  // Returns the owned elements, [owned.count], of w and of the gradient.
  Tensor owned_weights() const;
  Tensor owned_gradient() const;
  // Returns whether products add to product_grad() in a pass; otherwise they store it (ParamSpec::grad_stored_first).
  bool adds_to_grad(const MicroBatch& batch) const {
    const bool has_all = !shards_gradient() && (fuses_grad() || !sums_apart());
    return batch.first_row > 0 || (!batch.first_of_step && has_all);
  }
};

// Returns the spec with grad_stored_first set.
ParamSpec stored_first(ParamSpec spec);

// Returns a part of `whole`, a tensor with the layout of the parameter.
Tensor part_of(const Tensor& whole, const ParamPart& part);
// Returns the owned elements, [owned.count], of `whole`, a tensor with the layout of the parameter.
Tensor owned_elements(const Param& param, const Tensor& whole);
// Returns the owned elements of a part, as a range that counts from the part's first element.
ElementRange owned_of(const Param& param, const ParamPart& part);
// Returns the owned elements of a part in `owned`, a tensor with the layout of param.owned: the master or a moment.
Tensor owned_part_of(const Tensor& owned, const Param& param, const ParamPart& part);

// Copies of a parameter's weights in another format, in memory of the plan.
class WeightCopies {
 public:
  virtual ~WeightCopies() = default;
  virtual void make(Stream& s) = 0;  // copies the current weights
  virtual int64_t num_bytes() const = 0;
};

// The elements of masters with remainders that are split or joined at once.
inline constexpr int64_t kMastersPiece = int64_t{4} << 20;

class ParamTable {
 public:
  // freeze: patterns of part names, with * and ?. A matching parameter has no gradient, no master and no optimizer
  // state. Adapters are never frozen.
  ParamTable(MemoryPlan& plan, ModelUse use, std::vector<std::string> freeze = {})
      : plan_(plan), use_(use), freeze_(std::move(freeze)) {}
  ParamTable(const ParamTable&) = delete;
  // Declares a parameter: its weights in the plan, and its gradient if it is trained. The reference stays valid.
  // Throws Error{usage} when the patterns match only some of its parts, since these are one tensor in memory.
  const Param& declare(ParamSpec spec);
  // can_fuse_grad: one product of a micro-batch computes the gradient, and can add it to a sum in bf16
  // (ops/experts/experts.h: expert_wgrad). With optimizer.fuse_grad it does (Param::fuses_grad). REQUIRES:
  // grad_stored_first.
  const Param& declare(ParamSpec spec, bool can_fuse_grad);
  const std::deque<Param>& all() const { return params_; }
  ModelUse use() const { return use_; }

  // Sets the formats of masters and gradients; without this call they are those of OptimizerSpec{}.
  // REQUIRES: no parameter is declared yet.
  void set_formats(const OptimizerSpec& optimizer) { optimizer_ = optimizer; }

  // Runs body, which declares the parameters of one layer. Only these may have gradients summed in bf16.
  template <class Body>
  void layer(Body&& body) {
    plan_.reuse(Life::layer_grad);
    in_layer_ = true;
    ++num_layers_;
    body();
    in_layer_ = false;
  }
  // After the backward pass of a micro-batch, adds dw to grad_sum, or stores it there, for the parameters of the span.
  void sum_gradients(Stream& s, const ParamSpan& span, bool first_of_step) const;

  // Sets the object that the five calls below are forwarded to; null: all weights are always on this rank. The calls
  // must come in the order of model/residency.h; otherwise they throw Error{internal}.
  void set_residency(ParamResidency* residency) { residency_ = residency; }
  void gather(Stream& s, const ParamSpan& span);
  void ready(Stream& s, const ParamSpan& span);
  void release(Stream& s, const ParamSpan& span);
  // Also clears dw of parameters with grad_sum to which ops add: layers share the memory of dw.
  void begin_gradient(Stream& s, const ParamSpan& span, bool first_of_step);
  void grad_ready(Stream& s, const ParamSpan& span);
  bool is_idle() const { return order_.is_idle(); }  // no pass uses a parameter

  // Copies of weights, for passes between which the weights do not change. A copy is read only while it is valid.
  WeightCopies& own_copies(const Param& param, std::unique_ptr<WeightCopies> copies);
  bool has_copies() const { return !copies_.empty(); }
  bool holds(const WeightCopies& copies) const { return copies_hold_ && made_.contains(&copies); }  // are they valid
  int64_t copies_bytes(const Param& param) const;
  void make_copies(Stream& s);    // makes all copies; call hold_copies() afterwards
  void make_copies_when_ready();  // makes each copy at the next ready() of its parameter; it is valid from then on
  void hold_copies();             // marks all copies valid: they were made now, or by a replay of the work
  void drop_copies() { copies_hold_ = false; }

  // Makes this rank the owner of a range of all()[i], a trained or a frozen parameter, and declares its master if it is
  // trained. Called by a Sharding, before bind().
  void own(size_t i, const ElementRange& range);
  // With optimizer.offload: moves the master of all()[i] from the host to device memory of the states. Called after
  // own(), before moments are declared.
  void keep_states(size_t i);
  // Keep only the owned weights, or gradients, in `piece`, whose tensor must outlive their use, and remove the whole
  // ones from the plan. set_weights() and set_gradient() give these memory temporarily; null takes it away. Called by a
  // Sharding, after own().
  void keep_owned_weights(size_t i, const OwnedPiece& piece);
  void keep_owned_gradient(size_t i, const OwnedPiece& piece);
  void set_weights(size_t i, void* data, DeviceKind device);
  void set_gradient(size_t i, void* data, DeviceKind device);

  // Initialises the weights and masters of every parameter, including frozen ones. A value is a function of (seed, part
  // name, element of the global tensor), whatever the layout is. Quantised weights get only masters: call
  // Engine::gather_weights() afterwards. Masters with remainders are drawn through scratch for `piece` of them.
  void init(Stream& s, uint64_t seed, int64_t piece = kMastersPiece) const;
  void init_adapters(Stream& s, uint64_t seed) const;  // the same, for adapters alone
  // Rounds the masters of the owned elements into weights that are not quantised. Call it after masters were loaded,
  // and then Engine::gather_weights() to send the weights to the other ranks.
  void sync(Stream& s) const;
  void zero_grads(Stream& s) const;
  // Clears only the gradients that the next step does not store first.
  void zero_added_grads(Stream& s) const;
  void zero_added_grad(Stream& s, size_t i) const;  // the same for all()[i] alone

 private:
  bool is_frozen(const ParamSpec& spec) const;
  void declare_gradient(Param& p, bool can_fuse);
  void declare_master(Param& p, Life life);

  MemoryPlan& plan_;
  ModelUse use_;
  std::vector<std::string> freeze_;
  OptimizerSpec optimizer_;
  bool in_layer_ = false;
  int num_layers_ = 0;
  std::deque<Param> params_;
  struct CopiesOf {
    size_t param;
    std::unique_ptr<WeightCopies> copies;
  };
  std::vector<CopiesOf> copies_;
  std::set<const WeightCopies*> made_;
  bool copies_hold_ = false;
  ParamResidency* residency_ = nullptr;
  ResidencyOrder order_;
};

// Reads, or replaces, the f32 masters of the owned elements [first, first + values.size()) of a parameter with a
// remainder, which have no tensor of their own. `values` is in host memory; these return when the copies have ended.
// The halves are copied through host memory for `piece` elements.
void read_masters(Stream& s, const Param& p, int64_t first, std::span<float> values, int64_t piece = kMastersPiece);
void write_masters(Stream& s, const Param& p, int64_t first, std::span<const float> values,
                   int64_t piece = kMastersPiece);

bool matches_any(const std::vector<std::string>& patterns, const std::string& name);

}  // namespace moebius
