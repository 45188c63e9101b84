#include "ops/attention/cached_attention.h"

#include <algorithm>

#include "ops/attention/attention_ref.h"
#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t sequences, max_tokens, heads, kv_heads, width, window;
  std::vector<int32_t> sequence, pos;  // of each row
  DType dtype = DType::f32;
  int64_t rows() const { return std::ssize(pos); }
};

// Enough rows that a task of the CPU is a whole row. Query heads in groups of 3.
Case many_rows() {
  Case c{17, 290, 6, 2, 40, 0, {}, {}};
  for (int32_t n = 0; n < 17; ++n) {
    c.sequence.push_back(16 - n);
    c.pos.push_back(n * 17);
  }
  return c;
}

std::vector<Case> cases() {
  const std::vector<Case> shapes = {
      {1, 1, 1, 1, 1, 0, {0}, {0}},
      {3, 9, 4, 2, 6, 0, {2, 0}, {8, 3}},
      {2, 300, 3, 1, 5, 40, {0, 1}, {299, 20}},
      {2, 700, 12, 2, 64, 0, {1, 0}, {699, 255}},
      {3, 600, 8, 1, 128, 0, {0, 2, 1}, {256, 0, 511}},
      {1, 1500, 20, 2, 128, 300, {0}, {1300}},
      {2, 520, 16, 16, 32, 128, {0, 1}, {519, 128}},
      {2, 300, 3, 3, 96, 0, {1, 0}, {290, 17}},
      {1, 270, 4, 2, 256, 0, {0}, {269}},
      {4, 64, 5, 1, 72, 7, {3, 1, 0, 2}, {63, 0, 6, 7}},
      {2, 16, 2, 1, 8, 0, {}, {}},
      // At most eight pieces: on a Hopper, clusters merge those of up to four rows, and a kernel those of five.
      {5, 500, 6, 2, 128, 0, {4, 2, 0, 1, 3}, {499, 0, 64, 200, 63}},
      {2, 512, 8, 2, 64, 100, {1, 0}, {511, 150}},
      many_rows(),
  };
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (Case c : shapes) {
      c.dtype = dtype;
      all.push_back(c);
    }
  }
  return all;
}

class CachedAttentionTest : public testing::DeviceTest<Case> {
 protected:
  CachedAttentionTest() {
    const Case& c = this->c();
    const Shape cache{c.sequences * c.max_tokens, c.kv_heads, c.width}, kv{c.rows(), c.kv_heads, c.width};
    q_ = Array::normal({c.rows(), c.heads, c.width}, c.dtype, 1);
    k_ = Array::normal(kv, c.dtype, 2);
    v_ = Array::normal(kv, c.dtype, 3);
    cached_k_ = Array::normal(cache, c.dtype, 4);
    cached_v_ = Array::normal(cache, c.dtype, 5);
  }

  struct Out {
    Values o, lse;
  };
  // Computes these rows of the case, with a copy of the cache.
  Out run(const std::vector<int64_t>& rows) {
    const auto N = std::ssize(rows);
    Values pos, sequence, q, k, v;
    for (const int64_t n : rows) {
      pos.push_back(c().pos[n]);
      sequence.push_back(c().sequence[n]);
      append(q, q_, n);
      append(k, k_, n);
      append(v, v_, n);
    }
    const Shape kv{N, c().kv_heads, c().width};
    Array q_N = Array::of({N, c().heads, c().width}, c().dtype, q), k_N = Array::of(kv, c().dtype, k),
          v_N = Array::of(kv, c().dtype, v), pos_N = Array::of({N}, DType::i32, pos),
          sequence_N = Array::of({N}, DType::i32, sequence), o({N, c().heads, c().width}, c().dtype),
          lse({N, c().heads}, DType::f32);
    after_k_ = cached_k_;
    after_v_ = cached_v_;
    CachedAttentionFwd a{.o_NHd = o.tensor(),
                         .lse_NH = lse.tensor(),
                         .k_UGd = after_k_.tensor(),
                         .v_UGd = after_v_.tensor(),
                         .q_NHd = q_N.tensor(),
                         .k_NGd = k_N.tensor(),
                         .v_NGd = v_N.tensor(),
                         .pos_N = pos_N.tensor(),
                         .sequence_N = sequence_N.tensor(),
                         .max_tokens = c().max_tokens,
                         .window = c().window,
                         .scale = scale()};
    Array scratch({CachedAttentionFwd::scratch_bytes(a, s_)}, DType::u8);
    a.scratch = scratch.tensor();
    cached_attention_fwd(s_, a);
    return {o.values(), lse.values()};
  }
  // Appends a row of an array of one row for each of the case's rows.
  void append(Values& to, const Array& from, int64_t row) const {
    const Values all = from.values();
    const int64_t n = std::ssize(all) / c().rows();
    to.insert(to.end(), all.begin() + row * n, all.begin() + (row + 1) * n);
  }
  std::vector<int64_t> every_row() const {
    std::vector<int64_t> rows(c().pos.size());
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int64_t>(i);
    return rows;
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(c().width)); }
  // The cache of one sequence up to pos, with the row's own key or value at pos.
  Values keys(const Array& cache, const Array& own, int64_t n) const {
    const int64_t width = c().kv_heads * c().width, first = c().sequence[n] * c().max_tokens * width;
    const Values all = cache.values();
    Values seen(all.begin() + first, all.begin() + first + c().pos[n] * width);
    append(seen, own, n);
    return seen;
  }

  Array q_, k_, v_, cached_k_, cached_v_, after_k_, after_v_;
};
INSTANTIATE_TEST_SUITE_P(Shapes, CachedAttentionTest, ::testing::ValuesIn(testing::on_each_device(cases())));

