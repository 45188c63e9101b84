#include "ops/stash/stash.h"

#include <cmath>
#include <set>

#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

// A pool of pages, and passes of any number of rows.
class Stash {
 public:
  Stash(Stream& s, int64_t num_pages, int64_t columns, DType dtype)
      : s_(s),
        pages_(num_pages),
        dtype_(dtype),
        pool_(Array::poisoned({num_pages * kStashPageRows, columns}, dtype)),
        free_({num_pages}, DType::i32),
        state_({2}, DType::i64),
        counts_({3}, DType::f64) {
    clear_stash(s, {.free_P = free_.tensor(), .state_2 = state_.tensor(), .counts_3 = counts_.tensor()});
  }

  struct Pass {
    Array page, held{{3}, DType::i32}, offsets, x;
    int64_t first = 0;
  };
  // rows: of each expert. most: rows that x has room for.
  Pass pass(const std::vector<int32_t>& rows, int64_t most, int64_t columns, int64_t first, uint64_t key) {
    std::vector<int32_t> offsets{0};
    for (const int32_t n : rows) offsets.push_back(offsets.back() + n);
    return {.page = Array::poisoned({div_ceil(most, kStashPageRows)}, DType::i32),
            .held = Array::of({3}, DType::i32, {0, 0, 0}),
            .offsets = Array::of_ints({std::ssize(offsets)}, offsets),
            .x = Array::normal({most, columns}, dtype_, key),
            .first = first};
  }
  void take(Pass& p) {
    alloc_pages(s_, {.page_Q = p.page.tensor(),
                     .held_3 = p.held.tensor(),
                     .free_P = free_.tensor(),
                     .state_2 = state_.tensor(),
                     .counts_3 = counts_.tensor(),
                     .offsets_e1 = p.offsets.tensor()});
    stash_rows(s_, {.pool_SM = pool_.tensor(),
                    .x_RC = p.x.tensor(),
                    .page_Q = p.page.tensor(),
                    .held_3 = p.held.tensor(),
                    .first = p.first});
  }
  // Returns the rows that were read back, with NaN in the others, and their offsets.
  struct Back {
    Array x, spilled, since{{1}, DType::i64};
  };
  Back give(Pass& p) {
    Back back{.x = Array::poisoned(p.x.tensor().shape, dtype_),
              .spilled = Array::poisoned(p.offsets.tensor().shape, DType::i32),
              .since = Array({1}, DType::i64)};
    unstash_rows(s_, {.x_RC = back.x.tensor(),
                      .pool_SM = pool_.tensor(),
                      .page_Q = p.page.tensor(),
                      .held_3 = p.held.tensor(),
                      .first = p.first});
    free_pages(s_, {.spilled_e1 = back.spilled.tensor(),
                    .since_1 = back.since.tensor(),
                    .free_P = free_.tensor(),
                    .state_2 = state_.tensor(),
                    .page_Q = p.page.tensor(),
                    .held_3 = p.held.tensor(),
                    .offsets_e1 = p.offsets.tensor()});
    end_spill(s_, {.counts_3 = counts_.tensor(), .since_1 = back.since.tensor()});
    return back;
  }
  Values counts() const { return counts_.values(); }
  Values state() const { return state_.values(); }
  // All pages are free, each once.
  void expect_whole() const {
    EXPECT_EQ(state_.values(), (Values{static_cast<double>(pages_), 0}));
    const Values free = free_.values();
    EXPECT_EQ(std::set<double>(free.begin(), free.end()).size(), free.size());
  }

 private:
  Stream& s_;
  int64_t pages_;
  DType dtype_;
  Array pool_, free_, state_, counts_;
};

// The first num_kept elements were read back, and the others were not written.
void expect_rows(const Array& got, const Array& want, int64_t num_kept) {
  const Values g = got.values(), w = want.values();
  ASSERT_EQ(g.size(), w.size());
  for (size_t i = 0; i < g.size(); ++i) {
    if (i < static_cast<size_t>(num_kept))
      ASSERT_EQ(g[i], w[i]) << "element " << i;
    else
      ASSERT_TRUE(std::isnan(g[i])) << "element " << i;
  }
}

struct Case {
  int64_t columns, stride, first;
  DType dtype = DType::bf16;
};
class StashTest : public testing::DeviceTest<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Shapes, StashTest,
    ::testing::ValuesIn(testing::on_each_device(std::vector<Case>{
        {8, 8, 0}, {24, 40, 16}, {7, 12, 5}, {2, 2, 0}, {5, 9, 4, DType::f32}, {300, 304, 4, DType::f32}})));

