// The places of rows when every token goes to all ranks.
#include "io/testing.h"
#include "ops/cpu/testing.h"
#include "ops/dispatch/dispatch.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  const char* name;
  int64_t T, P, etp;
};

class ContiguousPlacesTest : public testing::DeviceTest<Case> {};

TEST_P(ContiguousPlacesTest, AreThoseOfTheRanks) {
  const int64_t T = c().T, P = c().P, etp = c().etp, W = P * etp;
  for (int64_t rank = 0; rank < W; ++rank) {
    Array dest = Array::poisoned({T, P}, DType::i32), row = dest, back_row = Array::poisoned({T, W}, DType::i32),
          arrive = Array::poisoned({W + 1}, DType::i32), back = Array::poisoned({W}, DType::i32);
    contiguous_places(s_, {.dest_TJ = dest.tensor(),
                           .row_TJ = row.tensor(),
                           .back_row_TB = back_row.tensor(),
                           .arrive_W1 = arrive.tensor(),
                           .back_W = back.tensor(),
                           .rank = rank});
    const Values dests = dest.values(), rows = row.values(), back_rows = back_row.values(), arrives = arrive.values(),
                 backs = back.values();
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t j = 0; j < P; ++j) {
        EXPECT_EQ(dests[t * P + j], static_cast<double>(j));
        EXPECT_EQ(rows[t * P + j], static_cast<double>(rank * T + t));
        for (int64_t i = 0; i < etp; ++i)
          EXPECT_EQ(back_rows[t * W + j * etp + i], static_cast<double>((j * etp + i) * T + t));
      }
    }
    for (int64_t from = 0; from <= W; ++from) EXPECT_EQ(arrives[from], static_cast<double>(from * T));
    for (int64_t to = 0; to < W; ++to) EXPECT_EQ(backs[to], static_cast<double>(rank * T));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ContiguousPlacesTest,
                         ::testing::ValuesIn(testing::on_each_device(std::vector<Case>{
                             {"two", 5, 2, 1}, {"etp", 300, 3, 2}, {"many_ranks", 2, 8, 40}, {"no_tokens", 0, 2, 1}})));

TEST(ContiguousPlaces, MessagesOfTheChecks) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array dest(Shape{4, 2}, DType::i32), back(Shape{3}, DType::i32), sent(Shape{1}, DType::i64),
      bases(Shape{2}, DType::i64), x(Shape{4, 1}, DType::i32);
  expect_error(ErrorKind::usage,
               "contiguous_places: P must divide the W ranks, and the rank be one of them; got P 2, W 3",
               [&] { contiguous_places(s, {.dest_TJ = dest.tensor(), .back_W = back.tensor()}); });
  expect_error(ErrorKind::usage,
               "push_rows: windows may be given only for rows that go to all ranks, and then those of all 2; got 1 "
               "windows and 2 destinations of 1 ranks",
               [&] {
                 push_rows(s, {.sent_1 = sent.tensor(),
                               .x_TD = x.tensor(),
                               .dest_TJ = dest.tensor(),
                               .row_TJ = dest.tensor(),
                               .bases_W = bases.tensor(),
                               .windows = {nullptr}});
               });
}

}  // namespace
}  // namespace moebius
