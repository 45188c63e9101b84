#include "ops/grouped_gemm/grouped_gemm_config.h"

#include <fmt/format.h>

namespace moebius {
namespace {

std::string_view name_of(GroupedEpilogue epilogue) {
  switch (epilogue) {
    case GroupedEpilogue::store:
      return "store";
    case GroupedEpilogue::gated_activation:
      return "gated_activation";
    case GroupedEpilogue::gated_activation_bwd:
      return "gated_activation_bwd";
    case GroupedEpilogue::add_f32:
      return "add_f32";
  }
  return "unknown";
}

std::string_view text_of(GatheredOperand gathered) {
  switch (gathered) {
    case GatheredOperand::none:
      return "";
    case GatheredOperand::a:
      return ", A gathered";
    case GatheredOperand::b:
      return ", B gathered";
  }
  return "";
}

std::string text_of(const OperandDesc& operand) {
  const std::string_view dtype = name_of(operand.dtype);
  if (operand.scales == ScaleLayout::none) return std::string(dtype);
  return fmt::format("{} with {}", dtype, name_of(operand.scales));
}

// Operands without scales have one dtype.
std::string text_of_operands(const GroupedGemmDesc& d) {
  const bool are_plain = d.a == d.b && d.a.scales == ScaleLayout::none;
  return are_plain ? text_of(d.a) : fmt::format("{} by {}", text_of(d.a), text_of(d.b));
}

}  // namespace

std::string to_string(const GroupedGemmDesc& d) {
  return fmt::format("{} x {} x {}, {} experts, {}{}{}{}, epilogue {}", d.m, d.n, d.k, d.num_experts,
                     text_of_operands(d), text_of(d.gathered), d.trans_a ? ", A transposed" : "",
                     d.trans_b ? ", B transposed" : "", name_of(d.epilogue));
}

std::string to_string(const GroupedGemmConfig& c) {
  return fmt::format(
      "tiles {} x {} x {}, {} slots, {} notes, clusters of {}, {} threads, registers {} and {}, L2 groups of {}",
      c.tile_m, c.tile_n, c.tile_k, c.num_slots, c.num_notes, c.cluster, c.threads, c.producer_registers,
      c.consumer_registers, c.l2_group);
}

GroupedGemmConfig choose_config(const GroupedGemmDesc& desc) {
  if (desc.a.scales != ScaleLayout::none) {
    if (desc.epilogue == GroupedEpilogue::add_f32) return kSm90WgradF8;
    return desc.gathered == GatheredOperand::none ? kSm90RowsF8 : kSm90GatheredRowsF8;
  }
  if (desc.epilogue == GroupedEpilogue::add_f32) return kSm90Wgrad;
  // The backward of the activation runs in the consumers, so no registers are left
  // for the producer.
  const bool producer_gets_more =
      desc.gathered != GatheredOperand::none && desc.epilogue != GroupedEpilogue::gated_activation_bwd;
  return producer_gets_more ? kSm90GatheredRows : kSm90Rows;
}

}  // namespace moebius
