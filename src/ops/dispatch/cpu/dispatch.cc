#include "ops/dispatch/dispatch.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <vector>

#include "ops/dispatch/dispatch_backends.h"
#include "ops/permute/permute.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kRowsPerTask = 64;

std::byte* array_of(const Tensor& bases_W, int64_t rank, int64_t offset) {
  return reinterpret_cast<std::byte*>(bases_W.ptr<int64_t>()[rank]) + offset;
}

// Returns the lowest ep rank above `last` that has an expert of these pairs, or P if there is none.
int32_t next_destination(const int32_t* topk, const int32_t* kept, int64_t K, int64_t e, int32_t last, int32_t P) {
  int32_t next = P;
  for (int64_t k = 0; k < K; ++k) {
    const auto p = static_cast<int32_t>(topk[k] / e);
    if ((!kept || kept[k] >= 0) && p > last) next = std::min(next, p);
  }
  return next;
}

// A rank among W, and the ranks that it sends rows to.
struct Sender {
  int64_t rank, etp, W;
  RowDistances of = {};
  bool sends_to(int64_t q) const { return of.has(rank_distance(rank, q, W)); }
};

int64_t rows_for_others(const int32_t* dest, int64_t n, const Sender& from) {
  int64_t rows = 0;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t q = dest[i] * from.etp; dest[i] >= 0 && q < (dest[i] + 1) * from.etp; ++q)
      rows += q != from.rank && from.sends_to(q) ? 1 : 0;
  return rows;
}

// Calls body(source rank, first row here, number of rows, first row there).
template <class Body>
void for_each_source(const Tensor& arrive_W1, const Tensor& back_W, Body&& body) {
  const int32_t *arrive = arrive_W1.ptr<int32_t>(), *back = back_W.ptr<int32_t>();
  for (int64_t q = 0; q < back_W.numel(); ++q) body(q, arrive[q], arrive[q + 1] - arrive[q], back[q]);
}

}  // namespace

void destinations(Stream& s, const Destinations& a) {
  const int64_t T = a.topk_TK.dim(0), K = a.topk_TK.dim(1), J = a.dest_TJ.dim(1);
  const auto P = static_cast<int32_t>(a.count_P.numel());
  int32_t *dest = a.dest_TJ.ptr<int32_t>(), *slot = a.slot_TJ.ptr<int32_t>(), *count = a.count_P.ptr<int32_t>();
  parallel_rows(s.pool(), T, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t* kept = a.kept_TK.empty() ? nullptr : a.kept_TK.ptr<int32_t>() + t * K;
      int32_t last = -1;
      for (int64_t j = 0; j < J; ++j) {
        if (last < P) last = next_destination(a.topk_TK.ptr<int32_t>() + t * K, kept, K, a.experts_of_rank, last, P);
        dest[t * J + j] = last < P ? last : -1;
      }
    }
  });
  std::fill(count, count + P, 0);
  for (int64_t i = 0; i < T * J; ++i) slot[i] = dest[i] < 0 ? -1 : count[dest[i]]++;
}

void dispatch_places(Stream& s, const DispatchPlaces& a) {
  const int64_t W = a.counts_WP.dim(0), P = a.counts_WP.dim(1), etp = W / P, T = a.dest_TJ.dim(0), J = a.dest_TJ.dim(1),
                ep = a.rank / etp;
  const int32_t* counts = a.counts_WP.ptr<int32_t>();
  int32_t *arrive = a.arrive_W1.ptr<int32_t>(), *back = a.back_W.ptr<int32_t>();
  arrive[0] = 0;
  for (int64_t q = 0; q < W; ++q) {
    const int32_t* of_rank = counts + q * P;
    arrive[q + 1] = arrive[q] + of_rank[ep];
    back[q] =
        static_cast<int32_t>(etp * std::accumulate(of_rank, of_rank + ep, int64_t{0}) + a.rank % etp * of_rank[ep]);
  }
  // Where this rank's rows for ep rank p begin in the window of p, and where the rows that return from p begin here.
  std::vector<int32_t> there(P), here(P);
  for (int64_t p = 0, returned = 0; p < P; ++p) {
    for (int64_t q = 0; q < a.rank; ++q) there[p] += counts[q * P + p];
    here[p] = static_cast<int32_t>(returned);
    returned += etp * counts[a.rank * P + p];
  }
  const int32_t *dest = a.dest_TJ.ptr<int32_t>(), *slot = a.slot_TJ.ptr<int32_t>();
  int32_t *row = a.row_TJ.ptr<int32_t>(), *back_row = a.back_row_TB.ptr<int32_t>();
  parallel_rows(s.pool(), T * J, kRowsPerTask * J, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int32_t p = dest[i];
      row[i] = p < 0 ? -1 : there[p] + slot[i];
      for (int64_t copy = 0; copy < etp; ++copy) {
        const auto before = static_cast<int32_t>(p < 0 ? 0 : copy * counts[a.rank * P + p]);
        back_row[i * etp + copy] = p < 0 ? -1 : here[p] + before + slot[i];
      }
    }
  });
}

