// The property that every dispatcher has, whatever the tokens choose. Each pair of a token and an
// expert arrives once where its expert is, with its weight. The result of the expert comes back to
// the pair.
#include <rapidcheck.h>

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>

#include "comm/transport/threads.h"
#include "config/dispatcher_choice.h"
#include "core/rng.h"
#include "io/testing.h"
#include "model/moe/direct_window.h"
#include "model/moe/dispatcher_allgather.h"
#include "ops/cpu/testing.h"
#include "ops/permute/index_rows.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

enum class Choice { even, skewed, one };  // experts of tokens: any; few; the same for all (as far as K goes)

struct Case {
  MeshShape mesh;
  DispatcherKind dispatcher;
  int64_t T = 1, E = 1, K = 1, D = 1;
  Choice choice = Choice::even;
  bool drops = false;
  DType dtype = DType::f32;
  int seed = 0;
  double rows_factor = 0;
};

// The pair (token, k) of the whole stage: tokens are counted over the ranks.
int64_t expert_of(const Case& c, int64_t token, int64_t k) {
  const Rng rng(static_cast<uint64_t>(c.seed), RngSite::bench);
  const int64_t first =
      c.choice == Choice::one
          ? c.E / 2
          : static_cast<int64_t>(rng.below(static_cast<uint64_t>(token), c.choice == Choice::even ? c.E : 2));
  return (first + k) % c.E;
}
bool is_kept(const Case& c, int64_t token, int64_t k) { return !c.drops || (token * 5 + k * 3 + c.seed) % 4 != 1; }
float weight_of(int64_t token, int64_t k) { return static_cast<float>(1 + (token * 7 + k * 3) % 16) / 16; }
// Numbers that bf16 holds, so that a row that is only moved is the same in any dtype; two of them name a token.
double row_value(int64_t token, int64_t d) {
  return static_cast<double>(d % 2 == 0 ? token % 64 - 32 : token / 64 + d);
}

// A rank of a case: its tokens and their route.
class RankOfCase {
 public:
  RankOfCase(const Case& c, const Mesh& mesh)
      : c_(c),
        mesh_(mesh),
        window_(plan_, mesh,
                {.max_tokens = c.T,
                 .top_k = c.K,
                 .width = c.D,
                 .dtype = c.dtype,
                 .two_level = c.dispatcher == DispatcherKind::two_level}),
        dispatcher_(make_dispatcher(c.dispatcher, {.num_experts = c.E,
                                                   .top_k = c.K,
                                                   .max_tokens = c.T,
                                                   .mesh = &mesh,
                                                   .rows_factor = c.rows_factor,
                                                   .window = &window_,
                                                   .layer = "layer 7"})),
        delivery_(dispatcher_->declare_saved(plan_, "delivery")),
        first_token_(mesh.group(Axis::tp_cp_dp).rank() * c.T),
        R_(dispatcher_->max_rows(c.T)) {
    plan_.bind(DeviceKind::cpu, int64_t{1} << 22);
    make_route();
    announce();
  }

  void announce() { dispatcher_->announce(step_, route_, *delivery_); }
  Array rows_of_tokens() const {
    Values x;
    for (int64_t t = 0; t < c_.T; ++t)
      for (int64_t d = 0; d < c_.D; ++d) x.push_back(row_value(first_token_ + t, d));
    return Array::of({c_.T, c_.D}, c_.dtype, x);
  }

  // How often each pair of the stage arrives on this rank, and whether it is what it should be.
  std::vector<int64_t> arrivals(const Dispatched& rows, bool weighted) {
    const int64_t W = mesh_.group(Axis::tp_cp_dp).size(), e = c_.E / c_.mesh.ep, first = e * mesh_.place().ep;
    std::vector<int64_t> times(W * c_.T * c_.K);
    const int32_t* offsets = rows.rows.offsets_e1.ptr<int32_t>();
    for (int64_t i = 0; i < e; ++i) {
      for (int64_t r = offsets[i]; r < offsets[i + 1]; ++r) count(rows, r, first + i, weighted, times);
    }
    return times;
  }

