// Layers on tp ranks equal the layer on one: outputs and input gradients row by row, weight gradients block by block.
#include "model/gqa.h"
#include "model/mlp.h"
#include "model/vocab.h"
#include "ops/rope/rope.h"
#include "tests/distributed/layer_rig.h"

namespace moebius {
namespace {

// tp everywhere it divides: heads 8 and 8, hidden 24, rows 3 * 8.
constexpr int64_t D = 5, kBatch = 3, kSeq = 8, kRows = kBatch * kSeq;
// Sums of at most 64 products of magnitude 1, a few of them in a row.
constexpr double kTolerance = 64 * 0x1p-23;

struct Passes {
  Values y, dx;
};

// x and dy are this rank's rows of what all tokens have.
template <class Layer>
Passes both_passes(LayerRig& rig, const Layer& layer, typename Layer::Saved& saved) {
  const int64_t t = std::ssize(rig.stream_tokens);
  const auto own = [&](uint64_t key) {
    return Array::of({t, D}, DType::f32, rig.own(Array::normal({kRows, D}, DType::f32, key).values(), D));
  };
  Array x = own(1), dy = own(2), y = Array::poisoned({t, D}, DType::f32), dx = y;
  Step step = rig.step();
  StackScope scope(step.stack);
  layer.forward(step, y.tensor(), x.tensor(), saved);
  layer.backward_input(step, dx.tensor(), dy.tensor(), saved);
  layer.backward_weight(step, saved);
  return {y.values(), dx.values()};
}

void declare_saved(const Mlp& layer, MemoryPlan& plan, int64_t rows, Mlp::Saved& saved) {
  layer.declare_saved(plan, "mlp", rows, saved, &RecomputeSpec::mlp);
}
void declare_saved(const Gqa& layer, MemoryPlan& plan, int64_t rows, Gqa::Saved& saved) {
  layer.declare_saved(plan, "attention", rows, saved);
}

// make(rig, mesh) gives the layer.
template <class Layer>
void expect_like_one_rank(Transport& transport, const std::function<Layer(LayerRig&, const Mesh&)>& make) {
  const Mesh one(MeshShape{}), mesh({.tp = transport.size(), .ep = transport.size()}, transport);
  const BatchShape whole{.batch = kBatch, .seq = kSeq};
  std::optional<Layer> alone, shared;
  typename Layer::Saved alone_saved, saved;
  const auto declare = [&](std::optional<Layer>& layer, typename Layer::Saved& to, const Mesh& on) {
    return [&](LayerRig& rig) {
      layer.emplace(make(rig, on));
      declare_saved(*layer, rig.plan, rows_between_projections(rig.batch.shape, on.shape()), to);
    };
  };
  LayerRig want(one, whole, declare(alone, alone_saved, one)), got(mesh, whole, declare(shared, saved, mesh));
  expect_blocks(got.params, want.params, &Param::w, 0);
  const Passes w = both_passes(want, *alone, alone_saved), g = both_passes(got, *shared, saved);
  reduce_gradients(got, mesh);
  testing::expect_close("y", g.y, got.own(w.y, D), kTolerance, kTolerance);
  testing::expect_close("dx", g.dx, got.own(w.dx, D), kTolerance, kTolerance);
  expect_blocks(got.params, want.params, &Param::dw, kTolerance);
}

class TensorParallel : public Ranks {};
INSTANTIATE_TEST_SUITE_P(Everywhere, TensorParallel, ::testing::Values(1, 2, 4, 8), name_of_ranks);

TEST_P(TensorParallel, MlpEqualsOneRank) {
  run([](Transport& transport) {
    expect_like_one_rank<Mlp>(transport, [](LayerRig& rig, const Mesh& mesh) {
      return Mlp(rig.params, "mlp", D, 24, DType::f32, mesh, 0.5f);
    });
  });
}

ModelSpec attention_model(QkNorm norm, bool bias) {
  ModelSpec m;
  m.vocab_size = 21;
  m.hidden_size = D;
  m.num_heads = 16;
  m.num_kv_heads = 8;
  m.head_dim = 2;
  m.initializer_range = 0.5;
  m.qk_norm = norm;
  m.qkv_bias = bias;
  return m;
}

void expect_attention_like_one_rank(Transport& transport, const ModelSpec& model) {
  Tensor table;
  Array cos_sin = Array::poisoned({kSeq, model.head_dim}, DType::f32);
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  rope_table(s, {.cos_sin_Pd = cos_sin.tensor()});
  table = cos_sin.tensor();
  expect_like_one_rank<Gqa>(transport, [&](LayerRig& rig, const Mesh& mesh) {
    return Gqa(rig.params, "attention", model, DType::f32, mesh, table);
  });
}

TEST_P(TensorParallel, AttentionEqualsOneRank) {
  run([](Transport& transport) {
    expect_attention_like_one_rank(transport, attention_model(QkNorm::none, false));
    expect_attention_like_one_rank(transport, attention_model(QkNorm::per_head, true));
  });
}

TEST(TensorParallelErrors, HeadsAndWidthsMustDivide) {
  const auto error_on = [](int ranks, const std::function<void(LayerRig&, const Mesh&)>& make) {
    std::string text;
    run_threads(ranks, test_world(), [&](Transport& transport) {
      const Mesh mesh({.tp = transport.size(), .ep = transport.size()}, transport);
      const std::string got = testing::error_of([&] { LayerRig(mesh, {}, [&](LayerRig& rig) { make(rig, mesh); }); });
      if (transport.rank() == 0) text = got;
    });
    return text;
  };
  ModelSpec m = attention_model(QkNorm::none, false);
  const auto attention = [&](LayerRig& rig, const Mesh& mesh) {
    Gqa(rig.params, "attention", m, DType::f32, mesh, Tensor{});
  };
  EXPECT_EQ(error_on(3, attention), "attention: query heads over parallel.tp: 16 must be divisible by 3");
  m.num_kv_heads = 1;
  EXPECT_EQ(error_on(2, attention), "attention: kv heads over parallel.tp: 1 must be divisible by 2");
  EXPECT_EQ(error_on(2, [](LayerRig& rig, const Mesh& mesh) { Mlp(rig.params, "mlp", 4, 5, DType::f32, mesh, 1.0f); }),
            "mlp: hidden width over parallel.tp: 5 must be divisible by 2");
  m.vocab_size = 2;
  EXPECT_EQ(error_on(3, [&](LayerRig& rig, const Mesh& mesh) { Embedding(rig.params, m, DType::f32, mesh); }),
            "parallel.tp must be at most model.vocab_size = 2; got 3");
}

struct VocabPasses {
  Values embedded, loss, dx;
};

// Of 21 tokens. One without weight has a target that is no token.
VocabPasses vocab_passes(LayerRig& rig, const Embedding& embedding, const LmHead& head) {
  const MicroBatch& batch = rig.batch;
  const int64_t t = std::ssize(rig.stream_tokens), T = std::ssize(rig.tokens);
  for (int64_t i = 0; i < T; ++i) {
    const int64_t token = rig.tokens[i];
    batch.token_T.ptr<int32_t>()[i] = static_cast<int32_t>(token * 5 % 21);
    batch.weight_T.ptr<float>()[i] = token % 4 == 1 ? 0.0f : 0.5f + static_cast<float>(token % 3);
    batch.target_T.ptr<int32_t>()[i] = token % 4 == 1 ? -100 : static_cast<int32_t>(token * 11 % 21);
  }
  const Values all = Array::normal({kRows, D}, DType::f32, 1).values();
  Array x = Array::of({t, D}, DType::f32, rig.own(all, D)), dx = Array::poisoned({t, D}, DType::f32), y = dx,
        loss = Array::poisoned({T}, DType::f32), alone = loss;
  Step step = rig.step();
  embedding.forward(step, y.tensor());
  head.loss(step, loss.tensor(), dx.tensor(), x.tensor());
  head.loss(step, alone.tensor(), Tensor{}, x.tensor());
  EXPECT_EQ(alone.bytes(), loss.bytes());
  embedding.backward_weight(step, dx.tensor());
  return {y.values(), loss.values(), dx.values()};
}

// Blocks of the vocabulary differ by one token where tp is 2, 4 or 8.
void expect_vocab_like_one_rank(Transport& transport, bool tied) {
  ModelSpec model = attention_model(QkNorm::none, false);
  model.tie_word_embeddings = tied;
  const Mesh one(MeshShape{}), mesh({.tp = transport.size(), .ep = transport.size()}, transport);
  const BatchShape whole{.batch = kBatch, .seq = kSeq};
  std::optional<Embedding> embedding[2];
  std::optional<LmHead> head[2];
  const auto declare = [&](int i, const Mesh& on) {
    return [&, i](LayerRig& rig) {
      embedding[i].emplace(rig.params, model, DType::f32, on);
      head[i].emplace(rig.params, model, DType::f32, on, &embedding[i]->table());
    };
  };
  LayerRig want(one, whole, declare(0, one)), got(mesh, whole, declare(1, mesh));
  expect_blocks(got.params, want.params, &Param::w, 0);
  const VocabPasses w = vocab_passes(want, *embedding[0], *head[0]), g = vocab_passes(got, *embedding[1], *head[1]);
  reduce_gradients(got, mesh);
  EXPECT_EQ(g.embedded, got.own(w.embedded, D));
  testing::expect_close("loss", g.loss, w.loss, kTolerance, kTolerance);
  testing::expect_close("dx", g.dx, got.own(w.dx, D), kTolerance, kTolerance);
  expect_blocks(got.params, want.params, &Param::dw, kTolerance);
}

TEST_P(TensorParallel, EmbeddingAndLossEqualOneRank) {
  run([](Transport& transport) {
    expect_vocab_like_one_rank(transport, false);
    expect_vocab_like_one_rank(transport, true);
  });
}

}  // namespace
}  // namespace moebius
