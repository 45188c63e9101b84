#include "hub/peft_experts.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "core/error.h"

namespace moebius {
namespace {

constexpr std::string_view kExperts = "mlp.experts", kBase = ".base_layer", kSuffixA = ".lora_A.weight",
                           kSuffixB = ".lora_B.weight", kGateUp = ".gate_up_proj";

// A [., columns] and B [rows, .] of a parameter in one order.
struct Form {
  ExpertMatrix matrix;
  bool exchanged, stacked;
  int64_t columns_a, rows_b;
};

std::vector<Form> forms_of(const ExpertAdapters& x) {
  const int64_t H = x.hidden, I = x.intermediate;
  std::vector<Form> forms{{ExpertMatrix::gate_up, false, false, H, 2 * I},
                          {ExpertMatrix::gate_up, false, true, H, 2 * I},
                          {ExpertMatrix::down, false, false, I, H}};
  if (x.family == HfFamily::gpt_oss) return forms;
  forms.push_back({ExpertMatrix::gate_up, true, false, 2 * I, H});
  forms.push_back({ExpertMatrix::down, true, false, H, I});
  return forms;
}

std::vector<Form> forms_of_pair(const ExpertAdapters& x, const ExpertAdapterPair& pair) {
  std::vector<Form> fitting;
  for (const Form& form : forms_of(x)) {
    const int64_t all = x.num_experts * (form.stacked ? 2 : 1) * x.rank;
    if (pair.a.shape == std::vector<int64_t>{all, form.columns_a} &&
        pair.b.shape == std::vector<int64_t>{form.rows_b, all})
      fitting.push_back(form);
  }
  return fitting;
}

// Returns whether a version is of PEFT before 0.19. PEFT writes its version since 0.18.
bool is_before_0_19(const std::string& version) {
  int major = 0, minor = 0;
  const char* const end = version.data() + version.size();
  const auto [dot, error] = std::from_chars(version.data(), end, major);
  if (error != std::errc() || dot == end) return true;
  std::from_chars(dot + 1, end, minor);
  return major == 0 && minor < 19;
}

// A or B of one expert, by its canonical name.
struct Part {
  std::string prefix;
  int64_t expert = 0;
  bool is_a = false, is_up = false;
  ExpertMatrix matrix = ExpertMatrix::gate_up;
};

std::optional<Part> parse_part(const std::string& name) {
  const bool is_a = name.ends_with(kSuffixA);
  if (!is_a && !name.ends_with(kSuffixB)) return std::nullopt;
  std::string matrix = name.substr(0, name.size() - kSuffixA.size());
  const bool is_shared = matrix.ends_with(kGateUp);
  if (is_shared) matrix.replace(matrix.size() - kGateUp.size(), kGateUp.size(), ".gate_proj");
  const auto expert = parse_expert_name(matrix + ".weight");
  if (!expert) return std::nullopt;
  const bool is_down = expert->projection == ExpertProjection::down;
  if (is_shared && !is_a) return std::nullopt;
  return Part{.prefix = expert->prefix,
              .expert = expert->expert,
              .is_a = is_a,
              .is_up = expert->projection == ExpertProjection::up,
              .matrix = is_down ? ExpertMatrix::down : ExpertMatrix::gate_up};
}

}  // namespace

std::optional<FusedPlace> expert_adapter_place(const ExpertAdapters& x, const std::string& name) {
  const auto part = parse_part(name);
  if (!part) return std::nullopt;
  const bool is_down = part->matrix == ExpertMatrix::down, alternates = x.family == HfFamily::gpt_oss && !is_down;
  const int64_t r = x.rank, E = x.num_experts, in = is_down ? x.intermediate : x.hidden,
                out = is_down ? x.hidden : 2 * x.intermediate;
  const int64_t R = is_down ? r : x.rank_of_gate_up(), all = R * E;
  const int64_t own = x.share_wide_a ? R : r;  // the rank of this part
  const int64_t first_rank = part->is_up && x.are_stacked ? r : 0;
  const std::string module = fmt::format("{}{}{}", part->prefix, kExperts, !is_down && x.has_down ? kBase : "");
  const auto tensor = [&](bool is_a) {
    return fmt::format("{}{}", module, is_a != x.is_exchanged ? kSuffixA : kSuffixB);
  };
  FusedPlace place;
  // Elements of the tensor whose rows are ranks of experts: [rank, in] of A, or the transposed B.
  if (part->is_a) {
    place = {.name = tensor(true),
             .shape = {all, in},
             .rows = own,
             .cols = in,
             .offset = (part->expert * R + first_rank) * in};
    place.row_stride = in;
    place.col_stride = 1;
    if (!x.is_exchanged) return place;
    place.shape = {in, all};
    place.offset = part->expert;
    place.row_stride = E;
    place.col_stride = all;
    return place;
  }
  const int64_t rows = is_down ? out : x.intermediate, step = alternates ? 2 : 1;
  const int64_t first = part->is_up ? (alternates ? 1 : rows) : 0;
  place = {.name = tensor(false), .shape = {out, all}, .rows = rows, .cols = own};
  place.offset = first * all + first_rank * E + part->expert;
  place.row_stride = step * all;
  place.col_stride = E;
  if (!x.is_exchanged) return place;
  place.shape = {all, out};
  place.offset = part->expert * r * out + first;
  place.row_stride = step;
  place.col_stride = out;
  return place;
}

std::optional<std::string> layer_of_expert_adapter(std::string_view module) {
  if (module.ends_with(kBase)) module.remove_suffix(kBase.size());
  if (!module.ends_with(kExperts)) return std::nullopt;
  return std::string(module.substr(0, module.size() - kExperts.size()));
}

bool is_exchanged(const ExpertAdapters& x, const std::vector<ExpertAdapterPair>& pairs, const std::string& version,
                  const std::string& who) {
  const ExpertAdapterPair *plain = nullptr, *exchanged = nullptr;
  for (const ExpertAdapterPair& pair : pairs) {
    const std::vector<Form> forms = forms_of_pair(x, pair);
    MOEBIUS_CHECK(input, !forms.empty(),
                  "{}: expected adapters of {} experts [{}, {}] and [{}, {}] with rank {}, as PEFT stores those of "
                  "gate_up_proj and down_proj; got {} [{}] and {} [{}]; check that the adapter belongs to this model",
                  who, x.num_experts, 2 * x.intermediate, x.hidden, x.hidden, x.intermediate, x.rank, pair.a.name,
                  fmt::join(pair.a.shape, ", "), pair.b.name, fmt::join(pair.b.shape, ", "));
    if (forms.size() == 1) (forms.front().exchanged ? exchanged : plain) = &pair;
  }
  MOEBIUS_CHECK(
      input, !plain || !exchanged,
      "{}: expected all adapters of experts in the order of one version of PEFT; got {} of PEFT 0.19 or later "
      "and {} of an earlier one; save the adapter again with one version",
      who, plain->a.name, exchanged->a.name);
  if (plain || exchanged) return exchanged != nullptr;
  return x.family != HfFamily::gpt_oss && is_before_0_19(version);
}

ExpertMatrix matrix_of_pair(const ExpertAdapters& x, const ExpertAdapterPair& pair) {
  return forms_of_pair(x, pair).front().matrix;
}

bool is_stacked(const ExpertAdapters& x, const ExpertAdapterPair& pair) {
  return forms_of_pair(x, pair).front().stacked;
}

bool has_two_blocks(const ExpertAdapters& x, const std::vector<std::byte>& b, DType dtype) {
  const int64_t I = x.intermediate, half = x.rank * x.num_experts, bytes = size_of(dtype);
  const auto is_zero = [](std::byte each) { return each == std::byte{0}; };
  for (int64_t row = 0; row < 2 * I; ++row) {
    const bool is_up = x.family == HfFamily::gpt_oss ? row % 2 == 1 : row >= I;
    const auto begin = b.begin() + (2 * row + (is_up ? 0 : 1)) * half * bytes;
    if (!std::all_of(begin, begin + half * bytes, is_zero)) return false;
  }
  return true;
}

std::vector<std::string> parts_of_pair(const ExpertAdapters& x, const ExpertAdapterPair& pair) {
  const bool is_down = matrix_of_pair(x, pair) == ExpertMatrix::down;
  std::vector<std::string> names{"gate_up_proj.lora_A", "gate_proj.lora_B", "up_proj.lora_B"};
  if (is_down) names = {"down_proj.lora_A", "down_proj.lora_B"};
  if (x.are_stacked && !is_down) names = {"gate_proj.lora_A", "gate_proj.lora_B", "up_proj.lora_A", "up_proj.lora_B"};
  std::vector<std::string> parts;
  for (int64_t e = 0; e < x.num_experts; ++e)
    for (const std::string& name : names)
      parts.push_back(fmt::format("{}{}.{}.{}.weight", pair.prefix, kExperts, e, name));
  return parts;
}

}  // namespace moebius