  // Experts that return their rows: of the etp ranks the first, the others nothing (their sum is the expert's row).
  Tensor identity(const Dispatched& rows) {
    const Tensor y_RD = step_.alloc({R_, c_.D}, c_.dtype);
    const int64_t row_bytes = c_.D * size_of(c_.dtype);
    for (int64_t r = 0; r < rows.rows.offsets_e1.ptr<int32_t>()[c_.E / c_.mesh.ep]; ++r) {
      auto* to = static_cast<std::byte*>(y_RD.data) + r * row_bytes;
      if (mesh_.place().etp == 0)
        std::memcpy(to, static_cast<const std::byte*>(rows.source.data) + token_row(rows, r) * row_bytes, row_bytes);
      else
        std::memset(to, 0, row_bytes);
    }
    return y_RD;
  }
  Tensor one_per_row(const Dispatched& rows, float value) {
    const Tensor w_R = step_.alloc({R_}, DType::f32);
    for (int64_t r = 0; r < rows.rows.offsets_e1.ptr<int32_t>()[c_.E / c_.mesh.ep]; ++r)
      w_R.ptr<float>()[r] = mesh_.place().etp == 0 ? value * static_cast<float>(1 + mesh_.place().ep) : 0;
    return w_R;
  }

  // By the direct dispatcher, so far.
  int64_t sent_bytes() const { return *window_.sent_1().ptr<int64_t>(); }
  Step& step() { return step_; }
  const Dispatcher& dispatcher() const { return *dispatcher_; }
  Delivery& delivery() { return *delivery_; }
  int64_t first_token() const { return first_token_; }

 private:
  static int64_t token_row(const Dispatched& rows, int64_t r) {
    return rows.rows.token_R.empty() ? r : rows.rows.token_R.ptr<int32_t>()[r];
  }
  void make_route() {
    const auto ints = [&](Shape shape) { return step_.alloc(shape, DType::i32); };
    const int64_t T = c_.T, K = c_.K, E = c_.E;
    route_ = {.topk_TK = ints({T, K}),
              .weight_TK = step_.alloc({T, K}, DType::f32),
              .counts_E = ints({E}),
              .offsets_E1 = ints({E + 1}),
              .row_token_R = ints({T * K}),
              .row_pair_R = ints({T * K}),
              .pair_row_TK = ints({T, K})};
    for (int64_t p = 0; p < T * K; ++p) {
      const int64_t token = first_token_ + p / K;
      const bool kept = is_kept(c_, token, p % K);
      route_.topk_TK.ptr<int32_t>()[p] = static_cast<int32_t>(expert_of(c_, token, p % K));
      route_.weight_TK.ptr<float>()[p] = kept ? weight_of(token, p % K) : 0;
      route_.pair_row_TK.ptr<int32_t>()[p] = kept ? 0 : -1;
    }
    index_rows(s_, {.counts_e = route_.counts_E,
                    .offsets_e1 = route_.offsets_E1,
                    .row_token_R = route_.row_token_R,
                    .row_pair_R = route_.row_pair_R,
                    .pair_row_TK = route_.pair_row_TK,
                    .scratch = step_.alloc_bytes(IndexRows::scratch_bytes(T, E, s_)),
                    .topk_TK = route_.topk_TK,
                    .kept_TK = route_.pair_row_TK});
  }
  // Finds the token by its row.
  void count(const Dispatched& rows, int64_t r, int64_t expert, bool weighted, std::vector<int64_t>& times) {
    const int64_t W = mesh_.group(Axis::tp_cp_dp).size(), at = token_row(rows, r) * c_.D;
    for (int64_t token = 0; token < W * c_.T; ++token) {
      bool same = true;
      for (int64_t d = 0; same && d < c_.D; ++d) {
        const double x =
            c_.dtype == DType::f32 ? rows.source.ptr<float>()[at + d] : to_f32(rows.source.ptr<bf16>()[at + d]);
        same = x == row_value(token, d);
      }
      for (int64_t k = 0; same && k < c_.K; ++k) {
        if (expert_of(c_, token, k) != expert || !is_kept(c_, token, k)) continue;
        if (weighted && rows.weight_R.ptr<float>()[r] != weight_of(token, k)) continue;
        ++times[token * c_.K + k];
        return;
      }
    }
    ADD_FAILURE() << "a row that no token sent to expert " << expert;
  }

