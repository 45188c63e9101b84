// The dispatchers that write into the memory of other ranks, direct and two-level: the bytes that they send, passes
// that follow each other, and their errors.
#include <gmock/gmock.h>

#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "io/testing.h"
#include "model/moe/dispatchers/dispatcher_testing.h"
#include "model/moe/dispatchers/two_level_testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Case;
using testing::Choice;
using testing::expect_once;
using testing::expect_rows;
using testing::expert_of;
using testing::is_kept;
using testing::RankOfCase;
using testing::Values;

// The rows that a rank of a case sends to others, if a token is sent once to each rank that has one of its experts.
struct DirectRows {
  int64_t left = 0, returned = 0;  // rows of its tokens, and sums of its experts
};
DirectRows direct_rows(const Case& c, int rank) {
  const int64_t W = c.mesh.etp * c.mesh.ep;
  DirectRows rows;
  for (int64_t token = 0; token < W * c.T; ++token) {
    std::set<int64_t> ranks;
    for (int64_t k = 0; k < c.K; ++k) {
      const int64_t ep = expert_of(c, token, k) / (c.E / c.mesh.ep);
      for (int64_t etp = 0; is_kept(c, token, k) && etp < c.mesh.etp; ++etp) ranks.insert(etp + c.mesh.etp * ep);
    }
    const bool own = token / c.T == rank, here = ranks.contains(rank);
    if (own) rows.left += std::ssize(ranks) - (here ? 1 : 0);
    if (here && !own) ++rows.returned;
  }
  return rows;
}

TEST(DirectDispatcher, SendsARowOnceToEachRank) {
  for (const MeshShape& mesh : {MeshShape{.dp = 4, .ep = 4}, MeshShape{.dp = 6, .etp = 2, .ep = 3}}) {
    const Case c{.mesh = mesh,
                 .dispatcher = DispatcherKind::direct,
                 .T = 37,
                 .E = 12,
                 .K = 4,
                 .D = 10,
                 .drops = true,
                 .dtype = DType::bf16};
    run_threads(static_cast<int>(mesh.world()), {.timeout_s = 60}, [&](Transport& transport) {
      Mesh all(mesh, transport);
      RankOfCase rank(c, all);
      Step& step = rank.step();
      const DirectRows rows = direct_rows(c, transport.rank());
      const int64_t W = mesh.world(), row_bytes = c.D * 2, L = std::min(c.K, c.E / mesh.ep);
      int64_t before = 0;
      const auto sent = [&] { return rank.sent_bytes() - std::exchange(before, rank.sent_bytes()); };
      EXPECT_EQ(sent(), (W - 1) * mesh.ep * 4 + rows.left * L * 8);
      Array x = rank.rows_of_tokens(), dx = x, dweight = Array::poisoned({c.T, c.K}, DType::f32);
      const Dispatched in = rank.dispatcher().dispatch(step, x.tensor(), rank.handle());
      EXPECT_EQ(sent(), rows.left * row_bytes);
      rank.dispatcher().combine(step, dx.tensor(), rank.identity(in), rank.handle());
      EXPECT_EQ(sent(), rows.returned * row_bytes);
      rank.dispatcher().combine_bwd(step, x.tensor(), rank.handle());
      EXPECT_EQ(sent(), rows.left * row_bytes);
      rank.dispatcher().dispatch_bwd(step, dx.tensor(), dweight.tensor(), rank.identity(in), rank.one_per_row(in, 1),
                                     rank.handle());
      EXPECT_EQ(sent(), rows.returned * (row_bytes + L * 4));
    });
  }
}

