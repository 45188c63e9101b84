#include "ops/rope/rope.h"

#include "ops/cpu/testing.h"
#include "ops/rope/rope_ref.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

constexpr double kTheta = 100, kEps = 1e-3;
constexpr int64_t kPositions = 50;

enum class Norm { none, per_head, all_heads };

struct Case {
  int64_t rows, heads, kv_heads, width;
  Norm norm;
  DType dtype;

  // Elements of the weight of a norm of so many heads.
  int64_t weights(int64_t n) const { return norm == Norm::none ? 0 : norm == Norm::per_head ? width : n * width; }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const Norm norm : {Norm::none, Norm::per_head, Norm::all_heads}) {
      for (const auto& [rows, heads, kv_heads, width] : std::vector<std::array<int64_t, 4>>{{0, 2, 1, 4},
                                                                                            {1, 1, 1, 2},
                                                                                            {5, 3, 1, 6},
                                                                                            {131, 4, 2, 34},
                                                                                            {67, 6, 2, 128},
                                                                                            {9, 2, 1, 96},
                                                                                            {20, 11, 3, 64}}) {
        all.push_back({rows, heads, kv_heads, width, norm, dtype});
      }
    }
    // On a GPU a block has one row of the first two shapes, and two or three rows of the third. Threads have two
    // vectors of the fourth in f32. Some threads have no vector of the fifth. The fallback kernels take the sixth,
    // and in f32 the last one, of which threads have two vectors in bf16.
    for (const auto& [rows, heads, kv_heads, width] : std::vector<std::array<int64_t, 4>>{{40, 16, 16, 128},
                                                                                          {4, 2, 5, 32},
                                                                                          {700, 2, 2, 32},
                                                                                          {37, 40, 40, 128},
                                                                                          {3, 34, 17, 96},
                                                                                          {530, 2, 1, 6},
                                                                                          {5, 70, 70, 128}}) {
      all.push_back({rows, heads, kv_heads, width, Norm::all_heads, dtype});
    }
  }
  return all;
}

std::vector<int32_t> positions(int64_t rows) {
  std::vector<int32_t> pos(rows);
  for (int64_t t = 0; t < rows; ++t) pos[t] = static_cast<int32_t>(t * 7 % kPositions);
  return pos;
}

// Columns [begin, end) of each row.
Values columns(const Values& x, int64_t width, int64_t begin, int64_t end) {
  Values part;
  for (size_t i = 0; i < x.size(); ++i) {
    const int64_t column = static_cast<int64_t>(i) % width;
    if (begin <= column && column < end) part.push_back(x[i]);
  }
  return part;
}

class RopeTest : public testing::DeviceTest<Case> {
 protected:
  RopeTest() {
    const auto& [rows, heads, kv_heads, width, norm, dtype] = c_;
    qkv_ = Array::normal({rows, columns_}, dtype, 1);
    q_norm_ = weights(heads, dtype, 2);
    k_norm_ = weights(kv_heads, dtype, 3);
    pos_ = Array::of_ints({rows}, positions(rows));
    table_ = Array::poisoned({kPositions, width}, DType::f32);
    rope_table(s_, {.cos_sin_Pd = table_.tensor(), .theta = kTheta});
    q_ref_ = {pos_.values(), q_norm_.values(), heads, width, kTheta, kEps};
    k_ref_ = {pos_.values(), k_norm_.values(), kv_heads, width, kTheta, kEps};
  }
  // Returns values for the weight of the norm of so many heads, or none.
  Array weights(int64_t n, DType dtype, uint64_t seed) const {
    return c_.norm == Norm::none ? Array() : Array::normal({c_.weights(n)}, dtype, seed);
  }
  // Returns the columns of a row of qkv at which q and k end.
  int64_t q_end() const { return c_.heads * c_.width; }
  int64_t k_end() const { return q_end() + c_.kv_heads * c_.width; }
  Values x_q() const { return columns(qkv_.values(), columns_, 0, q_end()); }
  Values x_k() const { return columns(qkv_.values(), columns_, q_end(), k_end()); }

  const Case c_ = c();
  const int64_t columns_ = (c_.heads + 2 * c_.kv_heads) * c_.width;
  // Roundings of the normalised head and of the result; table, norm and rotation are a handful of
  // f32 operations.
  const double error_ =
      2 * testing::epsilon(c_.dtype) +
      testing::epsilon(DType::f32) * (6 + std::sqrt(c_.norm == Norm::all_heads ? c_.heads * c_.width : c_.width));
  Array qkv_, q_norm_, k_norm_, pos_, table_;
  ref::Rope q_ref_, k_ref_;
};
INSTANTIATE_TEST_SUITE_P(Shapes, RopeTest, ::testing::ValuesIn(testing::on_each_device(cases())));

