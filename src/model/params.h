// Parameters. Each is one allocation, made of named global tensors ("parts") in the Hugging
// Face spelling. Checkpoints, import, export and initialisation work on parts; ops and the
// optimizer work on whole parameters.
#pragma once

#include <deque>
#include <memory>
#include <set>
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
  inference,  // weights alone; layers share one set of saved tensors
  gradients,  // gradients too, and saved tensors of every layer
  training,   // f32 master weights too
};

struct ParamPart {
  std::string name;    // global name, "model.layers.0.mlp.experts.3.up_proj.weight"
  Shape shape;         // global shape
  int64_t offset = 0;  // first element inside the parameter, of local_shape() elements
  Shard shard;
  Shape local_shape() const;
};

enum class ParamInit { normal, uniform, ones, zeros };  // normal and uniform have the standard deviation init_std

// The role of a parameter in the model. Optimizers group parameters by it
// (parallel/optim/param_groups.h).
enum class ParamKind {
  matrix,     // a projection: of attention, a dense MLP, a shared expert, multi-token prediction
  embedding,  // the table of the vocabulary; also the head's table, if the model ties them
  head,       // the head's table, if it has its own
  experts,    // the matrices of the routed experts of a layer, one after another
  router,     // the router's matrix
  norm,       // weights of a norm
  bias,       // a row that is added
  sink,       // attention sinks
  adapter,    // a low-rank matrix beside a frozen one (model/lora/adapter.h)
  state,      // changed by training without a gradient: expert biases, load of the last step
};

// The declaration of a parameter by its layer.
struct ParamSpec {
  std::string name;  // "model.layers.0.mlp.experts.w1"
  Shape shape;
  DType dtype = DType::f32;      // of the computation
  std::vector<ParamPart> parts;  // empty: the parameter itself, under its name
  ParamInit init = ParamInit::normal;
  float init_std = 0.02f;
  ParamKind kind = ParamKind::matrix;
  // False: training does not update it by a gradient, but it is still saved. It is then
  // state, which is f32, or a frozen parameter.
  bool trainable = true;
  // True: a copy of the embedding, as the head of another stage of a pipeline. Here it is a parameter
  // like any other, but only that of the first stage counts in the gradient norm and is saved.
  bool tied_copy = false;
  // True: where a gradient trains the parameter it is held in f8_e4m3 with square_blocks scales
  // (core/quantized.h), and its masters are f32. It is the products' operand then, and no weights in
  // dtype exist. Else it has dtype.
  bool is_quantised = false;
  // True: the first micro-batch of a step stores the gradient (MicroBatch::first_of_step), and the
  // others add to it. Its layer computes all of it, and once a micro-batch. False: every micro-batch
  // adds to it, and it is cleared at the end of the step before.
  bool grad_stored_first = false;
  // The ranks that hold the same elements, each with a share of their gradient. The gradient is
  // summed over them, and the optimizer is sharded over them. It is dp_cp for parameters that are
  // sharded over tp. It is tp_cp_dp for those that every tp rank holds whole and uses on its own
  // tokens (norms, the router), and edp for experts. So every element of the model is in the
  // shards of a stage exactly once.
  Axis grad_axis = Axis::dp_cp;
};

// The place of a parameter's owned elements in memory that holds those of several parameters.
struct OwnedPiece {
  const Tensor* of = nullptr;  // [N]; null: there is no such memory
  int64_t first = 0;           // the first of the owned elements in it
};

