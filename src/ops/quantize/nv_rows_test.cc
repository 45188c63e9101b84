// Rows of nvfp4 have the values of their quantised copies, wherever they are.
#include "ops/quantize/nv_rows.h"

#include <cmath>
#include <numeric>

#include "ops/quantize/quantize_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::QuantisedArray;
using testing::Values;

constexpr uint64_t kSeed = 3;
constexpr uint32_t kKey = 5;
constexpr int64_t kFirst = 100;  // the token of row 0

Array step_and_first() { return Array::of({2}, DType::i64, {7, static_cast<double>(kFirst)}); }

// The rows of one rank, with all that it needs to round them.
struct OneRank {
  Array magnitudes;
  Values values;
};

OneRank round_alone(Stream& s, NvRows of, const NvDraws& draws, bool draws_elements) {
  OneRank one{Array::poisoned({1, of.num_batches}, DType::i32), {}};
  nv_magnitudes(s, {.bits_M = one.magnitudes.tensor().view({of.num_batches}), .of = of, .draw_2 = draws.draw_2});
  Array y = Array::poisoned({of.num_rows(), of.x_NC.dim(1)}, of.x_NC.dtype);
  nv_round(s, {.y_RC = y.tensor(),
               .of = of,
               .magnitude_WB = one.magnitudes.tensor(),
               .draws = draws,
               .draws_elements = draws_elements});
  one.values = y.values();
  return one;
}

TEST(NvRows, HaveTheValuesOfTheirQuantisedCopies) {
  testing::on_each_device([](Stream& s) {
    for (const bool stochastic : {false, true}) {
      Array x = Array::normal({48, 72}, DType::f32, 1), draw = step_and_first(),
            want = Array::poisoned({48, 72}, DType::f32);
      QuantisedArray q({48, 72}, DType::f4_e2m1, ScaleLayout::nv_blocks),
          t({72, 128}, DType::f4_e2m1, ScaleLayout::nv_blocks, true);
      const StochasticRounding how{.draw_2 = stochastic ? draw.tensor() : Tensor{}, .seed = kSeed, .key = kKey};
      quantize(s, {.q = q.operand(), .x_RC = x.tensor(), .stochastic = how});
      quantize(s, {.q = t.operand(), .x_RC = x.tensor(), .hadamard = true, .stochastic = how});
      const NvDraws draws{.draw_2 = draw.tensor(), .seed = kSeed, .key = kKey};
      EXPECT_EQ(round_alone(s, {.x_NC = x.tensor()}, draws, stochastic).values, q.values(s));
      dequantize_transposed(s, {.x_RC = want.tensor(), .q = t.operand(), .hadamard = true});
      EXPECT_EQ(round_alone(s, {.x_NC = x.tensor(), .hadamard = true}, draws, stochastic).values, want.values());
    }
  });
}

TEST(NvRows, OfExpertsHaveTheValuesOfTheirQuantisedCopies) {
  testing::on_each_device([](Stream& s) {
    Array x = Array::normal({30, 40}, DType::bf16, 1), draw = step_and_first(),
          offsets = Array::of_ints({4}, {0, 21, 21, 50}), want = Array::poisoned({56, 40}, DType::bf16);
    std::vector<int32_t> tokens(56);
    for (int32_t i = 0; i < 56; ++i) tokens[static_cast<size_t>(i)] = i * 7 % 30;
    Array token = Array::of_ints({56}, tokens);
    QuantisedArray t({40, padded_rows(56, 3)}, DType::f4_e2m1, ScaleLayout::nv_blocks, true);
    quantize(s, {.q = t.operand(),
                 .x_RC = x.tensor(),
                 .offsets_e1 = offsets.tensor(),
                 .token_R = token.tensor(),
                 .hadamard = true});
    dequantize_transposed(s,
                          {.x_RC = want.tensor(), .q = t.operand(), .offsets_e1 = offsets.tensor(), .hadamard = true});
    const NvRows rows{.x_NC = x.tensor(), .token_R = token.tensor(), .offsets_g1 = offsets.tensor(), .hadamard = true};
    const Values got = round_alone(s, rows, {}, false).values, all = want.values();
    EXPECT_EQ(Values(got.begin(), got.begin() + 50 * 40), Values(all.begin(), all.begin() + 50 * 40));
    EXPECT_TRUE(std::isnan(got[50 * 40])) << "rows past the last offset are not written";
  });
}

// Two ranks have the rows of two micro-batches of 32 tokens in any order, and each has half of the columns. Rows of
// both experts are mixed. One rank has a micro-batch at a time, with the rows of an expert by token.
constexpr int64_t kTokens = 32, kColumns = 128, kExperts = 2;

struct MixedRow {
  int64_t expert, token;  // in both micro-batches
};

