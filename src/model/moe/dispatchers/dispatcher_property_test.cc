// The property that every dispatcher has, whatever the tokens choose. Each pair of a token and an
// expert arrives once where its expert is, with its weight. The result of the expert comes back to
// the pair.
#include <rapidcheck.h>

#include <cstdlib>

#include "io/testing.h"
#include "model/moe/dispatchers/dispatcher_allgather.h"
#include "model/moe/dispatchers/dispatcher_testing.h"

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

void check_rank(const Case& c, Mesh& mesh) {
  RankOfCase rank(c, mesh);
  Step& step = rank.step();
  const Dispatcher& dispatcher = rank.dispatcher();
  Array x = rank.rows_of_tokens(), y = Array::poisoned({c.T, c.D}, c.dtype), dx = y;
  Array dweight = Array::poisoned({c.T, c.K}, DType::f32);

  const Dispatched rows = dispatcher.dispatch(step, x.tensor(), rank.handle());
  expect_once(c, mesh, step.stream, rank.arrivals(rows, false));
  dispatcher.combine(step, y.tensor(), rank.identity(rows), rank.handle());
  expect_rows(c, y, rank.first_token(), true);

  const Dispatched grads = dispatcher.combine_bwd(step, x.tensor(), rank.handle());
  expect_once(c, mesh, step.stream, rank.arrivals(grads, true));
  dispatcher.dispatch_bwd(step, dx.tensor(), dweight.tensor(), rank.identity(grads), rank.one_per_row(grads, 0.5f),
                          rank.handle());
  expect_rows(c, dx, rank.first_token(), false);
  const Values got = dweight.values();
  for (int64_t p = 0; p < c.T * c.K; ++p) {
    const int64_t token = rank.first_token() + p / c.K, ep = expert_of(c, token, p % c.K) / (c.E / c.mesh.ep);
    ASSERT_EQ(got[p], is_kept(c, token, p % c.K) ? 0.5 * static_cast<double>(1 + ep) : 0);
  }
}

const std::vector<MeshShape> kMeshes = {
    {.dp = 2, .ep = 2},
    {.dp = 3, .ep = 3},
    {.dp = 4, .ep = 2, .edp = 2},
    {.dp = 2, .etp = 2},
    {.tp = 2, .dp = 2, .etp = 2, .ep = 2},
    {.tp = 2, .cp = 2, .ep = 4},
    {.cp = 2, .dp = 2, .etp = 2, .edp = 2},
};
// Nodes of one, two and three ranks; of whole ep ranks where etp is 2, and in one of two copies; ten of them, whose
// sums have two levels.
const std::vector<MeshShape> kMeshesOfNodes = {
    {.dp = 4, .ep = 4, .ranks_per_node = 2},           {.tp = 2, .cp = 2, .ep = 4, .ranks_per_node = 1},
    {.dp = 6, .ep = 6, .ranks_per_node = 3},           {.tp = 2, .dp = 4, .etp = 2, .ep = 4, .ranks_per_node = 4},
    {.dp = 8, .ep = 4, .edp = 2, .ranks_per_node = 2}, {.dp = 10, .ep = 10, .ranks_per_node = 1},
};

Case arbitrary_case() {
  Case c;
  c.dispatcher = *rc::gen::element(DispatcherKind::allgather, DispatcherKind::alltoall, DispatcherKind::direct,
                                   DispatcherKind::two_level);
  c.mesh = *rc::gen::elementOf(c.dispatcher == DispatcherKind::two_level ? kMeshesOfNodes : kMeshes);
  c.T = *rc::gen::inRange<int64_t>(1, 40);
  c.E = c.mesh.ep * *rc::gen::inRange<int64_t>(1, 5);
  c.K = *rc::gen::inRange<int64_t>(1, std::min<int64_t>(c.E, 4) + 1);
  c.D = *rc::gen::inRange<int64_t>(2, 20);
  c.choice = *rc::gen::element(Choice::even, Choice::skewed, Choice::one);
  c.drops = *rc::gen::arbitrary<bool>();
  c.dtype = *rc::gen::element(DType::f32, DType::bf16);
  c.seed = *rc::gen::inRange(0, 1000);
  c.fixed_messages = c.dispatcher == DispatcherKind::two_level && *rc::gen::arbitrary<bool>();
  c.sends_all = c.dispatcher == DispatcherKind::direct && c.mesh.ep <= c.K && *rc::gen::arbitrary<bool>();
  return c;
}

TEST(DispatcherProperty, EveryPairArrivesOnceAndReturns) {
  ::setenv("RC_PARAMS", "seed=1", 0);  // the same cases each time, unless set otherwise
  EXPECT_TRUE(rc::check([] {
    const Case c = arbitrary_case();
    run_threads(static_cast<int>(c.mesh.world()), {.timeout_s = 60}, [&](Transport& transport) {
      Mesh mesh(c.mesh, transport);
      check_rank(c, mesh);
    });
    RC_ASSERT(!::testing::Test::HasFailure());
  }));
}

