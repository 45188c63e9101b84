// The functions that each device implements for these ops. The arguments have been checked, and
// there is work to do.
#pragma once

#include <cstdint>

#include "device/device.h"

namespace moebius {

struct LowRankProduct;
struct LowRankWgrad;
struct LowRankBlock;
struct LowRankActivation;
struct DLowRankActivation;

namespace cpu {
void low_rank_product(Stream& s, const LowRankProduct& a);
void low_rank_wgrad(Stream& s, const LowRankWgrad& a);
void low_rank_block(Stream& s, const LowRankBlock& a);
void low_rank_activation(Stream& s, const LowRankActivation& a);
void d_low_rank_activation(Stream& s, const DLowRankActivation& a);
int64_t scratch_bytes(const LowRankProduct& a, int num_threads);
int64_t scratch_bytes(const LowRankWgrad& a, int num_threads);
}  // namespace cpu

// low_rank_wgrad needs the scratch of LowRankWgradTiles.
namespace cuda {
void low_rank_product(Stream& s, const LowRankProduct& a);
void low_rank_wgrad(Stream& s, const LowRankWgrad& a);
void low_rank_block(Stream& s, const LowRankBlock& a);
void low_rank_activation(Stream& s, const LowRankActivation& a);
void d_low_rank_activation(Stream& s, const DLowRankActivation& a);
}  // namespace cuda

}  // namespace moebius
