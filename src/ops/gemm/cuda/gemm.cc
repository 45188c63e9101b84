// gemm on CUDA by cuBLASLt. Row-major products are its column-major ones with the operands exchanged:
// c = op(a) op(b) in rows is c^T = op(b)^T op(a)^T in columns, without moving anything.
//
// The fastest of the algorithms that cuBLASLt proposes for a shape is cached. It can differ from run to run,
// so only algorithms that sum over k in the same order compete: one block sums all of k for its tile (k is not split,
// and nothing is reduced afterwards), with the same kind of instructions as the first proposal. This is also tested
// against the first proposal, which is a function of the shape: on operands that reveal the order of a sum, and on the
// real ones. If the first proposal splits k, which only narrow products may do, it has no competitors.
//
// Products of a batch run by an algorithm that was proposed for one of them, so their number changes no bit.
#include "ops/gemm/gemm.h"

#include <cublasLt.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <vector>

#include "device/block_limit.h"
#include "device/cuda/cuda.h"
#include "device/fallback_kernels.h"
#include "device/gpu_limits.h"
#include "device/out_of_memory.h"
#include "ops/elementwise/elementwise_backends.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/sm90/few_rows.h"
#include "ops/experts/wgrad_parts.h"
#include "ops/gemm/batched_gemm.h"
#include "ops/gemm/cuda/gemm_trial.h"
#include "ops/gemm/gemm_backends.h"
#include "ops/gemm/gemm_desc.h"
#include "ops/gemm/gemm_device.h"

namespace moebius::cuda {
namespace {

// The result of a comparison is stored after the memory for trials.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20, kTrialBytes = int64_t{96} << 20, kAnswerBytes = 256;
static_assert(WgradParts::kMaxParts * WgradParts::kBytes <= kWorkspaceBytes);
static_assert(kWorkspaceBytes + kTrialBytes + kAnswerBytes == kGemmKeptBytes);
constexpr int kMaxProposals = 8, kTimedRuns = 3;

void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw_library_error(ErrorKind::internal, fmt::format("gemm: {}: {} ({})", call, cublasLtGetStatusString(status),
                                                       cublasLtGetStatusName(status)));
}

cudaDataType type_of(DType dtype) { return dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

struct Sizes {
  int64_t m, n, k;
};

Sizes sizes_of(const Gemm& a) { return {a.c_MN.dim(0), a.c_MN.dim(1), a.a.data.dim(a.trans_a ? 0 : 1)}; }

// The description of a product for cuBLASLt, or of `count` contiguous products. Leading dimensions are
// as in `a`; sizes may be smaller.
struct Problem {
  Problem(const Gemm& a, Sizes sizes, Sizes ld, int64_t count = 1) {
    check(cublasLtMatmulDescInit(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescInit");
    const cublasOperation_t first = a.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                            second = a.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    check(cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first), "TRANSA");
    check(cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second), "TRANSB");
    if (!a.bias_N.empty()) add_bias(a.bias_N);
    layout(&b, a.b.data.dtype, a.trans_b ? sizes.k : sizes.n, a.trans_b ? sizes.n : sizes.k, a.trans_b ? ld.k : ld.n);
    layout(&this->a, a.a.data.dtype, a.trans_a ? sizes.m : sizes.k, a.trans_a ? sizes.k : sizes.m,
           a.trans_a ? ld.m : ld.k);
    layout(&c, a.c_MN.dtype, sizes.n, sizes.m, ld.n);
    if (count == 1) return;
    repeat(&b, count, a.b.data.numel());
    repeat(&this->a, count, a.a.data.numel());
    repeat(&c, count, a.c_MN.numel());
  }
  // Rows of c are columns for cuBLASLt, and its bias has one element for each of a column's.
  void add_bias(const Tensor& bias_N) {
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const int32_t type = type_of(bias_N.dtype);
    const void* const data = bias_N.data;
    check(cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue),
          "EPILOGUE");
    check(cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &type, sizeof type),
          "BIAS_DATA_TYPE");
    check(cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &data, sizeof data),
          "BIAS_POINTER");
  }
  // Persistent kernels have so many blocks; an algorithm's bits do not depend on it.
  void use_multiprocessors(int32_t count) {
    check(cublasLtMatmulDescSetAttribute(&product, CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, &count, sizeof count),
          "SM_COUNT_TARGET");
  }
  static void layout(cublasLtMatrixLayout_t to, DType dtype, int64_t rows, int64_t cols, int64_t ld) {
    check(cublasLtMatrixLayoutInit(to, type_of(dtype), rows, cols, ld), "cublasLtMatrixLayoutInit");
  }
  static void repeat(cublasLtMatrixLayout_t matrix, int64_t count, int64_t stride) {
    const int32_t n = narrow<int32_t>(count);
    check(cublasLtMatrixLayoutSetAttribute(matrix, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n), "BATCH_COUNT");
    check(cublasLtMatrixLayoutSetAttribute(matrix, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride),
          "STRIDED_BATCH_OFFSET");
  }
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t a, b, c;
};

