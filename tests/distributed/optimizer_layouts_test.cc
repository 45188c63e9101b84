// Updates of every optimizer, with every format of masters and state, on all layouts. Gradients are
// a function of the element of the global tensor alone, so that no sum depends on the layout. Then
// each layout has the bits of one rank: masters, state and weights. The layouts of a ring resume
// from the checkpoint of the one before, and one rank never stops.
#include <gtest/gtest.h>

#include <cstring>
#include <nlohmann/json.hpp>
#include <span>

#include "checkpoint/reader.h"
#include "checkpoint/store.h"
#include "comm/control.h"
#include "core/block_code.h"
#include "engine/engine_testing.h"
#include "io/testing.h"
#include "ops/optimizer/rounding.h"
#include "tests/distributed/checkpoint_files.h"
#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"
#include "train/state.h"

namespace moebius {
namespace {

constexpr double kRate = 1e-2;

struct Choice {
  const char* name;
  OptimizerSpec optimizer;
  bool wide = false;  // rows of some matrices are whole blocks of 8-bit codes on every layout, and others are shorter
  bool odd = false;   // tp does not divide the vocabulary
};
void PrintTo(const Choice& choice, std::ostream* out) { *out << choice.name; }

using enum MasterFormat;
constexpr StateFormat kHalf = StateFormat::bf16, kBlocks = StateFormat::blocks_8bit;
const Choice kChoices[] = {
    {"adamw", {}},
    {"adamw_remainder", {.master = bf16_remainder}},
    {"adamw_half_state", {.state = kHalf}},
    {"adamw_half_state_remainder", {.state = kHalf, .master = bf16_remainder}},
    {"adamw_stochastic", {.master = bf16_stochastic}},
    {"adamw_half_state_stochastic", {.state = kHalf, .master = bf16_stochastic}},
    {"sgd", {.kind = OptimizerKind::sgd}},
    {"sgd_without_momentum", {.kind = OptimizerKind::sgd, .momentum = 0}},
    {"sgd_half_state_remainder", {.kind = OptimizerKind::sgd, .state = kHalf, .master = bf16_remainder}},
    {"muon", {.kind = OptimizerKind::muon}},
    {"muon_odd_vocabulary", {.kind = OptimizerKind::muon}, false, true},
    {"muon_blocks_remainder_offload",
     {.kind = OptimizerKind::muon, .state = kBlocks, .master = bf16_remainder, .offload = true},
     true},
    {"muon_half_state_stochastic", {.kind = OptimizerKind::muon, .state = kHalf, .master = bf16_stochastic}},
    {"adamw_blocks", {.state = kBlocks}, true},
    {"adamw_blocks_remainder_offload", {.state = kBlocks, .master = bf16_remainder, .offload = true}, true},
    {"adamw_blocks_stochastic_half_grad",
     {.state = kBlocks, .master = bf16_stochastic, .grad = GradFormat::bf16, .offload = true, .offload_grad = true},
     true},
    {"sgd_blocks_remainder_half_grad",
     {.kind = OptimizerKind::sgd, .state = kBlocks, .master = bf16_remainder, .grad = GradFormat::bf16},
     true},
};

struct OnRanks {
  int ranks = 1;
  ParallelSpec layout = {};
};
const OnRanks kRing[] = {{8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4}},
                         {4, {.ep = 2, .etp = 2}},
                         {3, {}},
                         {4, {.pp = 2, .vpp = 2, .ep = 2}},
                         {4, {.tp = 2, .ep = 4}},
                         {2, {.tp = 2}},
                         {}};

EngineSpec engine_spec(Transport& world, const OptimizerSpec& optimizer, const ParallelSpec& layout, bool wide = false,
                       bool odd = false) {
  EngineSpec spec = layout_engine_spec(world, {}, layout);
  if (odd) spec.model.vocab_size = 65;  // shards of 768 and 792 elements, which need another number of blocks of 256
  if (wide) {
    spec.model.hidden_size = 256;
    spec.model.intermediate_size = 512;  // which tp cuts
  }
  spec.precision.compute = DType::bf16;
  spec.optimizer = optimizer;
  spec.optimizer->clip = 0;  // the norm is a sum over ranks
  return spec;
}

// The first rank of those that share a gradient has all of it.
void fill_gradients(Engine& engine, int64_t step) {
  for (const Param& p : engine.model().params().all()) {
    if (!p.has_grad) continue;
    const bool is_first = engine.mesh().group(p.spec.grad_axis).rank() == 0;
    for (const ParamPart& part : p.spec.parts) {
      const Rng rng(17, RngSite::bench, static_cast<uint64_t>(step), key_of(part.name.c_str()));
      const Tensor grad = part_of(p.grad(), part);
      for (int64_t i = 0; i < grad.numel(); ++i) {
        const float x = is_first ? 0.1f * rng.normal(static_cast<uint64_t>(flat_index(part, i))) : 0.0f;
        if (grad.dtype == DType::bf16)
          grad.ptr<bf16>()[i] = to_bf16(x);
        else
          grad.ptr<float>()[i] = x;
      }
    }
  }
}

void update(Engine& engine, int64_t step) {
  fill_gradients(engine, step);
  EngineTestAccess::optimizer_step(engine, step, kRate);
}

std::string folder_of(const std::string& dir, int64_t step) { return fmt::format("{}/step-{:08}", dir, step); }

struct Saved {
  DType dtype = DType::f32;
  std::vector<std::byte> bytes;
  bool operator==(const Saved&) const = default;
};
std::map<std::string, Saved> contents_of(const std::string& folder) {
  const CheckpointReader reader(folder);
  std::map<std::string, Saved> contents;
  for (const auto& [name, tensor] : reader.tensors()) {
    Saved& saved = contents[name];
    saved = {tensor.dtype, std::vector<std::byte>(tensor.num_bytes())};
    reader.read({.name = name,
                 .tensor = {.data = saved.bytes.data(), .shape = {numel_of(tensor.shape)}, .dtype = tensor.dtype},
                 .slice = whole_slice(tensor.shape)});
  }
  return contents;
}

void expect_same(const std::string& got, const std::string& expected) {
  const auto a = contents_of(got), b = contents_of(expected);
  EXPECT_EQ(a.size(), b.size());
  for (const auto& [name, saved] : b) EXPECT_TRUE(a.contains(name) && a.at(name) == saved) << name;
}

// The weights that this rank computes with, its own and those of other owners, are rounded from the masters.
void expect_weights_of(Engine& engine, const std::string& folder, const OptimizerSpec& optimizer) {
  const CheckpointReader reader(folder);
  for (const Param& p : engine.model().params().all()) {
    if (p.w.dtype != DType::bf16) continue;
    for (const ParamPart& part : p.spec.parts) {
      const Tensor here = part_of(p.w, part);
      std::vector<float> master(here.numel());
      reader.read({.name = part.name,
                   .tensor = tensor_of(master.data(), {std::ssize(master)}),
                   .slice = TensorSlice{.shape = dims_of(part.shape), .shard = part.shard, .end = here.numel()},
                   .converts = true});
      int64_t different = 0;
      for (int64_t i = 0; i < here.numel(); ++i) {
        const bf16 weight = optimizer.master == bf16_remainder ? split(master[i]).weight : to_bf16(master[i]);
        different += here.ptr<bf16>()[i].bits != weight.bits;
      }
      EXPECT_EQ(different, 0) << part.name;
    }
  }
}

// Every step of the ring is made by another layout, from the checkpoint that the layout before it saved.
void expect_bits_of_one_rank(const Choice& choice, std::span<const OnRanks> ring) {
  const OptimizerSpec& optimizer = choice.optimizer;
  const bool wide = choice.wide, odd = choice.odd;
  const auto num_steps = std::ssize(ring);
  const TestDir dir;
  run_threads(1, test_world(), [&](Transport& world) {
    Control control(world);
    Engine engine(engine_spec(world, optimizer, {}, wide, odd));
    init_layout(engine, {});
    save_checkpoint(engine, control, dir.path("alone"), 0);
    for (int64_t step = 1; step <= num_steps; ++step) {
      update(engine, step);
      save_checkpoint(engine, control, dir.path("alone"), step);
    }
  });
  ASSERT_FALSE(contents_of(folder_of(dir.path("alone"), 0)) == contents_of(folder_of(dir.path("alone"), 1)));
  for (int64_t step = 1; step <= num_steps; ++step) {
    const OnRanks& on = ring[static_cast<size_t>(step - 1)];
    SCOPED_TRACE(fmt::format("step {} on {} ranks", step, on.ranks));
    run_threads(on.ranks, test_world(), [&](Transport& world) {
      Control control(world);
      Engine engine(engine_spec(world, optimizer, on.layout, wide, odd));
      if (step == 1) {
        init_layout(engine, {});
        save_checkpoint(engine, control, dir.path("ring"), 0);
      } else {
        load_checkpoint(engine, control, folder_of(dir.path("ring"), step - 1));
      }
      expect_weights_of(engine, folder_of(dir.path("ring"), step - 1), optimizer);
      update(engine, step);
      save_checkpoint(engine, control, dir.path("ring"), step);
    });
    if (::testing::Test::HasFailure()) return;
    if (step == 1) expect_same(folder_of(dir.path("ring"), 0), folder_of(dir.path("alone"), 0));
    expect_same(folder_of(dir.path("ring"), step), folder_of(dir.path("alone"), step));
  }
}

class OptimizerLayouts : public ::testing::TestWithParam<Choice> {};

TEST_P(OptimizerLayouts, HaveTheBitsOfOneRank) { expect_bits_of_one_rank(GetParam(), kRing); }

INSTANTIATE_TEST_SUITE_P(Choices, OptimizerLayouts, ::testing::ValuesIn(kChoices),
                         [](const auto& info) { return std::string(info.param.name); });

// A choice with all that a layout could cut, blocks, remainders and memory on the host, on many more layouts.
const Choice kFewestBits[] = {
    {"adamw_blocks_remainder_offload", {.state = kBlocks, .master = bf16_remainder, .offload = true}, true},
};
const OnRanks kLongRing[] = {
    {2, {}},
    {4, {}},
    {5, {}},
    {7, {}},
    {2, {.cp = 2}},
    {4, {.cp = 2}},
    {6, {.cp = 2}},
    {4, {.tp = 2}},
    {6, {.tp = 2}},
    {8, {.tp = 2}},
    {4, {.tp = 2, .cp = 2}},
    {2, {.pp = 2}},
    {4, {.pp = 2}},
    {6, {.pp = 2}},
    {2, {.pp = 2, .vpp = 2}},
    {4, {.tp = 2, .pp = 2}},
    {4, {.cp = 2, .pp = 2}},
    {8, {.tp = 2, .cp = 2, .pp = 2}},
    {2, {.ep = 2}},
    {4, {.ep = 2}},
    {6, {.ep = 2}},
    {8, {.ep = 2}},
    {4, {.ep = 4}},
    {8, {.ep = 4}},
    {2, {.etp = 2}},
    {4, {.etp = 2}},
    {8, {.ep = 2, .etp = 2}},
    {8, {.ep = 4, .etp = 2}},
    {4, {.pp = 2, .ep = 2}},
    {8, {.pp = 2, .ep = 2}},
    {8, {.tp = 2, .pp = 2, .ep = 2}},
    {8, {.tp = 2, .ep = 4}},
    {8, {.cp = 2, .ep = 4}},
};

class ManyLayouts : public ::testing::TestWithParam<Choice> {};

TEST_P(ManyLayouts, HaveTheBitsOfOneRank) { expect_bits_of_one_rank(GetParam(), kLongRing); }

INSTANTIATE_TEST_SUITE_P(Choices, ManyLayouts, ::testing::ValuesIn(kFewestBits),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(OptimizerFormats, BlocksThatALayoutCutsAreRefused) {
  const auto body = [](Transport& world) {
    EngineSpec spec = engine_spec(world, {.state = kBlocks}, {.tp = 2}, /*wide=*/true);
    spec.model.intermediate_size = 256;
    const Engine engine(spec);
  };
  expect_error(ErrorKind::usage,
               "optimizer.state: \"8bit\" has a scale for each 256 elements of a row, and this layout cuts the rows of "
               "model.layers.0.mlp.down_proj.weight, 256 elements, into 128; lower parallel.tp or parallel.etp, or set "
               "optimizer.state = \"bf16\"",
               [&] { run_threads(2, test_world(), body); });
}

// Moments of f32 become the nearest codes, of a run on other ranks too. Codes become their values, and these the
// same codes again.
TEST(OptimizerFormats, EightBitStatesConvertThroughACheckpoint) {
  const TestDir dir;
  const auto pass_on = [&](const std::string& from, const std::string& to, StateFormat state, int ranks) {
    run_threads(ranks, test_world(), [&](Transport& world) {
      Control control(world);
      Engine engine(engine_spec(world, {.state = state}, {}, /*wide=*/true));
      if (from.empty()) {
        init_layout(engine, {});
        for (int64_t step = 1; step <= 2; ++step) update(engine, step);
      } else {
        load_checkpoint(engine, control, folder_of(dir.path(from), 2));
      }
      save_checkpoint(engine, control, dir.path(to), 2);
    });
    return contents_of(folder_of(dir.path(to), 2));
  };
  const auto wide = pass_on("", "wide", StateFormat::f32, 1), codes = pass_on("wide", "codes", kBlocks, 3),
             values = pass_on("codes", "values", StateFormat::f32, 2), again = pass_on("values", "again", kBlocks, 1);
  EXPECT_EQ(wide.size(), values.size());
  EXPECT_TRUE(codes == again);
  int64_t num_coded = 0;
  for (const auto& [name, saved] : wide) {
    const Saved& coded = codes.at(name);
    if (coded.dtype == DType::f32) {
      EXPECT_TRUE(coded == saved && values.at(name) == saved) << name;
      continue;
    }
    ++num_coded;
    const auto n = std::ssize(coded.bytes);
    const BlockCode code = name.starts_with("adam_m.") ? BlockCode::with_sign : BlockCode::without_sign;
    std::vector<uint8_t> expected(n);
    std::vector<float> scales(n / kCodeBlock), decoded(n);
    const auto f32 = [](const Saved& s) { return reinterpret_cast<const float*>(s.bytes.data()); };
    encode_blocks(code, expected.data(), scales.data(), f32(saved), nullptr, n);
    decode_blocks(code, decoded.data(), expected.data(), scales.data(), n);
    EXPECT_EQ(std::memcmp(coded.bytes.data(), expected.data(), n), 0) << name;
    EXPECT_EQ(std::memcmp(f32(codes.at(name + ".scales")), scales.data(), 4 * scales.size()), 0) << name;
    EXPECT_EQ(std::memcmp(f32(values.at(name)), decoded.data(), 4 * decoded.size()), 0) << name;
  }
  EXPECT_GT(num_coded, 50);
}

// Where masters, moments and sums are changes no bit of them.
TEST(OptimizerFormats, AreTheSameOnTheHost) {
  const TestDir dir;
  for (const Choice& choice : kChoices) {
    if (!choice.wide && choice.optimizer.state == StateFormat::f32 && choice.optimizer.master == f32) continue;
    const auto run = [&](const char* name, bool offload, double buffer_kib = 0) {
      const std::string folder = dir.path(fmt::format("{}_{}", choice.name, name));
      run_threads(2, test_world(), [&](Transport& world) {
        Control control(world);
        OptimizerSpec optimizer = choice.optimizer;
        optimizer.offload = offload;
        optimizer.offload_grad = offload && optimizer.grad == GradFormat::bf16;
        optimizer.offload_buffer = buffer_kib / (1 << 20);
        Engine engine(engine_spec(world, optimizer, {}, choice.wide));
        EXPECT_EQ(engine.plan().bytes(Life::host) > 0, offload);
        // Beside slots for what passes through.
        const bool streams = offload && optimizer.kind != OptimizerKind::muon;
        const bool has_none = !streams && (offload || choice.optimizer.momentum == 0);
        EXPECT_EQ(engine.plan().bytes(Life::optimizer) == 0, has_none && buffer_kib == 0);
        init_layout(engine, {});
        for (int64_t step = 1; step <= 2; ++step) update(engine, step);
        save_checkpoint(engine, control, folder, 2);
      });
      return folder_of(folder, 2);
    };
    SCOPED_TRACE(choice.name);
    const auto device = run("device", false);
    expect_same(run("host", true), device);
    if (choice.optimizer.momentum > 0) expect_same(run("both", true, /*buffer_kib=*/32), device);
  }
}

// On a pipeline an update may overlap with the first passes of the next step. On other layouts weights are sent
// after it.
TEST(OptimizerFormats, AreTheSameOnTheHostOverlappedWithPasses) {
  const TestDir dir;
  const OnRanks all[] = {{2, {.pp = 2}}, {2, {.pp = 2, .vpp = 2}}, {2, {}}};
  for (const bool tied : {false, true}) {
    for (size_t i = 0; i < std::size(all); ++i) {
      const auto run = [&](const char* name, bool overlaps, double buffer_kib = 0) {
        const std::string folder = dir.path(fmt::format("{}_{}_{}", tied, i, name));
        run_threads(all[i].ranks, test_world(), [&](Transport& world) {
          Control control(world);
          EngineSpec spec = layout_engine_spec(world, {.tied = tied}, all[i].layout);
          spec.precision.compute = DType::bf16;
          spec.optimizer->master = bf16_stochastic;
          spec.optimizer->offload = spec.overlaps_update = overlaps;
          spec.optimizer->offload_buffer = buffer_kib / (1 << 20);
          Engine engine(spec);
          init_layout(engine, {.tied = tied});
          for (int64_t step = 1; step <= 3; ++step) layout_step(engine, {.tied = tied}, step);
          engine.finish_update();
          save_checkpoint(engine, control, folder, 3);
        });
        return folder_of(folder, 3);
      };
      SCOPED_TRACE(fmt::format("tied {}, layout {}", tied, i));
      const auto device = run("device", false);
      expect_same(run("host", true), device);
      expect_same(run("both", true, /*buffer_kib=*/32), device);
    }
  }
}

// A checkpoint of each choice is read by a run of each other choice. The numbers of a narrower format are
// rounded to nearest, and all others keep their bits.
TEST(OptimizerFormats, AnyFormatReadsACheckpointOfAnyOther) {
  const TestDir dir;
  const OptimizerSpec formats[] = {{},
                                   {.state = kHalf, .master = bf16_remainder, .grad = GradFormat::bf16},
                                   {.state = kHalf, .master = bf16_stochastic}};
  for (size_t from = 0; from < std::size(formats); ++from) {
    const std::string saved = dir.path(fmt::format("from{}", from));
    run_threads(2, test_world(), [&](Transport& world) {
      Control control(world);
      Engine engine(engine_spec(world, formats[from], {}));
      init_layout(engine, {});
      for (int64_t step = 1; step <= 2; ++step) update(engine, step);
      save_checkpoint(engine, control, saved, 2);
    });
    for (size_t to = 0; to < std::size(formats); ++to) {
      SCOPED_TRACE(fmt::format("{} to {}", from, to));
      const std::string again = dir.path(fmt::format("from{}to{}", from, to));
      run_threads(3, test_world(), [&](Transport& world) {
        Control control(world);
        Engine engine(engine_spec(world, formats[to], {}));
        load_checkpoint(engine, control, folder_of(saved, 2));
        expect_weights_of(engine, folder_of(saved, 2), formats[to]);
        save_checkpoint(engine, control, again, 2);
      });
      const auto before = contents_of(folder_of(saved, 2)), after = contents_of(folder_of(again, 2));
      ASSERT_EQ(before.size(), after.size());
      for (const auto& [name, was] : before) {
        const Saved& is = after.at(name);
        if (is.dtype == was.dtype) {
          EXPECT_TRUE(is == was) << name;
          continue;
        }
        const bool narrows = is.dtype == DType::bf16;
        const std::vector<std::byte>&wide = narrows ? was.bytes : is.bytes, &narrow = narrows ? is.bytes : was.bytes;
        ASSERT_EQ(wide.size(), 2 * narrow.size()) << name;
        int64_t different = 0;
        for (size_t i = 0; i < narrow.size() / 2; ++i) {
          float x;
          bf16 y;
          std::memcpy(&x, &wide[4 * i], 4);
          std::memcpy(&y, &narrow[2 * i], 2);
          different += narrows ? to_bf16(x).bits != y.bits : x != to_f32(y);
        }
        EXPECT_EQ(different, 0) << name;
      }
    }
  }
}

}  // namespace
}  // namespace moebius
