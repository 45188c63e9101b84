#include "model/attention/latent_kv.h"

#include <algorithm>

#include "model/layers/row_chunks.h"
#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"
#include "ops/mla/mla.h"

namespace moebius {
namespace {

Tensor as_rows(const Tensor& t_THw) { return t_THw.view({t_THw.dim(0), t_THw.dim(1) * t_THw.dim(2)}); }

bool shares_heads(CpComm comm) { return comm == CpComm::alltoall || comm == CpComm::hierarchical; }

}  // namespace

LatentKv::LatentKv(const LayerContext& c, const ParamSpec& w_kvb, const Widths& widths)
    : w_(c, w_kvb), widths_(widths), max_chunk_(c.expert_chunk > 0 ? c.expert_chunk : 32768) {
  const bool plain = c.precision.recipe == PrecisionRecipe::none && w_.param().w.dtype == c.dtype;
  const MeshShape& mesh = c.mesh.shape();
  const bool is_late = mesh.cp > 1 ? plain || !shares_heads(c.shape.cp_comm) : is_long_sequence(c);
  // Rows are rounded by their tokens, and those of other ranks are not known here.
  const bool needs_own_rows =
      c.precision.recipe == PrecisionRecipe::nvfp4 && w_.linear().is_quantised() && mesh.tp * mesh.cp > 1;
  is_expanded_late_ = is_late && !needs_own_rows && !w_.linear().has_adapter();
}

int64_t LatentKv::chunk_of(int64_t rows) const {
  if (rows <= max_chunk_) return rows;
  constexpr int64_t kBlock = 128;  // of a quantised operand
  const int64_t even = div_ceil(rows, div_ceil(rows, max_chunk_));
  return max_chunk_ < kBlock ? even : div_ceil(even, kBlock) * kBlock;
}

void LatentKv::put_together(Step& step, const Kv& out, Tensor kv_THw, Tensor k_rope_Tr) const {
  latent_kv_fwd(step.stream, {.k_THd = out.k_TGd, .v_THv = out.v_TGd, .kv_THw = kv_THw, .k_rope_Tr = k_rope_Tr});
}

Kv LatentKv::expand(Step& step, const Kv& sent, const HeadRange& heads) const {
  const Tensor c_UR = as_rows(sent.k_TGd);
  const int64_t U = c_UR.dim(0);
  const DType dtype = c_UR.dtype;
  const Kv kv{step.alloc({U, heads.count, widths_.nope + widths_.rope}, dtype),
              step.alloc({U, heads.count, widths_.v}, dtype)};
  const int64_t chunk = chunk_of(U);
  for (int64_t begin = 0; begin < U; begin += chunk) {
    const int64_t end = std::min(U, begin + chunk);
    StackScope scope(step.stack);
    const Tensor kv_uHw = step.alloc({end - begin, heads.count, head_width()}, dtype), c_uR = c_UR.rows(begin, end);
    if (are_all(heads)) {
      w_.linear().forward(step, as_rows(kv_uHw), c_uR);
    } else {
      gemm(step.stream, {.c_MN = as_rows(kv_uHw), .a = c_uR, .b = rows_of(w_.param().w, heads), .trans_b = true});
    }
    put_together(step, {kv.k_TGd.rows(begin, end), kv.v_TGd.rows(begin, end)}, kv_uHw,
                 as_rows(sent.v_TGd.rows(begin, end)));
  }
  return kv;
}

void LatentKv::expand_bwd(Step& step, const Bwd& a) const {
  const int64_t U = a.sent.k_TGd.dim(0), chunk = chunk_of(U);
  const auto rows = [](const Kv& x, int64_t begin, int64_t end) {
    return Kv{x.k_TGd.rows(begin, end), x.v_TGd.rows(begin, end)};
  };
  for (int64_t begin = 0; begin < U; begin += chunk) {
    const int64_t end = std::min(U, begin + chunk);
    ChunkStep of_chunk(step, begin);
    expand_rows_bwd(of_chunk.step, {.dsent = rows(a.dsent, begin, end),
                                    .dkv = rows(a.dkv, begin, end),
                                    .sent = rows(a.sent, begin, end),
                                    .heads = a.heads,
                                    .is_first = a.is_first && begin == 0});
  }
}

void LatentKv::expand_rows_bwd(Step& step, const Bwd& a) const {
  const Tensor c_UR = as_rows(a.sent.k_TGd), dc_UR = as_rows(a.dsent.k_TGd);
  const Param& w = w_.param();
  StackScope scope(step.stack);
  const Tensor dkv_UHw = step.alloc({c_UR.dim(0), a.heads.count, head_width()}, c_UR.dtype), dkv = as_rows(dkv_UHw);
  latent_kv_bwd(
      step.stream,
      {.dkv_THw = dkv_UHw, .dk_rope_Tr = as_rows(a.dsent.v_TGd), .dk_THd = a.dkv.k_TGd, .dv_THv = a.dkv.v_TGd});
  if (are_all(a.heads)) {
    w_.linear().backward_input(step, dc_UR, dkv);
    w_.linear().backward_weight(step, dkv, c_UR, /*adds=*/!a.is_first);
    return;
  }
  gemm(step.stream, {.c_MN = dc_UR, .a = dkv, .b = rows_of(w.w, a.heads)});
  if (!w.has_grad) return;
  // The other heads' rows get their gradient from other ranks.
  const bool adds = !a.is_first || w.adds_to_grad(step.batch);
  if (!adds) fill_zero(step.stream, w.dw);
  gemm(step.stream, {.c_MN = rows_of(w.dw, a.heads), .a = dkv, .b = c_UR, .trans_a = true, .accumulate = adds});
}

}  // namespace moebius