struct Operands {
  void* c;
  const void *a, *b;
};

// The parts of cuBLASLt's algorithm that name it. A part that an algorithm does not
// have is UINT32_MAX.
struct GemmAlgorithm {
  uint32_t id, tile, stages, split_k, reduction, swizzle, custom, inner_shape;
};

uint32_t attribute(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t what) {
  uint32_t value = 0;
  size_t written = 0;
  const size_t size = what == CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID ? 2 : 4;
  const cublasStatus_t status = cublasLtMatmulAlgoConfigGetAttribute(&algorithm, what, &value, size, &written);
  return status == CUBLAS_STATUS_SUCCESS ? value : UINT32_MAX;
}

GemmAlgorithm describe(const cublasLtMatmulAlgo_t& algorithm) {
  const auto part = [&](cublasLtMatmulAlgoConfigAttributes_t what) { return attribute(algorithm, what); };
  return {.id = part(CUBLASLT_ALGO_CONFIG_ID),
          .tile = part(CUBLASLT_ALGO_CONFIG_TILE_ID),
          .stages = part(CUBLASLT_ALGO_CONFIG_STAGES_ID),
          .split_k = part(CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
          .reduction = part(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME),
          .swizzle = part(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
          .custom = part(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
          .inner_shape = part(CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID)};
}

std::string to_string(const GemmAlgorithm& a) {
  const auto text = [](uint32_t part) { return part == UINT32_MAX ? std::string("none") : std::to_string(part); };
  return fmt::format(
      "cuBLASLt algorithm {}: tile {}, stages {}, split-k {}, reduction {}, swizzle {}, custom {}, inner shape {}",
      text(a.id), text(a.tile), text(a.stages), text(a.split_k), text(a.reduction), text(a.swizzle), text(a.custom),
      text(a.inner_shape));
}

// Products of a batch are as aligned as all of them are.
GemmDesc describe_batched(const Gemm& a) {
  GemmDesc desc = moebius::describe(a);
  const auto align = [](int& to, const Tensor& matrix) {
    while (matrix.num_bytes() % to != 0) to /= 2;
  };
  align(desc.align_a, a.a.data);
  align(desc.align_b, a.b.data);
  align(desc.align_c, a.c_MN);
  desc.batched = true;
  return desc;
}

using Algorithms = std::vector<cublasLtMatmulAlgo_t>;

// The state of this op on a device. Calls come from one stream at a time: they share the workspace.
class CublasLt {
 public:
  CublasLt() {
    check(cublasLtCreate(&handle_), "cublasLtCreate");
    try {
      MOEBIUS_CUDA(cudaMalloc(reinterpret_cast<void**>(&workspace_), kGemmKeptBytes));
      MOEBIUS_CUDA(cudaEventCreate(&begin_));
      MOEBIUS_CUDA(cudaEventCreate(&end_));
    } catch (...) {
      release();
      throw;
    }
  }
  ~CublasLt() { release(); }
  CublasLt(const CublasLt&) = delete;

  // Returns false if cuBLASLt has no algorithm for this product. count: the number of products, of which a is the
  // first; 0: it is not part of a batch.
  bool run(Stream& s, const Gemm& a, int64_t count = 0) {
    const cudaStream_t stream = cuda_stream(s);
    const GemmDesc desc = count == 0 ? moebius::describe(a) : describe_batched(a);
    const Sizes sizes = sizes_of(a);
    const int64_t products = std::max<int64_t>(count, 1);
    Problem problem(a, sizes, sizes, products);
    if (const int blocks = limited_blocks(s, INT_MAX); blocks < INT_MAX) problem.use_multiprocessors(blocks);
    if (const auto it = chosen_.find(desc); it != chosen_.end()) return run_first(stream, problem, a, it->second);
    Problem one(a, sizes, sizes);
    Algorithms proposals = propose(one, desc);
    if (!is_capturing(s)) {
      if (proposals.size() > 1) proposals = {quickest(s, a, proposals, products)};
      chosen_[desc] = proposals;
    }
    return run_first(stream, problem, a, proposals);
  }

  // The memory of one product, for products of other kernels too.
  Tensor workspace() const { return {.data = workspace_, .shape = {kWorkspaceBytes}, .dtype = DType::u8}; }

  // Returns the algorithm that run() chose for such a product.
  std::string chosen_text(const Gemm& a) const {
    const auto it = chosen_.find(moebius::describe(a));
    if (it == chosen_.end()) return "no algorithm chosen yet";
    return it->second.empty() ? "tiled_gemm" : to_string(describe(it->second.front()));
  }

 private:
  void release() {
    if (end_) cudaEventDestroy(end_);
    if (begin_) cudaEventDestroy(begin_);
    cudaFree(workspace_);
    cublasLtDestroy(handle_);
  }

  char* trial() const { return workspace_ + kWorkspaceBytes; }

  bool run_first(cudaStream_t stream, Problem& problem, const Gemm& a, const Algorithms& algorithms) {
    if (algorithms.empty()) return false;
    check(multiply(stream, problem, {a.c_MN.data, a.a.data.data, a.b.data.data}, a.accumulate, algorithms.front()),
          "cublasLtMatmul");
    return true;
  }

  cublasStatus_t multiply(cudaStream_t stream, Problem& p, Operands x, bool accumulate,
                          const cublasLtMatmulAlgo_t& algorithm) {
    const float one = 1, beta = accumulate ? 1 : 0;
    return cublasLtMatmul(handle_, &p.product, &one, x.b, &p.b, x.a, &p.a, &beta, x.c, &p.c, x.c, &p.c, &algorithm,
                          workspace_, kWorkspaceBytes, stream);
  }

  // Few tiles over a long K, as gradients of narrow weights have, would leave a part of a GPU idle. There K may be
  // split: the parts are written to the workspace and added in order. The more tiles, the longer K must be, since
  // adding the parts takes as long as some hundred terms of K.
  static int reductions_for(const GemmDesc& desc) {
    if (desc.batched) return CUBLASLT_REDUCTION_SCHEME_NONE;
    constexpr int64_t kTile = 128, kFewTiles = 66, kTermsOfATile = 64;  // 66: half of a Hopper GPU's multiprocessors
    const int64_t tiles = div_ceil(desc.m, kTile) * div_ceil(desc.n, kTile);
    const bool is_narrow = tiles <= kFewTiles && desc.k >= std::max<int64_t>(1024, kTermsOfATile * tiles);
    return is_narrow ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE : CUBLASLT_REDUCTION_SCHEME_NONE;
  }

  // cuBLASLt's proposals, best first by its own account, that sum as the first of them does: a
  // function of shape, dtypes and alignment.
  Algorithms propose(Problem& p, const GemmDesc& desc) {
    cublasLtMatmulPreferenceOpaque_t preference;
    check(cublasLtMatmulPreferenceInit(&preference), "cublasLtMatmulPreferenceInit");
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t what, auto value) {
      check(cublasLtMatmulPreferenceSetAttribute(&preference, what, &value, sizeof value), "preference");
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspaceBytes));
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, static_cast<uint32_t>(reductions_for(desc)));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(desc.align_b));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(desc.align_a));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(desc.align_c));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(desc.align_c));
    cublasLtMatmulHeuristicResult_t results[kMaxProposals];
    int num_results = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle_, &p.product, &p.b, &p.a, &p.c, &p.c,
                                                                 &preference, kMaxProposals, results, &num_results);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
    check(status, "cublasLtMatmulAlgoGetHeuristic");
    Algorithms all;
    for (int i = 0; i < num_results; ++i) {
      if (results[i].state == CUBLAS_STATUS_SUCCESS && (all.empty() || sums_alike(all.front(), results[i].algo)))
        all.push_back(results[i].algo);
    }
    return all;
  }

  // Returns whether both are of the same kind, and each sums all of K for its tile.
  static bool sums_alike(const cublasLtMatmulAlgo_t& x, const cublasLtMatmulAlgo_t& y) {
    for (const auto what :
         {CUBLASLT_ALGO_CONFIG_ID, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
          CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID}) {
      if (attribute(x, what) != attribute(y, what)) return false;
    }
    return attribute(x, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1;
  }

  // Returns the fastest algorithm on the real operands, after comparing its bits there too. Results are written to c,
  // which the call overwrites anyway; with accumulation they are written to the memory for trials, with as many
  // rows, or products, as fit.
  cublasLtMatmulAlgo_t quickest(Stream& s, const Gemm& a, const Algorithms& proposals, int64_t count) {
    const cudaStream_t stream = cuda_stream(s);
    if (const auto& wait = s.accelerator().state<BlockLimit>().wait_for_others) wait();
    const Algorithms equal = same_bits(s, a, proposals);
    const Sizes ld = sizes_of(a);
    const int64_t row_bytes = ld.n * size_of(a.c_MN.dtype), room = a.accumulate ? kTrialBytes / 2 : kTrialBytes;
    Sizes sizes = ld;
    if (const int64_t rows = room / row_bytes; a.accumulate && rows < ld.m)
      sizes.m = rows >= 256 ? rows / 256 * 256 : rows;
    if (sizes.m == 0) return proposals.front();
    if (a.accumulate) count = std::clamp<int64_t>(room / (ld.m * row_bytes), 1, count);
    const int64_t num_bytes = count * sizes.m * row_bytes, compared = std::min(room, num_bytes) / 4 * 4;
    char *const want = trial(), *const got = a.accumulate ? want + room : static_cast<char*>(a.c_MN.data);
    if (reinterpret_cast<uintptr_t>(got) % 4 != 0) return proposals.front();  // bits are compared in words
    Problem problem(a, sizes, ld, count);
    const auto run = [&](const cublasLtMatmulAlgo_t& algorithm) {
      return multiply(stream, problem, {got, a.a.data.data, a.b.data.data}, a.accumulate, algorithm) ==
             CUBLAS_STATUS_SUCCESS;
    };
    const auto run_once = [&](const cublasLtMatmulAlgo_t& algorithm) {
      if (a.accumulate) copy_on(stream, got, a.c_MN.data, num_bytes);
      return run(algorithm);
    };
    if (!run_once(proposals.front())) return proposals.front();
    copy_on(stream, want, got, compared);
    float min_ms = std::numeric_limits<float>::infinity();
    cublasLtMatmulAlgo_t best = proposals.front();
    for (const cublasLtMatmulAlgo_t& algorithm : equal) {
      if (!run_once(algorithm) || differ(s, want, got, compared)) continue;
      float ms = min_ms;
      for (int i = 0; i < kTimedRuns; ++i) ms = std::min(ms, time_ms(stream, [&] { run(algorithm); }));
      if (ms < min_ms) {
        min_ms = ms;
        best = algorithm;
      }
    }
    return best;
  }

  template <class Body>
  float time_ms(cudaStream_t stream, Body body) {
    MOEBIUS_CUDA(cudaEventRecord(begin_, stream));
    body();
    MOEBIUS_CUDA(cudaEventRecord(end_, stream));
    MOEBIUS_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    MOEBIUS_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return ms;
  }

  void copy_on(cudaStream_t stream, void* to, const void* from, int64_t num_bytes) {
    MOEBIUS_CUDA(cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDeviceToDevice, stream));
  }

  bool differ(Stream& s, const void* x, const void* y, int64_t num_bytes) {
    const cudaStream_t stream = cuda_stream(s);
    int* const differs = reinterpret_cast<int*>(trial() + kTrialBytes);
    compare_trial(s, {.differs = differs, .x = x, .y = y, .num_bytes = num_bytes});
    int answer = 1;
    MOEBIUS_CUDA(cudaMemcpyAsync(&answer, differs, sizeof answer, cudaMemcpyDeviceToHost, stream));
    MOEBIUS_CUDA(cudaStreamSynchronize(stream));
    return answer != 0;
  }

  // Returns the proposals that give the bits of the first one on test operands with all of K, whose order may differ,
  // and few rows and columns. The second half of K cancels the sums of the first, so that the result is only the
  // rounding error of the order, which even a bf16 result shows. If c is added to, it is equally small.
  Algorithms same_bits(Stream& s, const Gemm& a, const Algorithms& proposals) {
    const cudaStream_t stream = cuda_stream(s);
    const Sizes all = sizes_of(a);
    const int64_t size = size_of(a.a.data.dtype);
    // The same remainders by 8 keep the alignment of rows.
    const auto few = [](int64_t x, int64_t most) { return x <= most ? x : most - 8 + x % 8; };
    Sizes sizes = all;
    for (int64_t most = 256;; most /= 2) {
      if (most < 16) return {proposals.front()};
      sizes = {few(all.m, most), few(all.n, most), all.k};
      if ((sizes.m + sizes.n) * sizes.k * size + 4 * most * most * 4 < kTrialBytes) break;
    }
    const auto aligned = [](int64_t num_bytes) { return div_ceil(num_bytes, 256) * 256; };
    const int64_t a_bytes = aligned(sizes.m * sizes.k * size), b_bytes = aligned(sizes.n * sizes.k * size),
                  c_bytes = aligned(sizes.m * sizes.n * size_of(a.c_MN.dtype));
    char *const x = trial(), *const y = x + a_bytes, *const start = y + b_bytes, *const want = start + c_bytes,
                *const got = want + c_bytes;
    fill_trial(s, {.to = x, .dtype = a.a.data.dtype, .seed = 1, .outer = sizes.m, .k = sizes.k, .k_is_row = a.trans_a});
    fill_trial(s, {.to = y,
                   .dtype = a.b.data.dtype,
                   .seed = 2,
                   .outer = sizes.n,
                   .k = sizes.k,
                   .k_is_row = !a.trans_b,
                   .turn_sign = true});
    // Padding is compared too: it must be equal from the start.
    MOEBIUS_CUDA(cudaMemsetAsync(start, 0, c_bytes, stream));
    fill_trial(s,
               {.to = start, .dtype = a.c_MN.dtype, .seed = 3, .outer = sizes.m * sizes.n, .k = 1, .scale = 0x1p-20f});
    Problem problem(a, sizes, sizes);
    const auto run = [&](char* to, const cublasLtMatmulAlgo_t& algorithm) {
      copy_on(stream, to, start, c_bytes);
      return multiply(stream, problem, {to, x, y}, a.accumulate, algorithm) == CUBLAS_STATUS_SUCCESS;
    };
    if (!run(want, proposals.front())) return {proposals.front()};
    Algorithms equal = {proposals.front()};
    for (size_t i = 1; i < proposals.size(); ++i) {
      if (run(got, proposals[i]) && !differ(s, want, got, c_bytes)) equal.push_back(proposals[i]);
    }
    return equal;
  }

  cublasLtHandle_t handle_ = nullptr;
  char* workspace_ = nullptr;  // the library's, then the memory of trials
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::unordered_map<GemmDesc, Algorithms, GemmDescHash> chosen_;  // one algorithm, or none
};