// The rows of an expert, in the order in which they arrive.
std::vector<MixedRow> mixed_rows() {
  std::vector<MixedRow> rows;
  for (int64_t e = 0; e < kExperts; ++e) {
    for (int64_t i = 0; i < 2 * kTokens; ++i) {
      const int64_t token = (i * 29 + 11) % (2 * kTokens);
      if ((token + e) % 3 != 0) rows.push_back({e, token});
    }
  }
  return rows;
}

struct ArrivedRows {
  ArrivedRows(const Values& x, DType dtype, int64_t first_column, int64_t columns) {
    const std::vector<MixedRow> all = mixed_rows();
    std::vector<int32_t> index, offsets(kExperts + 1);
    Values values;
    for (const MixedRow& row : all) {
      index.push_back(static_cast<int32_t>(kFirst / kTokens * kTokens + row.token));
      ++offsets[static_cast<size_t>(row.expert) + 1];
      for (int64_t c = 0; c < columns; ++c)
        values.push_back(x[static_cast<size_t>(row.token * kColumns + first_column + c)]);
    }
    std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
    R = std::ssize(all);
    index_R = Array::of_ints({R}, index);
    offsets_e1 = Array::of_ints({kExperts + 1}, offsets);
    x_RC = Array::of({R, columns}, dtype, values);
  }
  NvOrder order_op() {
    return {.order_R = order_R.tensor(),
            .offsets_of_batches = of_batches.tensor(),
            .offsets_e1 = offsets_e1.tensor(),
            .index_N = index_R.tensor(),
            .source_R = {},
            .num_batches = 2,
            .batch_tokens = kTokens};
  }
  void sort(Stream& s) {
    order_R = Array::poisoned({R}, DType::i32);
    of_batches = Array::poisoned({2 * kExperts + 1}, DType::i32);
    nv_order(s, order_op());
  }
  NvRows rows(bool hadamard) {
    return {.x_NC = x_RC.tensor(),
            .token_R = {},
            .offsets_g1 = hadamard ? of_batches.tensor() : offsets_e1.tensor(),
            .order_R = hadamard ? order_R.tensor() : Tensor{},
            .index_N = index_R.tensor(),
            .source_R = {},
            .hadamard = hadamard,
            .num_batches = 2,
            .batch_tokens = kTokens};
  }
  int64_t R = 0;
  Array index_R, offsets_e1, order_R, of_batches, x_RC;
};

// Numbers of which each micro-batch and each half of the columns has another largest one.
Values numbers_of_batches() {
  Values x = Array::normal({2 * kTokens, kColumns}, DType::bf16, 1).values();
  x[5 * kColumns + 3] = 900;
  x[(kTokens + 9) * kColumns + kColumns - 1] = 30;
  return x;
}

// Returns the values of the rows of one micro-batch on one rank, by expert and token; absent pairs are zeros.
Values of_one_rank(Stream& s, const Values& x, int64_t batch, bool hadamard, bool stochastic) {
  std::vector<int32_t> source, offsets{0};
  Values values;
  for (int64_t e = 0; e < kExperts; ++e) {
    for (int64_t t = 0; t < kTokens; ++t) {
      const int64_t token = batch * kTokens + t;
      if ((token + e) % 3 == 0) continue;
      source.push_back(static_cast<int32_t>(t));
      for (int64_t c = 0; c < kColumns; ++c) values.push_back(x[static_cast<size_t>(token * kColumns + c)]);
    }
    offsets.push_back(static_cast<int32_t>(source.size()));
  }
  const int64_t R = std::ssize(source);
  Array of_x = Array::of({R, kColumns}, DType::bf16, values), offsets_e1 = Array::of_ints({kExperts + 1}, offsets),
        source_R = Array::of_ints({R}, source),
        draw = Array::of({2}, DType::i64, {7, static_cast<double>(kFirst / kTokens * kTokens + batch * kTokens)});
  const NvDraws draws{.draw_2 = draw.tensor(), .seed = kSeed, .key = kKey, .first_expert = 4, .num_experts = 8};
  const Values got = round_alone(s,
                                 {.x_NC = of_x.tensor(),
                                  .token_R = {},
                                  .offsets_g1 = offsets_e1.tensor(),
                                  .order_R = {},
                                  .index_N = {},
                                  .source_R = source_R.tensor(),
                                  .hadamard = hadamard},
                                 draws, stochastic)
                         .values;
  Values by_token(kExperts * kTokens * kColumns, 0.0);
  for (int64_t e = 0; e < kExperts; ++e) {
    for (int64_t r = offsets[static_cast<size_t>(e)]; r < offsets[static_cast<size_t>(e) + 1]; ++r) {
      for (int64_t c = 0; c < kColumns; ++c)
        by_token[static_cast<size_t>((e * kTokens + source[static_cast<size_t>(r)]) * kColumns + c)] =
            got[static_cast<size_t>(r * kColumns + c)];
    }
  }
  return by_token;
}

