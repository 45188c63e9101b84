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

// All blocks of a multiprocessor have about as much shared memory as one may have; CUDA reserves 1 KiB of each.
bool fits(const GroupedGemmDesc& d, const PortableGemmConfig& c, const GpuLimits& limits) {
  constexpr int64_t kReservedBytes = 1024;
  const int64_t needed = c.shared_bytes(d.num_experts);
  return c == kPortablePair ? c.blocks * (needed + kReservedBytes) <= limits.shared_bytes_per_block
                            : needed <= limits.shared_bytes_per_block;
}

}  // namespace

std::string to_string(const PortableGemmConfig& c) {
  return fmt::format("mma.sync, tiles {} x {} x {}, {} slots, {} threads, {} block{} a multiprocessor, L2 groups of {}",
                     c.tile_m, c.tile_n, c.tile_k, c.num_slots, c.threads(), c.blocks, c.blocks == 1 ? "" : "s",
                     c.l2_group);
}

PortableGemmConfig choose_portable_config(const GroupedGemmDesc& desc, const GpuLimits& limits) {
  const bool only_stores = desc.epilogue == GroupedEpilogue::store;
  for (const PortableGemmConfig& config : {kPortablePair, kPortableDeep, kPortableWide}) {
    if (config == kPortablePair && only_stores) continue;
    if (fits(desc, config, limits) && max_tiles(desc, config) >= config.blocks * limits.num_multiprocessors)
      return config;
  }
  const int64_t needed = kPortableSmall.shared_bytes(desc.num_experts);
  MOEBIUS_CHECK(internal, needed <= limits.shared_bytes_per_block,
                "grouped product {}: expected {} bytes of shared memory for a block; this GPU has {}", to_string(desc),
                needed, limits.shared_bytes_per_block);
  return kPortableSmall;
}

}  // namespace moebius
