// The bytes that a training step sends over each axis equal the closed formulas of
// docs/design/parallelism.md and docs/design/expert-parallelism.md exactly.
#include <map>

#include "comm/control.h"
#include "tests/distributed/ranks.h"
#include "train/metrics.h"

namespace moebius {
namespace {

constexpr int64_t kBatch = 2, kSeq = 8, kMicroBatches = 3, kLayers = 3;

// Returns a dense layer and two MoE layers with a shared expert.
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

// Each layer has two pairs of products: attention, and MLP or shared expert. A pair has five
// exchanges of all rows, two in the forward pass and three in the backward pass.
// The embedding has one exchange in each pass. The loss has one before it and one after it, and
// three numbers for each row and rank.
int64_t expected_tp_bytes(const ModelSpec& m, const Layout& on) {
  const int64_t T = kBatch * kSeq / on.cp, exchanges = 2 * 5 * kLayers + 4;
  return kMicroBatches * (exchanges * T * m.hidden_size * 4 * (on.tp - 1) / on.tp + 3 * T * 4 * (on.tp - 1));
}

// Forward and backward of attention (model/attention/context_parallel.h), with documents.
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
  engine.step(1, 1e-2);  // of token 0 throughout: what is sent does not depend on it
  EXPECT_EQ(sent(Axis::tp) - tp, expected_tp_bytes(engine.spec().model, on));
  EXPECT_EQ(sent(Axis::cp) - cp, expected_cp_bytes(engine.spec().model, on));
}

class Traffic : public Ranks {};
INSTANTIATE_TEST_SUITE_P(Everywhere, Traffic, ::testing::Values(1, 2, 4), name_of_ranks);

TEST_P(Traffic, EqualsTheFormulas) {
  run([](Transport& world) {
    for (const CpComm comm : {CpComm::allgather, CpComm::ring, CpComm::alltoall}) {
      for (int64_t tp = 1; tp <= world.size(); tp *= 2) {
        SCOPED_TRACE(fmt::format("tp {}, cp_comm {}", tp, static_cast<int>(comm)));
        expect_traffic(world, {tp, world.size() / tp, comm});
      }
    }
  });
}

// --- gradients and weights, experts, stages -------------------------------------------------------------------------

struct Way {
  const char* name;
  MeshShape mesh;
  DispatcherKind dispatcher = DispatcherKind::automatic;
  bool overlap = true;
};

void PrintTo(const Way& way, std::ostream* out) { *out << way.name; }

using Sizes = std::vector<int64_t>;

// Each parameter begins at a multiple of 256 elements. Each rank has the same number of such blocks
// in a bucket.
int64_t bucket_bytes(const Sizes& params, int64_t n) {
  int64_t numel = 0;
  for (const int64_t size : params) numel += div_ceil(size, 256) * 256;
  return div_ceil(numel, 256 * n) * 256 * n * 4;
}

// The elements that a rank of stage `pp` holds. Layers are divided evenly.
struct Stage {
  Stage(const ModelSpec& m, const MeshShape& mesh, int64_t pp) {
    const int64_t D = m.hidden_size, tp = mesh.tp, vocabulary = div_ceil(m.vocab_size, tp) * D;
    const auto add_mlp = [&](int64_t F) { dense.insert(dense.end(), {2 * F / tp * D, D * F / tp}); };
    const int64_t here = m.num_layers / mesh.pp;
    for (int64_t i = pp * here; i < (pp + 1) * here; ++i) {
      dense.insert(dense.end(), {(m.q_size() + 2 * m.kv_size()) / tp * D, D * m.q_size() / tp});
      whole.insert(whole.end(), {D, D});
      if (!m.moe_layers[i]) {
        add_mlp(m.intermediate_size);
        continue;
      }
      ++moe_layers;
      add_mlp(m.shared_intermediate_size);
      whole.push_back(m.num_experts * D);
      const int64_t e = m.num_experts / mesh.ep, F = m.moe_intermediate_size / mesh.etp;
      experts.insert(experts.end(), {e * 2 * F * D, e * D * F});
    }
    if (pp == 0) dense.push_back(vocabulary);
    if (pp == mesh.pp - 1) {
      dense.push_back(vocabulary);
      whole.push_back(D);
    }
  }
  Sizes dense, whole, experts;  // reduced over dp_cp, tp_cp_dp and edp
  int64_t moe_layers = 0;
};

// A way that names no dispatcher has the one whose messages have the fewest bytes.
bool gathers(const ModelSpec& m, const Way& way) {
  return way.dispatcher == DispatcherKind::allgather ||
         (way.dispatcher == DispatcherKind::automatic && way.mesh.ep <= m.top_k);
}

// Returns the bytes for a MoE layer and micro-batch, of all ranks in a group together.
// Every token chooses the same experts, wherever they are. Each of their etp x ep ranks gets the
// tokens of the others.
int64_t expert_bytes(const ModelSpec& m, const Way& way, int64_t T) {
  const int64_t W = way.mesh.etp * way.mesh.ep, E = m.num_experts, K = m.top_k, row = m.hidden_size * 4;
  if (gathers(m, way)) return W * (W - 1) * (12 * T * K + 5 * T * row + 4 * T * K);
  const int64_t rows = (W - 1) * T * K * way.mesh.etp;
  return W * (W - 1) * 4 * E + rows * (5 * row + 4 + 4);
}

// Returns the bytes by axis, of all ranks of the world. Axes that do not exist send nothing.
std::map<Axis, int64_t> expected_bytes(const ModelSpec& m, const Way& way) {
  const MeshShape& mesh = way.mesh;
  const int64_t T = kBatch * kSeq / (mesh.tp * mesh.cp), L = m.num_layers, E = m.num_experts;
  std::map<Axis, int64_t> bytes;
  // Adds a collective in which each of n ranks sends b (n - 1) / n, in all groups of a stage.
  const auto add = [&](Axis axis, int64_t b, int64_t times) {
    const int64_t n = group_size(mesh, axis), groups = mesh.world() / mesh.pp / n;
    bytes[axis] += times * b * (n - 1) * groups;
  };
  for (int64_t pp = 0; pp < mesh.pp; ++pp) {
    const Stage stage(m, mesh, pp);
    // Gradients are reduced and weights are gathered.
    add(Axis::dp_cp, bucket_bytes(stage.dense, group_size(mesh, Axis::dp_cp)), 2);
    add(Axis::tp_cp_dp, bucket_bytes(stage.whole, group_size(mesh, Axis::tp_cp_dp)), 2);
    add(Axis::edp, bucket_bytes(stage.experts, group_size(mesh, Axis::edp)), 2);
    // The sums of a step are the loss and, for each router, the load, dropped pairs, z-loss,
    // entropy and balance loss.
    add(Axis::dp_cp, 8, 2);
    add(Axis::tp_cp_dp, stage.moe_layers * (8 * E + 32), 2);
    const Axis experts = mesh.etp > 1 ? Axis::etp_ep : Axis::ep;
    bytes[experts] +=
        kMicroBatches * stage.moe_layers * expert_bytes(m, way, T) * mesh.world() / mesh.pp / group_size(mesh, experts);
  }
  bytes[Axis::world] = 2 * 8 * (mesh.world() - 1);  // the norm
  // The loss, and when they are read the sums of each layer's router.
  const int64_t stages = mesh.world() / mesh.pp;
  bytes[Axis::pp] = bytes[Axis::pp_back] = stages * (mesh.pp - 1) * kMicroBatches * T * m.hidden_size * 4;
  bytes[Axis::pp] += 2 * stages * (mesh.pp - 1) * 8 * (1 + L * (5 + E));
  return bytes;
}

EngineSpec engine_spec(Transport& world, const Way& way) {
  EngineSpec spec;
  spec.model = model_spec();
  spec.model.num_layers = 4;
  spec.model.moe_layers = {false, true, true, true};
  spec.precision.compute = DType::f32;
  spec.use = ModelUse::training;
  spec.shape = {.batch = kBatch, .seq = kSeq / way.mesh.cp};
  spec.num_micro_batches = kMicroBatches;
  spec.max_positions = kSeq;
  spec.optimizer.emplace().lr = 1e-2;
  spec.mesh = way.mesh;
  spec.world = &world;
  spec.dispatcher = gathers(spec.model, way) ? DispatcherKind::allgather : DispatcherKind::alltoall;
  spec.overlap = way.overlap;
  return spec;
}

void expect_all_traffic(Transport& world, const Way& way) {
  Engine engine(engine_spec(world, way));
  Control control(world);
  Stream s = engine.stream();
  engine.model().params().init(s, 7);
  const auto step = [&](int64_t t) {
    engine.step(t, 1e-2);
    read_step(engine, /*step_time_s=*/1);
    engine.end_of_step();
  };
  step(1);  // the second step gathers the weights of the first one during its passes
  std::array<int64_t, kNumAxes> before{};
  for (int a = 0; a < kNumAxes; ++a) before[a] = engine.mesh().group(static_cast<Axis>(a)).sent_bytes();
  step(2);
  const std::map<Axis, int64_t> expected = expected_bytes(engine.spec().model, way);
  for (int a = 0; a < kNumAxes; ++a) {
    const Axis axis = static_cast<Axis>(a);
    const int64_t sent = control.sum(engine.mesh().group(axis).sent_bytes() - before[a]);
    if (axis == Axis::tp || axis == Axis::cp) continue;  // tested above
    const auto it = expected.find(axis);
    EXPECT_EQ(sent, it == expected.end() ? 0 : it->second) << name_of(axis);
  }
}

const Way kWays[] = {
    {"alone", {}},
    {"dp2", {.dp = 2, .edp = 2}},
    {"dp2_at_once", {.dp = 2, .edp = 2}, DispatcherKind::automatic, /*overlap=*/false},
    {"tp2", {.tp = 2, .edp = 2}},
    {"ep2", {.dp = 2, .ep = 2}},
    {"ep2_alltoall", {.dp = 2, .ep = 2}, DispatcherKind::alltoall},
    {"etp2", {.tp = 2, .etp = 2}},
    {"pp2", {.pp = 2}},
    {"dp4", {.dp = 4, .edp = 4}},
    {"ep4_of_tp2_cp2", {.tp = 2, .cp = 2, .ep = 4}},
    {"ep4_of_tp2_cp2_gathers", {.tp = 2, .cp = 2, .ep = 4}, DispatcherKind::allgather},
    {"ep2_edp2_of_tp2_dp2", {.tp = 2, .dp = 2, .ep = 2, .edp = 2}, DispatcherKind::alltoall},
    {"ep2_etp2_of_cp2_dp2", {.cp = 2, .dp = 2, .etp = 2, .ep = 2}, DispatcherKind::alltoall},
    {"ep2_etp2_gathers", {.dp = 4, .etp = 2, .ep = 2}},
    {"pp2_dp2_ep2", {.dp = 2, .pp = 2, .ep = 2}},
    {"pp2_tp2_cp2_ep2_edp2", {.tp = 2, .cp = 2, .pp = 2, .ep = 2, .edp = 2}, DispatcherKind::alltoall},
};

class TrafficOf : public ::testing::TestWithParam<Way> {};
// Names are such as "Everywhere/TrafficOf.EachAxisEqualsTheFormulas/dp4_on_4".
INSTANTIATE_TEST_SUITE_P(Everywhere, TrafficOf, ::testing::ValuesIn(kWays), [](const auto& info) {
  return fmt::format("{}_on_{}", info.param.name, info.param.mesh.world());
});

TEST_P(TrafficOf, EachAxisEqualsTheFormulas) {
  const Way& way = GetParam();
  run_ranks(static_cast<int>(way.mesh.world()), [&](Transport& world) { expect_all_traffic(world, way); });
}

}  // namespace
}  // namespace moebius
