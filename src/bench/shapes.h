// The shapes of timed layers, and the routes of their tokens.
// bench/peers/moe_shapes.py has the same table and rules, but for uneven, so that other software is timed on
// the same counts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/experts/experts.h"

namespace moebius {

struct BenchShape {
  std::string name;
  int64_t batch = 0, seq = 0;      // sequences and their length
  int64_t D = 0, F = 0;            // widths of the model and of an expert
  int64_t E = 0, K = 0;            // experts here, and experts of a token
  int64_t H = 0, G = 0, head = 0;  // query heads, kv heads and their width
  int64_t v_head = 0;              // width of values
  GatedActivation activation;      // activation of the experts
  bool expert_biases = false;      // both projections of an expert have one
  int64_t T() const { return batch * seq; }
  int64_t R() const { return T() * K; }
};

const std::vector<BenchShape>& bench_shapes();
// Returns the shape of this name. `scale` multiplies seq, D and F. Throws Error{usage} that
// lists the names.
BenchShape bench_shape(const std::string& name, double scale = 1.0);

// Returns max(1, round(size * scale)).
int64_t scaled(int64_t size, double scale);

// The rule that routes tokens to experts:
//   balanced   slot k of token t goes to expert (t K + k) mod E
//   zipf       popularity p[e] is proportional to (rank[e] + 1)^-s with rank[e] = (5 e + 3) mod E.
//              E > K: token t takes the K experts with the largest log p[e] - log(-log u(t E + e)).
//              That draws K different experts one after the other by popularity.
//              With E = K (a slice of an expert-parallel group, whose rows come from the tokens of many
//              ranks): slot (t, k) takes the first expert whose cumulative popularity exceeds
//              u(t K + k). Slots of a token may take the same expert.
//   uneven     The rows sorted by expert are divided in proportion to 0.6 + 0.8 u(e). The r-th of them is of token
//              p[r mod T], where p is the permutation of Fisher and Yates that is drawn with u(E + t), t from T - 1
//              to 1. With E = K slots of a token may take the same expert, as with zipf; with E >= 7/3 K they do not.
//              Only this program has it.
// u(i) = ((m(seed + (i + 1) 0x9E3779B97F4A7C15) >> 11) + 1/2) 2^-53,
//   where m is the finalizer of SplitMix64 modulo 2^64.
struct BenchRouting {
  enum class Kind { balanced, zipf, uneven } kind = Kind::balanced;
  double exponent = 1.0;  // s
  uint64_t seed = 1;
};

struct BenchRoute {
  std::vector<int32_t> topk_TK;
  std::vector<float>
      logits_TE;  // topk are their K largest, in descending order; empty if no router could choose this route
};
BenchRoute bench_route(const BenchShape& shape, const BenchRouting& routing);

// The rows of a route, sorted by expert, then by pair.
struct BenchRows {
  std::vector<int32_t> offsets_E1, row_token_R, row_pair_R, pair_row_TK;
};
BenchRows bench_rows(const BenchShape& shape, const std::vector<int32_t>& topk_TK);

}  // namespace moebius
