// Cases of dispatchers, whose tokens choose experts by a rule. RankOfCase is a rank of a case: its tokens, their
// routes, and its dispatcher.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "comm/transport/threads.h"
#include "config/dispatcher_choice.h"
#include "core/rng.h"
#include "model/moe/direct_window.h"
#include "model/moe/dispatcher.h"
#include "ops/cpu/testing.h"
#include "ops/permute/index_rows.h"

namespace moebius::testing {

// The first of a token's K experts: any; 0 or 1; the same for all tokens. The others are the experts that follow it.
enum class Choice { even, skewed, one };

struct Case {
  MeshShape mesh;
  DispatcherKind dispatcher;
  int64_t T = 1, E = 1, K = 1, D = 1;
  Choice choice = Choice::even;
  bool drops = false;
  DType dtype = DType::f32;
  int seed = 0;
  double rows_factor = 0;
  bool fixed_messages = false;  // for two-level: DispatcherSpec::fixed_messages
  bool sends_all = false;       // for direct: DispatcherSpec::sends_all
};

// Returns the expert of pair (token, k). Tokens are numbered over all ranks of the stage.
inline int64_t expert_of(const Case& c, int64_t token, int64_t k) {
  const Rng rng(static_cast<uint64_t>(c.seed), RngSite::bench);
  const int64_t first =
      c.choice == Choice::one
          ? c.E / 2
          : static_cast<int64_t>(rng.below(static_cast<uint64_t>(token), c.choice == Choice::even ? c.E : 2));
  return (first + k) % c.E;
}
inline bool is_kept(const Case& c, int64_t token, int64_t k) {
  return !c.drops || (token * 5 + k * 3 + c.seed) % 4 != 1;
}
inline float weight_of(int64_t token, int64_t k) { return static_cast<float>(1 + (token * 7 + k * 3) % 16) / 16; }
// Returns a number that bf16 holds, so that a row that is only moved is the same in any dtype. The first two columns
// of a row identify its token.
inline double row_value(int64_t token, int64_t d) {
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
                 .num_experts = c.E,
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
                                                   .sends_all = c.sends_all,
                                                   .fixed_messages = c.fixed_messages,
                                                   .layer = "layer 7"})),
        handle_(dispatcher_->declare_saved(plan_, "handle")),
        first_token_(mesh.group(Axis::tp_cp_dp).rank() * c.T),
        R_(dispatcher_->max_rows(c.T)) {
    plan_.bind(DeviceKind::cpu, int64_t{1} << 22);
    make_route();
    announce();
  }

  // Sets all bits of memory that later calls get from the step stack, so that what they do not write is a NaN.
  void poison() {
    StackScope scope(step_.stack);
    const Tensor memory = step_.alloc_bytes(int64_t{1} << 20);
    std::memset(memory.data, 0xff, static_cast<size_t>(memory.num_bytes()));
  }
  void announce() { dispatcher_->announce(step_, route_, *handle_); }
  Array rows_of_tokens() const {
    Values x;
    for (int64_t t = 0; t < c_.T; ++t)
      for (int64_t d = 0; d < c_.D; ++d) x.push_back(row_value(first_token_ + t, d));
    return Array::of({c_.T, c_.D}, c_.dtype, x);
  }

  // Returns how often each pair of the stage arrives on this rank. A row that no pair has fails the test.
  std::vector<int64_t> arrivals(const Dispatched& rows, bool weighted) {
    const int64_t W = mesh_.group(Axis::tp_cp_dp).size(), e = c_.E / c_.mesh.ep, first = e * mesh_.place().ep;
    std::vector<int64_t> times(W * c_.T * c_.K);
    const int32_t* offsets = rows.rows.offsets_e1.ptr<int32_t>();
    for (int64_t i = 0; i < e; ++i) {
      for (int64_t r = offsets[i]; r < offsets[i + 1]; ++r) count(rows, r, first + i, weighted, times);
    }
    return times;
  }

  // Returns results of experts that are their rows: the first etp rank returns the row, and the others zeros, since the
  // results are summed.
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

  // Returns the bytes that the direct dispatcher has sent so far.
  int64_t sent_bytes() const { return *window_.sent_1().ptr<int64_t>(); }
  Step& step() { return step_; }
  const Dispatcher& dispatcher() const { return *dispatcher_; }
  DispatchHandle& handle() { return *handle_; }
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
  std::unique_ptr<DispatchHandle> handle_;
  int64_t first_token_, R_;
  Route route_;
  Step step_{s_, plan_.stack(), batch_};
};

// Sums the arrivals of pairs over all ranks, and expects every kept pair once on each etp rank.
inline void expect_once(const Case& c, Mesh& mesh, Stream& s, std::vector<int64_t> times) {
  mesh.group(Axis::tp_cp_dp).all_reduce_sum(s, tensor_of(times.data(), {std::ssize(times)}));
  for (int64_t p = 0; p < std::ssize(times); ++p)
    ASSERT_EQ(times[p], is_kept(c, p / c.K, p % c.K) ? c.mesh.etp : 0) << "pair " << p;
}

// Returns the sum over the kept k of weight (or 1) times the token's row, in the order of k, in f32.
inline double expected(const Case& c, int64_t token, int64_t d, bool weighted) {
  float sum = 0;
  for (int64_t k = 0; k < c.K; ++k) {
    if (!is_kept(c, token, k)) continue;
    sum += (weighted ? weight_of(token, k) : 1.0f) * static_cast<float>(row_value(token, d));
  }
  return c.dtype == DType::f32 ? sum : to_f32(to_bf16(sum));
}

// Sums of sixteenths of small integers are exact in f32 in any order. In bf16 all-gather, direct and two-level round
// the part of each rank, and then the sum, each by at most 2^-8 of it. The K terms of a token are at most 32 each.
inline void expect_rows(const Case& c, const Array& got, int64_t first_token, bool weighted) {
  const Values values = got.values();
  const double slack = c.dtype == DType::f32 ? 0 : 64.0 * static_cast<double>(c.K) * 0x1p-8;
  for (int64_t i = 0; i < c.T * c.D; ++i) {
    ASSERT_NEAR(values[i], expected(c, first_token + i / c.D, i % c.D, weighted), slack)
        << name_of(c.dispatcher) << ", token " << first_token + i / c.D;
  }
}

}  // namespace moebius::testing
