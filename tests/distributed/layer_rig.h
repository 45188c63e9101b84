// A single layer on this rank. It is the layer on the world's mesh or, on a mesh of one rank, the
// layer that it must equal.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>

#include "comm/mesh.h"
#include "model/layer_context.h"
#include "ops/cpu/testing.h"
#include "ops/elementwise/elementwise.h"
#include "tests/distributed/ranks.h"

namespace moebius {

using testing::Array;
using testing::Values;

inline Values values_of(const Tensor& t) { return {t.ptr<float>(), t.ptr<float>() + t.numel()}; }

// Returns the block of a global tensor that belongs to a part, from all of the tensor's elements.
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

// Owns all that a layer needs to run. `declare` makes the layer and declares its saved tensors.
// Weights that a model starts with ones or zeros get distinct values too.
class LayerRig {
 public:
  static constexpr int64_t kStackBytes = 1 << 22, kDocument = 5;
  static constexpr uint64_t kSeed = 5;

  LayerRig(const Mesh& mesh, const BatchShape& whole, const std::function<void(LayerRig&)>& declare,
           const RecomputeSpec& recompute = {})
      : plan(recompute), params(plan, ModelUse::gradients) {
    BatchShape shape = whole;
    shape.seq = whole.seq / mesh.shape().cp;
    declare_micro_batch(plan, shape, batch);
    declare(*this);
    plan.bind(DeviceKind::cpu, kStackBytes);
    params.init(s, kSeed);
    for (const Param& p : params.all()) {
      if (p.spec.init != ParamInit::normal) draw(p);
    }
    batch.scalars.set_loss_scale(0, 0.25);
    batch.store_scalars();
    for (const TokenRun& run : token_runs(shape, {.cp = mesh.shape().cp}, {.cp = mesh.place().cp})) {
      for (int64_t i = 0; i < run.count; ++i) tokens.push_back(run.token + i);
    }
    for (size_t i = 0; i < tokens.size(); ++i) {
      const int64_t position = tokens[i] % whole.seq, begin = whole.documents ? position / kDocument * kDocument : 0;
      batch.pos_T.ptr<int32_t>()[i] = static_cast<int32_t>(position - begin);
      batch.doc_start_T.ptr<int32_t>()[i] = static_cast<int32_t>(begin);
    }
    const int64_t rows = rows_between_projections(shape, mesh.shape());
    stream_tokens.assign(tokens.begin() + mesh.place().tp * rows, tokens.begin() + (mesh.place().tp + 1) * rows);
  }
  Step step() { return {s, plan.stack(), batch}; }
  // For layers of `model`, in f32. The arguments outlive the layer.
  LayerContext context(const ModelSpec& model, const Mesh& mesh, const Tensor& rope_table_Pd) {
    return {.params = params,
            .plan = plan,
            .model = model,
            .balance = balance,
            .mesh = mesh,
            .rope_table_Pd = rope_table_Pd,
            .precision = precision,
            .shape = batch.shape};
  }
  void draw(const Param& p) {
    for (const ParamPart& part : p.spec.parts) {
      const Values block = block_of(Array::normal(part.shape, DType::f32, key_of(part.name.c_str())).values(), part);
      std::copy(block.begin(), block.end(), part_of(p.w, part).ptr<float>());
    }
  }

  // Returns this rank's rows of the residual stream, from the values of all tokens.
  Values own(const Values& all, int64_t width) const {
    Values rows;
    for (const int64_t t : stream_tokens)
      rows.insert(rows.end(), all.begin() + t * width, all.begin() + (t + 1) * width);
    return rows;
  }