TEST_P(RopeTest, ForwardEqualsTheReference) {
  const auto [rows, heads, kv_heads, width, norm, dtype] = c_;
  Array q = Array::poisoned({rows, heads, width}, dtype), k = Array::poisoned({rows, kv_heads, width}, dtype), v = k;
  rope_fwd(s_, {.q_THd = q.tensor(),
                .k_TGd = k.tensor(),
                .v_TGd = v.tensor(),
                .qkv_TC = qkv_.tensor(),
                .pos_T = pos_.tensor(),
                .cos_sin_Pd = table_.tensor(),
                .q_norm_A = q_norm_.tensor(),
                .k_norm_B = k_norm_.tensor(),
                .eps = kEps});
  testing::expect_close("q", q.values(), ref::rope_fwd(x_q(), q_ref_), error_, 1e-7);
  testing::expect_close("k", k.values(), ref::rope_fwd(x_k(), k_ref_), error_, 1e-7);
  EXPECT_EQ(v.values(), columns(qkv_.values(), columns_, k_end(), columns_));
}

TEST_P(RopeTest, BackwardEqualsTheReference) {
  const auto [rows, heads, kv_heads, width, norm, dtype] = c_;
  Array dq = Array::normal({rows, heads, width}, dtype, 4), dk = Array::normal({rows, kv_heads, width}, dtype, 5),
        dv = Array::normal({rows, kv_heads, width}, dtype, 6);
  Array dqkv = Array::poisoned({rows, columns_}, dtype);
  Array dq_norm = weights(heads, DType::f32, 7), dk_norm = weights(kv_heads, DType::f32, 8);
  Values want_dq_norm = dq_norm.values(), want_dk_norm = dk_norm.values();
  const Values want_q = ref::rope_bwd(want_dq_norm, dq.values(), x_q(), q_ref_),
               want_k = ref::rope_bwd(want_dk_norm, dk.values(), x_k(), k_ref_);
  RopeBwd a{.dqkv_TC = dqkv.tensor(),
            .dq_norm_A = dq_norm.tensor(),
            .dk_norm_B = dk_norm.tensor(),
            .dq_THd = dq.tensor(),
            .dk_TGd = dk.tensor(),
            .dv_TGd = dv.tensor(),
            .qkv_TC = qkv_.tensor(),
            .pos_T = pos_.tensor(),
            .cos_sin_Pd = table_.tensor(),
            .q_norm_A = q_norm_.tensor(),
            .k_norm_B = k_norm_.tensor(),
            .eps = kEps};
  Array partial;
  if (norm != Norm::none) {
    partial = Array::poisoned({RopeBwd::num_partials(a, s_), c_.weights(heads) + c_.weights(kv_heads)}, DType::f32);
    a.partial_PW = partial.tensor();
  }
  rope_bwd(s_, a);
  const Values got = dqkv.values();
  testing::expect_close("dq", columns(got, columns_, 0, q_end()), want_q, error_, 1e-6);
  testing::expect_close("dk", columns(got, columns_, q_end(), k_end()), want_k, error_, 1e-6);
  EXPECT_EQ(columns(got, columns_, k_end(), columns_), dv.values());
  // Sums of T H terms of magnitude 1, all in f32.
  const double sum_error = testing::epsilon(DType::f32) * std::sqrt(rows * heads + 1.0);
  testing::expect_close("dq_norm", dq_norm.values(), want_dq_norm, 8 * sum_error, 8 * sum_error);
  testing::expect_close("dk_norm", dk_norm.values(), want_dk_norm, 8 * sum_error, 8 * sum_error);
}

// Weights of 8 elements are those of both heads together.
class RopeReferenceTest : public ::testing::TestWithParam<int64_t> {};
INSTANTIATE_TEST_SUITE_P(Weights, RopeReferenceTest, ::testing::Values(4, 8));

TEST_P(RopeReferenceTest, BackwardEqualsFiniteDifferences) {
  const Values x = Array::normal({3, 2, 4}, DType::f32, 1).values(),
               dy = Array::normal({3, 2, 4}, DType::f32, 2).values(),
               w = Array::normal({GetParam()}, DType::f32, 3).values();
  ref::Rope r{{0, 5, 9}, w, 2, 4, kTheta, kEps};
  Values dw(w.size());
  const Values dx = ref::rope_bwd(dw, dy, x, r);
  testing::expect_gradient(
      "dx", [&](const Values& at) { return testing::dot(dy, ref::rope_fwd(at, r)); }, x, dx);
  testing::expect_gradient(
      "dw",
      [&](const Values& at) {
        return testing::dot(dy, ref::rope_fwd(x, {r.pos, at, 2, 4, kTheta, kEps}));
      },
      w, dw);
}

