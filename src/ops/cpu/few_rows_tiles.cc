#include "ops/cpu/few_rows_tiles.h"

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "core/error.h"
#include "ops/cpu/transpose.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kRows = 16;  // of a tile
// W is prefetched this many elements before it is multiplied. With two steps of the same rows W is read at the memory's
// rate. Prefetching the next 32 rows in the order of memory was slower, the more so the longer rows are.
constexpr int64_t kAhead = 2 * kTileDepth;

using Word = uint32_t;  // a pair of elements
using Words = Word __attribute__((vector_size(64)));

// The operand of ldtilecfg: the bytes of a row and the number of rows of each tile.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// Numbers of the tile registers. kSums: four tiles of sums, 16 rows of W by 16 rows of x. kW: two tiles of W. kX: two
// tiles of x.
enum TileNumber { kSums = 0, kW = 4, kX = 6 };
static_assert(kSums == 0 && kW == 4 && kX == 6, "add_products and multiply_block have these numbers");

bool has_instructions() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  return (edx & kAmxBf16) && (edx & kAmxTile) && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw");
}

// Linux saves tiles of a process only after this request, which holds for all of its threads.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// A block of at most 32 rows of W.
struct Block {
  const bf16* w;
  int64_t k;
  const bf16* next;  // the block after it, which is prefetched at the end; null if there is none
  const bf16* rest;  // the elements after the last whole step: kTileDepth of each row
};

int64_t rows_of(int64_t num, int64_t tile) { return std::clamp<int64_t>(num - tile * kRows, 0, kRows); }

[[gnu::target("amx-tile")]] void configure(int64_t num_w, int64_t num_x) {
  TileConfig c;
  for (int64_t i = 0; i < 2; ++i) {
    c.rows[kW + i] = static_cast<uint8_t>(rows_of(num_w, i));
    c.row_bytes[kW + i] = c.rows[kW + i] > 0 ? 64 : 0;
    c.row_bytes[kX + i] = static_cast<uint16_t>(rows_of(num_x, i) * sizeof(Word));
    c.rows[kX + i] = c.row_bytes[kX + i] > 0 ? kRows : 0;
  }
  for (int64_t g = 0; g < 2; ++g) {
    for (int64_t i = 0; i < 2; ++i) {
      const bool is_used = c.rows[kW + i] > 0 && c.rows[kX + g] > 0;
      c.rows[kSums + 2 * g + i] = is_used ? c.rows[kW + i] : 0;
      c.row_bytes[kSums + 2 * g + i] = is_used ? c.row_bytes[kX + g] : 0;
    }
  }
  // The compiler sees no use of most of `c`; the fence keeps its stores before the instruction.
  std::atomic_signal_fence(std::memory_order_seq_cst);
  _tile_loadconfig(&c);
}

// Adds the products of kTileDepth elements. x: packed rows of this step.
template <int kNumW, int kNumX>
[[gnu::target("amx-tile,amx-bf16"), gnu::always_inline]] inline void add_products(const bf16* w, int64_t w_stride,
                                                                                  const bf16* x, int64_t num_x) {
  const int64_t w_bytes = w_stride * int64_t{sizeof(bf16)}, x_bytes = std::min(num_x, kRows) * int64_t{sizeof(Word)};
  _tile_loadd(6, x, x_bytes);
  _tile_loadd(4, w, w_bytes);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kNumW == 2) {
    _tile_loadd(5, w + kRows * w_stride, w_bytes);
    _tile_dpbf16ps(1, 5, 6);
  }
  if constexpr (kNumX == 2) {
    _tile_loadd(7, x + kRows * kTileDepth, (num_x - kRows) * int64_t{sizeof(Word)});
    _tile_dpbf16ps(2, 4, 7);
    if constexpr (kNumW == 2) _tile_dpbf16ps(3, 5, 7);
  }
}

// sums[2 g + i][j][r] = the sum of row 16 i + j of W and row 16 g + r of x
using Sums = float[4][kRows * kRows];

template <int kNumW, int kNumX>
[[gnu::target("amx-tile,amx-bf16")]] void multiply_block(Sums& sums, const TileRows& x, const Block& b) {
  _tile_zero(0);
  if constexpr (kNumW == 2) _tile_zero(1);
  if constexpr (kNumX == 2) _tile_zero(2);
  if constexpr (kNumW == 2 && kNumX == 2) _tile_zero(3);
  const int64_t whole = b.k / kTileDepth * kTileDepth, row_bytes = b.k * int64_t{sizeof(bf16)};
  for (int64_t p = 0; p < whole; p += kTileDepth) {
    const bool is_in_block = p + kAhead < b.k;
    if (is_in_block || b.next) {
      // A number, since the last block may have fewer rows than are prefetched.
      const auto ahead = reinterpret_cast<uintptr_t>(is_in_block ? b.w + p + kAhead : b.next + (p + kAhead - b.k));
#pragma GCC unroll 8
      for (int64_t j = 0; j < kNumW * kRows; ++j)
        _mm_prefetch(reinterpret_cast<const char*>(ahead + j * row_bytes), _MM_HINT_T0);
    }
    add_products<kNumW, kNumX>(b.w + p, b.k, x.x + p * x.num_rows, x.num_rows);
  }
  if (whole < b.k) add_products<kNumW, kNumX>(b.rest, kTileDepth, x.x + whole * x.num_rows, x.num_rows);
  const int64_t first = std::min(x.num_rows, kRows) * int64_t{sizeof(float)},
                second = (x.num_rows - kRows) * int64_t{sizeof(float)};
  _tile_stored(0, sums[0], first);
  if constexpr (kNumW == 2) _tile_stored(1, sums[1], first);
  if constexpr (kNumX == 2) _tile_stored(2, sums[2], second);
  if constexpr (kNumW == 2 && kNumX == 2) _tile_stored(3, sums[3], second);
}

