// Training that moves from layout to layout by checkpoints. Each row is a ring, in which every
// layout resumes from the checkpoint of the one before.
// The loaded bits are those that were saved, moments included, and training continues as
// on one rank.
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint/reader.h"
#include "checkpoint/store.h"
#include "comm/control.h"
#include "io/testing.h"
#include "tests/distributed/checkpoint_files.h"
#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"
#include "train/state.h"

namespace moebius {
namespace {

struct OnRanks {
  int ranks = 1;
  ParallelSpec layout = {};
};

struct Ring {
  const char* name;
  LayoutModel model;
  std::vector<OnRanks> layouts;
};

void PrintTo(const Ring& ring, std::ostream* out) { *out << ring.name; }

const std::vector<std::string> kFrozen = {"model.embed_tokens.weight", "model.layers.1.*", "*.o_proj.weight"};

const Ring kRings[] = {
    {"plain",
     {},
     {{},
      {8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}},
      {3, {.pp = 3, .layout = "E t | t*2 | t L"}},
      {4, {.ep = 2, .etp = 2, .dispatcher = DispatcherKind::alltoall}},
      {3, {}},
      {4, {.pp = 2, .vpp = 2, .ep = 2}},
      {2, {.cp = 2, .cp_comm = CpComm::ring}},
      {4, {.tp = 2, .ep = 4}},
      {}}},
    {"router_bias",
     {.sigmoid = true},
     {{4, {.pp = 2, .ep = 2}}, {8, {.tp = 2, .ep = 8}}, {}, {6, {.pp = 2}}, {2, {.tp = 2}}}},
    {"tied",
     {.tied = true},
     {{8, {.tp = 2, .pp = 2, .vpp = 2, .ep = 2, .etp = 2}},
      {3, {}},
      {4, {.tp = 2, .pp = 2}},
      {},
      {4, {.pp = 2, .vpp = 2}}}},
    {"predicts_mtp",
     {.mtp = 2},
     {{8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}},
      {3, {.pp = 3, .layout = "E t*2 | t*2 | m*2 L"}},
      {3, {.pp = 3, .layout = "E t*4 | m*2 | L"}},
      {},
      {4, {.tp = 2, .ep = 2, .etp = 2}},
      {4, {.pp = 2, .vpp = 2}}}},
    {"predicts_mtp_tied",
     {.tied = true, .mtp = 1},
     {{2, {.pp = 2}}, {4, {.tp = 2, .ep = 2}}, {}, {4, {.pp = 2, .vpp = 2}}}},
    {"latent_attention",
     {.latent_qkv = true},
     {{4, {.tp = 4}}, {8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}}, {}, {2, {.cp = 2, .cp_comm = CpComm::ring}}}},
    {"gpt_oss",
     {.gpt_oss = true},
     {{4, {.ep = 2, .etp = 2}}, {2, {.tp = 2}}, {}, {4, {.pp = 2, .ep = 2}}, {4, {.tp = 2, .cp = 2, .ep = 4}}}},
    {"partly_frozen",
     {.freeze = kFrozen},
     {{4, {.pp = 4}}, {}, {8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}}, {3, {}}, {4, {.tp = 2, .ep = 2, .etp = 2}}}},
};

void expect_same_bits(const std::string& got, const std::string& saved) {
  const CheckpointBytes a = contents_of(got), b = contents_of(saved);
  EXPECT_EQ(a.size(), b.size());
  for (const auto& [name, bytes] : b) EXPECT_TRUE(a.contains(name) && a.at(name) == bytes) << name;
}

void save(Engine& engine, Control& control, const std::string& dir, int64_t step) {
  Stream s = engine.stream();
  CheckpointStore store(control, dir, 0, /*async_save=*/step % 2 == 0);
  store.save(step, training_state(engine), {{"step", step}}, &s);
  store.wait();
}

void load(Engine& engine, Control& control, const std::string& folder) {
  Stream s = engine.stream();
  CheckpointReader(folder, control.is_root()).read_all(control, training_state(engine), &s);
  engine.model().params().sync(s);
  engine.gather_weights(s);
}

// Checks the weights that this rank computes with, its own and those of other owners.
void expect_weights_of(Engine& engine, const std::string& folder) {
  const CheckpointReader reader(folder);
  for (const Param& p : engine.model().params().all()) {
    for (const ParamPart& part : p.spec.parts) {
      const Tensor here = part_of(p.w, part);
      std::vector<float> saved(here.numel());
      reader.read({.name = part.name,
                   .tensor = tensor_of(saved.data(), {std::ssize(saved)}),
                   .slice = TensorSlice{.shape = dims_of(part.shape), .shard = part.shard, .end = here.numel()}});
      EXPECT_EQ(std::memcmp(here.data, saved.data(), here.num_bytes()), 0) << part.name;
    }
  }
}

class LayoutCheckpoints : public ::testing::TestWithParam<Ring> {};

TEST_P(LayoutCheckpoints, ResumeAsOneRank) {
  const Ring& ring = GetParam();
  const auto num_steps = std::ssize(ring.layouts);
  const LayoutOutcome alone = train_alone(ring.model, num_steps);
  const TestDir dir;
  const auto folder = [&](const char* kind, int64_t step) {
    return dir.path(fmt::format("{}/step-{:08}", kind, step));
  };
  for (int64_t step = 1; step <= num_steps; ++step) {
    const OnRanks& on = ring.layouts[step - 1];
    SCOPED_TRACE(fmt::format("step {} on {} ranks", step, on.ranks));
    run_threads(on.ranks, test_world(), [&](Transport& world) {
      Control control(world);
      Engine engine(layout_engine_spec(world, ring.model, on.layout));
      if (step == 1) {
        init_layout(engine, ring.model);
      } else {
        load(engine, control, folder("trained", step - 1));
        expect_weights_of(engine, folder("trained", step - 1));
        save(engine, control, dir.path("loaded"), step - 1);
      }
      const StepReport report = layout_step(engine, ring.model, step);
      if (control.is_root()) expect_same_step(report, alone.steps[step - 1], 4e-6 * static_cast<double>(step));
      save(engine, control, dir.path("trained"), step);
    });
    if (HasFailure()) return;
    if (step > 1) expect_same_bits(folder("loaded", step - 1), folder("trained", step - 1));
  }
}

INSTANTIATE_TEST_SUITE_P(Rings, LayoutCheckpoints, ::testing::ValuesIn(kRings),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace moebius
