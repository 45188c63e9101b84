// Products of few rows of bf16 by AMX, whose instructions multiply tiles: 16 rows of 64 bytes.
//   tile[i][j] = sum over k of x[i][k] w[j][k]
//
// The left operand of an instruction is 16 rows of W as they are in memory, and the right one is up to 16 packed rows
// of x. So W is neither packed nor copied, and a product of 32 rows takes about the time of reading W.
//
// For each step of kTileDepth elements an instruction sums the products of even k and of odd k apart, and adds both
// sums to the f32 of the result. Numbers below 2^-126 count as zero.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace moebius::cpu {

constexpr int64_t kTileDepth = 32;    // elements of a row of a tile
constexpr int64_t kMaxTileRows = 32;  // rows of x in a product: two tiles

// Returns whether this CPU has AMX, and the system lets this process use it. The first call asks the system.
bool has_amx_bf16();

// Packs at most kMaxTileRows rows. For each step of kTileDepth elements, and each 16 rows, `to` receives the pairs of
// elements, and for each pair the rows. Elements after the last one of a row are zeros.
void pack_bf16_tiles(bf16* to, const void* const* row, int64_t num_rows, int64_t k);

// Multiplies packed rows with n rows of W, as multiply_few_rows does.
struct TileRows {
  const bf16* x;
  int64_t num_rows, k;
};
void multiply_bf16_tiles(float* tile, int64_t ld, const TileRows& x, const bf16* w, int64_t n, int64_t num_after);

}  // namespace moebius::cpu