struct Param {
  ParamSpec spec;
  int layer = -1;  // the call of ParamTable::layer() that it was declared in, counted from 0; -1: none
  Tensor w;        // what ops read, spec.dtype, or f8_e4m3 with scales
  Tensor scales;   // f32, of weights that are held quantised; else empty
  Tensor dw;       // f32, what ops add gradients to; only with has_grad
  // bf16, where gradients are summed in bf16: dw then holds those of one micro-batch, until
  // ParamTable::sum_gradients(), in memory that all layers use one after the other. Else empty.
  Tensor grad_sum;
  bool has_grad = false;
  bool has_master = false;  // f32, in memory of its own
  // w holds the masters rounded to spec.dtype and then quantised (ParamSpec::is_quantised). A sharding
  // does it in weights_changed(), since ranks that own parts of a block share its scale.
  bool is_quantised() const { return !scales.empty(); }
  bool has_remainder = false;  // f32, as a bf16 weight and 16 more bits
  bool frozen = false;         // a parameter like any other, but training leaves it unchanged
  // The elements that this rank updates and saves. They are all elements, unless a sharding
  // shards the parameter over the ranks of grad_axis. A parameter that is not trained is
  // owned, and the same, on every rank, unless its weights are sharded.
  ElementRange owned;
  // With parallel.fsdp: the only weights of it that this rank keeps. w is then in memory from its ready() on, until
  // another layer takes its place.
  OwnedPiece kept_weights;
  // With parallel.shard_gradients: the sums that this rank keeps. dw then holds those of one micro-batch, from
  // begin_gradient() to the next layer that takes its place.
  OwnedPiece kept_gradient;
  bool shards_weights() const { return kept_weights.of != nullptr; }
  bool shards_gradient() const { return kept_gradient.of != nullptr; }
  Tensor master_n;     // f32 [owned.count], only with has_master
  Tensor remainder_n;  // u16 [owned.count], only with has_remainder (ops/optimizer/rounding.h)
  // The values that the optimizer updates, [owned.count]. They are f32 in training, or bf16 where the
  // weights are rounded stochastically; else of w's dtype. With has_remainder this is the memory of
  // the gradient, which holds them after ParamTable::join_masters().
  Tensor master() const;
  // The sum over the micro-batches of a step. REQUIRES: !shards_gradient().
  const Tensor& grad() const { return sums_apart() ? grad_sum : dw; }
  bool sums_apart() const { return !grad_sum.empty(); }
  // The elements that this rank owns, [owned.count], of w and of the gradient.
  Tensor owned_weights() const;
  Tensor owned_gradient() const;
  // Returns whether products add to dw in a pass. Else they store it (ParamSpec::grad_stored_first).
  bool adds_to_grad(const MicroBatch& batch) const {
    return batch.later_part || (!batch.first_of_step && !sums_apart() && !shards_gradient());
  }
};

// The same declaration, with grad_stored_first.
ParamSpec stored_first(ParamSpec spec);

// A part's elements inside a whole tensor that is laid out like its parameter.
Tensor part_of(const Tensor& whole, const ParamPart& part);
// The elements that this rank owns, [owned.count], of a whole tensor that is laid out like the parameter.
Tensor owned_elements(const Param& param, const Tensor& whole);
// The elements of a part that this rank owns, counted from the part's first.
ElementRange owned_of(const Param& param, const ParamPart& part);
// The same elements of `owned`, a tensor that is laid out like param.owned: its master or a moment.
Tensor owned_part_of(const Tensor& owned, const Param& param, const ParamPart& part);

// Copies of a parameter's weights in another form, in memory of the plan.
class WeightCopies {
 public:
  virtual ~WeightCopies() = default;
  virtual void make(Stream& s) = 0;  // from the weights as they are
  virtual int64_t num_bytes() const = 0;
};

class ParamTable {
 public:
  // freeze: patterns of part names, with * and ?. A parameter that they match has no gradient, no
  // master and no optimizer state. Adapters are never frozen.
  ParamTable(MemoryPlan& plan, ModelUse use, std::vector<std::string> freeze = {})
      : plan_(plan), use_(use), freeze_(std::move(freeze)) {}
  ParamTable(const ParamTable&) = delete;
  // Declares its weights in the plan, and its gradient if it is trained. The
  // reference stays valid. Error{usage} when some of its parts are to be frozen and
  // others not, since they are stored as one tensor.
  const Param& declare(ParamSpec spec);
  const std::deque<Param>& all() const { return params_; }
  ModelUse use() const { return use_; }

