#include "ops/attention/attention_sizes.h"

namespace moebius::cuda {
namespace {

template <class Op>
AttentionSizes sizes_of(const Op& a, const Tensor& k, const Tensor& v) {
  const int64_t rows = a.q_THd.dim(0) / a.batch, kv_rows = k.dim(0) / a.batch;
  return {.rows = rows,
          .kv_rows = kv_rows,
          .shift = a.is_part ? a.q_first - a.kv_first : kv_rows - rows,
          .kv_first = a.is_part ? a.kv_first : 0,
          .heads = narrow<int>(a.q_THd.dim(1)),
          .kv_heads = narrow<int>(k.dim(1)),
          .width = narrow<int>(a.q_THd.dim(2)),
          .v_width = narrow<int>(v.dim(2)),
          .window = a.window,
          .scale = a.scale,
          .doc_start = a.doc_start_T.empty() ? nullptr : a.doc_start_T.template ptr<int32_t>()};
}

}  // namespace

AttentionSizes attention_sizes(const AttentionFwd& a) { return sizes_of(a, a.k_UGd, a.v_UGd); }
AttentionSizes attention_sizes(const AttentionBwd& a) { return sizes_of(a, a.k_TGd, a.v_TGd); }

}  // namespace moebius::cuda