[[gnu::target("avx512f")]] inline __mmask16 mask_of(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

// tile[r * ld + j] = sums[j * num_rows + r], for num_rows and num_columns of at most 16.
[[gnu::target("avx512f")]] void put_sums(float* tile, int64_t ld, const float* sums, int64_t num_rows,
                                         int64_t num_columns) {
  if (num_rows == 1) {
    std::memcpy(tile, sums, static_cast<size_t>(num_columns) * sizeof(float));
    return;
  }
  Words v[kRows];
#pragma GCC unroll 16
  for (int64_t j = 0; j < kRows; ++j)
    v[j] = j < num_columns ? (Words)_mm512_maskz_loadu_ps(mask_of(num_rows), sums + j * num_rows) : Words{};
  transpose(v);
#pragma GCC unroll 16
  for (int64_t r = 0; r < kRows; ++r)
    if (r < num_rows) _mm512_mask_storeu_ps(tile + r * ld, mask_of(num_columns), (__m512)v[r]);
}

// Packs `depth` elements of num_rows <= 16 rows as a tile.
[[gnu::target("avx512f,avx512bw")]] void pack_tile(bf16* to, const void* const* row, int64_t num_rows, int64_t first,
                                                   int64_t depth) {
  const __mmask32 mask = depth == kTileDepth ? ~__mmask32{0} : (__mmask32{1} << depth) - 1;
  Words v[kRows];
#pragma GCC unroll 16
  for (int64_t r = 0; r < kRows; ++r) {
    v[r] = r < num_rows ? (Words)_mm512_maskz_loadu_epi16(mask, static_cast<const bf16*>(row[r]) + first) : Words{};
  }
  if (num_rows == 1) {
    std::memcpy(to, &v[0], sizeof v[0]);
    return;
  }
  transpose(v);
#pragma GCC unroll 16
  for (int64_t pair = 0; pair < kRows; ++pair)
    _mm512_mask_storeu_epi32(to + pair * num_rows * 2, mask_of(num_rows), (__m512i)v[pair]);
}

// Copies the elements from `first` on of num_rows rows, and zeros.
void copy_rest(bf16* to, const bf16* w, int64_t num_rows, int64_t first, int64_t k) {
  std::memset(to, 0, static_cast<size_t>(num_rows * kTileDepth) * sizeof(bf16));
  for (int64_t j = 0; j < num_rows; ++j)
    std::memcpy(to + j * kTileDepth, w + j * k + first, static_cast<size_t>(k - first) * sizeof(bf16));
}

}  // namespace

bool has_amx_bf16() {
  static const bool has = has_instructions() && may_use_tiles();
  return has;
}

void pack_bf16_tiles(bf16* to, const void* const* row, int64_t num_rows, int64_t k) {
  for (int64_t p = 0; p < k; p += kTileDepth) {
    for (int64_t first = 0; first < num_rows; first += kRows) {
      const int64_t num = std::min(kRows, num_rows - first);
      pack_tile(to, row + first, num, p, std::min(kTileDepth, k - p));
      to += num * kTileDepth;
    }
  }
}

[[gnu::target("amx-tile")]] void multiply_bf16_tiles(float* tile, int64_t ld, const TileRows& x, const bf16* w,
                                                     int64_t n, int64_t num_after) {
  MOEBIUS_ASSERT(x.num_rows >= 1 && x.num_rows <= kMaxTileRows);
  using Multiply = void (*)(Sums&, const TileRows&, const Block&);
  constexpr Multiply kMultiply[2][2] = {{multiply_block<1, 1>, multiply_block<1, 2>},
                                        {multiply_block<2, 1>, multiply_block<2, 2>}};
  const int64_t rest = x.k % kTileDepth;
  alignas(64) Sums sums;
  alignas(64) bf16 rest_of_rows[2 * kRows * kTileDepth];
  for (int64_t col = 0, cols = 0, configured = 0; col < n; col += cols) {
    cols = std::min(2 * kRows, n - col);
    if (cols != configured) configure(cols, x.num_rows);
    configured = cols;
    const bf16* const rows = w + col * x.k;
    if (rest > 0) copy_rest(rest_of_rows, rows, cols, x.k - rest, x.k);
    const bool has_next = col + cols + 2 * kRows <= n + num_after;
    std::atomic_signal_fence(std::memory_order_seq_cst);  // the compiler does not know what a tile is loaded from
    kMultiply[cols > kRows][x.num_rows > kRows](
        sums, x, {.w = rows, .k = x.k, .next = has_next ? rows + cols * x.k : nullptr, .rest = rest_of_rows});
    for (int64_t g = 0; g * kRows < x.num_rows; ++g) {
      for (int64_t i = 0; i * kRows < cols; ++i)
        put_sums(tile + g * kRows * ld + col + i * kRows, ld, sums[2 * g + i], rows_of(x.num_rows, g),
                 rows_of(cols, i));
    }
  }
  _tile_release();
}

}  // namespace moebius::cpu