// Errors that a rank may make in its draws.
struct WrongDraws {
  int64_t token = 0, expert = 0, column = 0, step = 0;  // these are added
  uint32_t key = 0;
};

// Returns how many elements of the rows of two ranks are not those of one rank. The columns of a rank are two runs of a
// quarter, as those of gate and up.
int64_t elements_unlike_one_rank(Stream& s, bool hadamard, bool stochastic, const WrongDraws& wrong) {
  constexpr int64_t kQuarter = kColumns / 4;
  const Values x = numbers_of_batches();
  const Values one[] = {of_one_rank(s, x, 0, hadamard, stochastic), of_one_rank(s, x, 1, hadamard, stochastic)};
  Values ordered = x;
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t row = i / kColumns, c = i % kColumns, quarter = c / kQuarter;
    ordered[row * kColumns + (quarter % 2 * 2 + quarter / 2) * kQuarter + c % kQuarter] = x[i];
  }
  ArrivedRows ranks[] = {{ordered, DType::bf16, 0, 2 * kQuarter}, {ordered, DType::bf16, 2 * kQuarter, 2 * kQuarter}};
  Array all = Array::poisoned({2, 3}, DType::i32);  // the first column belongs to another tensor
  for (int w = 0; w < 2; ++w) {
    ranks[w].sort(s);
    Array own = Array::poisoned({2}, DType::i32);
    nv_magnitudes(s, {.bits_M = own.tensor(), .of = ranks[w].rows(hadamard)});
    for (int m = 0; m < 2; ++m) {
      const auto bits = static_cast<int32_t>(own.values()[static_cast<size_t>(m)]);
      all.tensor().ptr<int32_t>()[w * 3 + 1 + m] = bits;
    }
  }
  Array draw = Array::of({2}, DType::i64, {7.0 + static_cast<double>(wrong.step), static_cast<double>(kFirst)});
  int64_t unlike = 0;
  for (int64_t w = 0; w < 2; ++w) {
    // Tokens that are wrong by whole micro-batches have the scales of the right ones.
    Array index = Array::of_ints({ranks[w].R}, std::vector<int32_t>(static_cast<size_t>(ranks[w].R)));
    for (int64_t r = 0; r < ranks[w].R; ++r)
      index.tensor().ptr<int32_t>()[r] =
          static_cast<int32_t>(ranks[w].index_R.values()[static_cast<size_t>(r)]) + static_cast<int32_t>(wrong.token);
    NvRows rows = ranks[w].rows(hadamard);
    rows.index_N = index.tensor();
    Array y = Array::poisoned({ranks[w].R, 2 * kQuarter}, DType::bf16);
    NvDraws draws{.draw_2 = draw.tensor(),
                  .seed = kSeed,
                  .key = kKey + wrong.key,
                  .first_expert = 4 + wrong.expert,
                  .num_experts = 8,
                  .groups_per_expert = hadamard ? 2 : 1};
    draws.columns.runs[0] = {.here = 0, .whole = w * kQuarter + wrong.column};
    draws.columns.runs[1] = {.here = kQuarter, .whole = (2 + w) * kQuarter};
    draws.columns.num_runs = 2;
    draws.columns.count = kColumns;
    nv_round(s, {.y_RC = y.tensor(),
                 .of = rows,
                 .magnitude_WB = all.tensor(),
                 .first_batch = 1,
                 .draws = draws,
                 .draws_elements = stochastic});
    const Values got = y.values();
    const std::vector<MixedRow> of_rows = mixed_rows();
    for (size_t r = 0; r < of_rows.size(); ++r) {
      const Values& want = one[of_rows[r].token / kTokens];
      for (int64_t c = 0; c < 2 * kQuarter; ++c) {
        const int64_t column = c < kQuarter ? w * kQuarter + c : (1 + w) * kQuarter + c,
                      row = of_rows[r].expert * kTokens + of_rows[r].token % kTokens;
        const double here = got[r * 2 * kQuarter + static_cast<size_t>(c)];
        if (!(here == want[static_cast<size_t>(row * kColumns + column)])) ++unlike;
      }
    }
  }
  return unlike;
}

TEST(NvRows, AreThoseOfOneRankWhereverTheyAre) {
  testing::on_each_device([](Stream& s) {
    for (const bool hadamard : {false, true})
      for (const bool stochastic : {false, true})
        EXPECT_EQ(elements_unlike_one_rank(s, hadamard, stochastic, {}), 0)
            << (hadamard ? "hadamard" : "") << (stochastic ? " stochastic" : "");
  });
}

