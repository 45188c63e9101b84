// Parameters: one allocation each, made of named global tensors ("parts") in the Hugging Face spelling. Checkpoints,
// import, export and initialisation speak of parts; ops and the optimizer of whole parameters.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "comm/layout.h"
#include "memory/plan.h"

namespace moebius {

enum class ModelUse {
  inference,  // weights alone; layers share one set of saved tensors
  gradients,  // and gradients, and saved tensors of every layer
  training,   // and f32 master weights
};

// The block of a global tensor that this rank holds: [begin, begin + count) of dimension dim, all of the others. The
// whole tensor when dim is negative.
struct Shard {
  int dim = -1;
  int64_t begin = 0, count = 0;
  bool operator==(const Shard&) const = default;
};
// The r-th of n equal blocks of dimension dim; where n does not divide it, some are longer by one than others.
Shard shard_of(const Shape& global, int dim, int64_t r, int64_t n);

struct ParamPart {
  std::string name;    // global name, "model.layers.0.mlp.experts.3.up_proj.weight"
  Shape shape;         // global shape
  int64_t offset = 0;  // first element inside the parameter, of local_shape() elements
  Shard shard;
  Shape local_shape() const;
};

enum class ParamInit { normal, ones, zeros };

// Elements [begin, begin + count) of a parameter, counted as they lie in memory.
struct ElementRange {
  int64_t begin = 0, count = 0;
  int64_t end() const { return begin + count; }
  bool operator==(const ElementRange&) const = default;
};
// What both hold; count 0 when that is nothing.
ElementRange common(const ElementRange& a, const ElementRange& b);

// What a layer says of a parameter when it declares it.
struct ParamSpec {
  std::string name;  // "model.layers.0.mlp.experts.w1"
  Shape shape;
  DType dtype = DType::f32;      // of the computation
  std::vector<ParamPart> parts;  // empty: the parameter itself, under its name
  ParamInit init = ParamInit::normal;
  float init_std = 0.02f;
  bool decay = true;  // weight decay applies
  // False: nothing of it is trained, it is saved all the same. State without a gradient (f32), or a frozen parameter.
  bool trainable = true;
  // The embedding as the head of another stage of a pipeline: a parameter like any other here, but it is the first
  // stage's that counts in the gradient norm and is saved.
  bool tied_copy = false;
  // The ranks that hold the same elements, each with a share of their gradient: it is summed over them, and the
  // optimizer is sharded over them. dp_cp for what is sharded over tp; tp_cp_dp for what every tp rank holds whole and
  // uses on its own tokens (norms, the router); edp for experts. Every element of the model is then once in the shards
  // of a stage.
  Axis grad_axis = Axis::dp_cp;
};

struct Param {
  ParamSpec spec;
  Tensor w;   // what ops read, spec.dtype
  Tensor dw;  // f32, accumulated into; only with has_grad
  bool has_grad = false;
  bool has_master = false;
  bool frozen = false;  // a parameter like any other, that training leaves as it is
  // The elements whose truth this rank holds, with their moments: all of them unless an optimizer shards the parameter
  // over the ranks of grad_axis. What is not trained is owned, and the same, on every rank.
  ElementRange owned;
  Tensor master_n;  // f32 [owned.count], only with has_master
  // The truth that the optimizer updates, [owned.count]: f32 in training, else of w's dtype.
  Tensor master() const { return has_master ? master_n : w.view({w.numel()}).rows(owned.begin, owned.end()); }
};

// A part's elements inside a whole tensor that is laid out like its parameter.
Tensor part_of(const Tensor& whole, const ParamPart& part);
// The elements of a part that this rank owns, counted from the part's first; and they, of a tensor that is laid out
// like param.owned (its master, a moment).
ElementRange owned_of(const Param& param, const ParamPart& part);
Tensor owned_part_of(const Tensor& owned, const Param& param, const ParamPart& part);

// Params [begin, end) of a table, in the order they were declared.
struct ParamSpan {
  size_t begin = 0, end = 0;
};

// Is told how far a pass has come, so that communication can run behind it. Passes do not depend on it.
class ParamWatcher {
 public:
  virtual ~ParamWatcher() = default;
  virtual void before_use(Stream& s, const ParamSpan& span) = 0;  // a forward pass reads their weights next
  // A backward pass has added its micro-batch's share to their gradients, the last that it adds.
  virtual void after_gradient(Stream& s, const ParamSpan& span) = 0;
};

class ParamTable {
 public:
  // freeze: patterns with * and ? of part names; what they match has no gradient, no master and no optimizer state.
  ParamTable(MemoryPlan& plan, ModelUse use, std::vector<std::string> freeze = {})
      : plan_(plan), use_(use), freeze_(std::move(freeze)) {}
  ParamTable(const ParamTable&) = delete;
  // Error{usage} when only some of its parts are to be frozen: they are one in memory.
  const Param& declare(ParamSpec spec);
  const std::deque<Param>& all() const { return params_; }
  ModelUse use() const { return use_; }

  void watch(ParamWatcher* watcher) { watcher_ = watcher; }  // null: nobody
  void before_use(Stream& s, const ParamSpan& span) const {
    if (watcher_) watcher_->before_use(s, span);
  }
  void after_gradient(Stream& s, const ParamSpan& span) const {
    if (watcher_) watcher_->after_gradient(s, span);
  }

  // An optimizer's word on params all()[i], before bind(): declares its master.
  void own(size_t i, const ElementRange& range);

  // Draws every parameter, frozen ones too, weights and masters: a value depends on (seed, part name, element of the
  // global tensor), not on order or layout.
  void init(Stream& s, uint64_t seed) const;
  // Of the elements owned, compute = master, rounded: after masters were loaded. Optimizer::gather() does the rest.
  void sync(Stream& s) const;
  void zero_grads(Stream& s) const;

 private:
  bool is_frozen(const ParamSpec& spec) const;

  MemoryPlan& plan_;
  ModelUse use_;
  std::vector<std::string> freeze_;
  std::deque<Param> params_;
  ParamWatcher* watcher_ = nullptr;
};

bool matches_any(const std::vector<std::string>& patterns, const std::string& name);

}  // namespace moebius
