#include "model/device_support.h"

#include "core/error.h"
#include "ops/attention/attention_limits.h"
#include "ops/norm/norm.h"
#include "ops/routing/routing.h"

namespace moebius {
namespace {

constexpr const char* kUseCpu = "set run.device = \"cpu\" (--device cpu)";

// limit: "attention has kernels for heads of at most 256". key: the key of the recipe that sets the
// value. advice: what helps other than another device; may be empty.
void check_gpu_limit(int64_t value, int64_t most, const char* limit, const char* key, const std::string& advice = "") {
  MOEBIUS_CHECK(usage, value <= most,
                "run.device = \"cuda\" cannot be honoured: on a GPU {} at most {}; got {} = {}; {}{}", limit, most, key,
                value, advice.empty() ? "" : advice + ", or ", kUseCpu);
}

void check_heads(const ModelSpec& m, const DeviceUse& use) {
  constexpr const char* kWidth = "attention has kernels for heads of";
  check_gpu_limit(m.head_dim, cuda::kMaxHeadWidth, kWidth,
                  m.is_latent() ? "model.qk_nope_head_dim + qk_rope_head_dim" : "model.head_dim");
  if (m.is_latent()) check_gpu_limit(m.v_head_dim, cuda::kMaxHeadWidth, kWidth, "model.v_head_dim");
  check_gpu_limit(m.num_heads / use.tp, cuda::kMaxHeadsOrBatch, "attention has kernels for heads on a rank of",
                  "model.num_attention_heads / parallel.tp", "raise parallel.tp");
  check_gpu_limit(use.batch, cuda::kMaxHeadsOrBatch, "attention has kernels for sequences at a time of",
                  "train.micro_batch", "use a smaller train.micro_batch (--batch)");
}

void check_norms(const ModelSpec& m) {
  const auto check = [](int64_t width, const char* key) {
    check_gpu_limit(width, kMaxGpuNormWidth, "norms have kernels for rows of", key);
  };
  check(m.hidden_size, "model.hidden_size");
  check(m.q_lora_rank, "model.q_lora_rank");
  check(m.kv_lora_rank, "model.kv_lora_rank");
}

}  // namespace

void check_device(const ModelSpec& m, DeviceKind device, const DeviceUse& use) {
  MOEBIUS_CHECK(usage, m.num_experts <= kMaxExperts,
                "model.num_experts: the router has kernels for at most {} experts; got {}; use fewer", kMaxExperts,
                m.num_experts);
  if (device != DeviceKind::cuda) return;
  check_heads(m, use);
  check_norms(m);
}

}  // namespace moebius