// The test above finds draws by another token, expert, column, step or key. Two independent draws often round an
// element alike, so the bound is one element in 20.
TEST(NvRows, WrongDrawsAreFound) {
  testing::on_each_device([](Stream& s) {
    const int64_t elements = std::ssize(mixed_rows()) * kColumns;
    const WrongDraws all[] = {{.token = 2 * kTokens}, {.expert = 1}, {.column = 1},
                              {.column = kColumns},   {.step = 1},   {.key = 1}};
    for (const bool hadamard : {false, true}) {
      for (const WrongDraws& wrong : all) {
        EXPECT_GT(elements_unlike_one_rank(s, hadamard, true, wrong), elements / 20)
            << "token " << wrong.token << ", expert " << wrong.expert << ", column " << wrong.column << ", step "
            << wrong.step << ", key " << wrong.key;
        EXPECT_EQ(elements_unlike_one_rank(s, hadamard, false, wrong), 0) << "rounding to nearest draws nothing";
      }
    }
  });
}

TEST(NvRows, ZerosStayAndWhatIsNotFiniteSpreadsInItsBlock) {
  testing::on_each_device([](Stream& s) {
    Values x(32 * 40, 0.0);
    x[3 * 40 + 20] = std::nan("");
    x[7 * 40] = 5;
    Array rows = Array::of({32, 40}, DType::f32, x);
    const Values across = round_alone(s, {.x_NC = rows.tensor()}, {}, false).values,
                 down = round_alone(s, {.x_NC = rows.tensor(), .hadamard = true}, {}, false).values;
    for (int64_t r = 0; r < 32; ++r) {
      for (int64_t c = 0; c < 40; ++c) {
        const double a = across[static_cast<size_t>(r * 40 + c)], d = down[static_cast<size_t>(r * 40 + c)];
        EXPECT_EQ(std::isnan(a), r == 3 && c / 16 == 1) << r << " " << c;
        EXPECT_EQ(std::isnan(d), r < 16 && c == 20) << r << " " << c;
        if (r == 7 && c == 0) {
          EXPECT_NEAR(a, 5, 0.2) << "the scale of the tensor is 1, since a NaN gives none";
        } else if (!std::isnan(a)) {
          EXPECT_EQ(a, 0) << r << " " << c;
        }
      }
    }
  });
}

TEST(NvRows, SumsOfLogPrecisionAreThoseOfTheQuantisedCopy) {
  testing::on_each_device([](Stream& s) {
    Array x = Array::normal({48, 64}, DType::bf16, 1), stats = Array::of({5}, DType::f64, Values(5, 0.0)),
          want = Array::of({5}, DType::f64, Values(5, 0.0)), bits = Array::poisoned({1, 1}, DType::i32),
          y = Array::poisoned({48, 64}, DType::bf16);
    QuantisedArray q({48, 64}, DType::f4_e2m1, ScaleLayout::nv_blocks);
    quantize(s, {.q = q.operand(), .x_RC = x.tensor(), .stats_5 = want.tensor()});
    nv_magnitudes(s, {.bits_M = bits.tensor().view({1}), .of = {.x_NC = x.tensor()}});
    nv_round(
        s, {.y_RC = y.tensor(), .of = {.x_NC = x.tensor()}, .magnitude_WB = bits.tensor(), .stats_5 = stats.tensor()});
    EXPECT_EQ(stats.values(), want.values());
    EXPECT_EQ(stats.values()[0], 48 * 64);
  });
}

TEST(NvRows, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({4, 6}, DType::f32), y({4, 6}, DType::f32), bits({1, 1}, DType::i32),
      order = Array::of_ints({4}, {0, 1, 2, 3});
  const auto error = [&](const NvRound& a) { return testing::error_of([&] { nv_round(s, a); }); };
  EXPECT_EQ(error({.y_RC = y.tensor(),
                   .of = {.x_NC = x.tensor(), .token_R = {}, .offsets_g1 = {}, .order_R = order.tensor()},
                   .magnitude_WB = bits.tensor()}),
            "nv_round: an order of rows is for the Hadamard transform of groups");
  EXPECT_EQ(error({.y_RC = y.tensor(), .of = {.x_NC = x.tensor()}, .magnitude_WB = bits.tensor(), .first_batch = 1}),
            "nv_round: magnitudes must be i32 [ranks, micro-batches], with columns 1 to 1; got i32[1, 1]");
  EXPECT_EQ(
      error({.y_RC = y.tensor(), .of = {.x_NC = x.tensor()}, .magnitude_WB = bits.tensor(), .draws_elements = true}),
      "nv_round: elements are drawn by draw; it is missing");
}

}  // namespace
}  // namespace moebius
