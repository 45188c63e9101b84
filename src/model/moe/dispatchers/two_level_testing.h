// Compares the bytes that the two-level dispatcher counts, across nodes and inside them, with those of its rows.
#pragma once

#include <algorithm>
#include <set>
#include <utility>

#include "model/moe/dispatchers/dispatcher_testing.h"

namespace moebius::testing {

// The rows that a rank sends with two-level. A token is sent once to each node of its experts, to the rank that has the
// same place there as its own rank. That rank passes it on to the ranks of its experts.
struct TwoLevelRows {
  int64_t left = 0, passed_on = 0;  // across nodes: rows of its own tokens, and sums of tokens that it passed on
  int64_t out = 0, back = 0;        // inside its node: rows that it passes on, and sums of its experts
};
inline TwoLevelRows two_level_rows(const Case& c, int rank) {
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

// Expects that the bytes of every phase on this rank are those of its rows. All ranks of the case call it together.
inline void expect_two_level_traffic(const Case& c, Transport& transport) {
  const MeshShape& mesh = c.mesh;
  Mesh all(mesh, transport);
  const int64_t at_begin = group_of_experts(all).sent_bytes();
  RankOfCase rank(c, all);
  Step& step = rank.step();
  TwoLevelRows rows = two_level_rows(c, transport.rank());
  const int64_t nodes = mesh.nodes_of_experts(), n = mesh.ranks_per_node, row_bytes = c.D * 2, sum_bytes = c.D * 4;
  if (c.fixed_messages) rows.left = rows.passed_on = (nodes - 1) * c.T;
  const int64_t L = std::min(c.K, c.E / mesh.ep);  // pairs of a row at one rank, at most
  int64_t before = 0, before_across = at_begin;
  const auto inside = [&] { return rank.sent_bytes() - std::exchange(before, rank.sent_bytes()); };
  const auto across = [&] {
    const int64_t now = group_of_experts(all).sent_bytes();
    return now - std::exchange(before_across, now);
  };
  EXPECT_EQ(across(), (c.fixed_messages ? 0 : (nodes - 1) * 4) + rows.left * c.K * 8);
  EXPECT_EQ(inside(), (n - 1) * mesh.ep * 4 + rows.out * L * 8);
  Array x = rank.rows_of_tokens(), dx = x, dweight = Array::poisoned({c.T, c.K}, DType::f32);
  const Dispatched in = rank.dispatcher().dispatch(step, x.tensor(), rank.handle());
  EXPECT_EQ(across(), rows.left * row_bytes);
  EXPECT_EQ(inside(), rows.out * row_bytes);
  rank.dispatcher().combine(step, dx.tensor(), rank.identity(in), rank.handle());
  EXPECT_EQ(across(), rows.passed_on * sum_bytes);
  EXPECT_EQ(inside(), rows.back * row_bytes);
  rank.dispatcher().combine_bwd(step, x.tensor(), rank.handle());
  EXPECT_EQ(across(), rows.left * row_bytes);
  EXPECT_EQ(inside(), rows.out * row_bytes);
  rank.dispatcher().dispatch_bwd(step, dx.tensor(), dweight.tensor(), rank.identity(in), rank.one_per_row(in, 1),
                                 rank.handle());
  EXPECT_EQ(across(), rows.passed_on * (sum_bytes + c.K * 4));
  EXPECT_EQ(inside(), rows.back * (row_bytes + L * 4));
}

}  // namespace moebius::testing
