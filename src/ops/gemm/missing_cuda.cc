// Replaces the CUDA backend of these ops in a build without it.
#include "ops/gemm/cublas_lt.h"
#include "ops/gemm/gemm_backends.h"
#include "ops/missing_backend.h"

namespace moebius {

namespace cuda {
void gemm(Stream&, const Gemm&) { missing_cuda("gemm"); }
void batched_gemm(Stream&, const BatchedGemm&) { missing_cuda("batched_gemm"); }
void prepare_gemm(Stream&) { missing_cuda("gemm"); }
std::string gemm_algorithm_text(Stream&, const Gemm&) { missing_cuda("gemm"); }
}  // namespace cuda

void open_cublas_lt() { missing_cuda("gemm"); }
std::string why_no_cublas_lt() { return ""; }
std::string cublas_lt_text() { return "not part of this build"; }

}  // namespace moebius
