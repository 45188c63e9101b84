// Attention on tp x cp ranks equals attention on one rank, in every way of exchange, with and
// without documents and windows; grouped-query and latent.
// The bytes sent are those of model/attention/context_parallel.h.
#include "model/attention/gqa.h"
#include "model/attention/mla.h"
#include "ops/rope/rope.h"
#include "tests/distributed/layer_rig.h"

namespace moebius {
namespace {

constexpr int64_t D = 5, kBatch = 3, kSeq = 16, kHeads = 8, kKvHeads = 4, kWidth = 2;
// The error of sums of at most 64 products of magnitude 1, a few such sums in a row, and the
// merging of partial results.
constexpr double kTolerance = 64 * 0x1p-23;

struct ContextCase {
  CpComm comm;
  int64_t tp, cp;
  bool documents;
  int64_t window;
  int64_t inner = 1;
};

ModelSpec model_of(const ContextCase& c) {
  ModelSpec m;
  m.vocab_size = 21;
  m.hidden_size = D;
  m.num_heads = kHeads;
  m.num_kv_heads = kKvHeads;
  m.head_dim = kWidth;
  m.initializer_range = 0.5;
  m.qk_norm = QkNorm::per_head;
  m.sliding_window = c.window;
  return m;
}

using Bytes = std::array<int64_t, 2>;  // of the forward and of the backward pass

// The holdings of a rank: the bytes of its q and o, of its keys and values or what they are made of, and of its starts.
struct Held {
  int64_t q, o, kv, starts;
};

// Returns the table of model/attention/context_parallel.h for n ranks. f is b in f32.
Bytes expected_bytes(CpComm comm, int64_t n, const Held& h, bool latents) {
  switch (comm) {
    case CpComm::allgather:
    case CpComm::ring:
      return {(n - 1) * h.kv, 2 * (n - 1) * h.kv};
    case CpComm::alltoall:
    case CpComm::hierarchical:
      break;
  }
  const int64_t starts = (n - 1) * h.starts, kv = latents ? (n - 1) * h.kv : (n - 1) * h.kv / n;
  return {(n - 1) * (h.q + h.o) / n + kv + starts, (n - 1) * 2 * (h.q + h.o) / n + 2 * kv + starts};
}

void expect_sent(const LayerPasses& passes, const ContextCase& c, const Held& held, bool latents) {
  const auto expect = [&](int axis, const Bytes& bytes) {
    EXPECT_EQ(passes.sent[axis][0], bytes[0]);
    EXPECT_EQ(passes.sent[axis][1], bytes[1]);
  };
  if (c.comm != CpComm::hierarchical) return expect(1, expected_bytes(c.comm, c.cp, held, latents));
  Held outer = held;
  if (latents) outer.kv *= c.inner;
  expect(1, {0, 0});
  expect(2, expected_bytes(CpComm::hierarchical, c.inner, held, latents));
  expect(3, expected_bytes(CpComm::ring, c.cp / c.inner, outer, latents));
}

// Returns the layer of `Layer`, which `construct` makes in a context, on the mesh of the case.
template <class Layer, class Construct>
LayerPasses passes_of(Transport& transport, const ContextCase& c, const ModelSpec& model, Construct&& construct) {
  const MeshShape shape{.tp = c.tp, .cp = c.cp, .ep = transport.size(), .cp_inner = c.inner};
  Array cos_sin = Array::poisoned({kSeq, model.rope_dim()}, DType::f32);
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  rope_table(s, {.cos_sin_Pd = cos_sin.tensor()});
  const Tensor table = cos_sin.tensor();
  const auto make = [&](LayerRig& rig, const Mesh& on) {
    LayerContext context = rig.context(model, on, table);
    context.shape.cp_comm = context.shape.cp_comm_window = c.comm;
    return construct(context);
  };
  const auto declare = [](const Layer& layer, MemoryPlan& plan, typename Layer::Saved& saved) {
    layer.declare_saved(plan, "attention", saved);
  };
  const BatchShape whole{.batch = kBatch, .seq = kSeq, .documents = c.documents};
  return expect_like_one_rank<Layer>(transport, shape, whole, D, kTolerance, make, declare);
}

void expect_case(Transport& transport, const ContextCase& c) {
  const ModelSpec model = model_of(c);
  const int64_t T = kBatch * kSeq / c.cp, q = T * kHeads / c.tp * kWidth * 4;
  for (const int64_t chunk : {0, 3}) {  // with 3 rows, sequences are long and computed in sections of heads
    const LayerPasses passes = passes_of<Gqa>(transport, c, model, [&](LayerContext context) {
      context.expert_chunk = chunk;
      return Gqa(context, "attention", model.sliding_window);
    });
    expect_sent(passes, c, {q, q, 2 * T * kKvHeads / c.tp * kWidth * 4, c.documents ? 4 * T : 0}, false);
  }
}

// Ranks exchange R + r numbers of each token, whatever the heads: 8 of them would be 64.
void expect_latent_case(Transport& transport, const ContextCase& c) {
  ModelSpec model = model_of(c);
  model.qk_norm = QkNorm::none;
  model.num_kv_heads = kHeads;
  model.q_lora_rank = 3;
  model.kv_lora_rank = 6;
  model.qk_rope_head_dim = 2;
  model.head_dim = 5;
  model.v_head_dim = 3;
  const int64_t T = kBatch * kSeq / c.cp, heads = kHeads / c.tp;
  for (const int64_t chunk : {0, 3}) {  // with 3 rows, one rank expands the latents of its long sequence too
    const LayerPasses passes = passes_of<Mla>(transport, c, model, [&](LayerContext context) {
      context.expert_chunk = chunk;
      return Mla(context, "attention");
    });
    expect_sent(passes, c, {T * heads * 5 * 4, T * heads * 3 * 4, T * (6 + 2) * 4, c.documents ? 4 * T : 0}, true);
  }
}

class ContextParallel : public Ranks {};
INSTANTIATE_TEST_SUITE_P(Everywhere, ContextParallel, ::testing::Values(1, 2, 4, 8), name_of_ranks);

// Returns the values of cp_inner that make two levels of a method; for all others, 1.
std::vector<int64_t> levels(CpComm comm, int64_t cp) {
  if (comm != CpComm::hierarchical) return {1};
  std::vector<int64_t> inner;
  for (int64_t n = 2; n < cp; n *= 2) inner.push_back(n);
  return inner;
}

// Tests every tp x cp of these ranks. alltoall is tested where cp divides the kv heads of
// a tp rank.
template <class ExpectCase>
void expect_way(Transport& transport, CpComm comm, const std::vector<int64_t>& windows, ExpectCase&& expect) {
  for (int64_t tp = 1; tp <= std::min(transport.size(), 2); ++tp) {
    if (transport.size() % tp != 0) continue;
    const int64_t cp = transport.size() / tp;
    if (comm == CpComm::alltoall && kKvHeads / tp % cp != 0) continue;
    for (const int64_t inner : levels(comm, cp)) {
      for (const bool documents : {false, true}) {
        for (const int64_t window : windows) {
          SCOPED_TRACE(fmt::format("tp {} cp {} documents {} window {} inner {}", tp, cp, documents, window, inner));
          expect(transport, {comm, tp, cp, documents, window, inner});
        }
      }
    }
  }
}

void expect_way(Transport& transport, CpComm comm) { expect_way(transport, comm, {0, 6}, expect_case); }

TEST_P(ContextParallel, AllGatherEqualsOneRank) {
  run([](Transport& transport) { expect_way(transport, CpComm::allgather); });
}
TEST_P(ContextParallel, RingEqualsOneRank) {
  run([](Transport& transport) { expect_way(transport, CpComm::ring); });
}
TEST_P(ContextParallel, AllToAllEqualsOneRank) {
  run([](Transport& transport) { expect_way(transport, CpComm::alltoall); });
}
TEST_P(ContextParallel, HierarchicalEqualsOneRank) {
  run([](Transport& transport) { expect_way(transport, CpComm::hierarchical); });
}
TEST_P(ContextParallel, LatentsEqualOneRank) {
  run([](Transport& transport) {
    for (const CpComm comm : {CpComm::allgather, CpComm::ring, CpComm::alltoall, CpComm::hierarchical}) {
      SCOPED_TRACE(static_cast<int>(comm));
      expect_way(transport, comm, {0}, expect_latent_case);
    }
  });
}

TEST(ContextParallelErrors, AllToAllNeedsHeadsForEveryRank) {
  std::string text;
  run_threads(3, test_world(), [&](Transport& transport) {
    const Mesh mesh({.cp = 3, .ep = 3}, transport);
    const std::string got =
        testing::error_of([&] { make_context_parallel(CpComm::alltoall, mesh, {.heads = 6, .kv_heads = 4}); });
    if (transport.rank() == 0) text = got;
  });
  EXPECT_EQ(
      text,
      "parallel.cp_comm \"alltoall\" shares heads: parallel.cp must divide the kv heads of a tp rank, 4 % 3 must be "
      "0; choose \"allgather\" or \"ring\", or another cp");
}

}  // namespace
}  // namespace moebius