// Tokens are sent to ranks that have none of their experts too, whose sums return as zeros.
TEST(DirectDispatcher, SendsEveryTokenToAllRanks) {
  for (const MeshShape& mesh : {MeshShape{.dp = 4, .ep = 4}, MeshShape{.dp = 6, .etp = 2, .ep = 3}}) {
    const Case c{.mesh = mesh,
                 .dispatcher = DispatcherKind::direct,
                 .T = 37,
                 .E = 12,
                 .K = 4,
                 .D = 10,
                 .choice = Choice::skewed,
                 .drops = true,
                 .dtype = DType::bf16,
                 .sends_all = true};
    run_threads(static_cast<int>(mesh.world()), {.timeout_s = 60}, [&](Transport& transport) {
      Mesh all(mesh, transport);
      RankOfCase rank(c, all);
      Step& step = rank.step();
      const int64_t rows = (mesh.world() - 1) * c.T, row_bytes = c.D * 2, L = std::min(c.K, c.E / mesh.ep);
      int64_t before = 0;
      const auto sent = [&] { return rank.sent_bytes() - std::exchange(before, rank.sent_bytes()); };
      EXPECT_EQ(sent(), rows * L * 8);
      Array x = rank.rows_of_tokens(), dx = x, dweight = Array::poisoned({c.T, c.K}, DType::f32);
      const Dispatched in = rank.dispatcher().dispatch(step, x.tensor(), rank.handle());
      EXPECT_EQ(sent(), rows * row_bytes);
      rank.dispatcher().combine(step, dx.tensor(), rank.identity(in), rank.handle());
      EXPECT_EQ(sent(), rows * row_bytes);
      rank.dispatcher().combine_bwd(step, x.tensor(), rank.handle());
      EXPECT_EQ(sent(), rows * row_bytes);
      rank.dispatcher().dispatch_bwd(step, dx.tensor(), dweight.tensor(), rank.identity(in), rank.one_per_row(in, 1),
                                     rank.handle());
      EXPECT_EQ(sent(), rows * (row_bytes + L * 4));
    });
  }
}

TEST(TwoLevelDispatcher, SendsARowOnceToEachNode) {
  for (const MeshShape& mesh : {MeshShape{.dp = 4, .ep = 4, .ranks_per_node = 2},
                                {.dp = 6, .ep = 6, .ranks_per_node = 2},
                                {.dp = 8, .etp = 2, .ep = 4, .ranks_per_node = 4},
                                {.dp = 12, .ep = 12, .ranks_per_node = 1}}) {
    Case c{.mesh = mesh,
           .dispatcher = DispatcherKind::two_level,
           .T = 37,
           .E = 12,
           .K = 4,
           .D = 10,
           .drops = true,
           .dtype = DType::bf16};
    for (const bool fixed : {false, true}) {
      c.fixed_messages = fixed;
      run_threads(static_cast<int>(mesh.world()), {.timeout_s = 60},
                  [&](Transport& transport) { testing::expect_two_level_traffic(c, transport); });
    }
  }
}

// Returns the results that a rank gets for its tokens. Their values have sums that are not exact.
std::vector<Values> returned(const Case& c, Transport& transport) {
  Mesh mesh(c.mesh, transport);
  RankOfCase rank(c, mesh);
  Step& step = rank.step();
  Array x = Array::normal({c.T, c.D}, c.dtype, 10 + static_cast<uint64_t>(transport.rank()));
  Array y = Array::poisoned({c.T, c.D}, c.dtype), dx = y, dweight = Array::poisoned({c.T, c.K}, DType::f32);
  rank.poison();
  rank.announce();
  rank.poison();
  const Dispatched rows = rank.dispatcher().dispatch(step, x.tensor(), rank.handle());
  const Tensor y_RD = rank.identity(rows);
  rank.poison();
  rank.dispatcher().combine(step, y.tensor(), y_RD, rank.handle());
  rank.poison();
  const Dispatched grads = rank.dispatcher().combine_bwd(step, x.tensor(), rank.handle());
  const Tensor dx_RD = rank.identity(grads), dweight_R = rank.one_per_row(grads, 0.3f);
  rank.poison();
  rank.dispatcher().dispatch_bwd(step, dx.tensor(), dweight.tensor(), dx_RD, dweight_R, rank.handle());
  return {y.values(), dx.values(), dweight.values()};
}

// Expects that each rank gets the same numbers, and no NaN, whether `key` of the case is false or true.
void expect_same(Case& c, bool& key) {
  std::map<int, std::vector<Values>> of_false;
  std::mutex one_at_a_time;
  for (const bool value : {false, true}) {
    key = value;
    run_threads(static_cast<int>(c.mesh.world()), {.timeout_s = 60}, [&](Transport& transport) {
      const std::vector<Values> got = returned(c, transport);
      const std::lock_guard lock(one_at_a_time);
      std::vector<Values>& want = of_false[transport.rank()];
      if (!value) want = got;
      EXPECT_EQ(got, want);
      for (const Values& values : got)
        EXPECT_TRUE(std::none_of(values.begin(), values.end(), [](double x) { return std::isnan(x); }));
    });
  }
}

