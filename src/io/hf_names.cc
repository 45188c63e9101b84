#include "io/hf_names.h"

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

// name with `from` at its end replaced by `to`; false when it does not end so.
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
  if (model_type == "mixtral") return HfFamily::mixtral;
  if (model_type == "qwen3_moe") return HfFamily::qwen3_moe;
  MOEBIUS_FAIL(input,
               "hugging face model: expected model_type mixtral or qwen3_moe; got \"{}\"; this family is not supported",
               model_type);
}

std::string hf_name(HfFamily family, std::string_view canonical) {
  return family == HfFamily::mixtral ? mixtral_name(std::string(canonical)) : std::string(canonical);
}

std::string canonical_name(HfFamily family, std::string_view hf) {
  return family == HfFamily::mixtral ? from_mixtral_name(std::string(hf)) : std::string(hf);
}

std::optional<ExpertName> parse_expert_name(std::string_view canonical) {
  const size_t at = canonical.find(kExperts);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view rest = canonical.substr(at + kExperts.size());
  ExpertName name{.prefix = std::string(canonical.substr(0, at))};
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), name.expert);
  if (error != std::errc() || name.expert < 0) return std::nullopt;
  const std::string_view suffix = rest.substr(end - rest.data());
  for (const Projection& p : kProjections) {
    if (suffix != p.canonical) continue;
    name.projection = p.projection;
    return name;
  }
  return std::nullopt;
}

}  // namespace moebius