TEST(Rope, SameBitsForAnyTeam) {
  for (const int64_t heads : {1, 2}) {  // that are normalised together
    testing::expect_same_bits_for_any_team([&](Stream& s) {
      Array qkv = Array::normal({300, 48}, DType::bf16, 1), norm = Array::normal({8 * heads}, DType::bf16, 2),
            pos = Array::of_ints({300}, positions(300)), table({kPositions, 8}, DType::f32);
      Array q({300, 2, 8}, DType::bf16), k = q, v = q, dqkv = qkv, dq_norm({8 * heads}, DType::f32), dk_norm = dq_norm;
      rope_table(s, {.cos_sin_Pd = table.tensor()});
      rope_fwd(s, {.q_THd = q.tensor(),
                   .k_TGd = k.tensor(),
                   .v_TGd = v.tensor(),
                   .qkv_TC = qkv.tensor(),
                   .pos_T = pos.tensor(),
                   .cos_sin_Pd = table.tensor(),
                   .q_norm_A = norm.tensor(),
                   .k_norm_B = norm.tensor()});
      RopeBwd a{.dqkv_TC = dqkv.tensor(),
                .dq_norm_A = dq_norm.tensor(),
                .dk_norm_B = dk_norm.tensor(),
                .dq_THd = q.tensor(),
                .dk_TGd = k.tensor(),
                .dv_TGd = v.tensor(),
                .qkv_TC = qkv.tensor(),
                .pos_T = pos.tensor(),
                .cos_sin_Pd = table.tensor(),
                .q_norm_A = norm.tensor(),
                .k_norm_B = norm.tensor()};
      Array partial({RopeBwd::num_partials(a, s), 16 * heads}, DType::f32);
      a.partial_PW = partial.tensor();
      rope_bwd(s, a);
      return std::vector<Array>{table, q, k, v, dqkv, dq_norm, dk_norm};
    });
  }
}

TEST(Rope, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array q({2, 3, 4}, DType::f32), k({2, 1, 4}, DType::f32), qkv({2, 20}, DType::f32), short_qkv({2, 16}, DType::f32),
      pos = Array::of_ints({2}, {0, 9}), table({5, 4}, DType::f32);
  RopeFwd a{.q_THd = q.tensor(),
            .k_TGd = k.tensor(),
            .v_TGd = k.tensor(),
            .qkv_TC = short_qkv.tensor(),
            .pos_T = pos.tensor(),
            .cos_sin_Pd = table.tensor()};
  EXPECT_EQ(testing::error_of([&] { rope_fwd(s, a); }), "rope_fwd: qkv must be f32[2, 20]; got f32[2, 16]");
  a.qkv_TC = qkv.tensor();
  EXPECT_THROW(rope_fwd(s, a), Error);  // position 9 of 5
  a.q_norm_A = a.k_norm_B = table.tensor().view({20}).rows(0, 12);
  EXPECT_EQ(testing::error_of([&] { rope_fwd(s, a); }), "rope_fwd: k_norm must be f32[4]; got f32[12]");
  a.q_norm_A = a.k_norm_B = table.tensor().view({20});
  EXPECT_EQ(testing::error_of([&] { rope_fwd(s, a); }), "rope_fwd: q_norm must be f32[12]; got f32[20]");
  a.q_norm_A = a.k_norm_B = {};
  a.qkv_TC = pos.tensor();
  EXPECT_EQ(testing::error_of([&] { rope_fwd(s, a); }), "rope_fwd: qkv must be f32 or bf16; got i32[2]");
  a.qkv_TC = qkv.tensor();
  a.q_THd = qkv.tensor();
  EXPECT_EQ(testing::error_of([&] { rope_fwd(s, a); }),
            "rope_fwd: q and k must be [T, heads, d]; got f32[2, 20] and f32[2, 1, 4]");
  a.q_THd = q.tensor().view({2, 4, 3});
  EXPECT_EQ(testing::error_of([&] { rope_fwd(s, a); }), "rope_fwd: the head dim must be even; got f32[2, 4, 3]");
  EXPECT_EQ(testing::error_of([&] { rope_table(s, {.cos_sin_Pd = q.tensor()}); }),
            "rope_table: cos_sin must be [positions, even d]; got f32[2, 3, 4]");
}

TEST(Rope, NullDeviceCounts) {
  const Cost cost = testing::cost_on_null([](Stream& s) {
    const Tensor q = testing::null_tensor({3, 2, 4}), k = testing::null_tensor({3, 1, 4}),
                 qkv = testing::null_tensor({3, 16}), pos = testing::null_tensor({3}, DType::i32),
                 table = testing::null_tensor({9, 4});
    rope_table(s, {.cos_sin_Pd = table});
    rope_fwd(s, {.q_THd = q, .k_TGd = k, .v_TGd = k, .qkv_TC = qkv, .pos_T = pos, .cos_sin_Pd = table});
    rope_bwd(s,
             {.dqkv_TC = qkv, .dq_THd = q, .dk_TGd = k, .dv_TGd = k, .qkv_TC = qkv, .pos_T = pos, .cos_sin_Pd = table});
  });
  EXPECT_EQ(cost.flops, 36 + 2 * 3 * 36);
}

}  // namespace
}  // namespace moebius
