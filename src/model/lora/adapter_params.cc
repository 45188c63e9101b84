#include "model/lora/adapter_params.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "model/lora/shared_a.h"

namespace moebius {
namespace {

constexpr std::string_view kWeight = ".weight", kExperts = ".mlp.experts.";

std::string matrix_of(const ParamPart& part) {
  MOEBIUS_ASSERT(part.name.ends_with(kWeight));
  return part.name.substr(0, part.name.size() - kWeight.size());
}

// W as matrices: one matrix, or one for each expert.
struct Matrices {
  explicit Matrices(const ParamSpec& w)
      : experts(w.shape.rank() == 3 ? w.shape[0] : 1),
        out(w.shape[w.shape.rank() - 2]),
        in(w.shape[w.shape.rank() - 1]),
        parts_of_one(static_cast<int64_t>(w.parts.size()) / experts) {
    MOEBIUS_ASSERT(parts_of_one * experts == static_cast<int64_t>(w.parts.size()));
  }
  int64_t experts, out, in, parts_of_one;
};

// Adapters of an expert-wise matrix are stored together, so the experts of a layer agree.
// name(): the name of an expert's matrix. part: its position in the list of parts of one expert.
template <class Name>
bool is_target(const LoraSpec& lora, const ParamSpec& w, const Matrices& m, int64_t part, Name name) {
  std::string in, out;
  for (int64_t e = 0; e < m.experts; ++e) {
    const std::string matrix = name(matrix_of(w.parts[static_cast<size_t>(e * m.parts_of_one + part)]));
    (is_lora_target(lora.targets, matrix) ? in : out) = matrix;
  }
  MOEBIUS_CHECK(
      usage, in.empty() || out.empty(),
      "lora.targets: expected patterns that match a projection of all experts of a layer or of none; got some "
      "that match {} and not {}; write * for the number of the expert",
      in, out);
  return !in.empty();
}

// The parts of W that share an A, by their positions in the list of one expert.
using Group = std::vector<int64_t>;

// Returns the groups that have an adapter.
std::vector<Group> target_groups(const LoraSpec& lora, const ParamSpec& w, const Matrices& m) {
  std::vector<Group> groups;
  const auto own_name = [](const std::string& matrix) { return matrix; };
  for (int64_t part = 0; part < m.parts_of_one; ++part)
    if (is_target(lora, w, m, part, own_name)) groups.push_back({part});
  const bool is_gate_up = m.parts_of_one == 2 && matrix_of_shared_a(matrix_of(w.parts[0])) != matrix_of(w.parts[0]);
  // A pattern such as * matches all three names, and means the matrices themselves.
  if (is_gate_up && groups.empty() && is_target(lora, w, m, 0, matrix_of_shared_a)) groups.push_back({0, 1});
  return groups;
}

// Returns where the number of an expert and its dot are in the name of a matrix: [begin, end); empty for others.
std::pair<size_t, size_t> expert_number(const std::string& matrix) {
  const size_t at = matrix.find(kExperts);
  if (at == matrix.npos) return {};
  const size_t begin = at + kExperts.size(), end = matrix.find('.', begin);
  const bool is_number = end != matrix.npos && end > begin &&
                         std::all_of(matrix.begin() + static_cast<std::ptrdiff_t>(begin),
                                     matrix.begin() + static_cast<std::ptrdiff_t>(end),
                                     [](unsigned char c) { return std::isdigit(c) != 0; });
  return is_number ? std::pair{begin, end + 1} : std::pair<size_t, size_t>{};
}

// Returns the ranks that share the elements of a tensor, when they also share those that W splits.
Axis with_splitting_ranks(Axis axis) {
  switch (axis) {
    case Axis::dp_cp:
      return Axis::tp_cp_dp;
    case Axis::edp:
      return Axis::etp_edp;
    default:
      MOEBIUS_ASSERT(axis == Axis::tp_cp_dp);
      return axis;
  }
}

Shape shape_of(const ParamSpec& w, int64_t experts, int64_t rows, int64_t columns) {
  return w.shape.rank() == 3 ? Shape{experts, rows, columns} : Shape{rows, columns};
}

}  // namespace

// Names of experts' matrices may also lack the number of the expert, as PEFT's do: "mlp.experts.down_proj".
bool is_lora_target(const std::vector<std::string>& targets, const std::string& matrix) {
  const auto [begin, end] = expert_number(matrix);
  const std::string without = matrix.substr(0, begin) + matrix.substr(end);
  return std::any_of(targets.begin(), targets.end(), [&](const std::string& target) {
    return matches_any({target, "*." + target}, matrix) || (end > 0 && matches_any({target, "*." + target}, without));
  });
}

std::string matrix_of_shared_a(const std::string& matrix) {
  const size_t end = expert_number(matrix).second;
  const std::string_view rest = std::string_view(matrix).substr(end);
  return end > 0 && (rest == "gate_proj" || rest == "up_proj") ? matrix.substr(0, end) + "gate_up_proj" : matrix;
}

std::string adapted_matrix(const std::string& adapter_part) {
  MOEBIUS_ASSERT(adapter_part.ends_with(kLoraA) || adapter_part.ends_with(kLoraB));
  return adapter_part.substr(0, adapter_part.size() - std::string_view(kLoraA).size());
}

AdapterParams adapter_params(const LoraSpec& lora, const ParamSpec& w) {
  AdapterParams params;
  if (!lora.is_on()) return params;
  ParamSpec whole = w;
  if (whole.parts.empty()) whole.parts.push_back({w.name, w.shape, 0});
  const Matrices m(whole);
  const std::vector<Group> groups = target_groups(lora, whole, m);
  if (groups.empty()) return params;
  int64_t rows = 0;
  for (const Group& group : groups) {
    const ParamPart& first = whole.parts[static_cast<size_t>(group.front())];
    const int64_t count = std::ssize(group) * first.local_shape()[0];  // gate and up have the same number of rows
    std::string name = w.name;
    if (group.size() == 1) name = w.shape.rank() == 3 ? fmt::format("{}.{}", w.name, group.front()) : matrix_of(first);
    params.blocks.push_back({.column = first.offset / m.in, .row = rows, .count = count, .name = std::move(name)});
    rows += count;
  }

  const int64_t r = lora.rank, num_blocks = std::ssize(groups);
  const int split = whole.parts.front().shard.dim;
  // PEFT: A is Kaiming uniform with a = sqrt(5), which is uniform in +-1 / sqrt(in).
  const double bound = 1.0 / std::sqrt(static_cast<double>(whole.parts.front().shape[1]));
  params.a = {.name = w.name + ".lora_A",
              .shape = shape_of(w, m.experts, num_blocks * r, m.in),
              .dtype = w.dtype,
              .init = ParamInit::uniform,
              .init_std = static_cast<float>(bound / std::sqrt(3.0)),
              .kind = ParamKind::adapter,
              .grad_axis = split == 1 ? w.grad_axis : with_splitting_ranks(w.grad_axis)};
  params.b = {.name = w.name + ".lora_B",
              .shape = shape_of(w, m.experts, rows, r),
              .dtype = w.dtype,
              .init = ParamInit::zeros,
              .kind = ParamKind::adapter,
              .grad_axis = split == 0 ? w.grad_axis : with_splitting_ranks(w.grad_axis)};
  for (int64_t e = 0; e < m.experts; ++e) {
    for (int64_t b = 0; b < num_blocks; ++b) {
      const Group& group = groups[static_cast<size_t>(b)];
      const auto part_at = [&](int64_t part) -> const ParamPart& {
        return whole.parts[static_cast<size_t>(e * m.parts_of_one + part)];
      };
      const ParamPart& first = part_at(group.front());
      const std::string of_a = matrix_of(first);
      params.a.parts.push_back({.name = (group.size() == 1 ? of_a : matrix_of_shared_a(of_a)) + kLoraA,
                                .shape = {r, first.shape[1]},
                                .offset = (e * num_blocks + b) * r * m.in,
                                .shard = split == 1 ? first.shard : Shard{}});
      int64_t row = e * rows + params.blocks[static_cast<size_t>(b)].row;
      for (const int64_t each : group) {
        const ParamPart& part = part_at(each);
        params.b.parts.push_back({.name = matrix_of(part) + kLoraB,
                                  .shape = {part.shape[0], r},
                                  .offset = row * r,
                                  .shard = split == 0 ? part.shard : Shard{}});
        row += part.local_shape()[0];
      }
    }
  }
  return params;
}

}  // namespace moebius
