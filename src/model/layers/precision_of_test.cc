// The groups of ranks that share the scales of a parameter's products.
#include "model/layers/precision_of.h"

#include <gtest/gtest.h>

#include <cmath>

#include "comm/transport/threads.h"
#include "model/layers/precision_of_rows.h"
#include "model/layers/row_chunks.h"
#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;

// Ranks in the order of the mesh: tp is fastest, then cp, then dp; etp is fastest, then ep.
struct SharingCase {
  const char* name;
  MeshShape mesh;
  ParamKind kind;
  int split;                    // the dimension of the matrix that ranks share; -1: none
  int64_t of_rows, of_weights;  // how many consecutive ranks share the scale of rows, and of the weight
};
void PrintTo(const SharingCase& c, std::ostream* out) { *out << c.name; }

constexpr MeshShape kTpCp{.tp = 2, .cp = 2, .etp = 2, .edp = 2}, kDp{.dp = 4, .etp = 2, .ep = 2};
const SharingCase kCases[] = {
    {"qkv", kTpCp, ParamKind::matrix, 0, 4, 2},
    {"o", kTpCp, ParamKind::matrix, 1, 4, 2},
    {"whole", kTpCp, ParamKind::matrix, -1, 4, 1},
    {"qkv_of_copies", kDp, ParamKind::matrix, 0, 1, 1},
    {"experts_up", kTpCp, ParamKind::experts, 0, 4, 2},
    {"experts_down", kTpCp, ParamKind::experts, 1, 4, 2},
    {"experts_of_copies_up", kDp, ParamKind::experts, 0, 4, 2},
    {"experts_of_copies_down", kDp, ParamKind::experts, 1, 4, 2},
};

// Owns what the context of a layer with this recipe refers to.
struct Layer {
  Layer(const Mesh& of, PrecisionRecipe of_recipe) : mesh(of), recipe{.compute = DType::f32, .recipe = of_recipe} {}
  LayerContext context() {
    return {.params = params,
            .plan = plan,
            .model = model,
            .balance = balance,
            .mesh = mesh,
            .rope_table_Pd = no_table,
            .precision = recipe};
  }

  const Mesh& mesh;
  MemoryPlan plan;
  ParamTable params{plan, ModelUse::training};
  ModelSpec model;
  BalanceSpec balance;
  Tensor no_table;
  PrecisionSpec recipe;
};

class ScalesOfParameters : public ::testing::TestWithParam<SharingCase> {};

// The numbers of rank r are 2^r, so a scale tells the last rank of those that share it.
TEST_P(ScalesOfParameters, AreSharedByTheirOwnGroups) {
  const SharingCase& of = GetParam();
  run_threads(4, {.timeout_s = 60}, [&](Transport& world) {
    const Mesh mesh(of.mesh, world);
    const bool is_expert = of.kind == ParamKind::experts;
    const Shape whole{64, 64};
    const Shard shard = of.split < 0 ? Shard{}
                                     : shard_of(whole, of.split, is_expert ? mesh.place().etp : mesh.place().tp,
                                                is_expert ? of.mesh.etp : of.mesh.tp);
    const ParamPart part{.name = "model.layers.0.matrix.weight", .shape = whole, .offset = 0, .shard = shard};
    Shape shape = part.local_shape();
    if (is_expert) shape = {1, shape[0], shape[1]};
    const ParamSpec spec{.name = part.name, .shape = shape, .parts = {part}, .kind = of.kind};

    Layer layer(mesh, PrecisionRecipe::fp8_tensor);
    const LayerContext c = layer.context();
    const ProductPrecision precision = precision_of(c, spec);

    std::vector<char> memory(1 << 20);
    ThreadPool pool(1);
    Stream s(DeviceKind::cpu, pool);
    StepStack stack(DeviceKind::cpu, memory.data(), static_cast<int64_t>(memory.size()));
    const QuantizeContext q{s, stack, {}};
    const auto scale_of = [&](const Operand& operand) { return operand.scales.ptr<float>()[0]; };
    const auto numbers = [&](const Shape& of_shape) {
      return Array::of(of_shape, DType::f32,
                       testing::Values(static_cast<size_t>(of_shape.numel()), std::exp2(world.rank())));
    };
    // 2^-8 is the scale of 1, since 448 is below 2^9; E5M2 has one of 2^-15.
    const auto expected = [&](int64_t sharing, int top) {
      return static_cast<float>(std::exp2(world.rank() / sharing * sharing + sharing - 1 - top));
    };
    Array x = numbers({4, shape[shape.rank() - 1]}), dy = numbers({4, shape[shape.rank() - 2]}), w = numbers(shape);
    EXPECT_EQ(scale_of(precision.x(q, x.tensor())), expected(of.of_rows, 8));
    EXPECT_EQ(scale_of(precision.dy(q, dy.tensor())), expected(of.of_rows, 15));
    const auto [dy_q, x_q] = precision.for_dw(q, dy.tensor(), {}, x.tensor(), {});
    EXPECT_EQ(scale_of(x_q), expected(of.of_rows, 8));
    EXPECT_EQ(scale_of(dy_q), expected(of.of_rows, 15));
    EXPECT_EQ(scale_of(precision.w(q, w.tensor())), expected(of.of_weights, 8));
    EXPECT_EQ(scale_of(precision.w_for_dx(q, w.tensor())), expected(of.of_weights, 8));
  });
}