void push_rows(Stream& s, const PushRows& a) {
  const int64_t T = a.x_TD.dim(0), J = a.dest_TJ.dim(1), row_bytes = a.x_TD.dim(1) * size_of(a.x_TD.dtype);
  const int32_t *dest = a.dest_TJ.ptr<int32_t>(), *row = a.row_TJ.ptr<int32_t>();
  const auto* x = static_cast<const std::byte*>(a.x_TD.data);
  const Sender from{.rank = a.rank, .etp = a.etp, .W = a.bases_W.numel(), .of = a.of};
  parallel_rows(s.pool(), T, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * J; i < end * J; ++i) {
      for (int64_t q = dest[i] * a.etp; dest[i] >= 0 && q < (dest[i] + 1) * a.etp; ++q)
        if (from.sends_to(q))
          std::memcpy(array_of(a.bases_W, q, a.offset) + row[i] * row_bytes, x + i / J * row_bytes, row_bytes);
    }
  });
  *a.sent_1.ptr<int64_t>() += rows_for_others(dest, T * J, from) * row_bytes;
}

void contiguous_places(Stream&, const ContiguousPlaces& a) {
  const int64_t T = a.dest_TJ.dim(0), P = a.dest_TJ.dim(1), W = a.back_W.numel();
  int32_t *dest = a.dest_TJ.ptr<int32_t>(), *row = a.row_TJ.ptr<int32_t>(), *back_row = a.back_row_TB.ptr<int32_t>();
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t j = 0; j < P; ++j) {
      dest[t * P + j] = static_cast<int32_t>(j);
      row[t * P + j] = static_cast<int32_t>(a.rank * T + t);
    }
    for (int64_t q = 0; q < W; ++q) back_row[t * W + q] = static_cast<int32_t>(q * T + t);
  }
  for (int64_t q = 0; q <= W; ++q) a.arrive_W1.ptr<int32_t>()[q] = static_cast<int32_t>(q * T);
  for (int64_t q = 0; q < W; ++q) a.back_W.ptr<int32_t>()[q] = static_cast<int32_t>(a.rank * T);
}

void push_to_all(Stream&, const PushToAll& a) {
  const int64_t W = a.bases_W.numel(), bytes = a.x_M.num_bytes();
  for (int64_t q = 0; q < W; ++q) std::memcpy(array_of(a.bases_W, q, a.offset) + a.rank * bytes, a.x_M.data, bytes);
  *a.sent_1.ptr<int64_t>() += (W - 1) * bytes;
}

void sorted_places(Stream& s, const SortedPlaces& a) {
  const int64_t G = a.row_GTJ.dim(0), n = a.dest_TJ.numel(), P = a.count_P.numel();
  const int32_t *dest = a.dest_TJ.ptr<int32_t>(), *slot = a.slot_TJ.ptr<int32_t>(), *count = a.count_P.ptr<int32_t>();
  int32_t* row = a.row_GTJ.ptr<int32_t>();
  std::vector<int32_t> first(P);
  int64_t begin_of_next = 0;
  for (int64_t i = 0; i < P; ++i) {
    const int64_t p = i < a.last ? i : i + 1 < P ? i + 1 : a.last;
    first[p] = static_cast<int32_t>(begin_of_next);
    begin_of_next += a.section > 0 ? a.section : count[p];
  }
  parallel_rows(s.pool(), n, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t g = 0; g < G; ++g)
      for (int64_t i = begin; i < end; ++i)
        row[g * n + i] = dest[i] >= 0 && dest[i] / (P / G) == g ? first[dest[i]] + slot[i] : -1;
  });
}

void spread_rows(Stream& s, const SpreadRows& a) {
  const int64_t J = a.row_TJ.dim(1), row_bytes = a.x_TD.dim(1) * size_of(a.x_TD.dtype);
  const int32_t* row = a.row_TJ.ptr<int32_t>();
  const auto* x = static_cast<const std::byte*>(a.x_TD.data);
  auto* array = static_cast<std::byte*>(a.array_SD.data);
  parallel_rows(s.pool(), a.x_TD.dim(0), kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * J; i < end * J; ++i)
      if (row[i] >= 0) std::memcpy(array + row[i] * row_bytes, x + i / J * row_bytes, row_bytes);
  });
}

