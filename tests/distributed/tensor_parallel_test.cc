// Layers on tp ranks equal the layer on one rank: outputs and input gradients row by row, weight
// gradients block by block.
#include "model/attention/gqa.h"
#include "model/layers/chunked_mlp.h"
#include "model/layers/mlp.h"
#include "model/layers/vocab.h"
#include "ops/rope/rope.h"
#include "tests/distributed/layer_rig.h"

namespace moebius {
namespace {

// tp divides all of these: heads 8 and 8, hidden 24, rows 3 * 8.
constexpr int64_t D = 5, kBatch = 3, kSeq = 8, kRows = kBatch * kSeq;
// The error of sums of at most 64 products of magnitude 1, a few such sums in a row.
constexpr double kTolerance = 64 * 0x1p-23;

constexpr BatchShape kWhole{.batch = kBatch, .seq = kSeq};

void declare_mlp(const Mlp& layer, MemoryPlan& plan, Mlp::Saved& saved) { layer.declare_saved(plan, "mlp", saved); }
void declare_gqa(const Gqa& layer, MemoryPlan& plan, Gqa::Saved& saved) {
  layer.declare_saved(plan, "attention", saved);
}

MeshShape shape_of(const Transport& transport) { return {.tp = transport.size(), .ep = transport.size()}; }
Mesh mesh_of(Transport& transport) { return Mesh(shape_of(transport), transport); }

// In the forward pass a layer gathers x and sums y. In the backward pass it gathers dy, sums dx,
// and gathers x again for the weight gradient.
// Each of these sends (n - 1) / n of the rows of all ranks.
void expect_row_traffic(const LayerPasses& passes, int64_t n, int64_t more_forward = 0, int64_t more_backward = 0) {
  const int64_t all_rows = kRows * D * size_of(DType::f32), once = all_rows * (n - 1) / n;
  EXPECT_EQ(passes.sent[0][0], 2 * once + more_forward);
  EXPECT_EQ(passes.sent[0][1], 3 * once + more_backward);
  EXPECT_EQ(passes.sent[1][0] + passes.sent[1][1], 0);
}

class TensorParallel : public Ranks {};
INSTANTIATE_TEST_SUITE_P(Everywhere, TensorParallel, ::testing::Values(1, 2, 4, 8), name_of_ranks);

TEST_P(TensorParallel, MlpEqualsOneRank) {
  run([](Transport& transport) {
    ModelSpec model;
    model.hidden_size = D;
    model.initializer_range = 0.5;
    const auto make = [&](LayerRig& rig, const Mesh& on) { return Mlp(rig.context(model, on, {}), "mlp", 24); };
    expect_row_traffic(
        expect_like_one_rank<Mlp>(transport, shape_of(transport), kWhole, D, kTolerance, make, declare_mlp),
        transport.size());
  });
}

ModelSpec mlp_model() {
  ModelSpec model;
  model.hidden_size = D;
  model.initializer_range = 0.5;
  return model;
}

// Three chunks on the mesh, and all rows at once on one rank.
TEST_P(TensorParallel, ChunksOfAnMlpEqualOneRank) {
  run([](Transport& transport) {
    const ModelSpec model = mlp_model();
    const auto make = [&](LayerRig& rig, const Mesh& on) {
      const LayerContext c = rig.context(model, on, {});
      return ChunkedMlp(c, "mlp", 24, c.stream_rows() / (on.shape().tp > 1 ? 3 : 1));
    };
    const auto declare = [](const ChunkedMlp& layer, MemoryPlan& plan, ChunkedMlp::Saved& saved) {
      layer.declare_saved(plan, "mlp", saved);
    };
    expect_row_traffic(
        expect_like_one_rank<ChunkedMlp>(transport, shape_of(transport), kWhole, D, kTolerance, make, declare),
        transport.size());
  });
}

struct ChunkedPasses {
  std::vector<Values> values;  // y, dx and the weights' gradients
  int64_t stack_bytes;
};

ChunkedPasses chunked_passes(int64_t chunk, bool recomputes, bool splits) {
  const Mesh one(MeshShape{});
  const ModelSpec model = mlp_model();
  std::optional<ChunkedMlp> layer;
  ChunkedMlp::Saved saved;
  LayerRig rig(one, kWhole,
               [&](LayerRig& r) {
                 r.plan.split_backward(splits);
                 layer.emplace(r.context(model, one, {}), "mlp", 24, chunk);
                 layer->declare_saved(r.plan, "mlp", saved);
               },
               {.mlp = recomputes});
  const LayerPasses passes = both_passes(rig, one, *layer, saved, kRows, D);
  ChunkedPasses result{{passes.y, passes.dx}, rig.plan.stack().high_water()};
  for (const Param& p : rig.params.all()) result.values.push_back(values_of(p.dw));
  return result;
}

TEST(ChunkedMlp, MemoryChangesNoBitAndScratchIsThatOfAChunk) {
  const ChunkedPasses kept = chunked_passes(8, false, false);
  for (const auto& [recomputes, splits] : {std::pair{true, false}, std::pair{false, true}, std::pair{true, true}})
    EXPECT_EQ(chunked_passes(8, recomputes, splits).values, kept.values);
  EXPECT_LT(2 * chunked_passes(8, true, false).stack_bytes, chunked_passes(kRows, true, false).stack_bytes);
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

void expect_attention_like_one_rank(Transport& transport, const ModelSpec& model, int64_t more_forward = 0,
                                    int64_t more_backward = 0) {
  Array cos_sin = Array::poisoned({kSeq, model.head_dim}, DType::f32);
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  rope_table(s, {.cos_sin_Pd = cos_sin.tensor()});
  const Tensor table = cos_sin.tensor();
  const auto make = [&](LayerRig& rig, const Mesh& on) {
    return Gqa(rig.context(model, on, table), "attention", model.sliding_window);
  };
  expect_row_traffic(
      expect_like_one_rank<Gqa>(transport, shape_of(transport), kWhole, D, kTolerance, make, declare_gqa),
      transport.size(), more_forward, more_backward);
}

TEST_P(TensorParallel, AttentionEqualsOneRank) {
  run([](Transport& transport) { expect_attention_like_one_rank(transport, attention_model(QkNorm::none, false)); });
}

TEST_P(TensorParallel, AttentionWithBiasAndNormsEqualsOneRank) {
  run([](Transport& transport) { expect_attention_like_one_rank(transport, attention_model(QkNorm::per_head, true)); });
}

// Sums of squares are added up over the ranks. The backward pass recomputes q and k, so it adds up
// the sums of squares again, and the products with dy.
TEST_P(TensorParallel, AttentionWithNormsOverAllHeadsEqualsOneRank) {
  run([](Transport& transport) {
    const int64_t n = transport.size(), sums = 2 * kRows * 4 * (n - 1) / n;
    expect_attention_like_one_rank(transport, attention_model(QkNorm::whole, false), 2 * sums, (2 + 4) * sums);
  });
}

// The bound applies to values normed over all ranks. The backward pass recomputes them once
// more for it.
TEST_P(TensorParallel, ClippedAttentionWithNormsOverAllHeadsAndBiasEqualsOneRank) {
  run([](Transport& transport) {
    ModelSpec model = attention_model(QkNorm::whole, true);
    model.o_bias = true;
    model.clip_qkv = 0.75;
    const int64_t n = transport.size(), sums = 2 * kRows * 4 * (n - 1) / n;
    expect_attention_like_one_rank(transport, model, 2 * sums, (2 + 2 + 4) * sums);
  });
}

TEST_P(TensorParallel, ClippedAttentionEqualsOneRank) {
  run([](Transport& transport) {
    ModelSpec model = attention_model(QkNorm::none, false);
    model.clip_qkv = 0.75;
    expect_attention_like_one_rank(transport, model);
  });
}

TEST(TensorParallelErrors, HeadsAndWidthsMustDivide) {
  const auto error_on = [](int ranks, const std::function<void(LayerRig&, const Mesh&)>& make) {
    std::string text;
    run_threads(ranks, test_world(), [&](Transport& transport) {
      const Mesh mesh = mesh_of(transport);
      const std::string got = testing::error_of([&] { LayerRig(mesh, {}, [&](LayerRig& rig) { make(rig, mesh); }); });
      if (transport.rank() == 0) text = got;
    });
    return text;
  };
  ModelSpec m = attention_model(QkNorm::none, false);
  const auto attention = [&](LayerRig& rig, const Mesh& mesh) {
    Gqa(rig.context(m, mesh, {}), "attention", m.sliding_window);
  };
  EXPECT_EQ(error_on(3, attention), "attention: query heads over parallel.tp: 16 must be divisible by 3");
  m.num_kv_heads = 1;
  EXPECT_EQ(error_on(2, attention), "attention: kv heads over parallel.tp: 1 must be divisible by 2");
  EXPECT_EQ(error_on(2, [&](LayerRig& rig, const Mesh& mesh) { Mlp(rig.context(m, mesh, {}), "mlp", 5); }),
            "mlp: hidden width over parallel.tp: 5 must be divisible by 2");
  m.vocab_size = 2;
  EXPECT_EQ(error_on(3, [&](LayerRig& rig, const Mesh& mesh) { Embedding(rig.params, m, DType::f32, mesh); }),
            "parallel.tp must be at most model.vocab_size = 2; got 3");
}

struct VocabPasses {
  Values embedded, loss, dx;
};

// There are 21 tokens. A token without weight has a target that is no token.
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
  embedding.forward(step, y.tensor(), batch.token_T);
  head.loss(step, /*depth=*/0, loss.tensor(), dx.tensor(), x.tensor());
  head.loss(step, /*depth=*/0, alone.tensor(), Tensor{}, x.tensor());
  EXPECT_EQ(alone.bytes(), loss.bytes());
  embedding.backward_weight(step, dx.tensor(), batch.token_T);
  return {y.values(), loss.values(), dx.values()};
}

// Where tp is 2, 4 or 8, blocks of the vocabulary differ by one token.
void expect_vocab_like_one_rank(Transport& transport, bool tied) {
  ModelSpec model = attention_model(QkNorm::none, false);
  model.tie_word_embeddings = tied;
  const Mesh one(MeshShape{}), mesh = mesh_of(transport);
  std::optional<Embedding> embedding[2];
  std::optional<LmHead> head[2];
  const auto declare = [&](int i, const Mesh& on) {
    return [&, i](LayerRig& rig) {
      embedding[i].emplace(rig.params, model, DType::f32, on);
      head[i].emplace(rig.params, model, DType::f32, on, &embedding[i]->table());
    };
  };
  LayerRig want(one, kWhole, declare(0, one)), got(mesh, kWhole, declare(1, mesh));
  expect_blocks(got.params, want.params, &Param::w, 0);
  const VocabPasses w = vocab_passes(want, *embedding[0], *head[0]), g = vocab_passes(got, *embedding[1], *head[1]);
  // The embedding sums x and gathers dx. The loss gathers x twice, and three numbers per row and
  // rank, and sums dx once.
  const int64_t n = mesh.shape().tp;
  EXPECT_EQ(mesh.group(Axis::tp).sent_bytes(), 5 * kRows * D * 4 * (n - 1) / n + 2 * kRows * 3 * 4 * (n - 1));
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
