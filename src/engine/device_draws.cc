#include "engine/device_draws.h"

#include <cstring>

namespace moebius {
namespace {

constexpr int64_t kRuleBytes = sizeof(DrawRule);

}  // namespace

void DeviceDraws::declare(MemoryPlan& plan) { plan.declare(rule_, "draw_rule", {kRuleBytes}, DType::u8, Life::saved); }

void DeviceDraws::bind(int64_t sequences) {
  of_host_ = HostBuffer(DeviceKind::cuda, kRuleBytes + 2 * sequences * int64_t{sizeof(int32_t)});
}

void DeviceDraws::set_rule(Stream& s, const DrawRule& rule) {
  std::memcpy(of_host_.data(), &rule, sizeof rule);
  copy_to_device(s, rule_.data, of_host_.data(), kRuleBytes);
}

DrawTokens DeviceDraws::op(Tensor logits_NV, Tensor token_N, Tensor pos_N) const {
  auto* ids = reinterpret_cast<int32_t*>(static_cast<std::byte*>(of_host_.data()) + kRuleBytes);
  return {.id_N = token_N,
          .read_2N = tensor_of(ids, {2, logits_NV.dim(0)}),
          .pos_N = pos_N,
          .logits_NV = logits_NV,
          .rule = rule_};
}

int32_t DeviceDraws::id(int64_t n, int64_t num_rows, int64_t pos) const {
  const auto* ids = reinterpret_cast<const int32_t*>(static_cast<const std::byte*>(of_host_.data()) + kRuleBytes);
  return ids[pos % 2 * num_rows + n];
}

}  // namespace moebius
