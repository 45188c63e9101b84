#include "hub/hf_names.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "core/error.h"

namespace moebius {
namespace {

constexpr std::string_view kExperts = "mlp.experts.";

struct Projection {
  ExpertProjection projection;
  std::string_view canonical, mixtral;
};
constexpr std::array<Projection, 3> kProjections{{{ExpertProjection::gate, ".gate_proj.weight", ".w1.weight"},
                                                  {ExpertProjection::up, ".up_proj.weight", ".w3.weight"},
                                                  {ExpertProjection::down, ".down_proj.weight", ".w2.weight"}}};

// Replaces `from` at the end of *name by `to`. Returns false when *name does not end with `from`.
bool replace_suffix(std::string* name, std::string_view from, std::string_view to) {
  if (!name->ends_with(from)) return false;
  name->replace(name->size() - from.size(), from.size(), to);
  return true;
}

bool replace_once(std::string* name, std::string_view from, std::string_view to) {
  const size_t at = name->find(from);
  if (at == std::string::npos) return false;
  name->replace(at, from.size(), to);
  return true;
}

std::string mixtral_name(std::string name) {
  if (replace_suffix(&name, ".mlp.gate.weight", ".block_sparse_moe.gate.weight")) return name;
  if (!replace_once(&name, ".mlp.experts.", ".block_sparse_moe.experts.")) return name;
  for (const Projection& p : kProjections) {
    if (replace_suffix(&name, p.canonical, p.mixtral)) break;
  }
  return name;
}

std::string from_mixtral_name(std::string name) {
  if (replace_suffix(&name, ".block_sparse_moe.gate.weight", ".mlp.gate.weight")) return name;
  if (!replace_once(&name, ".block_sparse_moe.experts.", ".mlp.experts.")) return name;
  for (const Projection& p : kProjections) {
    if (replace_suffix(&name, p.mixtral, p.canonical)) break;
  }
  return name;
}

}  // namespace

HfFamily hf_family(std::string_view model_type) {
  constexpr std::string_view kCanonical[] = {"deepseek_v2", "deepseek_v3", "llama", "mistral",
                                             "olmoe",       "qwen2",       "qwen3", "qwen3_moe"};
  if (model_type == "mixtral") return HfFamily::mixtral;
  if (model_type == "qwen2_moe") return HfFamily::qwen2_moe;
  if (model_type == "gpt_oss") return HfFamily::gpt_oss;
  if (std::find(std::begin(kCanonical), std::end(kCanonical), model_type) != std::end(kCanonical)) {
    return HfFamily::canonical;
  }
  MOEBIUS_FAIL(input,
               "hugging face model: expected model_type gpt_oss, mixtral, qwen2_moe, {}; "
               "got \"{}\"; this family is not supported",
               fmt::join(kCanonical, ", "), model_type);
}

std::string hf_name(HfFamily family, std::string_view canonical) {
  std::string name(canonical);
  if (family == HfFamily::mixtral) return mixtral_name(std::move(name));
  if (family == HfFamily::qwen2_moe) replace_once(&name, ".mlp.shared_experts.", ".mlp.shared_expert.");
  if (family == HfFamily::gpt_oss) {
    if (const auto expert = parse_expert_name(canonical)) return fused_name(*expert);
    replace_once(&name, ".mlp.gate.", ".mlp.router.");
  }
  return name;
}

std::string canonical_name(HfFamily family, std::string_view hf) {
  std::string name(hf);
  if (family == HfFamily::mixtral) return from_mixtral_name(std::move(name));
  if (family == HfFamily::qwen2_moe) replace_once(&name, ".mlp.shared_expert.", ".mlp.shared_experts.");
  if (family == HfFamily::gpt_oss) replace_once(&name, ".mlp.router.", ".mlp.gate.");
  return name;
}

std::optional<ExpertName> parse_expert_name(std::string_view canonical) {
  const size_t at = canonical.find(kExperts);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view rest = canonical.substr(at + kExperts.size());
  ExpertName name{.prefix = std::string(canonical.substr(0, at))};
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), name.expert);
  if (error != std::errc() || name.expert < 0) return std::nullopt;
  std::string suffix(rest.substr(end - rest.data()));
  name.is_bias = replace_suffix(&suffix, ".bias", ".weight");
  for (const Projection& p : kProjections) {
    if (suffix != p.canonical) continue;
    name.projection = p.projection;
    return name;
  }
  return std::nullopt;
}

std::string fused_name(const ExpertName& e) {
  const char* matrix = e.projection == ExpertProjection::down ? "down_proj" : "gate_up_proj";
  return fmt::format("{}mlp.experts.{}{}", e.prefix, matrix, e.is_bias ? "_bias" : "");
}

}  // namespace moebius
