#include "core/quantized.h"

#include <fmt/format.h>

namespace moebius {

std::string_view name_of(ScaleLayout layout) {
  switch (layout) {
    case ScaleLayout::none:
      return "no";
    case ScaleLayout::per_tensor:
      return "per_tensor";
    case ScaleLayout::row_blocks:
      return "row_blocks";
    case ScaleLayout::square_blocks:
      return "square_blocks";
  }
  return "unknown";
}

std::string to_string(const Operand& operand) {
  if (operand.is_plain()) return to_string(operand.data);
  return fmt::format("{} with {} scales {}", to_string(operand.data), name_of(operand.layout),
                     to_string(operand.scales));
}

void check_plain(const char* who, const char* name, const Operand& operand) {
  MOEBIUS_CHECK(usage, operand.is_plain(),
                "{}: {} has no quantised form yet; expected an f32 or bf16 tensor without scales, got {}", who, name,
                to_string(operand));
}

}  // namespace moebius
