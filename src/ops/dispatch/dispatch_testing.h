// Cases of ranks that dispatch rows to each other, and what each rank of a case has.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "ops/cpu/testing.h"
#include "ops/dispatch/dispatch.h"
#include "ops/dispatch/dispatch_ref.h"

namespace moebius::testing::dispatch {

struct Case {
  int64_t P = 2, etp = 1, T = 5, e = 2, K = 2, D = 8;
  DType dtype = DType::f32;
  bool one_expert = false;  // all tokens choose the experts from E / 2 on
  int blocks = 0;           // > 0: the limit on the blocks of a GPU's kernels, so that each block has many rows
  // The ends of the parts of the distances, besides W. Rows move in a call for each part.
  std::vector<int64_t> ends_of_parts = {};
  int64_t W() const { return P * etp; }
  int64_t E() const { return P * e; }
  int64_t J() const { return std::min(K, P); }
  int64_t L() const { return std::min(K, e); }
  int64_t N() const { return W() * T; }
  int64_t B() const { return T * J() * etp; }
  std::vector<RowDistances> parts() const {
    std::vector<RowDistances> all;
    int64_t first = 0;
    for (const int64_t end : ends_of_parts) {
      all.push_back({.first = first, .end = end});
      first = end;
    }
    all.push_back({.first = first});
    return all;
  }
};

inline std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (Case c :
         {Case{},
          Case{.T = 0},
          Case{.P = 1, .etp = 3, .T = 4, .e = 3},
          Case{.P = 3, .T = 41, .e = 2, .K = 3, .D = 5},
          Case{.P = 4, .T = 70, .e = 2, .K = 8, .D = 72},
          Case{.P = 2, .etp = 2, .T = 33, .e = 4, .K = 3, .D = 264},
          Case{.P = 5, .T = 70, .e = 3, .K = 1, .D = 1},
          Case{.P = 3, .T = 1030, .e = 1, .K = 2, .D = 2},
          Case{.P = 3, .T = 64, .e = 4, .K = 4, .D = 40, .one_expert = true},
          Case{.P = 36, .T = 3, .e = 1, .K = 34, .D = 24},
          Case{.P = 2, .T = 9, .e = 40, .K = 34, .D = 24},                 // more pairs of a row than lanes of a warp
          Case{.P = 2, .T = 70, .e = 16, .K = 8, .D = 2056, .blocks = 2},  // experts of a rank as for 128 on 8 ranks
          Case{.P = 2, .T = 8300, .e = 1, .K = 1, .D = 1},                 // tokens of several loops of a scan
          Case{.P = 2, .T = 150, .e = 2, .K = 2, .D = 2056, .blocks = 2},  // rows of several pieces, slots used again
          Case{.P = 2, .etp = 2, .T = 131, .e = 4, .K = 3, .D = 520, .blocks = 2},
          Case{.P = 2, .T = 450, .e = 1, .K = 2, .D = 2056, .blocks = 16},  // by the bulk copy engine
          Case{.P = 2, .T = 30, .e = 2, .K = 2, .D = 72, .ends_of_parts = {1}},
          Case{.P = 5, .T = 70, .e = 2, .K = 3, .D = 72, .ends_of_parts = {1, 3}},
          Case{.P = 2, .etp = 2, .T = 33, .e = 4, .K = 3, .D = 5, .ends_of_parts = {1, 2, 3}},
          Case{.P = 3, .T = 200, .e = 1, .K = 2, .D = 2056, .blocks = 16, .ends_of_parts = {2}}}) {
      c.dtype = dtype;
      all.push_back(c);
    }
  }
  return all;
}

inline int64_t expert_of(const Case& c, int64_t q, int64_t t, int64_t k) {
  const Rng rng(7, RngSite::bench);
  const int64_t first = c.one_expert ? c.E() / 2 : static_cast<int64_t>(rng.below(q * 4096 + t, c.E()));
  return (first + k) % c.E();
}
inline bool is_kept(int64_t q, int64_t t, int64_t k) { return (q + 3 * t + 5 * k) % 7 != 2; }

// A rank: its window, and the tensors that it computes.
struct Rank {
  // The arrays of a window begin at multiples of 16 bytes.
  enum { counts, routes, tokens, back, back_pairs, kNumArrays };
  Rank(const Case& c, int64_t q)
      : dest(Array::poisoned({c.T, c.J()}, DType::i32)),
        slot(dest),
        count(Array::poisoned({c.P}, DType::i32)),
        row(dest),
        back_row(Array::poisoned({c.T, c.J() * c.etp}, DType::i32)),
        arrive(Array::poisoned({c.W() + 1}, DType::i32)),
        back_first(Array::poisoned({c.W()}, DType::i32)),
        x(Array::normal({c.T, c.D}, c.dtype, 100 + q)),
        weight(Array::normal({c.T, c.K}, DType::f32, 200 + q)),
        sent(Array::of({1}, DType::i64, {0})) {
    std::vector<int32_t> experts, kept_rows;
    for (int64_t t = 0; t < c.T; ++t) {
      experts_of_token.emplace_back();
      for (int64_t k = 0; k < c.K; ++k) {
        experts.push_back(static_cast<int32_t>(expert_of(c, q, t, k)));
        kept_rows.push_back(is_kept(q, t, k) ? 0 : -1);
        if (is_kept(q, t, k)) experts_of_token.back().push_back(experts.back());
      }
    }
    topk = Array::of_ints({c.T, c.K}, experts);
    kept = Array::of_ints({c.T, c.K}, kept_rows);
    const std::array<std::pair<Shape, DType>, kNumArrays> arrays = {{{{c.W(), c.P}, DType::i32},
                                                                     {{c.N(), 2 * c.L()}, DType::i32},
                                                                     {{c.N(), c.D}, c.dtype},
                                                                     {{c.B(), c.D}, c.dtype},
                                                                     {{c.B(), c.L()}, DType::f32}}};
    int64_t bytes = 0;
    for (int i = 0; i < kNumArrays; ++i) {
      offset[i] = bytes;
      shape[i] = arrays[i].first;
      dtype[i] = arrays[i].second;
      bytes += div_ceil(shape[i].numel() * size_of(dtype[i]), 16) * 16;
    }
    window = Array::poisoned({bytes / 2}, DType::bf16);
  }
  Tensor at(int array) {
    return {.data = static_cast<std::byte*>(window.tensor().data) + offset[array],
            .shape = shape[array],
            .dtype = dtype[array]};
  }

  ref::TokenExperts experts_of_token;
  Array topk, kept, dest, slot, count, row, back_row, arrive, back_first, x, weight, sent, window;
  int64_t offset[kNumArrays] = {};
  Shape shape[kNumArrays] = {{0}, {0}, {0}, {0}, {0}};
  DType dtype[kNumArrays] = {};
};

}  // namespace moebius::testing::dispatch