  MemoryPlan plan;
  ParamTable params;
  std::vector<int64_t> tokens, stream_tokens;  // the tokens of the rows of the micro-batch, and of the stream
  MicroBatch batch;
  const BalanceSpec balance;
  const PrecisionSpec precision;
  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
};

// Expects that every part of `got` equals its block of the same part in `want`, which has the whole
// of it. `tensor` selects weights or gradients.
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

inline void expect_same_gradients(const ParamTable& got, const ParamTable& want) {
  for (size_t i = 0; i < want.all().size(); ++i)
    EXPECT_EQ(values_of(got.all()[i].dw), values_of(want.all()[i].dw)) << want.all()[i].spec.name;
}

// Reduces the gradients, as for the optimizer.
inline void reduce_gradients(LayerRig& rig, const Mesh& mesh) {
  for (const Param& p : rig.params.all()) mesh.group(p.spec.grad_axis).all_reduce_sum(rig.s, p.dw);
}

// Outputs, of this rank or whole, and the bytes that the forward and the backward pass sent over
// tp and cp, and over the levels of cp.
struct LayerPasses {
  Values y, dx;
  int64_t sent[4][2];  // [tp, cp, cp_inner, cp_outer][forward, backward]
};

// x and dy are this rank's rows of the values of all tokens, of width D.
template <class Layer>
LayerPasses both_passes(LayerRig& rig, const Mesh& mesh, const Layer& layer, typename Layer::Saved& saved, int64_t T,
                        int64_t D) {
  const int64_t t = std::ssize(rig.stream_tokens);
  const auto own = [&](uint64_t key) {
    return Array::of({t, D}, DType::f32, rig.own(Array::normal({T, D}, DType::f32, key).values(), D));
  };
  constexpr Axis kCounted[4] = {Axis::tp, Axis::cp, Axis::cp_inner, Axis::cp_outer};
  LayerPasses passes;
  int64_t before[4];
  for (int a = 0; a < 4; ++a) before[a] = mesh.sent_bytes(kCounted[a]);
  const auto count = [&](int pass) {
    for (int a = 0; a < 4; ++a)
      passes.sent[a][pass] = mesh.sent_bytes(kCounted[a]) - before[a] - (pass == 1 ? passes.sent[a][0] : 0);
  };
  Array x = own(1), dy = own(2), y = Array::poisoned({t, D}, DType::f32), dx = y;
  Step step = rig.step();
  StackScope scope(step.stack);
  layer.forward(step, y.tensor(), x.tensor(), saved);
  count(0);
  const auto input = [&] { return x.tensor(); };
  if constexpr (requires { layer.backward_input(step, dy.tensor(), saved, /*with_dx=*/true, input); }) {
    auto gradient = layer.backward_input(step, dy.tensor(), saved, /*with_dx=*/true, input);
    layer.backward_weight(step, saved);
    gradient.sum.wait();
    copy(step.stream, dx.tensor(), gradient.dx_tD);
  } else if constexpr (requires { layer.backward(step, dx.tensor(), dy.tensor(), saved); }) {
    layer.backward(step, dx.tensor(), dy.tensor(), saved);
  } else {
    layer.backward_input(step, dx.tensor(), dy.tensor(), saved);
    layer.backward_weight(step, saved);
  }
  count(1);
  passes.y = y.values();
  passes.dx = dx.values();
  return passes;
}

// make(rig, mesh) gives the layer, declare(layer, plan, saved) its saved tensors. The layer on the mesh equals that
// on one rank: y and dx row by row, weights and their gradients block by block. Exchanges that overlap with products
// change no bit, and send the same. Gives what was sent.
template <class Layer>
LayerPasses expect_like_one_rank(
    Transport& transport, const MeshShape& shape, const BatchShape& whole, int64_t D, double tolerance,
    const std::function<Layer(LayerRig&, const Mesh&)>& make,
    const std::function<void(const Layer&, MemoryPlan&, typename Layer::Saved&)>& declare) {
  MeshShape overlapping = shape;
  overlapping.tp_overlap = overlapping.cp_overlap = true;
  const Mesh one(MeshShape{}), mesh(shape, transport), overlapped_mesh(overlapping, transport);
  std::optional<Layer> alone, shared, overlapped;
  typename Layer::Saved alone_saved, saved, overlapped_saved;
  const auto make_on = [&](std::optional<Layer>& layer, typename Layer::Saved& to, const Mesh& on) {
    return [&](LayerRig& rig) {
      layer.emplace(make(rig, on));
      declare(*layer, rig.plan, to);
    };
  };
  LayerRig want(one, whole, make_on(alone, alone_saved, one)), got(mesh, whole, make_on(shared, saved, mesh)),
      beside(overlapped_mesh, whole, make_on(overlapped, overlapped_saved, overlapped_mesh));
  expect_blocks(got.params, want.params, &Param::w, 0);
  const int64_t T = whole.tokens();
  const LayerPasses w = both_passes(want, one, *alone, alone_saved, T, D),
                    g = both_passes(got, mesh, *shared, saved, T, D),
                    b = both_passes(beside, overlapped_mesh, *overlapped, overlapped_saved, T, D);
  EXPECT_EQ(b.y, g.y);
  EXPECT_EQ(b.dx, g.dx);
  expect_same_gradients(beside.params, got.params);
  for (int axis = 0; axis < 4; ++axis)
    for (const int pass : {0, 1}) EXPECT_EQ(b.sent[axis][pass], g.sent[axis][pass]) << axis << ' ' << pass;
  reduce_gradients(got, mesh);
  testing::expect_close("y", g.y, got.own(w.y, D), tolerance, tolerance);
  testing::expect_close("dx", g.dx, got.own(w.dx, D), tolerance, tolerance);
  expect_blocks(got.params, want.params, &Param::dw, tolerance);
  return g;
}

}  // namespace moebius
