#include "ops/draw/draw.h"

#include "core/rng.h"
#include "ops/draw/draw_backends.h"
#include "ops/run_on_device.h"

namespace moebius {
namespace {

void check(const DrawTokens& a) {
  constexpr const char* who = "draw_tokens";
  MOEBIUS_CHECK(usage, a.logits_NV.shape.rank() == 2 && a.logits_NV.dim(1) > 0,
                "{}: logits must be f32 [N, V] with V above 0; got {}", who, to_string(a.logits_NV));
  const int64_t N = a.logits_NV.dim(0);
  check_tensor(who, "logits", a.logits_NV, DType::f32, a.logits_NV.shape);
  check_tensor(who, "id", a.id_N, DType::i32, {N});
  check_tensor(who, "pos", a.pos_N, DType::i32, {N});
  check_tensor(who, "read", a.read_2N, DType::i32, {2, N});
  check_tensor(who, "rule", a.rule, DType::u8, {int64_t{sizeof(DrawRule)}});
}

}  // namespace

DrawRule draw_rule(double temperature, int64_t num_ids, uint64_t seed) {
  const Rng::Words words = Rng(seed, RngSite::sampling).words();
  return {.temperature = temperature,
          .num_ids = num_ids,
          .key = {words.key[0], words.key[1]},
          .counter_high = {words.counter_high[0], words.counter_high[1]}};
}

void draw_tokens(Stream& s, const DrawTokens& a) {
  check(a);
  OpScope scope(s, "draw_tokens", cost(a));
  if (a.logits_NV.empty()) return;
  run_on_device(s, cpu::draw_tokens, cuda::draw_tokens, a);
}

// About 20 operations for the exponential of each logit.
Cost cost(const DrawTokens& a) {
  return {20.0 * static_cast<double>(a.logits_NV.numel()), static_cast<double>(a.logits_NV.num_bytes())};
}

}  // namespace moebius
