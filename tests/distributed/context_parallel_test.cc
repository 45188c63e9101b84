// Attention on tp x cp ranks equals attention on one rank, in both ways of exchange, with and
// without documents.
// The bytes sent are those of model/attention/context_parallel.h.
#include "model/attention/gqa.h"
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

// Returns [forward, backward] of model/attention/context_parallel.h, for the rows and heads
// of one rank.
std::array<int64_t, 2> expected_bytes(const ContextCase& c) {
  const int64_t T = kBatch * kSeq / c.cp, cp = c.cp, q = T * kHeads / c.tp * kWidth * 4,
                kv = 2 * T * kKvHeads / c.tp * kWidth * 4, starts = c.documents ? 4 * T * (cp - 1) : 0;
  switch (c.comm) {
    case CpComm::allgather:
      return {(cp - 1) * kv, 2 * (cp - 1) * kv};
    case CpComm::ring:
      return {(cp - 1) * kv, 2 * (cp - 1) * kv};
    case CpComm::alltoall:
      break;
  }
  return {(cp - 1) * (2 * q + kv) / cp + starts, (cp - 1) * (4 * q + 2 * kv) / cp + starts};
}

void expect_case(Transport& transport, const ContextCase& c) {
  const ModelSpec model = model_of(c);
  const Mesh mesh({.tp = c.tp, .cp = c.cp, .ep = transport.size()}, transport);
  Array cos_sin = Array::poisoned({kSeq, kWidth}, DType::f32);
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  rope_table(s, {.cos_sin_Pd = cos_sin.tensor()});
  const Tensor table = cos_sin.tensor();
  const auto make = [&](LayerRig& rig, const Mesh& on) {
    LayerContext context = rig.context(model, on, table);
    context.shape.cp_comm = c.comm;
    return Gqa(context, "attention", model.sliding_window);
  };
  const auto declare = [](const Gqa& layer, MemoryPlan& plan, Gqa::Saved& saved) {
    layer.declare_saved(plan, "attention", saved);
  };
  const BatchShape whole{.batch = kBatch, .seq = kSeq, .documents = c.documents};
  const LayerPasses passes = expect_like_one_rank<Gqa>(mesh, whole, D, kTolerance, make, declare);
  const std::array<int64_t, 2> bytes = expected_bytes(c);
  EXPECT_EQ(passes.sent[1][0], bytes[0]);
  EXPECT_EQ(passes.sent[1][1], bytes[1]);
}

class ContextParallel : public Ranks {};
INSTANTIATE_TEST_SUITE_P(Everywhere, ContextParallel, ::testing::Values(1, 2, 4, 8), name_of_ranks);

// Tests every tp x cp of these ranks. alltoall is tested where cp divides the kv heads of
// a tp rank.
void expect_way(Transport& transport, CpComm comm) {
  for (int64_t tp = 1; tp <= std::min(transport.size(), 2); ++tp) {
    if (transport.size() % tp != 0) continue;
    const int64_t cp = transport.size() / tp;
    if (comm == CpComm::alltoall && kKvHeads / tp % cp != 0) continue;
    for (const bool documents : {false, true}) {
      for (const int64_t window : {0, 6}) {
        SCOPED_TRACE(fmt::format("tp {} cp {} documents {} window {}", tp, cp, documents, window));
        expect_case(transport, {comm, tp, cp, documents, window});
      }
    }
  }
}

TEST_P(ContextParallel, AllGatherEqualsOneRank) {
  run([](Transport& transport) { expect_way(transport, CpComm::allgather); });
}
TEST_P(ContextParallel, RingEqualsOneRank) {
  run([](Transport& transport) { expect_way(transport, CpComm::ring); });
}
TEST_P(ContextParallel, AllToAllEqualsOneRank) {
  run([](Transport& transport) { expect_way(transport, CpComm::alltoall); });
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
