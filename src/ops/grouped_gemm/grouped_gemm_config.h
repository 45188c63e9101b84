// A grouped product has three steps. The desc says what is computed, choose_config() says how,
// and the launch (sm90/launch.h) runs the kernel that was compiled for that config. Both are plain
// values that can be printed. This header and its .cc need no CUDA, so the choice is tested on
// every machine.
#pragma once

#include <string>

#include "core/error.h"
#include "core/quantized.h"

namespace moebius {

// The operand whose rows are read by an index in memory.
enum class GatheredOperand : uint8_t { none, a, b };

// The work of the kernel on a tile of the product.
enum class GroupedEpilogue : uint8_t {
  store,                 // rounds it to the dtype and stores it: expert_down, d_expert_up
  gated_activation,      // also stores the gated activation of its columns: expert_up
  gated_activation_bwd,  // stores the gradients of the gated activation: d_expert_down
  add_f32,               // adds it to f32 sums in memory: expert_wgrad
};

// The elements of an operand, and how they are scaled.
struct OperandDesc {
  OperandDesc() = default;
  explicit OperandDesc(const Operand& operand) : dtype(operand.data.dtype), scales(operand.layout) {}
  bool operator==(const OperandDesc&) const = default;

  DType dtype = DType::bf16;
  ScaleLayout scales = ScaleLayout::none;
};

// C[e] = A[e] B[e] for each expert e. The rows of all experts are one dimension, and offsets in device memory cut it:
//   m, of A and C    for all epilogues but add_f32
//   k, of A and B    for add_f32
struct GroupedGemmDesc {
  int64_t num_experts = 1;
  int64_t m = 0, n = 0, k = 0;
  OperandDesc a, b;
  bool trans_a = false, trans_b = false;  // A is [k, m] in memory; B[e] is [n, k]
  GatheredOperand gathered = GatheredOperand::none;
  GroupedEpilogue epilogue = GroupedEpilogue::store;
};

// Returns a string such as "4096 x 1536 x 2048, 16 experts, bf16, A gathered, B transposed, epilogue store".
// Where the operands differ or have scales, both are named: "f8_e4m3 with row_blocks by
// f8_e4m3 with square_blocks".
std::string to_string(const GroupedGemmDesc& desc);

// How a kernel computes it. The kernels take a config as a template argument, so the members are
// public and plain. A block is one producer warpgroup, which fills a ring of slots in shared
// memory, and the consumer warpgroups, which multiply them.
struct GroupedGemmConfig {
  int tile_m = 0, tile_n = 0;  // output elements of a block at a time
  int tile_k = 0;              // depth of a slot, in elements
  int element_bytes = 2;       // bytes of an element of A and B
  int num_slots = 0;           // slots in the ring
  int num_notes = 0;           // tiles that can be announced to the consumers before they finish the first
  int cluster = 0;             // blocks that share the loads of one operand
  int threads = 0;             // threads of a block
  int producer_registers = 0, consumer_registers = 0;  // registers of a thread
  int l2_group = 0;  // neighbouring tiles down the rows that are computed together, so that L2 keeps their operands
  bool operator==(const GroupedGemmConfig&) const = default;

  constexpr int num_consumers() const { return threads / 128 - 1; }  // warpgroups
  constexpr int slot_bytes_a() const { return tile_m * tile_k * element_bytes; }
  constexpr int slot_bytes_b() const { return tile_n * tile_k * element_bytes; }
};

// Returns a string such as "tiles 128 x 256 x 64, 4 slots, 4 notes, clusters of 2, 384 threads, registers 40 and 232,
// L2 groups of 8"
std::string to_string(const GroupedGemmConfig& config);

// The configs that the kernels in sm90/ and experts/sm90/ are compiled for.
// TMA loads the rows of A, or the consumers need registers more than the producer does.
inline constexpr GroupedGemmConfig kSm90Rows{.tile_m = 128,
                                             .tile_n = 256,
                                             .tile_k = 64,
                                             .num_slots = 4,
                                             .num_notes = 4,
                                             .cluster = 2,
                                             .threads = 384,
                                             .producer_registers = 40,
                                             .consumer_registers = 232,
                                             .l2_group = 8};
// Rows of A are gathered: the producer keeps an address for each row that a thread copies.
inline constexpr GroupedGemmConfig kSm90GatheredRows = [] {
  GroupedGemmConfig config = kSm90Rows;
  config.producer_registers = 56;
  config.consumer_registers = 224;
  return config;
}();
// Weight gradients: 128 columns of the gathered side by 256 of the other.
inline constexpr GroupedGemmConfig kSm90Wgrad = [] {
  GroupedGemmConfig config = kSm90GatheredRows;
  config.l2_group = 4;
  return config;
}();

// Returns the same for FP8 operands with scales: a slot has the same number of bytes, and so twice the depth.
constexpr GroupedGemmConfig with_f8_elements(GroupedGemmConfig config) {
  config.tile_k = 128;
  config.element_bytes = 1;
  return config;
}
inline constexpr GroupedGemmConfig kSm90RowsF8 = with_f8_elements(kSm90Rows);
inline constexpr GroupedGemmConfig kSm90GatheredRowsF8 = with_f8_elements(kSm90GatheredRows);
// Both operands come by TMA, so the producer needs few registers.
inline constexpr GroupedGemmConfig kSm90WgradF8 = [] {
  GroupedGemmConfig config = kSm90RowsF8;
  config.l2_group = 4;
  return config;
}();

// Returns the config for Hopper; a function of the desc alone.
GroupedGemmConfig choose_config(const GroupedGemmDesc& desc);

// Calls body<config>() for the one of kConfigs that equals config. An op lists the configs that its
// kernel is compiled for; Error{internal} when the chosen one is not among them.
template <GroupedGemmConfig... kConfigs, class Body>
void with_config(const GroupedGemmConfig& config, const char* who, Body&& body) {
  const bool found = ((config == kConfigs && (body.template operator()<kConfigs>(), true)) || ...);
  MOEBIUS_CHECK(internal, found, "{}: no kernel was compiled for {}; add the config to the op's list", who,
                to_string(config));
}

}  // namespace moebius
