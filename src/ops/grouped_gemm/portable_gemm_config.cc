#include "ops/grouped_gemm/portable_gemm_config.h"

#include <fmt/format.h>

#include <algorithm>

namespace moebius {
namespace {

// Returns the most output tiles that the product can have. Rows of experts may leave a tile of each ragged.
int64_t max_tiles(const GroupedGemmDesc& d, const PortableGemmConfig& c) {
  const int64_t across = div_ceil(d.n, c.tile_n);
  if (d.epilogue == GroupedEpilogue::add_f32) return d.num_experts * div_ceil(d.m, c.tile_m) * across;
  return (d.m / c.tile_m + std::min(d.num_experts, d.m)) * across;
}

// Returns whether the small tiles of a product are too many for one round of blocks: with room for one block of a
// multiprocessor instead of two, larger tiles take as many rounds or fewer, and have twice the warps.
bool lacks_room_for_small(const GroupedGemmDesc& d, const GpuLimits& limits) {
  const int64_t blocks = blocks_of_multiprocessor(kPortableSmall, d.num_experts, limits);
  return blocks < kPortableSmall.blocks && max_tiles(d, kPortableSmall) > blocks * limits.num_multiprocessors;
}

// Returns whether the rows of all operands and results have whole chunks of 8 elements.
bool has_whole_chunks(const GroupedGemmDesc& d) {
  const int64_t columns = d.epilogue == GroupedEpilogue::gated_activation ? d.n / 2 : d.n;
  return columns % 8 == 0 && (d.epilogue == GroupedEpilogue::add_f32 ? d.m : d.k) % 8 == 0;
}

}  // namespace

int64_t blocks_of_multiprocessor(const PortableGemmConfig& c, int64_t num_experts, const GpuLimits& limits) {
  const int64_t needed = c.shared_bytes(num_experts);
  if (needed > limits.shared_bytes_per_block) return 0;
  return std::min<int64_t>(c.blocks, limits.blocks_together(needed));
}

std::string to_string(const PortableGemmConfig& c, int64_t blocks) {
  return fmt::format("mma.sync, tiles {} x {} x {}, {} slots, {} threads, {} block{} a multiprocessor, L2 groups of {}",
                     c.tile_m, c.tile_n, c.tile_k, c.num_slots, c.threads(), blocks, blocks == 1 ? "" : "s",
                     c.l2_group);
}

PortableGemmConfig choose_portable_config(const GroupedGemmDesc& desc, const GpuLimits& limits) {
  const bool only_stores = desc.epilogue == GroupedEpilogue::store;
  for (const PortableGemmConfig& config : {kPortablePair, kPortableDeep, kPortableWide}) {
    if (!has_whole_chunks(desc) || (config == kPortablePair && only_stores)) continue;
    if (blocks_of_multiprocessor(config, desc.num_experts, limits) < config.blocks) continue;
    if (max_tiles(desc, config) >= config.blocks * limits.num_multiprocessors) return config;
  }
  if (has_whole_chunks(desc) && blocks_of_multiprocessor(kPortableWide, desc.num_experts, limits) > 0 &&
      lacks_room_for_small(desc, limits))
    return kPortableWide;
  const int64_t needed = kPortableSmall.shared_bytes(desc.num_experts);
  MOEBIUS_CHECK(internal, needed <= limits.shared_bytes_per_block,
                "grouped product {}: expected {} bytes of shared memory for a block; this GPU has {}", to_string(desc),
                needed, limits.shared_bytes_per_block);
  return kPortableSmall;
}

}  // namespace moebius
