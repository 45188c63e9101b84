#include "comm/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "comm/collective_levels.h"
#include "comm/mesh.h"
#include "comm/transport/threads.h"
#include "core/error.h"

namespace moebius {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const Axis kAllAxes[] = {Axis::tp,        Axis::cp,       Axis::dp,       Axis::pp,       Axis::etp,    Axis::ep,
                         Axis::edp,       Axis::tp_cp,    Axis::dp_cp,    Axis::tp_cp_dp, Axis::etp_ep, Axis::tp_pp,
                         Axis::etp_ep_pp, Axis::cp_inner, Axis::cp_outer, Axis::world};

std::string error_text(const MeshShape& shape) {
  try {
    shape.check();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    return e.what();
  }
  return "no error";
}

// Returns a valid shape: the prime factors of a stage's ranks, distributed once for each view.
MeshShape any_shape() {
  MeshShape shape;
  shape.pp = *rc::gen::inRange(1, 4);
  for (int i = *rc::gen::inRange(0, 5); i > 0; --i) {
    const int factor = *rc::gen::element(2, 3);
    *(*rc::gen::element(&shape.tp, &shape.cp, &shape.dp)) *= factor;
    *(*rc::gen::element(&shape.etp, &shape.ep, &shape.edp)) *= factor;
  }
  const std::vector<int64_t> inner{1, shape.cp % 2 == 0 ? 2 : 1, shape.cp % 3 == 0 ? 3 : 1, shape.cp};
  shape.cp_inner = inner[*rc::gen::inRange(0, 4)];
  return shape;
}

std::vector<int> all_ranks(const MeshShape& shape) {
  std::vector<int> ranks;
  for (int r = 0; r < shape.world(); ++r) ranks.push_back(r);
  return ranks;
}

// The cases are the same each time, unless the environment asks for others.
void fix_seed() { ::setenv("RC_PARAMS", "seed=1", 0); }

// --- properties -----------------------------------------------------------------------------------------------------

TEST(LayoutProperty, CoordinatesAreABijectionInBothViews) {
  fix_seed();
  EXPECT_TRUE(rc::check([] {
    const MeshShape shape = any_shape();
    shape.check();
    for (const int r : all_ranks(shape)) {
      const RankPlace p = place_of(shape, r);
      RC_ASSERT(p.tp < shape.tp && p.cp < shape.cp && p.dp < shape.dp && p.pp < shape.pp);
      RC_ASSERT(p.etp < shape.etp && p.ep < shape.ep && p.edp < shape.edp);
      RC_ASSERT(rank_in_dense_view(shape, p) == r);
      RC_ASSERT(rank_in_expert_view(shape, p) == r);
    }
  }));
}

TEST(LayoutProperty, GroupsOfAnAxisPartitionTheRanks) {
  fix_seed();
  EXPECT_TRUE(rc::check([] {
    const MeshShape shape = any_shape();
    for (const Axis axis : kAllAxes) {
      std::set<std::vector<int>> groups;
      for (const int r : all_ranks(shape)) {
        const std::vector<int> group = ranks_of_group(shape, axis, r);
        RC_ASSERT(std::is_sorted(group.begin(), group.end()));
        RC_ASSERT(std::count(group.begin(), group.end(), r) == 1);
        RC_ASSERT(std::ssize(group) == group_size(shape, axis));
        for (const int other : group) RC_ASSERT(ranks_of_group(shape, axis, other) == group);
        groups.insert(group);
      }
      RC_ASSERT(std::ssize(groups) * group_size(shape, axis) == shape.world());
    }
  }));
}

TEST(LayoutProperty, AGroupDiffersOnlyInItsCoordinates) {
  fix_seed();
  EXPECT_TRUE(rc::check([] {
    const MeshShape shape = any_shape();
    const int r = *rc::gen::inRange(0, static_cast<int>(shape.world()));
    const RankPlace mine = place_of(shape, r);
    for (const int other : ranks_of_group(shape, Axis::dp_cp, r)) {
      const RankPlace p = place_of(shape, other);
      RC_ASSERT(p.tp == mine.tp && p.pp == mine.pp);
    }
    for (const int other : ranks_of_group(shape, Axis::etp_ep, r)) {
      const RankPlace p = place_of(shape, other);
      RC_ASSERT(p.edp == mine.edp && p.pp == mine.pp);
    }
  }));
}

TEST(LayoutProperty, ViewsAgreeOnTheStage) {
  fix_seed();
  EXPECT_TRUE(rc::check([] {
    const MeshShape shape = any_shape();
    for (const int r : all_ranks(shape)) {
      // A rank exchanges tokens only with ranks of its stage, and a pipeline has one rank
      // of each stage.
      for (const Axis axis : {Axis::ep, Axis::edp, Axis::etp_ep, Axis::tp_cp_dp})
        for (const int other : ranks_of_group(shape, axis, r))
          RC_ASSERT(place_of(shape, other).pp == place_of(shape, r).pp);
      for (const int other : ranks_of_group(shape, Axis::pp, r)) {
        RankPlace p = place_of(shape, other);
        p.pp = place_of(shape, r).pp;
        RC_ASSERT(p == place_of(shape, r));
      }
    }
  }));
}

TEST(LayoutProperty, SizesMultiplyToTheWorld) {
  fix_seed();
  EXPECT_TRUE(rc::check([] {
    const MeshShape shape = any_shape();
    const auto size = [&](Axis axis) { return group_size(shape, axis); };
    RC_ASSERT(size(Axis::tp) * size(Axis::cp) * size(Axis::dp) * size(Axis::pp) == shape.world());
    RC_ASSERT(size(Axis::etp) * size(Axis::ep) * size(Axis::edp) * size(Axis::pp) == shape.world());
    RC_ASSERT(size(Axis::cp_inner) * size(Axis::cp_outer) == size(Axis::cp));
    RC_ASSERT(size(Axis::tp_cp_dp) * size(Axis::pp) == shape.world());
    RC_ASSERT(size(Axis::etp_ep_pp) * size(Axis::edp) == shape.world());
    RC_ASSERT(size(Axis::tp_pp) * size(Axis::dp_cp) == shape.world());
  }));
}

// Returns the ranks of a group on each node by counting them, or 1 if nodes have different numbers of them.
int counted_on_node(const MeshShape& shape, Axis axis) {
  std::set<int> sizes;
  for (const int r : all_ranks(shape)) {
    std::map<int64_t, int> on_node;
    for (const int other : ranks_of_group(shape, axis, r)) ++on_node[other / shape.ranks_per_node];
    for (const auto& [node, ranks] : on_node) sizes.insert(ranks);
  }
  return sizes.size() == 1 ? *sizes.begin() : 1;
}

// The levels of a group are those of its ranks on each node, or those without nodes if its nodes are not alike.
TEST(LayoutProperty, LevelsBeginWithTheRanksOnANode) {
  fix_seed();
  EXPECT_TRUE(rc::check([] {
    MeshShape shape = any_shape();
    shape.ranks_per_node = *rc::gen::inRange(1, 9);
    const auto axis = static_cast<Axis>(*rc::gen::inRange(0, kNumAxes));
    const auto size = static_cast<int>(group_size(shape, axis));
    const CollectiveLevels levels(size, static_cast<int>(ranks_on_node(shape, axis)));
    const CollectiveLevels wanted(size, counted_on_node(shape, axis));
    RC_ASSERT(levels.count() == wanted.count());
    for (int l = 0; l < levels.count(); ++l) RC_ASSERT(levels.radix(l) == wanted.radix(l));
  }));
}

// --- by hand --------------------------------------------------------------------------------------------------------

TEST(Layout, EpSpansTpCpAndDp) {
  const MeshShape shape{.tp = 2, .cp = 2, .dp = 1, .pp = 2, .etp = 1, .ep = 4, .edp = 1};
  EXPECT_THAT(ranks_of_group(shape, Axis::tp, 5), ElementsAre(4, 5));
  EXPECT_THAT(ranks_of_group(shape, Axis::cp, 5), ElementsAre(5, 7));
  EXPECT_THAT(ranks_of_group(shape, Axis::ep, 5), ElementsAre(4, 5, 6, 7));
  EXPECT_THAT(ranks_of_group(shape, Axis::pp, 5), ElementsAre(1, 5));
  EXPECT_EQ(to_string(place_of(shape, 7)), "tp 1, cp 1, dp 0, pp 1, etp 0, ep 3, edp 0");
}

// Ranks of cp_inner are as near as they can be, so that a fast domain has all of them.
TEST(Layout, CpHasTwoLevels) {
  const MeshShape shape{.tp = 2, .cp = 4, .dp = 2, .edp = 16, .cp_inner = 2};
  EXPECT_THAT(ranks_of_group(shape, Axis::cp, 3), ElementsAre(1, 3, 5, 7));
  EXPECT_THAT(ranks_of_group(shape, Axis::cp_inner, 3), ElementsAre(1, 3));
  EXPECT_THAT(ranks_of_group(shape, Axis::cp_outer, 3), ElementsAre(3, 7));
  EXPECT_THAT(error_text({.cp = 4, .edp = 4, .cp_inner = 3}), HasSubstr("cp_inner must divide cp, 4 % 3 must be 0"));
}

TEST(Layout, RanksThatShareExpertsAreOnNodes) {
  const MeshShape two{.dp = 8, .ep = 4, .edp = 2, .ranks_per_node = 2};
  EXPECT_EQ(two.nodes_of_experts(), 2);
  EXPECT_EQ((MeshShape{.dp = 16, .etp = 2, .ep = 8}).nodes_of_experts(), 2);
  EXPECT_EQ((MeshShape{.dp = 8, .ep = 8}).nodes_of_experts(), 1);                       // one whole node
  EXPECT_EQ((MeshShape{.dp = 6, .ep = 6, .ranks_per_node = 4}).nodes_of_experts(), 1);  // not whole nodes
  EXPECT_EQ((MeshShape{.dp = 4, .ep = 2, .edp = 2}).nodes_of_experts(), 1);             // two groups on one node
  EXPECT_THAT(error_text({.ranks_per_node = 9}), HasSubstr("ranks_per_node must be from 1 to 8; got 9"));
  EXPECT_THAT(error_text({.ranks_per_node = 0}), HasSubstr("ranks_per_node must be from 1 to 8; got 0"));
  run_threads(8, {.timeout_s = 60}, [&](Transport& transport) {
    const Mesh mesh(two, transport);
    const int first = transport.rank() / 2 * 2;
    EXPECT_THAT(mesh.node_of_experts().ranks(), ElementsAre(first, first + 1));
  });
}

TEST(Layout, NodesHaveFewerRanksOfAGroupWithAStride) {
  const MeshShape shape{.tp = 2, .dp = 16, .ep = 8, .edp = 4};
  EXPECT_EQ(ranks_on_node(shape, Axis::tp), 2);
  EXPECT_EQ(ranks_on_node(shape, Axis::dp), 4);
  EXPECT_EQ(ranks_on_node(shape, Axis::tp_cp_dp), 8);
  EXPECT_EQ(ranks_on_node(shape, Axis::ep), 8);
  EXPECT_EQ(ranks_on_node(shape, Axis::edp), 1);                         // each on a node of its own
  EXPECT_EQ(ranks_on_node({.tp = 3, .dp = 8, .edp = 24}, Axis::dp), 1);  // nodes have 2 or 3 of them
  EXPECT_EQ(ranks_on_node({.dp = 16, .etp = 2, .ep = 2, .edp = 4}, Axis::etp_edp), 4);
  EXPECT_EQ(ranks_on_node({.tp = 2, .cp = 8, .dp = 2, .edp = 32, .cp_inner = 2}, Axis::cp), 4);
}

// Two nodes of 8 ranks have 4 ranks each of a group of dp: these are added first. In another order the sum of the first
// number is another one in f32. Between the nodes a rank sends a quarter of the bytes, not half as in one exchange.
TEST(Mesh, AddsTheRanksOfANodeFirstInGroupsWithAStride) {
  const MeshShape shape{.tp = 2, .dp = 8, .edp = 16};
  run_threads(16, {.timeout_s = 60}, [&](Transport& transport) {
    const Mesh mesh(shape, transport);
    Group& dp = mesh.group(Axis::dp);
    ThreadPool pool(1);
    Stream s(DeviceKind::cpu, pool);
    // ((big + 1) + (-big + 1)) of the nodes is 0, since big + 1 is big; one after the other it is 1.
    constexpr float kBig = 1 << 25;
    const float parts[] = {kBig, 1, 0, 0, -kBig, 1, 0, 0};
    std::vector<float> x(8, parts[dp.rank()]);
    dp.all_reduce_sum(s, tensor_of(x.data(), {8}));
    EXPECT_EQ(x[0], 0);
    EXPECT_EQ(dp.sent_bytes(), 2 * 32 * 7 / 8);
  });
}

// etp changes fastest, as tp does: a folded expert group consists of whole tensor-parallel groups.
TEST(Layout, ShardsAreBlocksOfRanksThatHoldTheSame) {
  const MeshShape shape{.tp = 2, .dp = 4, .ep = 4, .edp = 2, .fsdp_shard = 2};
  shape.check();
  EXPECT_EQ(shard_size(shape, Axis::dp_cp), 2);
  EXPECT_EQ(shard_size(shape, Axis::tp_cp_dp), 2);
  EXPECT_EQ(shard_size(shape, Axis::edp), 2);
  EXPECT_EQ(shard_size({.dp = 4, .edp = 4}, Axis::dp_cp), 4);  // all
  EXPECT_THAT(error_text({.dp = 6, .edp = 6, .fsdp_shard = 4}),
              HasSubstr("fsdp_shard must divide the size of the group dp_cp, 6 % 4 must be 0"));
  EXPECT_THAT(error_text({.fsdp_shard = 1}), HasSubstr("fsdp_shard must be at least 2"));
}

TEST(Layout, ExpertTensorParallelRanksAreNeighbours) {
  const MeshShape shape{.tp = 4, .dp = 2, .etp = 2, .ep = 2, .edp = 2};
  EXPECT_THAT(ranks_of_group(shape, Axis::etp, 3), ElementsAre(2, 3));
  EXPECT_THAT(ranks_of_group(shape, Axis::ep, 3), ElementsAre(1, 3));
  EXPECT_THAT(ranks_of_group(shape, Axis::edp, 3), ElementsAre(3, 7));
  EXPECT_THAT(ranks_of_group(shape, Axis::dp_cp, 3), ElementsAre(3, 7));
}

TEST(Layout, RefusesWithTheEquationThatFails) {
  EXPECT_THAT(error_text({.tp = 2, .dp = 3, .ep = 4}), HasSubstr("tp*cp*dp = 2*1*3 = 6, etp*ep*edp = 1*4*1 = 4"));
  EXPECT_THAT(error_text({.ep = 0}), HasSubstr("mesh: ep must be from 1 to 2147483647; got 0"));
  EXPECT_THAT(error_text({.tp = 65536, .cp = 65536, .dp = 65536, .pp = 65536, .etp = 65536, .ep = 65536, .edp = 65536}),
              HasSubstr("mesh: at most 2147483647 ranks; got tp*cp*dp*pp = 65536*65536*65536*65536"));
  EXPECT_EQ(error_text({.tp = 3, .dp = 2, .pp = 5, .etp = 2, .edp = 3}), "no error");
}

TEST(Layout, TableShowsRanksAndThePurposeOfEachGroup) {
  const std::string text = layout_table({.tp = 2, .dp = 2, .pp = 2, .ep = 4});
  EXPECT_THAT(text, HasSubstr("8 ranks: dense tp 2 x cp 1 x dp 2 x pp 2, experts etp 1 x ep 4 x edp 1 x pp 2\n"));
  EXPECT_THAT(text, HasSubstr("\n     7     1   0   1   1     0   3   0\n"));
  EXPECT_THAT(text, HasSubstr("\nep              4      2  0 1 2 3                   the experts of one layer"));
  EXPECT_THAT(text, HasSubstr("  copies of the dense parameters: their gradients and weights\n"));
  EXPECT_THAT(
      text, HasSubstr("  one pipeline stage: gradients of parameters that tp does not split, expert loads, z-loss\n"));
  EXPECT_THAT(text, HasSubstr("\nworld           8      1  0 1 2 3 4 5 6 7 "));
}

TEST(Layout, TableOfManyRanksIsShort) {
  const std::string text = layout_table({.tp = 8, .dp = 128, .ep = 64, .edp = 16}, 4);
  EXPECT_THAT(text,
              HasSubstr("\n     1     1   0   0   0     0   1   0\n   ...\n  1023     7   0 127   0     0  63  15\n"));
  EXPECT_THAT(text, HasSubstr("0 1 2 3 4 5 6 7 ... 1023"));
}

// The purposes of groups are in one column, however long the ranks of the first group are.
TEST(Layout, TableOfVeryManyRanksHasItsColumns) {
  const std::string text = layout_table({.dp = 100000, .ep = 100, .edp = 1000});
  EXPECT_THAT(text, HasSubstr("0 100 200 300 400 500 600 700 ... 99900"));
  const size_t header = text.find("group  ");
  const size_t column = text.find("  purpose\n", header) - header;
  for (int i = 0; i < kNumAxes; ++i) {
    const Axis axis = static_cast<Axis>(i);
    const size_t line = text.find(fmt::format("\n{:10} ", name_of(axis)), header) + 1;
    EXPECT_EQ(text.find(fmt::format("  {}\n", purpose_of(axis)), line) - line, column) << name_of(axis);
  }
}

}  // namespace
}  // namespace moebius