// Notes a large product whose rows are not aligned for the fastest kernels of cuBLASLt.
void note_odd_operands(const Stream& s, const Gemm& a) {
  const Sizes z = sizes_of(a);
  const bool is_odd = a.a.data.dim(1) % 8 != 0 || a.b.data.dim(1) % 8 != 0;
  if (!is_odd || a.a.data.dtype != DType::bf16 || std::min({z.m, z.n, z.k}) < 8) return;
  note_fallback_kernel(s, "gemm",
                       fmt::format("cuBLASLt's quickest kernels take rows of a multiple of 8; got {} times {}",
                                   to_string(a.a.data), to_string(a.b.data)));
}

// A dense product is the product of one expert that has every row.
Operand as_experts(Operand w) {
  w.data = w.data.view({1, w.data.dim(0), w.data.dim(1)});
  if (w.layout != ScaleLayout::per_tensor) w.scales = w.scales.view({1, w.scales.dim(0), w.scales.dim(1)});
  return w;
}

void quantised_gemm(Stream& s, const Gemm& a) {
  if (!a.trans_a) {
    return sm90::rows_product_f8(s, {.y_RN = a.c_MN, .a_RK = a.a, .b_eNK = as_experts(a.b), .accumulate = a.accumulate},
                                 "gemm");
  }
  sm90::wgrad_product_f8(s,
                         {.dw_eMN = a.c_MN.view({1, a.c_MN.dim(0), a.c_MN.dim(1)}),
                          .left_MR = a.a,
                          .right_NR = a.b,
                          .accumulate = a.accumulate,
                          .scratch = op_state<CublasLt>(s).workspace()},
                         "gemm");
}

