// One layer on its own, on this rank: the layer of the world's mesh or, on a mesh of one rank, what it must equal.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "comm/mesh.h"
#include "model/params.h"
#include "model/token_runs.h"
#include "ops/cpu/testing.h"
#include "tests/distributed/ranks.h"

namespace moebius {

using testing::Array;
using testing::Values;

inline Values values_of(const Tensor& t) { return {t.ptr<float>(), t.ptr<float>() + t.numel()}; }

// The block of a global tensor that a part is, from all of its elements.
inline Values block_of(const Values& whole, const ParamPart& part) {
  const int dim = std::max(part.shard.dim, 0);
  int64_t outer = 1, inner = 1;
  for (int i = 0; i < dim; ++i) outer *= part.shape[i];
  for (int i = dim + 1; i < part.shape.rank(); ++i) inner *= part.shape[i];
  const int64_t count = part.local_shape()[dim], all = part.shape[dim];
  Values block;
  for (int64_t o = 0; o < outer; ++o) {
    const auto first = whole.begin() + (o * all + part.shard.begin) * inner;
    block.insert(block.end(), first, first + count * inner);
  }
  return block;
}

// Owns what a layer needs to run. `declare` makes the layer and declares what it saves. Weights that a model starts
// with ones or zeros get values that differ, too.
class LayerRig {
 public:
  static constexpr int64_t kStackBytes = 1 << 22;
  static constexpr uint64_t kSeed = 5;

  LayerRig(const Mesh& mesh, const BatchShape& whole, const std::function<void(LayerRig&)>& declare)
      : params(plan, ModelUse::gradients) {
    BatchShape shape = whole;
    shape.seq = whole.seq / mesh.shape().cp;
    declare_micro_batch(plan, shape, batch);
    declare(*this);
    plan.bind(DeviceKind::cpu, kStackBytes);
    params.init(s, kSeed);
    for (const Param& p : params.all()) {
      if (p.spec.init != ParamInit::normal) draw(p);
    }
    *batch.loss_scale_1.ptr<float>() = 0.25f;
    for (const TokenRun& run : token_runs(shape, {.cp = mesh.shape().cp}, {.cp = mesh.place().cp})) {
      for (int64_t i = 0; i < run.count; ++i) tokens.push_back(run.token + i);
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
      batch.pos_T.ptr<int32_t>()[i] = static_cast<int32_t>(tokens[i] % whole.seq);
      batch.doc_start_T.ptr<int32_t>()[i] = 0;
    }
    const int64_t rows = rows_between_projections(shape, mesh.shape());
    stream_tokens.assign(tokens.begin() + mesh.place().tp * rows, tokens.begin() + (mesh.place().tp + 1) * rows);
  }
  Step step() { return {s, plan.stack(), batch}; }
  void draw(const Param& p) {
    for (const ParamPart& part : p.spec.parts) {
      const Values block = block_of(Array::normal(part.shape, DType::f32, key_of(part.name.c_str())).values(), part);
      std::copy(block.begin(), block.end(), part_of(p.w, part).ptr<float>());
    }
  }

  // These rows of the residual stream, of values of all tokens.
  Values own(const Values& all, int64_t width) const {
    Values rows;
    for (const int64_t t : stream_tokens)
      rows.insert(rows.end(), all.begin() + t * width, all.begin() + (t + 1) * width);
    return rows;
  }

  MemoryPlan plan;
  ParamTable params;
  std::vector<int64_t> tokens, stream_tokens;  // which tokens the rows of the micro-batch and of the stream are
  MicroBatch batch;
  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
};

// Every part of `got`, whose tensors are chosen by `tensor` (weights or gradients), equals its block of the same part
// in `want`, which has all of it.
inline void expect_blocks(const ParamTable& got, const ParamTable& want, Tensor Param::*tensor, double tolerance) {
  std::map<std::string, Values> whole;
  for (const Param& p : want.all()) {
    for (const ParamPart& part : p.spec.parts) whole[part.name] = values_of(part_of(p.*tensor, part));
  }
  for (const Param& p : got.all()) {
    for (const ParamPart& part : p.spec.parts) {
      testing::expect_close(part.name, values_of(part_of(p.*tensor, part)), block_of(whole.at(part.name), part),
                            tolerance, tolerance);
    }
  }
}

// The gradients as the optimizer sees them.
inline void reduce_gradients(LayerRig& rig, const Mesh& mesh) {
  for (const Param& p : rig.params.all()) mesh.group(p.spec.grad_axis).all_reduce_sum(rig.s, p.dw);
}

}  // namespace moebius
