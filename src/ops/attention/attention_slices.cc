#include "ops/attention/attention_slices.h"

namespace moebius {
namespace {

constexpr int64_t kKeysOfBlock = 128;
// Each slice is a separate kernel, and should fill a GPU with enough blocks of dk and dv that the long ones overlap
// with others.
constexpr int64_t kMinBlocks = 256;
// If queries are cut, all blocks of a slice have the same length, and their last wave is seldom full.
constexpr int64_t kBlocksOfCutSlice = 1024;
// Returns the number of blocks of dq that run concurrently on a Hopper GPU: two per multiprocessor, one with
// width 192 or 256.
constexpr int64_t dq_slots(int64_t width) { return width == 192 || width == 256 ? 132 : 264; }
constexpr int64_t kMaxDqParts = 8;

int64_t div_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Returns the size of slices that are equal, except for the last one.
int64_t even_slice(int64_t all, int64_t at_most) { return div_up(all, div_up(all, at_most)); }

int64_t ds_bytes(const DsSizes& z, const DsSlice& s) {
  const int64_t tiles = z.tiles_before(s.query_tile + s.query_tiles) - z.tiles_before(s.query_tile);
  return s.sequences * s.kv_heads * (z.heads / z.kv_heads) * tiles * kDsTileBytes;
}

void add_slice(const DsSizes& z, DsPlan& plan, const DsSlice& slice) {
  plan.ds_bytes = std::max(plan.ds_bytes, ds_bytes(z, slice));
  plan.slices.push_back(slice);
}

// Cuts between sequences, or between heads of a sequence.
DsPlan whole_heads(const DsSizes& z, int64_t fit) {
  const bool whole = fit >= z.kv_heads;
  const int64_t sequences = whole ? even_slice(z.batch, fit / z.kv_heads) : 1,
                kv_heads = whole ? z.kv_heads : even_slice(z.kv_heads, fit);
  DsPlan plan;
  for (int64_t b = 0; b < z.batch; b += sequences) {
    for (int64_t g = 0; g < z.kv_heads; g += kv_heads) {
      add_slice(z, plan,
                {b, std::min(sequences, z.batch - b), g, std::min(kv_heads, z.kv_heads - g), 0, z.num_tiles()});
    }
  }
  return plan;
}

// Returns the slices of the first kv heads of the first sequence. Blocks of dq have whole groups of query tiles.
std::vector<DsSlice> slices_of_queries(const DsSizes& z, int64_t kv_heads, int64_t max_ds_bytes) {
  const int64_t step = dq_tiles_of_block(z.width);
  std::vector<DsSlice> slices;
  for (int64_t tile = 0; tile < z.num_tiles();) {
    DsSlice slice{0, 1, 0, kv_heads, tile, 0};
    do {
      slice.query_tiles = std::min(slice.query_tiles + step, z.num_tiles() - tile);
      DsSlice more = slice;
      more.query_tiles = std::min(more.query_tiles + step, z.num_tiles() - tile);
      if (ds_bytes(z, more) > max_ds_bytes) break;
    } while (tile + slice.query_tiles < z.num_tiles());
    slices.push_back(slice);
    tile += slice.query_tiles;
  }
  return slices;
}

// Cuts the queries of some heads of a sequence. All heads and sequences are cut in the same way.
DsPlan cut_queries(const DsSizes& z, int64_t max_ds_bytes) {
  const int64_t blocks = div_up(z.rows, kKeysOfBlock),
                kv_heads = even_slice(z.kv_heads, std::max<int64_t>(1, div_up(kBlocksOfCutSlice, blocks)));
  DsPlan plan{.cuts_queries = true};
  std::vector<DsSlice> cut;
  for (int64_t b = 0; b < z.batch; ++b) {
    for (int64_t g = 0; g < z.kv_heads; g += kv_heads) {
      const int64_t heads_here = std::min(kv_heads, z.kv_heads - g);
      if (cut.empty() || cut[0].kv_heads != heads_here) cut = slices_of_queries(z, heads_here, max_ds_bytes);
      for (DsSlice slice : cut) {
        slice.sequence = b;
        slice.kv_head = g;
        add_slice(z, plan, slice);
        if (const int64_t parts = dq_parts(z, slice); parts > 1) {
          const int64_t rows = slice.query_tiles * kDsEdge, heads = slice.kv_heads * (z.heads / z.kv_heads);
          plan.q_parts_bytes = std::max(plan.q_parts_bytes, parts * rows * heads * z.width * 4);
        }
      }
    }
  }
  plan.kv_sums_bytes = kv_heads * blocks * kKeysOfBlock * (z.width + z.v_width) * 4;
  return plan;
}

}  // namespace

int64_t dq_parts(const DsSizes& z, const DsSlice& slice) {
  const int64_t blocks =
      slice.kv_heads * (z.heads / z.kv_heads) * div_up(slice.query_tiles, dq_tiles_of_block(z.width));
  return std::clamp<int64_t>(dq_slots(z.width) / blocks, 1, kMaxDqParts);
}

namespace {

// Returns the kv groups whose blocks begin in turn. Blocks of a group that begin together find the same queries in L2.
// Those that begin last have the fewest steps, so the longer a wave is, the shorter the time in which some
// multiprocessors have no work. These values were measured to be the fastest
// (docs/measurements/performance/attention.md). Gradients do not depend on them: each sum has one order, whichever
// groups begin together.
int64_t fused_wave(const DsSizes& z) {
  const int64_t blocks = div_up(z.rows, kKeysOfBlock), heads = z.heads / z.kv_heads;
  const auto groups_of = [&](int64_t blocks_of_wave) { return std::max<int64_t>(1, blocks_of_wave / blocks); };
  // Windows and documents make blocks short, and blocks of distant keys read different tiles.
  if (z.window > 0 || z.has_documents) return groups_of(64) * std::clamp<int64_t>(4 / heads, 1, 4);
  // A group of one head has few steps for each of its tiles, so blocks of several groups fill the time in which one
  // waits for the sums of another.
  if (heads == 1) return 4 * groups_of(z.width == 192 ? 64 : 128);
  return groups_of(256);
}

// Returns whether recomputing the scores is the fastest, as measured on an H100. The host knows
// only that there are documents. Where a sequence is not long, they are taken to be shorter than it: with narrow heads
// the sums of dq are then most of the memory that is read and written.
bool recomputed_is_fastest(const DsSizes& z) {
  constexpr int64_t kShortRows = 4096;
  return z.width == 64 && z.has_documents && z.window == 0 && z.rows <= kShortRows;
}

// Returns whether one kernel is faster than the kernels with ds, as measured on an H100. Where a window is short, the
// sums of dq are most of the memory that is read and written.
bool one_kernel_is_faster(const DsSizes& z) {
  constexpr int64_t kShortWindow = 512;
  return z.window == 0 || z.window > kShortWindow;
}

// Returns whether f32 sums of dq are less work than scores that are computed twice, by the equation at bwd_path().
bool sums_are_less_work(const DsSizes& z) {
  if (z.window == 0) return true;
  const int64_t sums = 2 * 4 * z.width, inputs = 2 * (z.width + z.v_width), keys = keys_of_window(z.window),
                operations = 2 * (z.width + z.v_width) * keys;
  return (sums - inputs) * kOperationsOfByte <= operations;
}

}  // namespace

FusedPlan fused_plan(const DsSizes& z, int64_t max_dq_bytes, int64_t max_group_bytes) {
  constexpr int64_t kHalves = 2;  // of a tile, one for each warpgroup
  const int64_t all = z.batch * z.kv_heads, tile_rows = fused_tile_rows(z.width),
                tiles = z.heads / z.kv_heads * div_up(z.rows, tile_rows), counters = tiles * kHalves,
                group_bytes = tiles * tile_rows * z.width * 4;
  if (all == 0 || z.rows == 0 || group_bytes > max_group_bytes) return {};
  FusedPlan plan;
  plan.groups_of_slice = even_slice(all, std::clamp<int64_t>(max_dq_bytes / group_bytes, 1, all));
  plan.wave = std::min(plan.groups_of_slice, fused_wave(z));
  plan.dq_bytes = plan.groups_of_slice * group_bytes;
  plan.counter_bytes = div_up((plan.groups_of_slice * counters + 1) * 4, 256) * 256;
  return plan;
}

int64_t alternating_set(const DsSizes& z, int64_t multiprocessors) {
  constexpr int64_t kMinBlocks = 129, kMinHeads = 4, kBlocksOfEachLacking = 25;
  const int64_t blocks = div_up(z.rows, kKeysOfBlock), sets = div_up(blocks, multiprocessors),
                lacking = sets * multiprocessors - blocks;
  const bool is_causal = z.window == 0 && !z.has_documents && !z.is_part;
  const bool takes = z.owns_gpu && is_causal && (z.width == 64 || z.width == 128) &&
                     z.heads / z.kv_heads >= kMinHeads && blocks >= kMinBlocks && sets % 2 == 0 &&
                     kBlocksOfEachLacking * lacking <= blocks;
  return takes ? multiprocessors : 0;
}

bool can_take(const DsSizes& z, AttentionBwdPath path) {
  const AttentionBwdPath only = only_path(z.width);
  if (only != AttentionBwdPath::chosen && path != only) return false;
  if (path == AttentionBwdPath::one_kernel) return fused_plan(z, kMaxDqBytes, kMaxDsBytes).groups_of_slice > 0;
  return path != AttentionBwdPath::kept_ds || !ds_plan(z, kMaxDsBytes).slices.empty();
}

AttentionBwdPath bwd_path(const DsSizes& z) {
  using enum AttentionBwdPath;
  if (const AttentionBwdPath only = only_path(z.width); only != chosen) return only;
  if (recomputed_is_fastest(z)) return recomputed;
  const bool can_sum = can_take(z, one_kernel);
  if (can_sum && one_kernel_is_faster(z)) return one_kernel;
  if (can_take(z, kept_ds)) return kept_ds;
  return can_sum && sums_are_less_work(z) ? one_kernel : recomputed;
}

DsPlan ds_plan(const DsSizes& z, int64_t max_ds_bytes) {
  if (z.rows == 0 || z.is_part) return {};
  const int64_t group_bytes = ds_bytes(z, {0, 1, 0, 1, 0, z.num_tiles()}), all = z.batch * z.kv_heads,
                fit = max_ds_bytes / group_bytes;
  // Documents give blocks of any length in any order, so a slice would end with few running blocks.
  if (z.has_documents && fit < all) return {};
  if (fit >= std::min(all, div_up(kMinBlocks, div_up(z.rows, kKeysOfBlock)))) return whole_heads(z, fit);
  return z.window > 0 ? DsPlan{} : cut_queries(z, max_ds_bytes);
}

}  // namespace moebius
