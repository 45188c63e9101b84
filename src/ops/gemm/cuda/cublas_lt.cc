// The functions of cuBLASLt that cuda/gemm.cc calls, under their own names. Each looks up the library's function when
// it is first called. A program that links to the library would spend a tenth of a second on loading it at each start,
// even without a GPU, and would not start if it is missing.
#include "ops/gemm/cublas_lt.h"

#include <cublasLt.h>

#include "core/error.h"
#include "core/shared_library.h"

namespace moebius {
namespace {

const SharedLibrary& library() {
  static const SharedLibrary opened =
      open_library(fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR), MOEBIUS_CUBLASLT_LIBRARY);
  return opened;
}

// F: the type in the header.
template <class F>
F* find(F*, const char* name) {
  open_cublas_lt();
  F* const found = find_function<F*>(library(), name);
  MOEBIUS_CHECK(usage, found != nullptr, "libcublasLt has no {}: expected that of CUDA {}.{} or later; install it",
                name, CUBLAS_VER_MAJOR, CUBLAS_VER_MINOR);
  return found;
}

}  // namespace

}  // namespace moebius

// Calls the library's function NAME with ARGUMENTS.
#define MOEBIUS_FORWARD(NAME, ...)                          \
  static auto* const found = moebius::find(&::NAME, #NAME); \
  return found(__VA_ARGS__)

extern "C" {

size_t cublasLtGetVersion() { MOEBIUS_FORWARD(cublasLtGetVersion); }

const char* cublasLtGetStatusName(cublasStatus_t status) { MOEBIUS_FORWARD(cublasLtGetStatusName, status); }

const char* cublasLtGetStatusString(cublasStatus_t status) { MOEBIUS_FORWARD(cublasLtGetStatusString, status); }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) { MOEBIUS_FORWARD(cublasLtCreate, handle); }

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { MOEBIUS_FORWARD(cublasLtDestroy, handle); }

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t product, size_t size, cublasComputeType_t compute,
                                               cudaDataType_t scale) {
  MOEBIUS_FORWARD(cublasLtMatmulDescInit_internal, product, size, compute, scale);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t product, cublasLtMatmulDescAttributes_t what,
                                              const void* value, size_t size) {
  MOEBIUS_FORWARD(cublasLtMatmulDescSetAttribute, product, what, value, size);
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size, cudaDataType type,
                                                 uint64_t rows, uint64_t cols, int64_t ld) {
  MOEBIUS_FORWARD(cublasLtMatrixLayoutInit_internal, layout, size, type, rows, cols, ld);
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t what,
                                                const void* value, size_t size) {
  MOEBIUS_FORWARD(cublasLtMatrixLayoutSetAttribute, layout, what, value, size);
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference, size_t size) {
  MOEBIUS_FORWARD(cublasLtMatmulPreferenceInit_internal, preference, size);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t what, const void* value,
                                                    size_t size) {
  MOEBIUS_FORWARD(cublasLtMatmulPreferenceSetAttribute, preference, what, value, size);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t product,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t results[], int* num_results) {
  MOEBIUS_FORWARD(cublasLtMatmulAlgoGetHeuristic, handle, product, a, b, c, d, preference, most, results, num_results);
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t* algorithm,
                                                    cublasLtMatmulAlgoConfigAttributes_t what, void* value, size_t size,
                                                    size_t* written) {
  MOEBIUS_FORWARD(cublasLtMatmulAlgoConfigGetAttribute, algorithm, what, value, size, written);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t product, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
  MOEBIUS_FORWARD(cublasLtMatmul, handle, product, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout,
                  algorithm, workspace, workspace_bytes, stream);
}

}  // extern "C"

namespace moebius {

std::string why_no_cublas_lt() { return library().why_missing; }

void open_cublas_lt() {
  MOEBIUS_CHECK(usage, why_no_cublas_lt().empty(), "run.device = \"cuda\" cannot be honoured: {}", why_no_cublas_lt());
}

std::string cublas_lt_text() {
  if (!why_no_cublas_lt().empty()) return "cannot be opened";
  const size_t version = cublasLtGetVersion();
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

}  // namespace moebius
