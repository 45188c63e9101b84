#include "ops/low_rank/low_rank_dropout.h"
#include "ops/cpu/vector.h"
#include "ops/low_rank/low_rank_dropout_bits.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kGrain = 16;  // rows of a task

struct Dropout {
  const LowRankDropout& a;
  Rng rng;
  uint32_t threshold;
  const int32_t *offsets, *token, *index;

  template <class T>
  void row(int64_t r, int64_t expert) const {
    const int64_t K = a.y_RK.dim(1), from = token && a.gather ? token[r] : r;
    T* y = a.y_RK.ptr<T>() + r * K;
    const T* x = a.x_TK.ptr<T>() + from * K;
    uint64_t element =
        dropout_row(index[token ? token[r] : r], a.draw.first_expert + expert, a.draw.num_experts, a.draw.num_columns) +
        static_cast<uint64_t>(a.draw.first_column);
    std::array<uint32_t, 4> words = rng.bits(element / 2);
    for (int64_t c = 0; c < K; ++c, ++element) {
      if (element % 2 == 0) words = rng.bits(element / 2);
      const bool keep = words[element % 2] >= threshold;
      if (a.accumulate)
        y[c] = keep ? from_f32<T>(to_f32(y[c]) + to_f32(x[c])) : y[c];
      else
        y[c] = keep ? x[c] : from_f32<T>(0.0f);
    }
  }
};

}  // namespace

void row_tokens(Stream&, const RowTokens& a) {
  const int64_t first = a.draw_2.ptr<int64_t>()[1];
  int32_t* index = a.index_T.ptr<int32_t>();
  for (int64_t r = 0; r < a.index_T.numel(); ++r) index[r] = static_cast<int32_t>(first + token_of(a.token, r));
}

void low_rank_dropout(Stream& s, const LowRankDropout& a) {
  const Tensor &offsets = a.rows.offsets_e1, &token = a.rows.token_R;
  const Dropout dropout{
      a,
      Rng(a.draw.seed, RngSite::dropout, static_cast<uint64_t>(a.draw.draw_2.ptr<int64_t>()[0]), a.draw.matrix),
      dropout_threshold(a.draw.rate),
      offsets.empty() ? nullptr : offsets.ptr<int32_t>(),
      token.empty() ? nullptr : token.ptr<int32_t>(),
      a.draw.index_N.ptr<int32_t>()};
  const int64_t num_experts = offsets.empty() ? 1 : offsets.numel() - 1;
  with_float_type(a.y_RK.dtype, [&]<class T>(T) {
    for (int64_t e = 0; e < num_experts; ++e) {
      const int64_t begin = offsets.empty() ? 0 : dropout.offsets[e],
                    end = offsets.empty() ? a.y_RK.dim(0) : dropout.offsets[e + 1];
      parallel_rows(s.pool(), end - begin, kGrain, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) dropout.row<T>(begin + r, e);
      });
    }
  });
}

}  // namespace moebius::cpu
