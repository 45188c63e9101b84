#include "ops/gemm/cpu/tile_gemm.h"

#include <dnnl.hpp>

#include "ops/gemm/cpu/dnnl_gemm.h"
#include "ops/gemm/cpu/widened_gemm.h"
#include "ops/gemm/gemm.h"

namespace moebius::cpu {

// Intel without AMX issues a bf16 dot every second cycle and two f32 multiply-adds every cycle, so
// f32 has twice the rate (measured on Emerald Rapids: 189 against 96 GFLOP/s a core). With AMX, and
// on AMD, bf16 is native and faster. Without AVX-512 oneDNN has no bf16 at all.
bool runs_widened() {
  static const bool widened =
      !onednn_multiplies(DType::bf16) ||
      (__builtin_cpu_is("intel") && dnnl::get_effective_cpu_isa() != dnnl::cpu_isa::avx512_core_amx);
  return widened;
}

void tile_gemm(const TileGemm& g) { runs_widened() || g.a.quantised ? widened_gemm(g) : dnnl_gemm(g); }

}  // namespace moebius::cpu