  Case c_;
  const Mesh& mesh_;
  ThreadPool pool_{1};
  Stream s_{DeviceKind::cpu, pool_};
  MemoryPlan plan_;
  MicroBatch batch_;
  DirectWindow window_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::unique_ptr<Delivery> delivery_;
  int64_t first_token_, R_;
  Route route_;
  Step step_{s_, plan_.stack(), batch_};
};

// Sums over the ranks that hold copies of the same experts, and over experts: every kept pair once on each etp rank.
void expect_once(const Case& c, Mesh& mesh, Stream& s, std::vector<int64_t> times) {
  mesh.group(Axis::tp_cp_dp).all_reduce_sum(s, tensor_of(times.data(), {std::ssize(times)}));
  for (int64_t p = 0; p < std::ssize(times); ++p)
    ASSERT_EQ(times[p], is_kept(c, p / c.K, p % c.K) ? c.mesh.etp : 0) << "pair " << p;
}

// sum over the kept k of weight (or 1) times the token's row, in the order of k, in f32.
double expected(const Case& c, int64_t token, int64_t d, bool weighted) {
  float sum = 0;
  for (int64_t k = 0; k < c.K; ++k) {
    if (!is_kept(c, token, k)) continue;
    sum += (weighted ? weight_of(token, k) : 1.0f) * static_cast<float>(row_value(token, d));
  }
  return c.dtype == DType::f32 ? sum : to_f32(to_bf16(sum));
}

// Sums of sixteenths of small integers are exact in f32, so no order of adding shows. In bf16 all-gather and direct
// round the part of each rank: half a unit of at most W K / W terms each.
void expect_rows(const Case& c, const Array& got, int64_t first_token, bool weighted) {
  const Values values = got.values();
  const double slack = c.dtype == DType::f32 ? 0 : 64.0 * static_cast<double>(c.K) * 0x1p-8;
  for (int64_t i = 0; i < c.T * c.D; ++i) {
    ASSERT_NEAR(values[i], expected(c, first_token + i / c.D, i % c.D, weighted), slack)
        << name_of(c.dispatcher) << ", token " << first_token + i / c.D;
  }
}

