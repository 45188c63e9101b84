// The passes of attention of a long sequence, for a few kv heads at a time.
#include <algorithm>

#include "model/attention/gqa.h"
#include "model/frozen.h"
#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"

namespace moebius {

// Ranks of cp that exchange heads need all of them, the norm over all heads needs the rows of all, and so do the
// largest logits. The gradient of o is that of plain products, which a section computes with its columns of W_o.
int64_t Gqa::kv_heads_of_section(const LayerContext& c) const {
  const Linear& o = o_.linear();
  const CpComm comm = window_ > 0 ? c.shape.cp_comm_window : c.shape.cp_comm;
  const bool exchanges_heads = c.mesh.shape().cp > 1 && (comm == CpComm::alltoall || comm == CpComm::hierarchical);
  const bool whole = !is_long_ || exchanges_heads || qk_norm_ == QkNorm::whole || c.max_logits != nullptr ||
                     o.is_quantised() || o.has_adapter();
  int64_t sections = whole ? 1 : std::min<int64_t>(G_, 4);
  while (G_ % sections != 0) --sections;
  return G_ / sections;
}

// The columns of q, k and v follow one another, in all heads and in those of the section.
template <class F>
void Gqa::for_each_part(const HeadRange& kv, F&& fn) const {
  const int64_t per_kv = heads_of(1), q = per_kv * kv.count;
  fn(per_kv * kv.first * d_, 0, q * d_);
  fn((H_ + kv.first) * d_, q * d_, kv.count * d_);
  fn((H_ + G_ + kv.first) * d_, (q + kv.count) * d_, kv.count * d_);
}

Tensor Gqa::section_of(Step& step, Tensor qkv_TC, const HeadRange& kv) const {
  const Tensor section_TC = step.alloc({qkv_TC.dim(0), (heads_of(kv.count) + 2 * kv.count) * d_}, dtype_);
  for_each_part(kv, [&](int64_t from, int64_t to, int64_t count) {
    copy_columns(step.stream,
                 {.to_TA = section_TC, .from_TB = qkv_TC, .to_first = to, .from_first = from, .count = count});
  });
  return section_TC;
}

Tensor Gqa::columns_of(Step& step, Tensor x_TA, const HeadRange& heads, int64_t width) const {
  const Tensor columns_TB = step.alloc({x_TA.dim(0), heads.count * width}, x_TA.dtype);
  copy_columns(step.stream,
               {.to_TA = columns_TB, .from_TB = x_TA, .from_first = heads.first * width, .count = heads.count * width});
  return columns_TB;
}

Qkv Gqa::rotated_section(Step& step, Tensor qkv_TC, const HeadRange& kv, Tensor section_TC) const {
  const int64_t T = qkv_TC.dim(0);
  Qkv r = alloc_qkv(step, T, kv.count);
  if (sinks_) r.sink_H = r.sink_H.rows(heads_of(kv.first), heads_of(kv.first + kv.count));
  r.doc_start_T = step.batch.attention_starts(T);
  StackScope rotation(step.stack);
  split_and_rotate(step, r, section_TC.empty() ? section_of(step, qkv_TC, kv) : section_TC);
  return r;
}

void Gqa::attend_in_sections(Step& step, Saved& saved, int64_t T) const {
  const int64_t heads = heads_of(section_G_);
  const Tensor o_TC = saved.o_THd.rows(0, T).view({T, H_ * d_}), lse_TH = saved.lse_TH.rows(0, T);
  for (int64_t first = 0; first < G_; first += section_G_) {
    StackScope section(step.stack);
    const Tensor own_o_THd = step.alloc({T, heads, d_}, dtype_), own_lse_TH = step.alloc({T, heads}, DType::f32);
    const Qkv r = rotated_section(step, saved.qkv_TC.rows(0, T), {first, section_G_});
    context_parallel_->forward(step, own_o_THd, own_lse_TH, r);
    const int64_t begin = heads_of(first);
    copy_columns(
        step.stream,
        {.to_TA = o_TC, .from_TB = own_o_THd.view({T, heads * d_}), .to_first = begin * d_, .count = heads * d_});
    copy_columns(step.stream, {.to_TA = lse_TH, .from_TB = own_lse_TH, .to_first = begin, .count = heads});
  }
}

// A section reads its columns of qkv before it writes those of dqkv. So qkv is projected to the memory of dqkv if it
// was not kept.
void Gqa::attend_bwd_in_sections(Step& step, Saved& saved, int64_t T, const Attention::Input& x) const {
  StackScope scope(step.stack);
  const bool is_projected = saved.qkv_TC.is_recomputed();
  const Tensor dqkv_TC = saved.dqkv_TC, qkv_TC = is_projected ? dqkv_TC : saved.qkv_TC.rows(0, T);
  if (is_projected) {
    StackScope projected(step.stack);
    project(step, qkv_TC, x(), saved.qkv_rows.low(T));
  }
  const Tensor dsink_H = sinks_ ? gradient_or_scratch(step, *sinks_) : Tensor{};
  for (int64_t first = 0; first < G_; first += section_G_) {
    StackScope section(step.stack);
    Qkv dr = alloc_qkv(step, T, section_G_);
    if (sinks_) dr.sink_H = dsink_H.rows(heads_of(first), heads_of(first + section_G_));
    attend_section_bwd(step, dqkv_TC, dr, {first, section_G_}, qkv_TC, saved);
  }
}

void Gqa::attend_section_bwd(Step& step, Tensor dqkv_TC, const Qkv& dr, const HeadRange& kv, Tensor qkv_TC,
                             const Saved& saved) const {
  const HeadRange heads{heads_of(kv.first), heads_of(kv.count)};
  const int64_t T = qkv_TC.dim(0);
  // The section is copied again after attention where memory counts more than the copy's time.
  Tensor section_TC = has_forward_sections_ ? Tensor{} : section_of(step, qkv_TC, kv);
  {
    StackScope attention(step.stack);
    const Qkv r = rotated_section(step, qkv_TC, kv, section_TC);
    const Tensor do_TC = step.alloc({T, heads.count * d_}, dtype_);
    const auto compute_do = [&] {
      StackScope product(step.stack);
      const Tensor w_DC = columns_of(step, o_.linear().w_for_dx(step).data, heads, d_);
      gemm(step.stream, {.c_MN = do_TC, .a = Tensor(saved.dy_TD), .b = w_DC});
    };
    const Tensor o_TC = columns_of(step, saved.o_THd.rows(0, T).view({T, H_ * d_}), heads, d_);
    const Tensor lse_TH = columns_of(step, saved.lse_TH.rows(0, T), heads, 1);
    const Shape rows{T, heads.count, d_};
    context_parallel_->backward(step, {.grads = dr,
                                       .do_THd = do_TC.view(rows),
                                       .o_THd = o_TC.view(rows),
                                       .lse_TH = lse_TH,
                                       .in = r,
                                       .compute_do = compute_do});
  }
  if (section_TC.empty()) section_TC = section_of(step, qkv_TC, kv);
  const Tensor dsection_TC = step.alloc(section_TC.shape, dtype_);
  rotate_bwd(step, dsection_TC, dr, section_TC);
  for_each_part(kv, [&](int64_t to, int64_t from, int64_t count) {
    copy_columns(step.stream,
                 {.to_TA = dqkv_TC, .from_TB = dsection_TC, .to_first = to, .from_first = from, .count = count});
  });
}

}  // namespace moebius