TEST(Dispatcher, IsOfTheKindThatWasChosen) {
  run_threads(4, {.timeout_s = 60}, [](Transport& transport) {
    const Mesh mesh({.dp = 4, .ep = 4}, transport);
    const auto gathers = [&](DispatcherKind kind) {
      const auto made = make_dispatcher(kind, {.num_experts = 8, .top_k = 4, .max_tokens = 3, .mesh = &mesh});
      return dynamic_cast<const AllGatherDispatcher*>(made.get()) != nullptr;
    };
    EXPECT_TRUE(gathers(DispatcherKind::allgather));
    EXPECT_FALSE(gathers(DispatcherKind::alltoall));
    expect_error(ErrorKind::internal, "experts on 4 ranks need a dispatcher that was chosen; got \"auto\"",
                 [&] { gathers(DispatcherKind::automatic); });
  });
}

// A bound of 1.5 times the even share: enough if experts are chosen evenly, and an error on every rank if all tokens
// choose the experts of one rank.
TEST(Dispatcher, MoreRowsThanTheBoundAreAnErrorOnEveryRank) {
  for (const Choice choice : {Choice::even, Choice::one}) {
    run_threads(2, {.timeout_s = 60}, [&](Transport& transport) {
      const Mesh mesh({.dp = 2, .ep = 2}, transport);
      const Case c{.mesh = mesh.shape(),
                   .dispatcher = DispatcherKind::alltoall,
                   .T = 64,
                   .E = 8,
                   .K = 1,
                   .D = 2,
                   .choice = choice,
                   .rows_factor = 1.5};
      RankOfCase rank(c, mesh);
      EXPECT_EQ(rank.dispatcher().max_rows(64), 96);
      Array x = rank.rows_of_tokens();
      const auto dispatch = [&] { rank.dispatcher().dispatch(rank.step(), x.tensor(), rank.handle()); };
      if (choice == Choice::even) return dispatch();
      expect_error(
          ErrorKind::usage,
          "moe.rank_rows_factor = 1.5 plans for 96 rows at the experts of a rank; the tokens of layer 7 chose 128 "
          "for ep rank 1; raise it (0: memory for the worst case, 128 rows), or balance the experts",
          dispatch);
    });
  }
  run_threads(2, {.timeout_s = 60}, [](Transport& transport) {
    const Mesh mesh({.dp = 2, .ep = 2}, transport);
    expect_error(ErrorKind::usage,
                 "moe.rank_rows_factor = 2 bounds the rows of a rank, which only all-to-all can check", [&] {
                   make_dispatcher(DispatcherKind::allgather,
                                   {.num_experts = 8, .top_k = 2, .max_tokens = 3, .mesh = &mesh, .rows_factor = 2});
                 });
  });
}

// A bound above the worst case, be it above all integers, is the worst case.
TEST(Dispatcher, ABoundIsNoMoreThanTheWorstCase) {
  run_threads(2, {.timeout_s = 60}, [](Transport& transport) {
    const Mesh mesh({.dp = 2, .ep = 2}, transport);
    for (const double factor : {2.0, 1e6, 1e300}) {
      const auto dispatcher =
          make_dispatcher(DispatcherKind::alltoall,
                          {.num_experts = 8, .top_k = 1, .max_tokens = 64, .mesh = &mesh, .rows_factor = factor});
      EXPECT_EQ(dispatcher->max_rows(64), 128) << factor;
    }
  });
}

// The other copy of the experts (edp) has no such error, and ends because of it.
TEST(Dispatcher, ABoundExceededInOneCopyOfTheExpertsEndsTheRun) {
  const auto body = [](Transport& transport) {
    const Mesh mesh({.dp = 4, .ep = 2, .edp = 2}, transport);
    const bool breaks = transport.rank() < 2;
    const Case c{.mesh = mesh.shape(),
                 .dispatcher = DispatcherKind::alltoall,
                 .T = 64,
                 .E = 8,
                 .K = 1,
                 .D = 2,
                 .choice = breaks ? Choice::one : Choice::even,
                 .rows_factor = 1.5};
    RankOfCase rank(c, mesh);
    Array x = rank.rows_of_tokens();
    rank.dispatcher().dispatch(rank.step(), x.tensor(), rank.handle());
    std::vector<float> loss(1);
    mesh.group(Axis::dp).all_reduce_sum(rank.step().stream, tensor_of(loss.data(), {1}));
  };
  expect_error(ErrorKind::usage, "moe.rank_rows_factor = 1.5 plans for 96 rows",
               [&] { run_threads(4, {.timeout_s = 60}, body); });
}

}  // namespace
}  // namespace moebius