void check_rank(const Case& c, Mesh& mesh) {
  RankOfCase rank(c, mesh);
  Step& step = rank.step();
  const Dispatcher& dispatcher = rank.dispatcher();
  Array x = rank.rows_of_tokens(), y = Array::poisoned({c.T, c.D}, c.dtype), dx = y;
  Array dweight = Array::poisoned({c.T, c.K}, DType::f32);

  const Dispatched rows = dispatcher.dispatch(step, x.tensor(), rank.delivery());
  expect_once(c, mesh, step.stream, rank.arrivals(rows, false));
  dispatcher.combine(step, y.tensor(), rank.identity(rows), rank.delivery());
  expect_rows(c, y, rank.first_token(), true);

  const Dispatched grads = dispatcher.combine_bwd(step, x.tensor(), rank.delivery());
  expect_once(c, mesh, step.stream, rank.arrivals(grads, true));
  dispatcher.dispatch_bwd(step, dx.tensor(), dweight.tensor(), rank.identity(grads), rank.one_per_row(grads, 0.5f),
                          rank.delivery());
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
// Nodes of one, two and three ranks; of whole ep ranks where etp is 2, and in one of two copies.
const std::vector<MeshShape> kMeshesOfNodes = {
    {.dp = 4, .ep = 4, .ranks_per_node = 2},           {.tp = 2, .cp = 2, .ep = 4, .ranks_per_node = 1},
    {.dp = 6, .ep = 6, .ranks_per_node = 3},           {.tp = 2, .dp = 4, .etp = 2, .ep = 4, .ranks_per_node = 4},
    {.dp = 8, .ep = 4, .edp = 2, .ranks_per_node = 2},
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
  return c;
}

TEST(DispatcherProperty, EveryPairArrivesOnceAndComesBack) {
  ::setenv("RC_PARAMS", "seed=1", 0);  // the same cases each time, unless asked otherwise
  EXPECT_TRUE(rc::check([] {
    const Case c = arbitrary_case();
    run_threads(static_cast<int>(c.mesh.world()), {.timeout_s = 60}, [&](Transport& transport) {
      Mesh mesh(c.mesh, transport);
      check_rank(c, mesh);
    });
    RC_ASSERT(!::testing::Test::HasFailure());
  }));
}

// Rows that ranks of a case send to others, when a token goes once to each rank that has one of its experts.
struct DirectRows {
  int64_t left = 0, returned = 0;  // from a rank with tokens, and from a rank with experts
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

TEST(DirectDispatcher, ARowTravelsOnceToEachRank) {
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
      const int64_t W = mesh.world(), row_bytes = c.D * 2;
      int64_t before = 0;
      const auto sent = [&] { return rank.sent_bytes() - std::exchange(before, rank.sent_bytes()); };
      EXPECT_EQ(sent(), (W - 1) * mesh.ep * 4 + rows.left * c.K * 8);
      Array x = rank.rows_of_tokens(), dx = x, dweight = Array::poisoned({c.T, c.K}, DType::f32);
      const Dispatched in = rank.dispatcher().dispatch(step, x.tensor(), rank.delivery());
      EXPECT_EQ(sent(), rows.left * row_bytes);
      rank.dispatcher().combine(step, dx.tensor(), rank.identity(in), rank.delivery());
      EXPECT_EQ(sent(), rows.returned * row_bytes);
      rank.dispatcher().combine_bwd(step, x.tensor(), rank.delivery());
      EXPECT_EQ(sent(), rows.left * row_bytes);
      rank.dispatcher().dispatch_bwd(step, dx.tensor(), dweight.tensor(), rank.identity(in), rank.one_per_row(in, 1),
                                     rank.delivery());
      EXPECT_EQ(sent(), rows.returned * (row_bytes + c.K * 4));
    });
  }
}

// Rows that a rank sends when a token goes once to each node, and from the rank there that is at the place of the
// token's own rank to all ranks of its experts.
struct TwoLevelRows {
  int64_t left = 0, passed_on = 0;  // across nodes: of its own tokens, and sums of tokens that it has passed on
  int64_t out = 0, back = 0;        // inside: rows that it passes on, and sums of its experts
};
TwoLevelRows two_level_rows(const Case& c, int rank) {
  const int64_t W = c.mesh.etp * c.mesh.ep, n = c.mesh.ranks_per_node, node = rank / n;
  TwoLevelRows rows;
  for (int64_t token = 0; token < W * c.T; ++token) {
    std::set<int64_t> ranks, nodes;
    for (int64_t k = 0; k < c.K; ++k) {
      const int64_t ep = expert_of(c, token, k) / (c.E / c.mesh.ep);
      for (int64_t etp = 0; is_kept(c, token, k) && etp < c.mesh.etp; ++etp) ranks.insert(etp + c.mesh.etp * ep);
    }
    for (const int64_t q : ranks) nodes.insert(q / n);
    const int64_t home = token / c.T, passes_on = node * n + home % n;  // the rank of this node that gets the token
    if (home == rank) rows.left += std::ssize(nodes) - (nodes.contains(node) ? 1 : 0);
    if (passes_on == rank && home / n != node && nodes.contains(node)) ++rows.passed_on;
    for (const int64_t q : ranks) rows.out += passes_on == rank && q / n == node && q != rank ? 1 : 0;
    if (ranks.contains(rank) && passes_on != rank) ++rows.back;
  }
  return rows;
}

