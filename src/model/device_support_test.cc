#include "model/device_support.h"

#include <gtest/gtest.h>

#include <functional>

#include "core/error.h"

namespace moebius {
namespace {

std::string error_of(const ModelSpec& m, const DeviceUse& use = {}, DeviceKind device = DeviceKind::cuda) {
  try {
    check_device(m, device, use);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    return e.what();
  }
  return "";
}

// The first value above the limit of the kernels; the limit itself passes.
struct Limit {
  std::function<void(ModelSpec&, DeviceUse&, int64_t)> set;
  int64_t most;
  std::string text;
};

std::vector<Limit> limits_of_gpus() {
  const auto heads = [](const char* key) {
    return fmt::format("attention has kernels for heads of at most 256; got {} = 257; ", key);
  };
  const auto norms = [](const char* key) {
    return fmt::format("norms have kernels for rows of at most 16384; got {} = 16385; ", key);
  };
  return {
      {[](ModelSpec& m, DeviceUse&, int64_t n) { m.head_dim = n; }, 256, heads("model.head_dim")},
      {[](ModelSpec& m, DeviceUse&, int64_t n) { m.kv_lora_rank = 4, m.head_dim = n; }, 256,
       heads("model.qk_nope_head_dim + qk_rope_head_dim")},
      {[](ModelSpec& m, DeviceUse&, int64_t n) { m.kv_lora_rank = 4, m.v_head_dim = n; }, 256,
       heads("model.v_head_dim")},
      {[](ModelSpec& m, DeviceUse&, int64_t n) { m.num_heads = n; }, 65535,
       "attention has kernels for heads on a rank of at most 65535; "
       "got model.num_attention_heads / parallel.tp = 65536; raise parallel.tp, or "},
      {[](ModelSpec&, DeviceUse& u, int64_t n) { u.batch = n; }, 65535,
       "attention has kernels for sequences at a time of at most 65535; got train.micro_batch = 65536; use a smaller "
       "train.micro_batch (--batch), or "},
      {[](ModelSpec& m, DeviceUse&, int64_t n) { m.hidden_size = n; }, 16384, norms("model.hidden_size")},
      {[](ModelSpec& m, DeviceUse&, int64_t n) { m.q_lora_rank = n; }, 16384, norms("model.q_lora_rank")},
      {[](ModelSpec& m, DeviceUse&, int64_t n) { m.kv_lora_rank = n; }, 16384, norms("model.kv_lora_rank")}};
}

TEST(DeviceSupport, ErrorsNameKeyLimitValueAndRemedy) {
  for (const Limit& limit : limits_of_gpus()) {
    SCOPED_TRACE(limit.text);
    ModelSpec m;
    DeviceUse use;
    limit.set(m, use, limit.most);
    EXPECT_EQ(error_of(m, use), "");
    limit.set(m, use, limit.most + 1);
    EXPECT_EQ(error_of(m, use), "run.device = \"cuda\" cannot be honoured: on a GPU " + limit.text +
                                    "set run.device = \"cpu\" (--device cpu)");
    EXPECT_EQ(error_of(m, use, DeviceKind::cpu), "");
  }
}

TEST(DeviceSupport, TensorParallelRanksShareHeads) {
  ModelSpec m;
  m.num_heads = 65536, m.head_dim = 2;
  EXPECT_NE(error_of(m), "");
  EXPECT_EQ(error_of(m, {.tp = 2}), "");
}

TEST(DeviceSupport, ExpertsHaveALimitOnEveryDevice) {
  ModelSpec m;
  m.num_experts = 1024;
  for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda}) EXPECT_EQ(error_of(m, {}, device), "");
  m.num_experts = 2000;
  for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda})
    EXPECT_EQ(error_of(m, {}, device),
              "model.num_experts: the router has kernels for at most 1024 experts; got 2000; use fewer");
}

}  // namespace
}  // namespace moebius
