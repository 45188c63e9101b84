#include "device/fallback_kernels.h"

#include <fmt/format.h>

namespace moebius {

std::string fallback_kernels_text(const FallbackKernels& noted, DType compute) {
  std::map<std::string, std::string> ops;  // by the reason
  for (const auto& [op, why] : noted.why) ops[why] += (ops[why].empty() ? "" : ", ") + op;
  std::string text;
  const auto add = [&](const std::string& what) { text += (text.empty() ? "fallback kernels: " : "; ") + what; };
  if (compute == DType::f32) add("f32: no tensor cores (bf16 has them)");
  for (const auto& [why, names] : ops) add(names + ": " + why);
  return text;
}

std::vector<std::string> fallback_kernels_of_ranks(const std::vector<std::string>& by_rank) {
  std::map<std::string, std::vector<int>> ranks;  // by text
  for (size_t r = 0; r < by_rank.size(); ++r) ranks[by_rank[r]].push_back(static_cast<int>(r));
  std::vector<std::string> texts;
  for (const auto& [text, who] : ranks) {
    if (text.empty()) continue;
    const bool is_shared = who.size() == by_rank.size();
    texts.push_back(is_shared ? text
                              : fmt::format("rank{} {}: {}", who.size() > 1 ? "s" : "", fmt::join(who, ", "), text));
  }
  return texts;
}

}  // namespace moebius
