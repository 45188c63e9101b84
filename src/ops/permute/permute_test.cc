#include "ops/permute/permute.h"

#include "ops/cpu/testing.h"
#include "ops/permute/permute_ref.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t T, K, D;
  DType dtype;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [T, K, D] : std::vector<std::array<int64_t, 3>>{
             {0, 2, 3}, {1, 1, 1}, {5, 1, 7}, {7, 3, 33}, {70, 2, 256}, {9, 8, 600}, {33, 10, 72}}) {
      all.push_back({T, K, D, dtype});
    }
  }
  return all;
}

// Pairs and rows in some bijection; every fifth pair is dropped.
struct Pairs {
  Pairs(int64_t T, int64_t K) : R(T * K), pair_row(R, -1), row_pair(R, -1) {
    for (int64_t p = R - 1; p >= 0; --p) {
      if (p % 5 == 4) continue;
      row_pair[num_rows] = static_cast<int32_t>(p);
      pair_row[p] = static_cast<int32_t>(num_rows++);
    }
  }
  int64_t R, num_rows = 0;
  std::vector<int32_t> pair_row, row_pair;
};

class CombineTest : public testing::DeviceTest<Case> {};

TEST_P(CombineTest, EqualsTheReference) {
  const auto [T, K, D, dtype] = c();
  const Pairs pairs(T, K);
  Array y = Array::normal({T * K, D}, dtype, 1), pair_row = Array::of_ints({T, K}, pairs.pair_row);
  // Rows that no pair has are poison: nothing may read them.
  const Array poison = Array::poisoned({T * K, D}, dtype);
  Tensor unused = y.tensor().rows(pairs.num_rows, T * K);
  if (!unused.empty()) std::memcpy(unused.data, poison.bytes().data(), unused.num_bytes());
  for (const bool weighted : {false, true}) {
    for (const bool accumulate : {false, true}) {
      Array weight = weighted ? Array::normal({T, K}, DType::f32, 2) : Array();
      Array out = accumulate ? Array::normal({T, D}, dtype, 3) : Array::poisoned({T, D}, dtype);
      Values want = out.values();
      const Values rows(pairs.pair_row.begin(), pairs.pair_row.end());
      ref::combine(want, y.values(), rows, weight.values(), T, K, D, accumulate);
      combine(s_, {.out_TD = out.tensor(),
                   .y_RD = y.tensor(),
                   .pair_row_TK = pair_row.tensor(),
                   .weight_TK = weight.tensor(),
                   .accumulate = accumulate});
      // K additions in f32 of terms near 1, rounded once.
      testing::expect_close("out", out.values(), want, testing::epsilon(dtype), 0x1p-22 * static_cast<double>(K));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, CombineTest, ::testing::ValuesIn(testing::on_each_device(cases())));

// Sums of bf16 rows that stay f32, and sums of f32 rows that are rounded to bf16: the bits of a copy in the
// other dtype.
TEST_P(CombineTest, OutMayHaveAnotherDtype) {
  const auto [T, K, D, dtype] = c();
  const DType other = dtype == DType::f32 ? DType::bf16 : DType::f32;
  const Pairs pairs(T, K);
  Array y = Array::normal({T * K, D}, dtype, 1), pair_row = Array::of_ints({T, K}, pairs.pair_row);
  Array weight = Array::normal({T, K}, DType::f32, 2), got = Array::poisoned({T, D}, other);
  const auto sum = [&](Array& out, Array& rows) {
    combine(s_, {.out_TD = out.tensor(),
                 .y_RD = rows.tensor(),
                 .pair_row_TK = pair_row.tensor(),
                 .weight_TK = weight.tensor()});
  };
  sum(got, y);
  Array wide = Array::of({T * K, D}, DType::f32, y.values()), want = Array::poisoned({T, D}, DType::f32);
  sum(want, wide);
  EXPECT_EQ(got.values(), Array::of({T, D}, other, want.values()).values());
}

TEST(Combine, SameBitsForAnyTeam) {
  const Pairs pairs(150, 3);
  testing::expect_same_bits_for_any_team([&](Stream& s) {
    Array y = Array::normal({450, 300}, DType::bf16, 1), pair_row = Array::of_ints({150, 3}, pairs.pair_row);
    Array weight = Array::normal({150, 3}, DType::f32, 2), out = Array::poisoned({150, 300}, DType::bf16);
    combine(
        s,
        {.out_TD = out.tensor(), .y_RD = y.tensor(), .pair_row_TK = pair_row.tensor(), .weight_TK = weight.tensor()});
    return std::vector<Array>{out};
  });
}

// Whatever bits a NaN has, among them those of memory that was filled with ones: no rounding makes
// a number of it.
TEST(Combine, KeepsNaN) {
  const int64_t D = 200;
  testing::on_each_device([&](Stream& s) {
    for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fff8000u, 0x7fffffffu, 0xffffffffu}) {
      Array y = Array::of({2, D}, DType::bf16, Values(2 * D, 1.0)), weight = Array::of({1, 2}, DType::f32, {1.0, 1.0});
      Array pair_row = Array::of_ints({1, 2}, {0, 1}), out = Array::poisoned({1, D}, DType::bf16);
      std::memcpy(weight.tensor().ptr<float>() + 1, &bits, sizeof bits);
      combine(
          s,
          {.out_TD = out.tensor(), .y_RD = y.tensor(), .pair_row_TK = pair_row.tensor(), .weight_TK = weight.tensor()});
      for (const double each : out.values()) ASSERT_TRUE(std::isnan(each)) << std::hex << bits;
    }
  });
}

