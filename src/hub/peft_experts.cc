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
  bool exchanged = false;  // A and B are exchanged (ExpertAdapters::is_exchanged)
  bool stacked = false;    // of twice the rank: gate and up each have an A, or share a wide one
  int64_t columns_a = 0, rows_b = 0;
};

std::vector<Form> forms_of(const ExpertAdapters& x) {
  const int64_t H = x.hidden, I = x.intermediate;
  std::vector<Form> forms{{.matrix = ExpertMatrix::gate_up, .columns_a = H, .rows_b = 2 * I},
                          {.matrix = ExpertMatrix::gate_up, .stacked = true, .columns_a = H, .rows_b = 2 * I},
                          {.matrix = ExpertMatrix::down, .columns_a = I, .rows_b = H}};
  if (x.family == HfFamily::gpt_oss) return forms;
  forms.push_back({.matrix = ExpertMatrix::gate_up, .exchanged = true, .columns_a = 2 * I, .rows_b = H});
  forms.push_back({.matrix = ExpertMatrix::down, .exchanged = true, .columns_a = H, .rows_b = I});
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

// The sizes of one expert's matrix, and of the tensors that hold the adapters of all experts.
struct PartSizes {
  PartSizes(const ExpertAdapters& x, const Part& part)
      : is_down(part.matrix == ExpertMatrix::down),
        in(is_down ? x.intermediate : x.hidden),
        out(is_down ? x.hidden : 2 * x.intermediate),
        rank(is_down ? x.rank : x.rank_of_gate_up()),
        rank_of_part(x.share_wide_a ? rank : x.rank),
        first_rank(part.is_up && x.are_stacked ? x.rank : 0),
        all_ranks(rank * x.num_experts) {}

  bool is_down;
  int64_t in, out;       // columns and rows of the matrix
  int64_t rank;          // that an expert has in the tensors
  int64_t rank_of_part;  // of this A or B
  int64_t first_rank;    // of this A or B among those of its expert
  int64_t all_ranks;     // of all experts
};

// Returns the place of an A [rank, in].
FusedPlace place_of_a(const ExpertAdapters& x, const Part& part) {
  const PartSizes z(x, part);
  FusedPlace place{.name = {},
                   .shape = {z.all_ranks, z.in},
                   .rows = z.rank_of_part,
                   .cols = z.in,
                   .offset = (part.expert * z.rank + z.first_rank) * z.in};
  place.row_stride = z.in;
  place.col_stride = 1;
  if (!x.is_exchanged) return place;
  place.shape = {z.in, z.all_ranks};
  place.offset = part.expert;
  place.row_stride = x.num_experts;
  place.col_stride = z.all_ranks;
  return place;
}

// Returns the place of a B [out, rank]: of the rows of gate or of up, or of down.
FusedPlace place_of_b(const ExpertAdapters& x, const Part& part) {
  const PartSizes z(x, part);
  const bool alternates = x.family == HfFamily::gpt_oss && !z.is_down;  // rows of gate and up
  const int64_t rows = z.is_down ? z.out : x.intermediate, step = alternates ? 2 : 1;
  const int64_t first_row = part.is_up ? (alternates ? 1 : rows) : 0;
  FusedPlace place{.name = {}, .shape = {z.out, z.all_ranks}, .rows = rows, .cols = z.rank_of_part};
  place.offset = first_row * z.all_ranks + z.first_rank * x.num_experts + part.expert;
  place.row_stride = step * z.all_ranks;
  place.col_stride = x.num_experts;
  if (!x.is_exchanged) return place;
  place.shape = {z.all_ranks, z.out};
  place.offset = part.expert * x.rank * z.out + first_row;
  place.row_stride = step;
  place.col_stride = z.out;
  return place;
}

}  // namespace

std::optional<FusedPlace> expert_adapter_place(const ExpertAdapters& x, const std::string& name) {
  const auto part = parse_part(name);
  if (!part) return std::nullopt;
  FusedPlace place = part->is_a ? place_of_a(x, *part) : place_of_b(x, *part);
  const bool is_wrapped_twice = part->matrix == ExpertMatrix::gate_up && x.has_down;
  const bool is_in_a = part->is_a != x.is_exchanged;
  place.name =
      fmt::format("{}{}{}{}", part->prefix, kExperts, is_wrapped_twice ? kBase : "", is_in_a ? kSuffixA : kSuffixB);
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
