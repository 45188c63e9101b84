#include "ops/attention/cudnn_shapes.h"

#include <algorithm>

#include "device/accelerator.h"

namespace moebius {
namespace cuda {
namespace {

// Short sequences are not worth a graph.
constexpr int64_t kMinRows = 64;
// cuDNN supports heads of these widths.
constexpr int kMinWidth = 32, kMaxWidth = 256;
// On 8.x and 12.x cuDNN 9.19 has no backward pass of wider heads. On 10.x it has that of latent attention, which is not
// used, since plans count the same scratch for all of these GPUs.
constexpr int kMaxBwdWidthElsewhere = 128;

// Returns the keys of a sequence, or of a part in which every query attends to all keys, or to all but those after it.
// Returns nothing if cuDNN cannot mask the keys in this way.
std::optional<CudnnKeys> masked_keys(const AttentionSizes& z, bool is_part) {
  if (!is_part) return z.rows == z.kv_rows ? std::optional(CudnnKeys{z.kv_rows, true}) : std::nullopt;
  if (z.window > 0 || z.shift < 0) return std::nullopt;
  if (z.shift >= z.kv_rows - 1) return CudnnKeys{z.kv_rows, false};
  // Keys after the last query are left out.
  if (z.shift + z.rows <= z.kv_rows) return CudnnKeys{z.shift + z.rows, true};
  return std::nullopt;
}

template <class Op>
std::optional<CudnnKeys> keys_of(const Op& a) {
  if (a.q_THd.dtype != DType::bf16 || !a.doc_start_T.empty()) return std::nullopt;
  AttentionSizes z = attention_sizes(a);
  if (z.rows < kMinRows || z.kv_rows < kMinRows) return std::nullopt;
  if (z.window >= z.kv_rows) z.window = 0;  // a window that covers the sequence has no effect
  const bool is_latent = z.width == 192 && z.v_width == 128;
  const bool is_even = z.width == z.v_width && z.width % 8 == 0 && z.width >= kMinWidth && z.width <= kMaxWidth;
  if (!is_latent && !is_even) return std::nullopt;
  return masked_keys(z, a.is_part);
}

int64_t round_up(int64_t n, int64_t to) { return div_ceil(n, to) * to; }

// Returns the workspace of the backward pass per sequence and head, as cuDNN 9.19 needs it: gradients of scores in
// bf16, in tiles of 64 x 128; dk and dv of each query head if heads share them; <do, o>.
int64_t head_bytes(const AttentionSizes& z) {
  const int64_t rows = round_up(z.rows, 128), kv_rows = round_up(z.kv_rows, 128);
  return rows * kv_rows * 2 + kv_rows * (z.width + z.v_width) * 2 + rows * 4;
}

constexpr int64_t kMaxWorkspaceBytes = int64_t{1152} << 20;  // one sequence of 4096 with 32 heads
constexpr int64_t kSlackBytes = int64_t{1} << 20;

int64_t largest_divisor(int64_t n, int64_t at_most) {
  int64_t divisor = std::max<int64_t>(1, std::min(n, at_most));
  while (n % divisor != 0) --divisor;
  return divisor;
}

int64_t bwd_workspace_bytes(const AttentionSizes& z, int64_t batch) {
  const CudnnPart part = cudnn_part(z, batch);
  return part.batch * part.kv_heads * (z.heads / z.kv_heads) * head_bytes(z) + kSlackBytes;
}

}  // namespace

std::optional<CudnnKeys> cudnn_keys(const AttentionFwd& a) { return keys_of(a); }
std::optional<CudnnKeys> cudnn_keys(const AttentionBwd& a) { return keys_of(a); }

CudnnPart cudnn_part(const AttentionSizes& z, int64_t batch) {
  const int64_t group_bytes = head_bytes(z) * (z.heads / z.kv_heads), sequence_bytes = group_bytes * z.kv_heads;
  if (sequence_bytes <= kMaxWorkspaceBytes)
    return {largest_divisor(batch, kMaxWorkspaceBytes / sequence_bytes), z.kv_heads};
  return {1, largest_divisor(z.kv_heads, kMaxWorkspaceBytes / group_bytes)};
}

int64_t cudnn_lse_bytes(const AttentionBwd& a) { return round_up(a.lse_TH.num_bytes(), 256); }

int64_t cudnn_scratch_bytes(const AttentionFwd&) { return kSlackBytes; }

int64_t cudnn_scratch_bytes(const AttentionBwd& a) {
  return cudnn_lse_bytes(a) + bwd_workspace_bytes(attention_sizes(a), a.batch);
}

}  // namespace cuda

bool has_cudnn() { return !Accelerator::is_built_in() || is_measured_cudnn(cudnn_version()); }

bool cudnn_can(const AttentionFwd& a) { return has_cudnn() && cuda::cudnn_keys(a); }

// Keys to which no query attends need zero gradients, which only our own kernels write.
bool cudnn_can(const AttentionBwd& a) {
  if (!has_cudnn()) return false;
  const cuda::AttentionSizes z = cuda::attention_sizes(a);
  const std::optional<cuda::CudnnKeys> keys = cuda::cudnn_keys(a);
  return keys && keys->rows == z.kv_rows && cuda::head_bytes(z) * (z.heads / z.kv_heads) <= cuda::kMaxWorkspaceBytes;
}

bool cudnn_can_elsewhere(const AttentionBwd& a) {
  return cudnn_can(a) && std::max(a.q_THd.dim(2), a.v_TGd.dim(2)) <= cuda::kMaxBwdWidthElsewhere;
}

}  // namespace moebius