// Passes are given back in another order than they took their pages, and pages go around.
TEST_P(StashTest, RowsComeBackAsTheyWere) {
  const Case c = this->c();
  Stash stash(s_, 5, c.stride, c.dtype);
  auto a = stash.pass({0, 70, 3}, 200, c.columns, c.first, 1);  // 2 pages
  auto b = stash.pass({64}, 200, c.columns, c.first, 2);        // 1
  auto none = stash.pass({0, 0}, 200, c.columns, c.first, 3);
  stash.take(a), stash.take(b), stash.take(none);
  EXPECT_EQ(stash.state(), (Values{2, 137}));
  expect_rows(stash.give(a).x, a.x, 73 * c.columns);
  auto d = stash.pass({1, 128}, 200, c.columns, c.first, 4);  // 3
  stash.take(d);
  expect_rows(stash.give(none).x, none.x, 0);
  expect_rows(stash.give(b).x, b.x, 64 * c.columns);
  const auto back = stash.give(d);
  expect_rows(back.x, d.x, 129 * c.columns);
  EXPECT_EQ(back.spilled.values(), (Values{129, 129, 129})) << "no rows are left";
  EXPECT_EQ(back.since.values(), Values{-1});
  stash.expect_whole();
  EXPECT_EQ(stash.counts()[0], 0);
  EXPECT_EQ(stash.counts()[1], (64.0 + 129) / 320);
  EXPECT_EQ(stash.counts()[2], 0);
}

TEST_P(StashTest, RowsWithoutAPageAreNamed) {
  const Case c = this->c();
  Stash stash(s_, 2, c.stride, c.dtype);
  auto a = stash.pass({10}, 500, c.columns, c.first, 1);
  auto b = stash.pass({30, 0, 60, 20}, 500, c.columns, c.first, 2);
  auto full = stash.pass({5, 7}, 500, c.columns, c.first, 3);
  stash.take(a), stash.take(b), stash.take(full);
  EXPECT_EQ(stash.state(), (Values{0, 132}));
  EXPECT_EQ(stash.counts()[0], 110 - 64 + 12);
  const auto back = stash.give(b), nothing = stash.give(full);
  expect_rows(back.x, b.x, 64 * c.columns);
  EXPECT_EQ(back.spilled.values(), (Values{64, 64, 64, 90, 110}));
  EXPECT_GE(back.since.values()[0], 0);
  expect_rows(nothing.x, full.x, 0);
  EXPECT_EQ(nothing.spilled.values(), (Values{0, 5, 12}));
  expect_rows(stash.give(a).x, a.x, 10 * c.columns);
  stash.expect_whole();
  EXPECT_EQ(stash.counts()[1], 132.0 / 128);
  EXPECT_GE(stash.counts()[2], 0);
}

// A forward pass without a backward keeps no page from the next one with its table.
TEST(Stash, AllocatingAgainFreesFirst) {
  testing::on_each_device([](Stream& s) {
    Stash stash(s, 3, 4, DType::f32);
    auto a = stash.pass({100}, 128, 4, 0, 1);
    for (int i = 0; i < 5; ++i) stash.take(a);
    EXPECT_EQ(stash.state(), (Values{1, 100}));
    EXPECT_EQ(stash.counts()[0], 0);
    expect_rows(stash.give(a).x, a.x, 400);
    stash.expect_whole();
  });
}

TEST(Stash, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array pages({128, 6}, DType::f32), odd({100, 6}, DType::f32), x({70, 4}, DType::f32), half({70, 4}, DType::bf16),
      page({2}, DType::i32), held({3}, DType::i32), longs({3}, DType::i64);
  const auto copy = [&](Array& to, Array& from, Array& h, int64_t first) {
    return testing::error_of([&] {
      stash_rows(s, {.pool_SM = to.tensor(),
                     .x_RC = from.tensor(),
                     .page_Q = page.tensor(),
                     .held_3 = h.tensor(),
                     .first = first});
    });
  };
  EXPECT_EQ(copy(odd, x, held, 0),
            "stash_rows: the pool must have pages of 64 rows, and columns from 0 on for x f32[70, 4]; got f32[100, 6]");
  EXPECT_EQ(copy(pages, x, held, 3),
            "stash_rows: the pool must have pages of 64 rows, and columns from 3 on for x f32[70, 4]; got f32[128, 6]");
  EXPECT_EQ(copy(pages, half, held, 0), "stash_rows: pool must be bf16[128, 6]; got f32[128, 6]");
  EXPECT_EQ(copy(pages, x, longs, 0), "stash_rows: held must be i32[3]; got i64[3]");
  EXPECT_EQ(copy(pages, page, held, 0), "stash_rows: x must be an f32 or bf16 matrix; got i32[2]");
}

}  // namespace
}  // namespace moebius
