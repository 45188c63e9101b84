#include "bench/shapes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "core/rng.h"

namespace moebius {
namespace {

// Returns the function u of the routing rule.
double uniform(uint64_t seed, uint64_t i) {
  uint64_t x = seed + (i + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  x ^= x >> 31;
  return (static_cast<double>(x >> 11) + 0.5) * 0x1p-53;
}

std::vector<double> popularity(int64_t E, double exponent) {
  std::vector<double> p(E);
  for (int64_t e = 0; e < E; ++e) p[e] = std::pow(static_cast<double>((5 * e + 3) % E) + 1.0, -exponent);
  const double sum = std::accumulate(p.begin(), p.end(), 0.0);
  for (double& x : p) x /= sum;
  return p;
}

BenchRoute balanced(const BenchShape& shape, uint64_t seed) {
  const Rng rng(seed, RngSite::bench);
  BenchRoute route;
  for (int64_t i = 0; i < shape.T() * shape.E; ++i) route.logits_TE.push_back(std::clamp(rng.normal(i), -3.0f, 3.0f));
  for (int64_t t = 0; t < shape.T(); ++t) {
    for (int64_t k = 0; k < shape.K; ++k) {
      const int64_t e = (t * shape.K + k) % shape.E;
      route.topk_TK.push_back(static_cast<int32_t>(e));
      // These logits are above all others, fall from slot to slot, and differ enough for bf16.
      route.logits_TE[t * shape.E + e] = 8.0f - 0.25f * static_cast<float>(k);
    }
  }
  return route;
}

BenchRoute zipf(const BenchShape& shape, const BenchRouting& routing) {
  std::vector<double> log_p = popularity(shape.E, routing.exponent), key(shape.E);
  for (double& p : log_p) p = std::log(p);
  std::vector<int32_t> order(shape.E);
  BenchRoute route;
  for (int64_t t = 0; t < shape.T(); ++t) {
    for (int64_t e = 0; e < shape.E; ++e) {
      key[e] = log_p[e] - std::log(-std::log(uniform(routing.seed, t * shape.E + e)));
      route.logits_TE.push_back(static_cast<float>(key[e]));
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t j) { return key[i] > key[j]; });
    route.topk_TK.insert(route.topk_TK.end(), order.begin(), order.begin() + shape.K);
  }
  return route;
}

// The k-th choices of tokens are T neighbours in the rows sorted by expert. So a token chooses an expert once if none
// has more than T rows.
BenchRoute uneven(const BenchShape& shape, uint64_t seed) {
  std::vector<double> edge(shape.E);
  for (int64_t e = 0; e < shape.E; ++e) edge[e] = 0.6 + 0.8 * uniform(seed, e);
  std::partial_sum(edge.begin(), edge.end(), edge.begin());
  std::vector<int64_t> token(shape.T());
  std::iota(token.begin(), token.end(), 0);
  for (int64_t t = shape.T() - 1; t > 0; --t)
    std::swap(token[t], token[static_cast<int64_t>(uniform(seed, shape.E + t) * static_cast<double>(t + 1))]);
  BenchRoute route;
  route.topk_TK.resize(shape.R());
  int64_t expert = 0;
  for (int64_t r = 0; r < shape.R(); ++r) {
    const double part = (static_cast<double>(r) + 0.5) / static_cast<double>(shape.R());
    while (expert + 1 < shape.E && part * edge.back() > edge[expert]) ++expert;
    route.topk_TK[token[r % shape.T()] * shape.K + r / shape.T()] = static_cast<int32_t>(expert);
  }
  return route;
}

BenchRoute zipf_of_a_slice(const BenchShape& shape, const BenchRouting& routing) {
  std::vector<double> edge = popularity(shape.E, routing.exponent);
  std::partial_sum(edge.begin(), edge.end(), edge.begin());
  BenchRoute route;
  for (int64_t i = 0; i < shape.R(); ++i) {
    const int64_t e = std::upper_bound(edge.begin(), edge.end(), uniform(routing.seed, i)) - edge.begin();
    route.topk_TK.push_back(static_cast<int32_t>(std::min(e, shape.E - 1)));
  }
  return route;
}

}  // namespace

const std::vector<BenchShape>& bench_shapes() {
  static const std::vector<BenchShape> all = {
      {.name = "bench-cpu",
       .batch = 8,
       .seq = 512,
       .D = 512,
       .F = 1024,
       .E = 16,
       .K = 2,
       .H = 8,
       .G = 4,
       .head = 64,
       .v_head = 64},
      {.name = "mixtral-8x7b",
       .batch = 8,
       .seq = 4096,
       .D = 4096,
       .F = 14336,
       .E = 8,
       .K = 2,
       .H = 32,
       .G = 8,
       .head = 128,
       .v_head = 128},
      {.name = "qwen3-30b-a3b",
       .batch = 8,
       .seq = 4096,
       .D = 2048,
       .F = 768,
       .E = 128,
       .K = 8,
       .H = 32,
       .G = 4,
       .head = 128,
       .v_head = 128},
      {.name = "deepseek-v3-8-local",
       .batch = 8,
       .seq = 4096,
       .D = 7168,
       .F = 2048,
       .E = 8,
       .K = 8,
       .H = 128,
       .G = 128,
       .head = 192,
       .v_head = 128},
      {.name = "olmoe",
       .batch = 8,
       .seq = 4096,
       .D = 2048,
       .F = 1024,
       .E = 64,
       .K = 8,
       .H = 16,
       .G = 16,
       .head = 128,
       .v_head = 128},
      {.name = "gpt-oss-20b",
       .batch = 8,
       .seq = 4096,
       .D = 2880,
       .F = 2880,
       .E = 32,
       .K = 4,
       .H = 64,
       .G = 8,
       .head = 64,
       .v_head = 64,
       .activation = {.alpha = 1.702f, .limit = 7, .shift = 1},
       .expert_biases = true},
  };
  return all;
}

int64_t scaled(int64_t size, double scale) {
  return std::max<int64_t>(1, std::llround(static_cast<double>(size) * scale));
}

BenchShape bench_shape(const std::string& name, double scale) {
  std::string names;
  for (BenchShape shape : bench_shapes()) {
    names += (names.empty() ? "" : ", ") + shape.name;
    if (shape.name != name) continue;
    for (int64_t* size : {&shape.seq, &shape.D, &shape.F}) *size = scaled(*size, scale);
    return shape;
  }
  MOEBIUS_FAIL(usage, "bench: --shape: expected one of {}; got \"{}\"", names, name);
}

BenchRoute bench_route(const BenchShape& shape, const BenchRouting& routing) {
  if (routing.kind == BenchRouting::Kind::balanced) return balanced(shape, routing.seed);
  if (routing.kind == BenchRouting::Kind::uneven) return uneven(shape, routing.seed);
  return shape.E > shape.K ? zipf(shape, routing) : zipf_of_a_slice(shape, routing);
}

BenchRows bench_rows(const BenchShape& shape, const std::vector<int32_t>& topk_TK) {
  BenchRows rows{std::vector<int32_t>(shape.E + 1), std::vector<int32_t>(shape.R()), std::vector<int32_t>(shape.R()),
                 std::vector<int32_t>(shape.R())};
  for (const int32_t e : topk_TK) ++rows.offsets_E1[e + 1];
  std::partial_sum(rows.offsets_E1.begin(), rows.offsets_E1.end(), rows.offsets_E1.begin());
  std::vector<int32_t> next = rows.offsets_E1;
  for (int64_t pair = 0; pair < shape.R(); ++pair) {
    const int32_t row = next[topk_TK[pair]]++;
    rows.row_token_R[row] = static_cast<int32_t>(pair / shape.K);
    rows.row_pair_R[row] = static_cast<int32_t>(pair);
    rows.pair_row_TK[pair] = row;
  }
  return rows;
}

}  // namespace moebius
