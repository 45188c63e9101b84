#include "model/quantize_stats.h"

#include <algorithm>
#include <charconv>

#include "ops/elementwise/elementwise.h"

namespace moebius {

const Tensor* QuantizeStats::of(const std::string& param) {
  constexpr std::string_view kPrefix = "model.layers.";
  if (!param.starts_with(kPrefix)) return nullptr;
  int64_t layer = 0;
  std::from_chars(param.data() + kPrefix.size(), param.data() + param.size(), layer);
  const auto found = std::find_if(layers_.begin(), layers_.end(), [&](const Layer& l) { return l.layer == layer; });
  if (found != layers_.end()) return &found->sums_5;
  Layer& added = layers_.emplace_back(Layer{.layer = layer});
  plan_.declare(added.sums_5, fmt::format("quantize_stats.{}", layer), {5}, DType::f64, Life::metrics);
  return &added.sums_5;
}

void QuantizeStats::clear(Stream& s) const {
  for (const Layer& each : layers_) fill_zero(s, each.sums_5);
}

}  // namespace moebius