  // Sets the formats of masters and gradients, and where masters are; those of OptimizerSpec{} without
  // this call. It comes before the first declare().
  void set_formats(const OptimizerSpec& optimizer) { optimizer_ = optimizer; }

  // Declares the parameters of one layer, in body. Only these may have sums of gradients in bf16.
  template <class Body>
  void layer(Body&& body) {
    plan_.reuse(Life::layer_grad);
    in_layer_ = true;
    ++num_layers_;
    body();
    in_layer_ = false;
  }
  // Adds dw of the span to the sums that are apart, or stores them, once the backward pass of a
  // micro-batch has made it. dw is then clear where ops add to it.
  void sum_gradients(Stream& s, const ParamSpan& span, bool first_of_step) const;

  // Sets the object that acts on the five calls below; null: weights are always on this rank. The
  // order of the calls is given in model/residency.h, and checked: Error{internal}.
  void set_residency(ParamResidency* residency) { residency_ = residency; }
  void gather(Stream& s, const ParamSpan& span);
  void ready(Stream& s, const ParamSpan& span);
  void release(Stream& s, const ParamSpan& span);
  void begin_gradient(Stream& s, const ParamSpan& span, bool first_of_step);
  void grad_ready(Stream& s, const ParamSpan& span);
  bool is_idle() const { return order_.is_idle(); }  // no pass uses a parameter

  // Copies of weights, for passes between which the weights do not change. Nobody reads a copy that does
  // not hold.
  WeightCopies& own_copies(const Param& param, std::unique_ptr<WeightCopies> copies);
  bool has_copies() const { return !copies_.empty(); }
  bool holds(const WeightCopies& copies) const { return copies_hold_ && made_.contains(&copies); }
  int64_t copies_bytes(const Param& param) const;
  void make_copies(Stream& s);    // all of them; hold_copies() follows
  void make_copies_when_ready();  // each at the first ready() of its parameter from now on; then it holds
  void hold_copies();             // all of them were made, now or by a replay of the work
  void drop_copies() { copies_hold_ = false; }

  // Makes this rank the owner of a range of all()[i], a trained or a frozen parameter, and declares its master if it is
  // trained. Called by a sharding, before bind().
  void own(size_t i, const ElementRange& range);
  // This rank keeps only the elements that it owns, in `piece`, whose tensor outlives their use. The weights, or the
  // gradient, leave the plan. set_weights() and set_gradient() give them memory for a while, or take it away.
  // Called by a sharding after own().
  void keep_owned_weights(size_t i, const OwnedPiece& piece);
  void keep_owned_gradient(size_t i, const OwnedPiece& piece);
  void set_weights(size_t i, void* data, DeviceKind device);
  void set_gradient(size_t i, void* data, DeviceKind device);

  // Draws every parameter, frozen ones too, weights and masters: a value depends on (seed, part
  // name, element of the global tensor), not on order or layout. Of quantised weights only masters are
  // drawn: Engine::gather_weights() follows.
  void init(Stream& s, uint64_t seed) const;
  void init_adapters(Stream& s, uint64_t seed) const;  // the same for adapters alone
  // Rounds the masters of the owned elements into weights that are not quantised; split_masters() is part of it. Call
  // it after masters were loaded; Engine::gather_weights() then sends the weights to the other ranks.
  void sync(Stream& s) const;
  // For parameters with a remainder, between two steps. join_masters() writes the f32 masters into
  // the memory of the gradient, where Param::master() is. split_masters() makes weights and
  // remainders of what is there. Both it and clear_masters() clear the gradient.
  void join_masters(Stream& s) const;
  void split_masters(Stream& s) const;
  void clear_masters(Stream& s) const;
  void zero_grads(Stream& s) const;
  // Only those that the next step does not store first.
  void zero_added_grads(Stream& s) const;

 private:
  bool is_frozen(const ParamSpec& spec) const;
  void declare_gradient(Param& p);

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

bool matches_any(const std::vector<std::string>& patterns, const std::string& name);

}  // namespace moebius