// Runs the product as one expert of few rows. Returns false where that does not apply.
bool run_few_rows(Stream& s, const Gemm& a) {
  if (!a.few_rows || !a.a.is_plain() || sizes_of(a).k == 0 || a.trans_a || !a.trans_b || a.accumulate ||
      a.c_MN.dim(0) > kFewRows)
    return false;
  if (!a.bias_N.empty() && a.bias_N.dtype != DType::bf16) return false;
  const Tensor& w = a.b.data;
  const ExpertDown product{.y_RD = a.c_MN,
                           .a_RF = a.a,
                           .w2_eDF = w.view({1, w.dim(0), w.dim(1)}),
                           .b2_eC = a.bias_N.empty() ? Tensor{} : a.bias_N.view({1, a.bias_N.dim(0)}),
                           .few_rows = true};
  if (uses_hopper_kernels(s) && sm90::takes_few_rows(product)) {
    sm90::expert_down_few_rows(s, product, /*after_up=*/false);
    return true;
  }
  if (!sm80::takes_few_rows(product)) return false;
  sm80::expert_down_few_rows(s, product);
  return true;
}

// cuBLASLt's epilogue needs a bias that begins at a multiple of 16 bytes.
bool cublas_lt_adds_bias(const Gemm& a) {
  const bool aligned = reinterpret_cast<uintptr_t>(a.bias_N.data) % 16 == 0;
  return !a.bias_N.empty() && a.a.is_plain() && sizes_of(a).k > 0 && aligned;
}

