#include "model/lora/adapter_params.h"

#include <algorithm>
#include <cmath>

namespace moebius {
namespace {

constexpr std::string_view kWeight = ".weight";

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
bool is_target(const LoraSpec& lora, const ParamSpec& w, const Matrices& m, int64_t part) {
  const ParamPart *in = nullptr, *out = nullptr;
  for (int64_t e = 0; e < m.experts; ++e) {
    const ParamPart& each = w.parts[static_cast<size_t>(e * m.parts_of_one + part)];
    (is_lora_target(lora.targets, matrix_of(each)) ? in : out) = &each;
  }
  MOEBIUS_CHECK(
      usage, !in || !out,
      "lora.targets: expected patterns that match a projection of all experts of a layer or of none; got some "
      "that match {} and not {}; write * for the number of the expert",
      matrix_of(*in), matrix_of(*out));
  return in != nullptr;
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

bool is_lora_target(const std::vector<std::string>& targets, const std::string& matrix) {
  return std::any_of(targets.begin(), targets.end(), [&](const std::string& target) {
    return matches_any({target, "*." + target}, matrix);
  });
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
  std::vector<int64_t> targets;
  int64_t rows = 0;
  for (int64_t part = 0; part < m.parts_of_one; ++part) {
    const ParamPart& first = whole.parts[static_cast<size_t>(part)];
    if (!is_target(lora, whole, m, part)) continue;
    const int64_t count = first.local_shape()[0];
    params.blocks.push_back({.column = first.offset / m.in,
                             .row = rows,
                             .count = count,
                             .name = w.shape.rank() == 3 ? fmt::format("{}.{}", w.name, part) : matrix_of(first)});
    targets.push_back(part);
    rows += count;
  }
  if (targets.empty()) return params;

  const int64_t r = lora.rank, num_blocks = std::ssize(targets);
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
      const ParamPart& part = whole.parts[static_cast<size_t>(e * m.parts_of_one + targets[b])];
      params.a.parts.push_back({.name = matrix_of(part) + kLoraA,
                                .shape = {r, part.shape[1]},
                                .offset = (e * num_blocks + b) * r * m.in,
                                .shard = split == 1 ? part.shard : Shard{}});
      params.b.parts.push_back({.name = matrix_of(part) + kLoraB,
                                .shape = {part.shape[0], r},
                                .offset = (e * rows + params.blocks[b].row) * r,
                                .shard = split == 0 ? part.shard : Shard{}});
    }
  }
  return params;
}

}  // namespace moebius