TEST(TwoLevelDispatcher, ARowTravelsOnceToEachNode) {
  for (const MeshShape& mesh : {MeshShape{.dp = 4, .ep = 4, .ranks_per_node = 2},
                                {.dp = 6, .ep = 6, .ranks_per_node = 2},
                                {.dp = 8, .etp = 2, .ep = 4, .ranks_per_node = 4}}) {
    const Case c{.mesh = mesh,
                 .dispatcher = DispatcherKind::two_level,
                 .T = 37,
                 .E = 12,
                 .K = 4,
                 .D = 10,
                 .drops = true,
                 .dtype = DType::bf16};
    run_threads(static_cast<int>(mesh.world()), {.timeout_s = 60}, [&](Transport& transport) {
      Mesh all(mesh, transport);
      const int64_t at_begin = group_of_experts(all).sent_bytes();
      RankOfCase rank(c, all);
      Step& step = rank.step();
      const TwoLevelRows rows = two_level_rows(c, transport.rank());
      const int64_t nodes = mesh.nodes_of_experts(), n = mesh.ranks_per_node, row_bytes = c.D * 2, sum_bytes = c.D * 4;
      int64_t before = 0, before_across = at_begin;
      const auto inside = [&] { return rank.sent_bytes() - std::exchange(before, rank.sent_bytes()); };
      const auto across = [&] {
        const int64_t now = group_of_experts(all).sent_bytes();
        return now - std::exchange(before_across, now);
      };
      EXPECT_EQ(across(), (nodes - 1) * 4 + rows.left * c.K * 8);
      EXPECT_EQ(inside(), (n - 1) * mesh.ep * 4 + rows.out * c.K * 8);
      Array x = rank.rows_of_tokens(), dx = x, dweight = Array::poisoned({c.T, c.K}, DType::f32);
      const Dispatched in = rank.dispatcher().dispatch(step, x.tensor(), rank.delivery());
      EXPECT_EQ(across(), rows.left * row_bytes);
      EXPECT_EQ(inside(), rows.out * row_bytes);
      rank.dispatcher().combine(step, dx.tensor(), rank.identity(in), rank.delivery());
      EXPECT_EQ(across(), rows.passed_on * sum_bytes);
      EXPECT_EQ(inside(), rows.back * row_bytes);
      rank.dispatcher().combine_bwd(step, x.tensor(), rank.delivery());
      EXPECT_EQ(across(), rows.left * row_bytes);
      EXPECT_EQ(inside(), rows.out * row_bytes);
      rank.dispatcher().dispatch_bwd(step, dx.tensor(), dweight.tensor(), rank.identity(in), rank.one_per_row(in, 1),
                                     rank.delivery());
      EXPECT_EQ(across(), rows.passed_on * (sum_bytes + c.K * 4));
      EXPECT_EQ(inside(), rows.back * (row_bytes + c.K * 4));
    });
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
      const Dispatched rows = rank.dispatcher().dispatch(rank.step(), x.tensor(), rank.delivery());
      if (transport.rank() == 3 && throws) MOEBIUS_FAIL(numerics, "not a number");
      if (transport.rank() == 3) std::this_thread::sleep_for(std::chrono::seconds(2));
      rank.dispatcher().combine(rank.step(), x.tensor(), rank.identity(rows), rank.delivery());
    };
  };
  expect_error(ErrorKind::distributed, "rank 3", [&] { run_threads(4, {.timeout_s = 0.5}, body(false)); });
  expect_error(ErrorKind::numerics, "rank 3: not a number", [&] { run_threads(4, {.timeout_s = 60}, body(true)); });
}

