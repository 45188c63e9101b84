// Heads that ranks share: two ranks, each with half of the columns of q and of
// k, give together what one with all gives.
#include "ops/qk_norm/qk_norm_blocks.h"

#include "ops/cpu/testing.h"
#include "ops/qk_norm/qk_norm_ref.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

constexpr float kEps = 1e-3f;

struct Case {
  int64_t rows, A, B;  // columns of q and of k on a rank
  DType dtype;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [rows, A, B] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
             {0, 6, 2}, {1, 1, 1}, {3, 5, 2}, {67, 24, 8}, {131, 65, 33}, {40, 1056, 64}})
      all.push_back({rows, A, B, dtype});
  }
  return all;
}

// Returns the rows of [2 A of q | 2 B of k | 2 B of v], and the columns of them that rank r has.
Values columns_of(const Values& all, const Case& c, int64_t r) {
  Values mine;
  for (int64_t t = 0; t < c.rows; ++t) {
    int64_t begin = t * 2 * (c.A + 2 * c.B);
    for (const int64_t width : {c.A, c.B, c.B}) {
      for (int64_t j = 0; j < width; ++j) mine.push_back(all[begin + r * width + j]);
      begin += 2 * width;
    }
  }
  return mine;
}

class QkNormBlocksTest : public testing::DeviceTest<Case> {};
INSTANTIATE_TEST_SUITE_P(Shapes, QkNormBlocksTest, ::testing::ValuesIn(testing::on_each_device(cases())));

TEST_P(QkNormBlocksTest, TwoRanksEqualTheReference) {
  const Case k = c();
  const int64_t C = k.A + 2 * k.B;
  const Values x = Array::normal({k.rows, 2 * C}, k.dtype, 1).values(),
               dy = Array::normal({k.rows, 2 * C}, k.dtype, 2).values();
  Array q_norm = Array::normal({2 * k.A}, k.dtype, 3), k_norm = Array::normal({2 * k.B}, k.dtype, 4);
  const Values want_y = ref::qk_norm_fwd(x, q_norm.values(), k_norm.values(), kEps);
  const ref::QkNormGrads want = ref::qk_norm_bwd(dy, x, q_norm.values(), k_norm.values(), kEps);
  const double eps = testing::epsilon(k.dtype), eps32 = testing::epsilon(DType::f32),
               sums = 8 * eps32 * std::sqrt(static_cast<double>(2 * k.A + k.rows));

  struct Rank {
    Array x, dy, sums, dsums;
    Tensor q_norm_A, k_norm_B;
  };
  std::vector<Rank> ranks;
  for (int64_t r = 0; r < 2; ++r) {
    Rank& rank = ranks.emplace_back(Rank{
        Array::of({k.rows, C}, k.dtype, columns_of(x, k, r)), Array::of({k.rows, C}, k.dtype, columns_of(dy, k, r)),
        Array::poisoned({k.rows, 2}, DType::f32), Array::poisoned({k.rows, 4}, DType::f32),
        q_norm.tensor().rows(r * k.A, (r + 1) * k.A), k_norm.tensor().rows(r * k.B, (r + 1) * k.B)});
    QkNormSums a{
        .sums_TS = rank.sums.tensor(), .x_TC = rank.x.tensor(), .q_norm_A = rank.q_norm_A, .k_norm_B = rank.k_norm_B};
    qk_norm_sums(s_, a);
    a.sums_TS = rank.dsums.tensor(), a.dy_TC = rank.dy.tensor();
    qk_norm_sums(s_, a);
  }
  const auto added = [](const Array& a, const Array& b) {
    Values sum = a.values();
    const Values other = b.values();
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
    return sum;
  };
  Array sums2 = Array::of({k.rows, 2}, DType::f32, added(ranks[0].sums, ranks[1].sums)),
        sums4 = Array::of({k.rows, 4}, DType::f32, added(ranks[0].dsums, ranks[1].dsums));
  for (int64_t r = 0; r < 2; ++r) {
    Rank& rank = ranks[r];
    Array y = Array::poisoned({k.rows, C}, k.dtype), dx = rank.dy, dq = Array::of({k.A}, DType::f32, Values(k.A, 1.0)),
          dk = Array::of({k.B}, DType::f32, Values(k.B, 2.0));
    qk_norm_block_fwd(s_, {.y_TC = y.tensor(),
                           .x_TC = rank.x.tensor(),
                           .q_norm_A = rank.q_norm_A,
                           .k_norm_B = rank.k_norm_B,
                           .sums_T2 = sums2.tensor(),
                           .num_ranks = 2,
                           .eps = kEps});
    qk_norm_block_bwd(s_, {.dx_TC = dx.tensor(),
                           .dq_norm_A = dq.tensor(),
                           .dk_norm_B = dk.tensor(),
                           .x_TC = rank.x.tensor(),
                           .q_norm_A = rank.q_norm_A,
                           .k_norm_B = rank.k_norm_B,
                           .sums_T4 = sums4.tensor(),
                           .num_ranks = 2,
                           .eps = kEps});
    testing::expect_close("y", y.values(), columns_of(want_y, k, r), 3 * eps + sums, 1e-7);
    testing::expect_close("dx", dx.values(), columns_of(want.dx, k, r), eps + sums, 1e-5);
    Values want_dq(want.dq_norm.begin() + r * k.A, want.dq_norm.begin() + (r + 1) * k.A),
        want_dk(want.dk_norm.begin() + r * k.B, want.dk_norm.begin() + (r + 1) * k.B);
    for (double& v : want_dq) v += 1;
    for (double& v : want_dk) v += 2;
    testing::expect_close("dq_norm", dq.values(), want_dq, sums, 1e-5);
    testing::expect_close("dk_norm", dk.values(), want_dk, sums, 1e-5);
  }
}

}  // namespace
}  // namespace moebius