INSTANTIATE_TEST_SUITE_P(Parameters, ScalesOfParameters, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

// A layer that multiplies some rows of a matrix draws for dy as for these columns of the whole dy. Both parts have the
// largest magnitude, and so the scales of the whole.
TEST(PrecisionOfRows, DrawsByTheColumnsOfTheWholeMatrix) {
  run_threads(1, {.timeout_s = 60}, [&](Transport& world) {
    constexpr int64_t kRows = 32, kFirst = 32, kWhole = 48;
    const Mesh mesh({}, world);
    Layer layer(mesh, PrecisionRecipe::nvfp4);
    const LayerContext c = layer.context();
    const ParamSpec spec{.name = "matrix.weight", .shape = {kWhole, 64}};
    testing::Values of_whole(kRows * kWhole), of_parts[2];
    for (int64_t i = 0; i < kRows; ++i) {
      for (int64_t j = 0; j < kWhole; ++j) {
        const double x = j == 0 || j == kFirst ? 4 : std::sin(static_cast<double>(7 * i + j));
        of_whole[static_cast<size_t>(i * kWhole + j)] = x;
        of_parts[j >= kFirst].push_back(x);
      }
    }
    Array whole = Array::of({kRows, kWhole}, DType::f32, of_whole),
          latent = Array::of({kRows, kFirst}, DType::f32, of_parts[0]),
          rope = Array::of({kRows, kWhole - kFirst}, DType::f32, of_parts[1]);
    std::vector<char> memory(1 << 20);
    ThreadPool pool(1);
    Stream s(DeviceKind::cpu, pool);
    StepStack stack(DeviceKind::cpu, memory.data(), static_cast<int64_t>(memory.size()));
    int64_t draw[2] = {5, 0};
    const QuantizeContext q{s, stack, {.data = draw, .shape = {2}, .dtype = DType::i64}};
    const Tensor want = precision_of(c, spec).dy(q, whole.tensor()).data;
    const Tensor got[2] = {precision_of_rows(c, spec, 0).dy(q, latent.tensor()).data,
                           precision_of_rows(c, spec, kFirst).dy(q, rope.tensor()).data};
    for (int64_t i = 0; i < kRows; ++i)
      for (int64_t j = 0; j < kWhole; ++j)
        EXPECT_EQ(
            j < kFirst ? got[0].ptr<float>()[i * kFirst + j] : got[1].ptr<float>()[i * (kWhole - kFirst) + j - kFirst],
            want.ptr<float>()[i * kWhole + j])
            << i << ", " << j;
  });
}

// The rows of a chunk are those of each tp rank from its first row on. Every token of the micro-batch is in one
// of them.
TEST(DenseRows, OfAChunkHaveTheTokensOfTheMicroBatch) {
  for (const int64_t tp : {1, 2}) {
    run_threads(static_cast<int>(tp), {.timeout_s = 60}, [&](Transport& world) {
      constexpr int64_t kTokens = 16, kChunk = 4, kFirst = 100;
      const Mesh mesh({.tp = tp, .edp = tp}, world);
      Layer layer(mesh, PrecisionRecipe::nvfp4);
      LayerContext c = layer.context();
      c.shape = {.batch = 2, .seq = kTokens / 2};
      const int64_t t = kTokens / tp;
      const ParamSpec spec{.name = "matrix.weight", .shape = {48, 64}};
      const DenseRows rows(of_chunk(c, kChunk), precision_of(c, spec));
      std::vector<char> memory(1 << 20);
      ThreadPool pool(1);
      Stream s(DeviceKind::cpu, pool);
      StepStack stack(DeviceKind::cpu, memory.data(), static_cast<int64_t>(memory.size()));
      MicroBatch batch;
      std::vector<char> scalars(sizeof(StepScalars));
      batch.scalars_memory = {.data = scalars.data(), .shape = {int64_t{sizeof(StepScalars)}}, .dtype = DType::u8};
      batch.scalars.set_first_token(kFirst);
      batch.store_scalars();
      for (int64_t begin = 0; begin < t; begin += kChunk) {
        Step whole{s, stack, batch};
        ChunkStep chunk(whole, begin);
        Step& step = chunk.step;
        const auto tokens_of = [&](int64_t num_rows) {
          const Tensor index = rows.groups(step, num_rows).index_N;
          return index.empty() ? std::vector<int32_t>{}
                               : std::vector<int32_t>(index.ptr<int32_t>(), index.ptr<int32_t>() + num_rows);
        };
        std::vector<int32_t> own, all;
        for (int64_t r = 0; r < tp; ++r) {
          for (int64_t i = 0; i < kChunk; ++i) {
            all.push_back(static_cast<int32_t>(kFirst + r * t + begin + i));
            if (r == world.rank()) own.push_back(all.back());
          }
        }
        if (tp == 1 && begin == 0) {
          EXPECT_EQ(tokens_of(kChunk), std::vector<int32_t>{}) << "rows are by number there";
          continue;
        }
        EXPECT_EQ(tokens_of(kChunk * tp), all);
        EXPECT_EQ(tokens_of(kChunk), own);
      }
    });
  }
}

}  // namespace
}  // namespace moebius
