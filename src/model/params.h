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

// What a layer says of a parameter when it declares it.
struct ParamSpec {
  std::string name;  // "model.layers.0.mlp.experts.w1"
  Shape shape;
  DType dtype = DType::f32;      // of the computation
  std::vector<ParamPart> parts;  // empty: the parameter itself, under its name
  ParamInit init = ParamInit::normal;
  float init_std = 0.02f;
  bool decay = true;      // weight decay applies
  bool trainable = true;  // false: state without a gradient (f32), saved all the same
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
  Tensor master_storage;                                                    // f32, only with has_master
  const Tensor& master() const { return has_master ? master_storage : w; }  // the f32 truth that the optimizer updates
};

// A part's elements inside a whole tensor that is laid out like its parameter.
Tensor part_of(const Tensor& whole, const ParamPart& part);

class ParamTable {
 public:
  ParamTable(MemoryPlan& plan, ModelUse use) : plan_(plan), use_(use) {}
  ParamTable(const ParamTable&) = delete;
  const Param& declare(ParamSpec spec);
  const std::deque<Param>& all() const { return params_; }
  ModelUse use() const { return use_; }

  // Draws every trainable parameter: a value depends on (seed, part name, element), not on order or layout. Then
  // sync().
  void init(Stream& s, uint64_t seed) const;
  // compute = master, rounded: after masters were drawn or loaded.
  void sync(Stream& s) const;
  void zero_grads(Stream& s) const;

 private:
  MemoryPlan& plan_;
  ModelUse use_;
  std::deque<Param> params_;
};

}  // namespace moebius