void pack_routes(Stream& s, const PackRoutes& a) {
  const int64_t T = a.topk_TK.dim(0), K = a.topk_TK.dim(1);
  const int32_t *topk = a.topk_TK.ptr<int32_t>(), *kept = a.kept_TK.empty() ? nullptr : a.kept_TK.ptr<int32_t>();
  int32_t* routes = a.routes_T2K.ptr<int32_t>();
  const auto shift = static_cast<int32_t>(a.shift);
  parallel_rows(s.pool(), T, kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t k = 0; k < K; ++k)
        routes[t * 2 * K + k] = kept && kept[t * K + k] < 0 ? -1 : topk[t * K + k] + shift;
      std::memcpy(routes + t * 2 * K + K, a.weight_TK.ptr<float>() + t * K, K * sizeof(float));
    }
  });
}

void select_routes(Stream& s, const SelectRoutes& a) {
  const int64_t K = a.topk_NK.dim(1);
  int32_t* topk = a.topk_NK.ptr<int32_t>();
  const int32_t* routes = a.routes_N2K.ptr<int32_t>();
  parallel_rows(s.pool(), a.topk_NK.dim(0), kRowsPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t k = 0; k < K; ++k) {
        const int64_t here = routes[n * 2 * K + k] - a.first_expert;
        topk[n * K + k] = here >= 0 && here < a.num_experts ? static_cast<int32_t>(here) : -1;
      }
      std::memcpy(a.weight_NK.ptr<float>() + n * K, routes + n * 2 * K + K, K * sizeof(float));
    }
  });
}

void push_routes(Stream& s, const PushRoutes& a) {
  const int64_t T = a.dest_TJ.dim(0), J = a.dest_TJ.dim(1), K = a.topk_TK.dim(1), e = a.experts_of_rank,
                L = std::min(K, e), row_bytes = 2 * L * size_of(DType::i32);
  const int32_t *dest = a.dest_TJ.ptr<int32_t>(), *row = a.row_TJ.ptr<int32_t>();
  parallel_rows(s.pool(), T, kRowsPerTask, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> pairs(2 * L);
    for (int64_t i = begin * J; i < end * J; ++i) {
      if (dest[i] < 0) continue;
      const int32_t* topk = a.topk_TK.ptr<int32_t>() + i / J * K;
      const int32_t* kept = a.kept_TK.empty() ? nullptr : a.kept_TK.ptr<int32_t>() + i / J * K;
      std::fill_n(pairs.begin(), L, -1);
      std::fill_n(pairs.begin() + L, L, 0);
      for (int64_t k = 0, l = 0; k < K; ++k) {
        if ((kept && kept[k] < 0) || topk[k] / e != dest[i]) continue;
        pairs[l] = topk[k];
        pairs[L + l++] = std::bit_cast<int32_t>(a.weight_TK.ptr<float>()[i / J * K + k]);
      }
      for (int64_t q = dest[i] * a.etp; q < (dest[i] + 1) * a.etp; ++q)
        std::memcpy(array_of(a.bases_W, q, a.offset) + row[i] * row_bytes, pairs.data(), row_bytes);
    }
  });
  const Sender from{.rank = a.rank, .etp = a.etp, .W = a.bases_W.numel()};
  *a.sent_1.ptr<int64_t>() += rows_for_others(dest, T * J, from) * row_bytes;
}

// The rows that return to one rank are consecutive in its window, so one combine computes them.
void return_sums(Stream& s, const ReturnSums& a) {
  const int64_t row_bytes = a.y_RD.dim(1) * size_of(a.y_RD.dtype);
  for_each_source(a.arrive_W1, a.back_W, [&](int64_t q, int64_t first, int64_t num, int64_t there) {
    if (num == 0 || !a.of.has(rank_distance(q, a.rank, a.bases_W.numel()))) return;
    const Tensor out{.data = array_of(a.bases_W, q, a.offset) + there * row_bytes,
                     .shape = {num, a.y_RD.dim(1)},
                     .dtype = a.y_RD.dtype};
    combine(s, {.out_TD = out,
                .y_RD = a.y_RD,
                .pair_row_TK = a.pair_row_NL.rows(first, first + num),
                .weight_TK = a.weight_NL.empty() ? Tensor{} : a.weight_NL.rows(first, first + num)});
    if (q != a.rank) *a.sent_1.ptr<int64_t>() += num * row_bytes;
  });
}

