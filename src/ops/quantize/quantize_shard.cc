#include "ops/quantize/quantize_shard.h"

#include "ops/quantize/quantize_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check_values(const char* who, const Tensor& x_n, const Shape& whole, int64_t first, DType rounded) {
  check_tensor(who, "x", x_n, DType::f32, {x_n.numel()});
  MOEBIUS_CHECK(usage, first >= 0 && first + x_n.numel() <= whole.numel(),
                "{}: expected elements of weights {}; got [{}, {})", who, to_string(whole), first, first + x_n.numel());
  MOEBIUS_CHECK(usage, rounded == DType::f32 || rounded == DType::bf16,
                "{}: expected values that are rounded to f32 or bf16; got {}", who, name_of(rounded));
}

int64_t num_blocks(const Shape& whole) { return scale_shape(ScaleLayout::square_blocks, whole).numel(); }

void check(const BlockMagnitudes& a) {
  constexpr const char* who = "block_magnitudes";
  check_tensor(who, "bits", a.bits_B, DType::i32, {num_blocks(a.whole)});
  check_values(who, a.x_n, a.whole, a.first, a.rounded);
}

void check(const QuantizeShard& a) {
  constexpr const char* who = "quantize_shard";
  check_tensor(who, "q", a.q_n, DType::f8_e4m3, a.x_n.shape);
  check_tensor(who, "scales", a.scales, DType::f32, scale_shape(ScaleLayout::square_blocks, a.whole));
  MOEBIUS_CHECK(usage, a.bits_WB.shape.rank() == 2, "{}: expected bits of ranks and blocks; got {}", who,
                to_string(a.bits_WB));
  const int64_t B = a.bits_WB.dim(1), blocks = num_blocks(a.whole);
  check_tensor(who, "bits", a.bits_WB, DType::i32, {a.bits_WB.dim(0), B});
  MOEBIUS_CHECK(usage, a.first_block >= 0 && a.first_block + blocks <= B,
                "{}: expected bits of the blocks [{}, {}); got {} of each rank", who, a.first_block,
                a.first_block + blocks, B);
  check_values(who, a.x_n, a.whole, a.first, a.rounded);
}

}  // namespace

void block_magnitudes(Stream& s, const BlockMagnitudes& a) {
  check(a);
  OpScope scope(s, "block_magnitudes", cost(a));
  run_on_device(s, cpu::block_magnitudes, cuda::block_magnitudes, a);
}

Cost cost(const BlockMagnitudes& a) {
  return {static_cast<double>(a.x_n.numel()), static_cast<double>(a.x_n.num_bytes() + a.bits_B.num_bytes())};
}

void quantize_shard(Stream& s, const QuantizeShard& a) {
  check(a);
  OpScope scope(s, "quantize_shard", cost(a));
  run_on_device(s, cpu::quantize_shard, cuda::quantize_shard, a);
}

Cost cost(const QuantizeShard& a) {
  const auto n = static_cast<double>(a.x_n.numel());
  return {n, 5 * n + static_cast<double>(a.bits_WB.num_bytes() + a.scales.num_bytes())};
}

}  // namespace moebius