TEST(DirectDispatcher, SendingAllTokensChangesNoBit) {
  for (const MeshShape& mesh : {MeshShape{.dp = 4, .ep = 4}, MeshShape{.dp = 6, .etp = 2, .ep = 3}}) {
    for (const Choice choice : {Choice::even, Choice::skewed, Choice::one}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        Case c{.mesh = mesh,
               .dispatcher = DispatcherKind::direct,
               .T = 21,
               .E = 12,
               .K = 4,
               .D = 6,
               .choice = choice,
               .drops = true,
               .dtype = dtype};
        expect_same(c, c.sends_all);
      }
    }
  }
}

// Messages of captured steps have unused rows, here NaNs, and no result has one of them. In some cases only a few
// ranks, or none, have tokens with experts on a node.
TEST(TwoLevelDispatcher, FixedMessagesChangeNoBit) {
  for (const MeshShape& mesh : {MeshShape{.dp = 4, .ep = 4, .ranks_per_node = 2},
                                {.dp = 8, .etp = 2, .ep = 4, .ranks_per_node = 4},
                                {.dp = 12, .ep = 12, .ranks_per_node = 1}}) {
    for (const Choice choice : {Choice::even, Choice::skewed, Choice::one}) {
      for (const DType dtype : {DType::f32, DType::bf16}) {
        Case c{.mesh = mesh,
               .dispatcher = DispatcherKind::two_level,
               .T = 21,
               .E = 24,
               .K = 3,
               .D = 6,
               .choice = choice,
               .drops = true,
               .dtype = dtype};
        expect_same(c, c.fixed_messages);
      }
    }
  }
}

TEST(TwoLevelDispatcher, ARankThatThrowsOrStallsIsNamed) {
  const Case c{.mesh = {.dp = 4, .ep = 4, .ranks_per_node = 2},
               .dispatcher = DispatcherKind::two_level,
               .T = 5,
               .E = 4,
               .K = 2,
               .D = 4,
               .choice = Choice::even};
  const auto body = [&](bool throws) {
    return [&c, throws](Transport& transport) {
      Mesh mesh(c.mesh, transport);
      RankOfCase rank(c, mesh);
      Array x = rank.rows_of_tokens();
      const Dispatched rows = rank.dispatcher().dispatch(rank.step(), x.tensor(), rank.handle());
      if (transport.rank() == 3 && throws) MOEBIUS_FAIL(numerics, "not a number");
      if (transport.rank() == 3) std::this_thread::sleep_for(std::chrono::seconds(2));
      rank.dispatcher().combine(rank.step(), x.tensor(), rank.identity(rows), rank.handle());
    };
  };
  // Rank 0 waits for rank 2, which waits for rank 3. The rank that has waited longest reports first.
  try {
    run_threads(4, {.timeout_s = 0.5}, body(false));
    ADD_FAILURE() << "nobody missed rank 3";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::distributed);
    EXPECT_THAT(e.what(), ::testing::ContainsRegex("rank [23]"));
  }
  expect_error(ErrorKind::numerics, "rank 3: not a number", [&] { run_threads(4, {.timeout_s = 60}, body(true)); });
}

// A wait for another node names the phase and the layer, as a wait inside a node does.
TEST(TwoLevelDispatcher, AFailureAcrossNodesIsNamed) {
  const Case c{.mesh = {.dp = 3, .ep = 3, .ranks_per_node = 1},
               .dispatcher = DispatcherKind::two_level,
               .T = 5,
               .E = 6,
               .K = 2,
               .D = 4};
  std::map<int, std::string> errors;
  std::mutex one_at_a_time;
  expect_error(ErrorKind::numerics, "rank 2: not a number", [&] {
    run_threads(3, {.timeout_s = 60}, [&](Transport& transport) {
      Mesh mesh(c.mesh, transport);
      RankOfCase rank(c, mesh);
      Array x = rank.rows_of_tokens();
      const Dispatched rows = rank.dispatcher().dispatch(rank.step(), x.tensor(), rank.handle());
      if (transport.rank() == 2) MOEBIUS_FAIL(numerics, "not a number");
      try {
        rank.dispatcher().combine(rank.step(), x.tensor(), rank.identity(rows), rank.handle());
      } catch (const Error& e) {
        const std::lock_guard lock(one_at_a_time);
        errors[transport.rank()] = e.what();
        throw;
      }
    });
  });
  for (const int rank : {0, 1}) {
    EXPECT_THAT(errors[rank], ::testing::StartsWith("combine of layer 7, across nodes: "));
    EXPECT_THAT(errors[rank], ::testing::HasSubstr("rank 2"));
  }
}