TEST_P(CachedAttentionTest, EqualsTheReferenceOfEachSequence) {
  const Out got = run(every_row());
  const double eps = testing::epsilon(c().dtype), eps32 = testing::epsilon(DType::f32);
  for (int64_t n = 0; n < c().rows(); ++n) {
    ref::Attention at{.batch = 1,
                      .rows = 1,
                      .kv_rows = c().pos[n] + 1,
                      .heads = c().heads,
                      .kv_heads = c().kv_heads,
                      .width = c().width,
                      .window = c().window,
                      .scale = scale()};
    append(at.q, q_, n);
    at.k = keys(cached_k_, k_, n);
    at.v = keys(cached_v_, v_, n);
    const ref::AttentionOut want = ref::attention_fwd(at);
    const auto row = [n](const Values& all, int64_t width) {
      return Values(all.begin() + n * width, all.begin() + (n + 1) * width);
    };
    // Values are of the order of 1. The CPU rounds probabilities to the dtype, too.
    testing::expect_close("o", row(got.o, c().heads * c().width), want.o, 4 * eps, 4 * eps + 64 * eps32);
    testing::expect_close("lse", row(got.lse, c().heads), want.lse, 32 * eps32, 32 * eps32);
  }
}

TEST_P(CachedAttentionTest, OnlyNewRowsAreWrittenToTheCache) {
  run(every_row());
  const int64_t width = c().kv_heads * c().width;
  for (const auto& [before, own, after] : {std::tuple(cached_k_, k_, after_k_), std::tuple(cached_v_, v_, after_v_)}) {
    Values want = before.values();
    const Values rows = own.values();
    for (int64_t n = 0; n < c().rows(); ++n)
      std::copy_n(rows.begin() + n * width, width,
                  want.begin() + (c().sequence[n] * c().max_tokens + c().pos[n]) * width);
    EXPECT_EQ(after.values(), want);
  }
}

TEST_P(CachedAttentionTest, ARowDoesNotDependOnTheOthers) {
  const Out all = run(every_row());
  for (int64_t n = 0; n < c().rows(); ++n) {
    const Out alone = run({n});
    const int64_t width = c().heads * c().width;
    EXPECT_TRUE(std::equal(alone.o.begin(), alone.o.end(), all.o.begin() + n * width)) << "row " << n;
    EXPECT_TRUE(std::equal(alone.lse.begin(), alone.lse.end(), all.lse.begin() + n * c().heads)) << "row " << n;
  }
}

TEST(CachedAttention, ArgumentsThatDoNotFitAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array q({2, 2, 4}, DType::f32), kv({2, 1, 4}, DType::f32), cache({12, 1, 4}, DType::f32), rows({2}, DType::i32),
      lse({2, 2}, DType::f32);
  CachedAttentionFwd a{.o_NHd = q.tensor(),
                       .lse_NH = lse.tensor(),
                       .k_UGd = cache.tensor(),
                       .v_UGd = cache.tensor(),
                       .q_NHd = q.tensor(),
                       .k_NGd = kv.tensor(),
                       .v_NGd = kv.tensor(),
                       .pos_N = rows.tensor(),
                       .sequence_N = rows.tensor(),
                       .max_tokens = 5};
  EXPECT_EQ(testing::error_of([&] { cached_attention_fwd(s, a); }),
            "cached_attention_fwd: max_tokens 5 must divide the rows of the cache " + to_string(cache.tensor()));
  a.max_tokens = 12;
  EXPECT_EQ(testing::error_of([&] { cached_attention_fwd(s, a); }),
            "cached_attention_fwd: expected at most one row for each of the cache's 1 sequences; got 2");
}

}  // namespace
}  // namespace moebius
