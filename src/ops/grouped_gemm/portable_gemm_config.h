// How a grouped product is computed on any GPU of compute capability 8.0 and later. grouped_gemm_config.h describes
// the products, and how Hopper's own kernels compute them. choose_portable_config() returns how mma.sync computes the
// product of a desc within the limits of the GPU at hand. sm80/launch.h runs the kernel that was compiled for that
// config. All are plain values, and no CUDA is needed here.
#pragma once

#include <string>

#include "device/gpu_limits.h"
#include "ops/grouped_gemm/grouped_gemm_config.h"

namespace moebius {

// A block has a warp for each 64 x 64 elements of its output tile. All warps fill a ring of slots in
// shared memory with cp.async, and multiply what is in it.
struct PortableGemmConfig {
  int tile_m = 0, tile_n = 0;  // output elements of a block at a time
  int tile_k = 0;              // depth of a slot, in elements of 2 bytes
  int num_slots = 0;           // slots in the ring
  int blocks = 0;              // blocks of a multiprocessor, by registers
  int l2_group = 0;            // as in GroupedGemmConfig
  bool operator==(const PortableGemmConfig&) const = default;

  constexpr int threads() const { return tile_m / 64 * (tile_n / 64) * 32; }
  constexpr int slot_bytes_a() const { return tile_m * tile_k * 2; }
  constexpr int slot_bytes_b() const { return tile_n * tile_k * 2; }
  // A block has the slots, and the offsets of the experts.
  constexpr int64_t shared_bytes(int64_t num_experts) const {
    return num_slots * (slot_bytes_a() + slot_bytes_b()) + 4 * (num_experts + 1);
  }
};

// Returns how many blocks of a product with this many experts a multiprocessor of this GPU holds; 0: not one fits.
int64_t blocks_of_multiprocessor(const PortableGemmConfig& config, int64_t num_experts, const GpuLimits& limits);

// Returns a string such as "mma.sync, tiles 128 x 256 x 64, 3 slots, 256 threads, 1 block a multiprocessor, L2
// groups of 8"; blocks: as blocks_of_multiprocessor() returns them.
std::string to_string(const PortableGemmConfig& config, int64_t blocks);

// The configs that the kernels in experts/sm80/ are compiled for.
// 9.0 and 10.0, where the epilogue does more than store: two blocks of a multiprocessor, so that one multiplies while
// the other is in its epilogue.
inline constexpr PortableGemmConfig kPortablePair{
    .tile_m = 128, .tile_n = 128, .tile_k = 64, .num_slots = 3, .blocks = 2, .l2_group = 8};
// 8.0, 9.0 and 10.0: at least 163 KiB of shared memory for a block.
inline constexpr PortableGemmConfig kPortableDeep{
    .tile_m = 128, .tile_n = 256, .tile_k = 64, .num_slots = 3, .blocks = 1, .l2_group = 8};
// 8.6, 8.9 and 12.0: 99 KiB.
inline constexpr PortableGemmConfig kPortableWide{
    .tile_m = 128, .tile_n = 256, .tile_k = 32, .num_slots = 4, .blocks = 1, .l2_group = 8};
// Products of too few tiles for the GPU, those of so many experts that the others do not fit, and those of rows whose
// width is no multiple of 8, which have kernels of this config only. On 8.6, 8.9 and 12.0 a
// multiprocessor has the memory for one block of it.
inline constexpr PortableGemmConfig kPortableSmall{
    .tile_m = 128, .tile_n = 128, .tile_k = 32, .num_slots = 4, .blocks = 2, .l2_group = 8};

// The most experts of a portable kernel: kPortableSmall then fits every GPU.
inline constexpr int64_t kMaxPortableExperts = 1024;

// Returns a config that fits the limits. It depends only on the desc and the limits.
// Throws Error{internal} where none does: a GPU with less than 69 KiB of shared memory for a block.
PortableGemmConfig choose_portable_config(const GroupedGemmDesc& desc, const GpuLimits& limits);

}  // namespace moebius