TEST(TwoLevelDispatcher, RanksThatAreNotOnWholeNodesAreRefused) {
  run_threads(4, {.timeout_s = 60}, [](Transport& transport) {
    for (const int64_t node : {3, 4, 8}) {
      const Mesh mesh({.dp = 4, .ep = 4, .ranks_per_node = node}, transport);
      MemoryPlan plan;
      expect_error(
          ErrorKind::usage,
          fmt::format("parallel.dispatcher = \"two_level\": the ep * etp = 4 * 1 ranks that share experts must "
                      "be on two or more whole nodes of parallel.ranks_per_node = {} ranks",
                      node),
          [&] { make_direct_window(plan, mesh, {}, DispatcherKind::two_level, 1); });
    }
  });
}

// Passes follow each other in any number, since no pass writes to a window before all ranks have read it.
TEST(DirectDispatcher, PassesFollowEachOther) {
  const Case c{.mesh = {.dp = 3, .ep = 3}, .dispatcher = DispatcherKind::direct, .T = 11, .E = 6, .K = 2, .D = 6};
  run_threads(3, {.timeout_s = 60}, [&](Transport& transport) {
    Mesh mesh(c.mesh, transport);
    RankOfCase rank(c, mesh);
    Step& step = rank.step();
    Array x = rank.rows_of_tokens(), y = Array::poisoned({c.T, c.D}, c.dtype), dweight({c.T, c.K}, DType::f32);
    for (int pass = 0; pass < 50; ++pass) {
      StackScope scope(step.stack);
      if (pass % 3 == 0) rank.announce();
      const Dispatched rows = rank.dispatcher().dispatch(step, x.tensor(), rank.handle());
      if (transport.rank() == pass % 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // others continue
      if (pass % 3 == 0) {
        rank.dispatcher().combine(step, y.tensor(), rank.identity(rows), rank.handle());
        expect_rows(c, y, rank.first_token(), true);
        continue;
      }
      const Dispatched grads = rank.dispatcher().combine_bwd(step, x.tensor(), rank.handle());
      rank.dispatcher().dispatch_bwd(step, y.tensor(), dweight.tensor(), rank.identity(grads),
                                     rank.one_per_row(grads, 1), rank.handle());
      expect_rows(c, y, rank.first_token(), false);
      expect_once(c, mesh, step.stream, rank.arrivals(rows, false));  // the backward pass keeps the rows of tokens
    }
  });
}

TEST(DirectDispatcher, ARankThatStallsOrThrowsIsNamed) {
  const Case c{.mesh = {.dp = 2, .ep = 2}, .dispatcher = DispatcherKind::direct, .T = 5, .E = 4, .K = 2, .D = 4};
  const auto body = [&](bool throws) {
    return [&c, throws](Transport& transport) {
      Mesh mesh(c.mesh, transport);
      RankOfCase rank(c, mesh);
      Array x = rank.rows_of_tokens();
      const Dispatched rows = rank.dispatcher().dispatch(rank.step(), x.tensor(), rank.handle());
      if (transport.rank() == 1 && throws) MOEBIUS_FAIL(numerics, "not a number");
      if (transport.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(2));
      rank.dispatcher().combine(rank.step(), x.tensor(), rank.identity(rows), rank.handle());
    };
  };
  expect_error(ErrorKind::distributed,
               "combine of layer 7: rank 0 has waited for 0.5 s for rank 1, which has not come: round 4 of group ep is "
               "expected of it, and 3 was seen",
               [&] { run_threads(2, {.timeout_s = 0.5}, body(false)); });
  expect_error(ErrorKind::numerics, "rank 1: not a number", [&] { run_threads(2, {.timeout_s = 60}, body(true)); });
}

TEST(DirectDispatcher, ABoundOnRowsIsRefused) {
  run_threads(2, {.timeout_s = 60}, [](Transport& transport) {
    const Mesh mesh({.dp = 2, .ep = 2}, transport);
    expect_error(ErrorKind::usage,
                 "moe.rank_rows_factor = 2 bounds the rows of a rank, which only all-to-all can check", [&] {
                   make_dispatcher(DispatcherKind::direct,
                                   {.num_experts = 8, .top_k = 2, .max_tokens = 3, .mesh = &mesh, .rows_factor = 2});
                 });
  });
}

}  // namespace
}  // namespace moebius
