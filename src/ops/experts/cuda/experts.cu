// Chooses the kernel that runs an expert op, and checks what it requires.
#include "ops/experts/cuda/experts.h"

#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "device/gpu_limits.h"
#include "ops/experts/experts_backends.h"
#include "ops/experts/experts_desc.h"
#include "ops/experts/few_rows_backends.h"
#include "ops/experts/sm90/few_rows.h"
#include "ops/grouped_gemm/portable_gemm_config.h"

namespace moebius::cuda {
namespace {

// The kernels that an op runs on, fastest first.
enum class Path { sm90, sm80, generic };

template <class Op>
Path path_of(const Stream& s, const Op& a) {
  if (uses_hopper_kernels(s) && sm90::takes(a)) return Path::sm90;
  return sm80::takes(a) ? Path::sm80 : Path::generic;
}

// Notes a fallback or a portable kernel if a faster one does not support the op. weights: their shape gives the columns
// and the number of experts.
void note_path(const Stream& s, const char* name, Path path, const Tensor& weights) {
  if (path == Path::generic) {
    note_fallback_kernel(s, name,
                         fmt::format("the tensor-core kernels take at most {} experts; got weights {}",
                                     kMaxPortableExperts, to_string(weights)));
  } else if (path == Path::sm80 && uses_hopper_kernels(s)) {
    note_fallback_kernel(s, name,
                         fmt::format("portable kernels, since the Hopper kernels take columns in multiples of 8, at "
                                     "most 512 experts, and biases of an even number of columns; got weights {}",
                                     to_string(weights)));
  }
}

// rows: the rows that the op reads.
template <class Op>
Path choose_path(const Stream& s, const char* name, const Op& a, const Tensor& rows, const Tensor& weights) {
  const Path path = path_of(s, a);
  if constexpr (requires { a.part; }) {
    MOEBIUS_CHECK(usage, a.part.runs_2G.empty() || path != Path::sm80,
                  "{}: the portable kernels do not compute a part of the rows; those of Hopper GPUs do, for columns in "
                  "multiples of 8, at most 512 experts and biases of an even number of columns; set "
                  "parallel.expert_overlap to \"layer\" or \"none\"",
                  name);
  }
  if (rows.dtype == DType::bf16 && rows.numel() > 0) note_path(s, name, path, weights);
  return path;
}

// The kernels of sm_90 for bf16 add a term. They read both of its tensors by the copy engine.
template <class Op>
bool adds(const Stream& s, const Op& a, const Operand& rows) {
  const auto takes = [](const Tensor& t) {
    return t.dtype == DType::bf16 && t.shape[t.shape.rank() - 1] % 8 == 0 &&
           reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  };
  return rows.is_plain() && path_of(s, a) == Path::sm90 && takes(a.added.low_RL) && takes(a.added.w);
}

std::string portable_text(const GroupedGemmDesc& desc, const GpuLimits& limits) {
  const PortableGemmConfig config = choose_portable_config(desc, limits);
  return to_string(config, blocks_of_multiprocessor(config, desc.num_experts, limits));
}

template <class Op>
std::string text_of(const Stream& s, const Op& a) {
  if (const GroupedGemmDesc desc = describe(a); desc.a.scales != ScaleLayout::none)
    return to_string(choose_config(desc));
  switch (path_of(s, a)) {
    case Path::sm90:
      return to_string(choose_config(describe(a)));
    case Path::sm80:
      return portable_text(describe(a), gpu_limits(s));
    case Path::generic:
      return "fallback kernel";
  }
  return "";
}

}  // namespace

void expert_up(Stream& s, const ExpertUp& a) {
  if (!a.x_TD.is_plain()) return sm90::expert_up_f8(s, a);
  if (uses_hopper_kernels(s) && sm90::takes_few_rows(a)) return sm90::expert_up_few_rows(s, a);
  if (sm80::takes_few_rows(a)) return sm80::expert_up_few_rows(s, a);
  switch (choose_path(s, "expert_up", a, a.x_TD.data, a.w1_e2FD.data)) {
    case Path::sm90:
      return sm90::expert_up(s, a);
    case Path::sm80:
      return sm80::expert_up(s, a);
    case Path::generic:
      return generic::expert_up(s, a);
  }
}

void expert_down(Stream& s, const ExpertDown& a) {
  if (!a.a_RF.is_plain()) {
    return sm90::rows_product_f8(
        s, {.y_RN = a.y_RD, .a_RK = a.a_RF, .b_eNK = a.w2_eDF, .offsets_e1 = a.rows.offsets_e1}, "expert_down");
  }
  if (uses_hopper_kernels(s) && sm90::takes_few_rows(a)) return sm90::expert_down_few_rows(s, a, false);
  if (sm80::takes_few_rows(a)) return sm80::expert_down_few_rows(s, a);
  switch (choose_path(s, "expert_down", a, a.a_RF.data, a.w2_eDF.data)) {
    case Path::sm90:
      return sm90::expert_down(s, a);
    case Path::sm80:
      return sm80::expert_down(s, a);
    case Path::generic:
      return generic::expert_down(s, a);
  }
}

void expert_down_after_up(Stream& s, const ExpertDown& a) {
  if (uses_hopper_kernels(s) && sm90::takes_few_rows(a)) return sm90::expert_down_few_rows(s, a, true);
  cuda::expert_down(s, a);
}

void d_expert_down(Stream& s, const DExpertDown& a) {
  if (!a.dout_TD.is_plain()) return sm90::d_expert_down_f8(s, a);
  switch (choose_path(s, "d_expert_down", a, a.dout_TD.data, a.w2_eDF.data)) {
    case Path::sm90:
      return sm90::d_expert_down(s, a);
    case Path::sm80:
      return sm80::d_expert_down(s, a);
    case Path::generic:
      return generic::d_expert_down(s, a);
  }
}

void d_expert_up(Stream& s, const DExpertUp& a) {
  if (!a.dh_R2F.is_plain()) {
    return sm90::rows_product_f8(
        s, {.y_RN = a.dx_RD, .a_RK = a.dh_R2F, .b_eNK = a.w1_e2FD, .offsets_e1 = a.rows.offsets_e1}, "d_expert_up");
  }
  switch (choose_path(s, "d_expert_up", a, a.dh_R2F.data, a.w1_e2FD.data)) {
    case Path::sm90:
      return sm90::d_expert_up(s, a);
    case Path::sm80:
      return sm80::d_expert_up(s, a);
    case Path::generic:
      return generic::d_expert_up(s, a);
  }
}

void expert_wgrad(Stream& s, const ExpertWgrad& a) {
  if (!a.left_RM.is_plain()) {
    return sm90::wgrad_product_f8(s,
                                  {.dw_eMN = a.dw_eMN,
                                   .left_MR = a.left_RM,
                                   .right_NR = a.right_RN,
                                   .offsets_e1 = a.rows.offsets_e1,
                                   .accumulate = a.accumulate},
                                  "expert_wgrad");
  }
  if (a.left_RM.data.empty() || a.right_RN.data.empty()) {  // no rows: every sum is zero
    if (!a.accumulate) MOEBIUS_CUDA(cudaMemsetAsync(a.dw_eMN.data, 0, a.dw_eMN.num_bytes(), cuda_stream(s)));
    return;
  }
  const Path path = choose_path(s, "expert_wgrad", a, a.left_RM.data, a.dw_eMN);
  MOEBIUS_CHECK(usage, path == Path::sm90 || a.dw_eMN.dtype == DType::f32,
                "expert_wgrad: only the kernels of Hopper GPUs add to a dw in bf16, at multiples of 16 bytes and with "
                "columns in multiples of 8; got dw {}; set optimizer.fuse_grad = false",
                to_string(a.dw_eMN));
  switch (path) {
    case Path::sm90:
      return sm90::expert_wgrad(s, a);
    case Path::sm80:
      return sm80::expert_wgrad(s, a);
    case Path::generic:
      return generic::expert_wgrad(s, a);
  }
}

bool adds_term(const Stream& s, const ExpertUp& a) { return !a.few_rows && adds(s, a, a.x_TD); }
bool adds_term(const Stream& s, const ExpertDown& a) { return !a.few_rows && adds(s, a, a.a_RF); }
bool adds_term(const Stream& s, const DExpertDown& a) { return adds(s, a, a.dout_TD); }
bool adds_term(const Stream& s, const DExpertUp& a) { return adds(s, a, a.dh_R2F); }

std::string kernel_text(const Stream& s, const ExpertUp& a) { return text_of(s, a); }
std::string kernel_text(const Stream& s, const ExpertDown& a) { return text_of(s, a); }
std::string kernel_text(const Stream& s, const DExpertDown& a) { return text_of(s, a); }
std::string kernel_text(const Stream& s, const DExpertUp& a) { return text_of(s, a); }
std::string kernel_text(const Stream& s, const ExpertWgrad& a) { return text_of(s, a); }

}  // namespace moebius::cuda
