#include <omp.h>

#include <thread>

#include "core/start_thread.h"
#include "ops/gemm/cpu/dnnl_gemm.h"
#include "ops/gemm/gemm.h"

namespace moebius {

bool onednn_multiplies(DType dtype) { return dtype == DType::f32 || __builtin_cpu_supports("avx512bw"); }

void gemm_by_onednn(Stream& s, const Gemm& a) {
  MOEBIUS_CHECK(usage, s.device() == DeviceKind::cpu, "gemm_by_onednn: expected a CPU stream; got {}",
                name_of(s.device()));
  check_plain("gemm_by_onednn", "a", a.a);
  check_plain("gemm_by_onednn", "b", a.b);
  const auto matrix = [](const Tensor& t, bool transposed) {
    return cpu::Matrix{t.data, t.dim(1), t.dtype, transposed};
  };
  const cpu::TileGemm whole{.c = matrix(a.c_MN, false),
                            .a = matrix(a.a.data, a.trans_a),
                            .b = matrix(a.b.data, a.trans_b),
                            .m = a.c_MN.dim(0),
                            .n = a.c_MN.dim(1),
                            .k = a.a.data.dim(a.trans_a ? 0 : 1),
                            .accumulate = a.accumulate};
  // It runs on a separate thread: oneDNN's team size and its cached primitives belong to a thread, and those of this
  // thread are for one core.
  const auto multiply = [&] {
    omp_set_num_threads(s.pool().size());
    cpu::dnnl_gemm(whole);
  };
  start_thread([&] { return std::thread(multiply); }).join();
}

}  // namespace moebius