// With weights 1/K and rows that are the tokens themselves, gathering and combining
// is the identity.
TEST(Combine, OfIdentityExpertsIsTheIdentity) {
  testing::on_each_device([](Stream& s) {
    const int64_t T = 6, K = 4, D = 5;
    std::vector<int32_t> rows(T * K);
    Values x = Array::normal({T, D}, DType::f32, 1).values(), y(T * K * D);
    for (int64_t p = 0; p < T * K; ++p) {
      rows[p] = static_cast<int32_t>((p * 5 + 2) % (T * K));
      for (int64_t d = 0; d < D; ++d) y[rows[p] * D + d] = x[p / K * D + d];
    }
    Array ys = Array::of({T * K, D}, DType::f32, y), index = Array::of_ints({T, K}, rows);
    Array weight = Array::of({T, K}, DType::f32, Values(T * K, 0.25)), out = Array::poisoned({T, D}, DType::f32);
    combine(s,
            {.out_TD = out.tensor(), .y_RD = ys.tensor(), .pair_row_TK = index.tensor(), .weight_TK = weight.tensor()});
    EXPECT_EQ(out.values(), x);
  });
}

TEST(Permute, WeightsGoToRowsAndGradientsComeBack) {
  testing::on_each_device([](Stream& s) {
    for (const int64_t T : {0, 1, 37, 9000}) {
      const int64_t K = 2;
      const Pairs pairs(T, K);
      Array weight = Array::normal({T, K}, DType::f32, 1), to = Array::poisoned({T * K}, DType::f32);
      Array row_pair = Array::of_ints({T * K}, pairs.row_pair), pair_row = Array::of_ints({T, K}, pairs.pair_row);
      Array offsets = Array::of_ints({3}, {0, 0, static_cast<int32_t>(pairs.num_rows)}),
            back = Array::poisoned({T, K}, DType::f32);
      pairs_to_rows(s, {.to_R = to.tensor(),
                        .from_TK = weight.tensor(),
                        .row_pair_R = row_pair.tensor(),
                        .offsets_E1 = offsets.tensor()});
      rows_to_pairs(s, {.to_TK = back.tensor(), .from_R = to.tensor(), .pair_row_TK = pair_row.tensor()});
      Values want = weight.values();
      const Values got = to.values();
      for (int64_t r = 0; r < T * K; ++r) {
        if (r < pairs.num_rows)
          EXPECT_EQ(got[r], want[pairs.row_pair[r]]);
        else
          EXPECT_TRUE(std::isnan(got[r])) << "a row that does not exist was written";
      }
      for (int64_t p = 0; p < T * K; ++p) want[p] = pairs.pair_row[p] < 0 ? 0 : want[p];
      EXPECT_EQ(back.values(), want);
    }
  });
}

TEST(Permute, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array out({2, 3}, DType::f32), y({4, 5}, DType::f32), ints({2, 2}, DType::i32), f({2, 2}, DType::f32);
  const Combine good{.out_TD = y.tensor().rows(0, 2), .y_RD = y.tensor(), .pair_row_TK = ints.tensor()};
  const auto error = [&](Stream& on, const Combine& a) { return testing::error_of([&] { combine(on, a); }); };
  Combine bad = good;
  bad.out_TD = out.tensor();
  EXPECT_EQ(error(s, bad), "combine: out must be f32[2, 5]; got f32[2, 3]");
  bad.out_TD = ints.tensor();
  EXPECT_EQ(error(s, bad), "combine: out must be f32 or bf16 [T, D]; got i32[2, 2]");
  bad = good;
  bad.pair_row_TK = f.tensor();
  EXPECT_EQ(error(s, bad), "combine: pair_row must be i32[2, 2]; got f32[2, 2]");
  bad = good;
  bad.weight_TK = out.tensor();
  EXPECT_EQ(error(s, bad), "combine: weight must be f32[2, 2]; got f32[2, 3]");
  bad = good;
  bad.y_RD = y.tensor().view({20});
  EXPECT_EQ(error(s, bad), "combine: y must be [R, D] and pair_row [T, K]; got f32[20] and i32[2, 2]");
  const Tensor row = f.tensor().view({4});
  EXPECT_EQ(testing::error_of(
                [&] { pairs_to_rows(s, {.to_R = row, .from_TK = f.tensor(), .row_pair_R = ints.tensor().view({4})}); }),
            "pairs_to_rows: offsets must be i32 [E + 1]; got f32[0]");
  EXPECT_EQ(
      testing::error_of([&] { rows_to_pairs(s, {.to_TK = f.tensor(), .from_R = row, .pair_row_TK = f.tensor()}); }),
      "rows_to_pairs: pair_row must be i32[2, 2]; got f32[2, 2]");
}

TEST(Permute, NullDeviceCounts) {
  const auto null = [](Shape shape, DType dtype = DType::f32) { return testing::null_tensor(shape, dtype); };
  const Cost cost = testing::cost_on_null([&](Stream& s) {
    combine(s, {.out_TD = null({3, 5}), .y_RD = null({6, 5}), .pair_row_TK = null({3, 2}, DType::i32)});
  });
  EXPECT_EQ(cost.flops, 2 * 6 * 5);
  EXPECT_EQ(cost.bytes, 4 * (3 * 5 + 6 * 5 + 6));
  EXPECT_EQ(testing::cost_on_null([&](Stream& s) {
              pairs_to_rows(s, {.to_R = null({6}),
                                .from_TK = null({3, 2}),
                                .row_pair_R = null({6}, DType::i32),
                                .offsets_E1 = null({3}, DType::i32)});
              rows_to_pairs(s, {.to_TK = null({3, 2}), .from_R = null({6}), .pair_row_TK = null({3, 2}, DType::i32)});
            }).bytes,
            2 * 3 * 4 * 6);
}

}  // namespace
}  // namespace moebius