bool run_cublas_lt(Stream& s, const Gemm& a) {
  note_odd_operands(s, a);
  return op_state<CublasLt>(s).run(s, a);
}

void gemm_without_bias(Stream& s, const Gemm& a) {
  if (a.a.data.empty()) {  // K is 0, since c is not empty
    if (!a.accumulate) MOEBIUS_CUDA(cudaMemsetAsync(a.c_MN.data, 0, a.c_MN.num_bytes(), cuda_stream(s)));
    return;
  }
  if (!a.a.is_plain()) return quantised_gemm(s, a);
  if (run_cublas_lt(s, a)) return;
  if (a.a.data.dtype == DType::bf16)
    note_fallback_kernel(s, "gemm",
                         fmt::format("cuBLASLt has no way for {} times {}", to_string(a.a.data), to_string(a.b.data)));
  tiled_gemm(s, a);
}

}  // namespace

void prepare_gemm(Stream& s) { op_state<CublasLt>(s); }

std::string gemm_algorithm_text(Stream& s, const Gemm& a) { return op_state<CublasLt>(s).chosen_text(a); }

void gemm(Stream& s, const Gemm& a) {
  if (run_few_rows(s, a)) return;
  if (cublas_lt_adds_bias(a) && run_cublas_lt(s, a)) return;
  Gemm product = a;
  product.bias_N = {};
  gemm_without_bias(s, product);
  if (!a.bias_N.empty()) add_row(s, a.c_MN, a.bias_N.view({1, a.bias_N.dim(0)}));
}

void batched_gemm(Stream& s, const BatchedGemm& a) {
  const Gemm first = product_of(a, 0);
  const int64_t count = a.c_BMN.dim(0);
  if (sizes_of(first).k > 0 && op_state<CublasLt>(s).run(s, first, count)) return;
  for (int64_t i = 0; i < count; ++i) {
    const Gemm product = product_of(a, i);
    sizes_of(product).k == 0 ? gemm_without_bias(s, product) : tiled_gemm(s, product);
  }
}

}  // namespace moebius::cuda
