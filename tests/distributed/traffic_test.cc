// What a training step sends over tp and over cp is what the closed formulas of docs/parallelism.md say, to the byte.
#include "tests/distributed/ranks.h"
#include "train/engine.h"

namespace moebius {
namespace {

constexpr int64_t kBatch = 2, kSeq = 8, kMicroBatches = 3, kLayers = 3;

// A dense layer and two MoE layers with a shared expert.
ModelSpec model_spec() {
  ModelSpec m;
  m.vocab_size = 21;
  m.hidden_size = 6;
  m.num_layers = kLayers;
  m.num_heads = 8;
  m.num_kv_heads = 4;
  m.head_dim = 4;
  m.intermediate_size = 4;
  m.max_position_embeddings = 16;
  m.moe_layers = {false, true, true};
  m.num_experts = 4;
  m.top_k = 2;
  m.moe_intermediate_size = 4;
  m.shared_intermediate_size = 8;
  m.check();
  return m;
}

struct Layout {
  int64_t tp, cp;
  CpComm comm;
};

// Each layer has two pairs of products, attention and MLP or shared expert, with five exchanges of all rows: two in the
// forward pass and three in the backward. The embedding has one in each, the loss one before it and one behind it, and
// three numbers for each row and rank.
int64_t expected_tp_bytes(const ModelSpec& m, const Layout& on) {
  const int64_t T = kBatch * kSeq / on.cp, exchanges = 2 * 5 * kLayers + 4;
  return kMicroBatches * (exchanges * T * m.hidden_size * 4 * (on.tp - 1) / on.tp + 3 * T * 4 * (on.tp - 1));
}

// Forward and backward of attention (model/context.h), with documents.
int64_t expected_cp_bytes(const ModelSpec& m, const Layout& on) {
  const int64_t T = kBatch * kSeq / on.cp, q = T * m.q_size() / on.tp * 4, kv = 2 * T * m.kv_size() / on.tp * 4;
  const int64_t others = on.cp - 1;
  const int64_t of_layer =
      on.comm == CpComm::alltoall ? others * (6 * q + 3 * kv) / on.cp + 2 * 4 * T * others : 3 * others * kv;
  return kMicroBatches * kLayers * of_layer;
}

void expect_traffic(Transport& world, const Layout& on) {
  OptimizerSpec optimizer;
  optimizer.lr = 1e-2;
  Engine engine({.model = model_spec(),
                 .precision = {.compute = DType::f32},
                 .use = ModelUse::training,
                 .shape = {.batch = kBatch, .seq = kSeq / on.cp, .cp_comm = on.comm},
                 .num_micro_batches = kMicroBatches,
                 .max_positions = kSeq,
                 .optimizer = optimizer,
                 .mesh = {.tp = on.tp, .cp = on.cp, .edp = world.size()},
                 .world = &world});
  Stream s = engine.stream();
  engine.model().params().init(s, 7);
  const auto sent = [&](Axis axis) { return engine.mesh().group(axis).sent_bytes(); };
  const int64_t tp = sent(Axis::tp), cp = sent(Axis::cp);
  engine.train_step(1, 1e-2);  // of token 0 throughout: what is sent does not depend on it
  EXPECT_EQ(sent(Axis::tp) - tp, expected_tp_bytes(engine.spec().model, on));
  EXPECT_EQ(sent(Axis::cp) - cp, expected_cp_bytes(engine.spec().model, on));
}

class Traffic : public Ranks {};
INSTANTIATE_TEST_SUITE_P(Everywhere, Traffic, ::testing::Values(1, 2, 4), name_of_ranks);

TEST_P(Traffic, IsWhatTheFormulasSay) {
  run([](Transport& world) {
    for (const CpComm comm : {CpComm::allgather, CpComm::ring, CpComm::alltoall}) {
      for (int64_t tp = 1; tp <= world.size(); tp *= 2) {
        SCOPED_TRACE(fmt::format("tp {}, cp_comm {}", tp, static_cast<int>(comm)));
        expect_traffic(world, {tp, world.size() / tp, comm});
      }
    }
  });
}

}  // namespace
}  // namespace moebius