TEST(TwoLevelDispatcher, RanksThatAreNotOnWholeNodesAreRefused) {
  run_threads(4, {.timeout_s = 60}, [](Transport& transport) {
    for (const int64_t node : {3, 4, 8}) {
      const Mesh mesh({.dp = 4, .ep = 4, .ranks_per_node = node}, transport);
      MemoryPlan plan;
      expect_error(
          ErrorKind::usage,
          fmt::format("parallel.dispatcher = \"two_level\": the ep * etp = 4 * 1 ranks that share experts must "
                      "be on 2 to 8 whole nodes of parallel.ranks_per_node = {} ranks",
                      node),
          [&] { make_direct_window(plan, mesh, {}, DispatcherKind::two_level, 1); });
    }
  });
}

// The layers' passes of any number: each begins with windows that all ranks have read.
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
      const Dispatched rows = rank.dispatcher().dispatch(step, x.tensor(), rank.delivery());
      if (transport.rank() == pass % 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // others run ahead
      if (pass % 3 == 0) {
        rank.dispatcher().combine(step, y.tensor(), rank.identity(rows), rank.delivery());
        expect_rows(c, y, rank.first_token(), true);
        continue;
      }
      const Dispatched grads = rank.dispatcher().combine_bwd(step, x.tensor(), rank.delivery());
      rank.dispatcher().dispatch_bwd(step, y.tensor(), dweight.tensor(), rank.identity(grads),
                                     rank.one_per_row(grads, 1), rank.delivery());
      expect_rows(c, y, rank.first_token(), false);
      expect_once(c, mesh, step.stream, rank.arrivals(rows, false));  // the tokens are still here
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
      const Dispatched rows = rank.dispatcher().dispatch(rank.step(), x.tensor(), rank.delivery());
      if (transport.rank() == 1 && throws) MOEBIUS_FAIL(numerics, "not a number");
      if (transport.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(2));
      rank.dispatcher().combine(rank.step(), x.tensor(), rank.identity(rows), rank.delivery());
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
                 "moe.rank_rows_factor = 2 bounds the rows of a rank, which all-to-all alone can check", [&] {
                   make_dispatcher(DispatcherKind::direct,
                                   {.num_experts = 8, .top_k = 2, .max_tokens = 3, .mesh = &mesh, .rows_factor = 2});
                 });
  });
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

// Room for half as much again as the even share: enough where experts are chosen evenly, and an error on every rank
// where all tokens choose the experts of one.
TEST(Dispatcher, ABoundOnRowsIsKeptOrSaid) {
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
      const auto dispatch = [&] { rank.dispatcher().dispatch(rank.step(), x.tensor(), rank.delivery()); };
      if (choice == Choice::even) return dispatch();
      expect_error(ErrorKind::usage,
                   "moe.rank_rows_factor = 1.5 plans for 96 rows at the experts of a rank; a layer's tokens chose 128 "
                   "for ep rank 1; raise it (0: room for the worst case, 128 rows), or balance the experts",
                   dispatch);
    });
  }
  run_threads(2, {.timeout_s = 60}, [](Transport& transport) {
    const Mesh mesh({.dp = 2, .ep = 2}, transport);
    expect_error(ErrorKind::usage,
                 "moe.rank_rows_factor = 2 bounds the rows of a rank, which all-to-all alone can check", [&] {
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

// Another copy of the experts (edp) knows nothing of it, and ends because of it.
TEST(Dispatcher, ABoundThatOneCopyBreaksEndsTheRun) {
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
    rank.dispatcher().dispatch(rank.step(), x.tensor(), rank.delivery());
    std::vector<float> loss(1);
    mesh.group(Axis::dp).all_reduce_sum(rank.step().stream, tensor_of(loss.data(), {1}));
  };
  expect_error(ErrorKind::usage, "moe.rank_rows_factor = 1.5 plans for 96 rows",
               [&] { run_threads(4, {.timeout_s = 60}, body); });
}

}  // namespace
}  // namespace moebius