void return_pairs(Stream& s, const ReturnPairs& a) {
  const int64_t L = a.pair_row_NL.dim(1);
  for_each_source(a.arrive_W1, a.back_W, [&](int64_t q, int64_t first, int64_t num, int64_t there) {
    if (num == 0) return;
    auto* to = reinterpret_cast<float*>(array_of(a.bases_W, q, a.offset)) + there * L;
    rows_to_pairs(
        s,
        {.to_TK = tensor_of(to, {num, L}), .from_R = a.from_R, .pair_row_TK = a.pair_row_NL.rows(first, first + num)});
    if (q != a.rank) *a.sent_1.ptr<int64_t>() += num * L * 4;
  });
}

void sum_pairs(Stream& s, const SumPairs& a) {
  const int64_t T = a.topk_TK.dim(0), K = a.topk_TK.dim(1), J = a.dest_TJ.dim(1), etp = a.back_row_TB.dim(1) / J,
                L = a.from_BL.dim(1), e = a.experts_of_rank;
  parallel_rows(s.pool(), T, kRowsPerTask, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> seen(J);  // by destination: pairs of the token before k
    for (int64_t t = begin; t < end; ++t) {
      const int32_t* kept = a.kept_TK.empty() ? nullptr : a.kept_TK.ptr<int32_t>() + t * K;
      const int32_t *topk = a.topk_TK.ptr<int32_t>() + t * K, *dest = a.dest_TJ.ptr<int32_t>() + t * J;
      std::fill(seen.begin(), seen.end(), 0);
      for (int64_t k = 0; k < K; ++k) {
        float sum = 0;
        const int64_t j = kept && kept[k] < 0 ? J : std::find(dest, dest + J, topk[k] / e) - dest;
        for (int64_t i = 0; j < J && i < etp; ++i) {
          const int64_t row = a.back_row_TB.ptr<int32_t>()[(t * J + j) * etp + i];
          sum += a.from_BL.ptr<float>()[row * L + seen[j]];
        }
        if (j < J) ++seen[j];
        a.to_TK.ptr<float>()[t * K + k] = sum;
      }
    }
  });
}

void part_rows(Stream&, const PartRows& a) {
  const int64_t e = a.offsets_e1.numel() - 1, J = a.dest_TJ.dim(1), L = a.pair_row_NL.dim(1), ep = a.rank / a.etp,
                W = a.arrive_W1.numel() - 1;
  const int32_t *offsets = a.offsets_e1.ptr<int32_t>(), *token = a.row_token_R.ptr<int32_t>();
  int32_t* own = a.own_2e.ptr<int32_t>();
  for (int64_t i = 0; i < e; ++i) {
    // Returns the first row of the expert that comes from rank q or from one after it.
    const auto first_from = [&](int64_t q) {
      const int32_t n = a.arrive_W1.ptr<int32_t>()[q];
      return static_cast<int32_t>(std::lower_bound(token + offsets[i], token + offsets[i + 1], n) - token);
    };
    own[i] = first_from(a.rank);
    own[e + i] = first_from(a.rank + 1);
    const auto write_runs = [&](const Tensor& runs_22e, const RowDistances& of) {
      int32_t *begins = runs_22e.ptr<int32_t>() + 2 * i, *ends = begins + 2 * e;
      begins[0] = begins[1] = ends[0] = ends[1] = offsets[i + 1];
      if (of.count(W) == 0) return;
      const SourceRanks from = source_ranks(of, a.rank, W);
      begins[0] = from.wraps() ? offsets[i] : first_from(from.first);
      ends[0] = first_from(from.last + 1);
      if (from.wraps()) begins[1] = first_from(from.first);
    };
    if (a.far_from > 1) write_runs(a.near_22e, {.first = 1, .end = a.far_from});
    write_runs(a.far_22e, {.first = a.far_from});
  }
  const int32_t *dest = a.dest_TJ.ptr<int32_t>(), *row = a.row_TJ.ptr<int32_t>();
  for (int64_t i = 0; i < a.dest_TJ.numel(); ++i) {
    if (dest[i] != ep) continue;
    for (int64_t l = 0; l < L; ++l) {
      const int32_t r = a.pair_row_NL.ptr<int32_t>()[row[i] * L + l];
      if (r >= 0) a.own_token_R.ptr<int32_t>()[r] = static_cast<int32_t>(i / J);
    }
  }
}

}  // namespace moebius::cpu
