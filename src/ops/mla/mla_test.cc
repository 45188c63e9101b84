#include "ops/mla/mla.h"

#include "ops/cpu/testing.h"
#include "ops/mla/mla_ref.h"
#include "ops/rope/rope.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t rows, heads, n, r, v;
  DType dtype = DType::f32;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (Case c : {Case{0, 2, 3, 4, 5}, Case{1, 1, 1, 2, 1}, Case{37, 3, 5, 6, 7}, Case{19, 2, 128, 64, 128},
                   Case{300, 16, 16, 8, 24}}) {
      c.dtype = dtype;
      all.push_back(c);
    }
  }
  return all;
}

class MlaTest : public testing::DeviceTest<Case> {
 protected:
  double eps() const { return testing::epsilon(c_.dtype); }
  const Case c_ = c();
};
INSTANTIATE_TEST_SUITE_P(Shapes, MlaTest, ::testing::ValuesIn(testing::on_each_device(cases())));

TEST_P(MlaTest, RotationEqualsTheReference) {
  ref::RotateHeads ref{.heads = c_.heads, .width = c_.n + c_.r, .magnitude = 1.25};
  std::vector<int32_t> pos;
  for (int64_t t = 0; t < c_.rows; ++t) pos.push_back(static_cast<int32_t>(t * 7 % 11));
  ref.pos = {pos.begin(), pos.end()};
  for (int64_t i = 0; i < c_.r / 2; ++i) ref.frequency.push_back(1.0 / static_cast<double>(1 + i));
  Array table({11, c_.r}, DType::f32), pos_T = Array::of_ints({c_.rows}, pos);
  rope_table(s_, {.cos_sin_Pd = table.tensor(), .frequencies = ref.frequency, .magnitude = ref.magnitude});
  for (const bool interleaved : {false, true}) {
    for (const bool transposed : {false, true}) {
      Array x = Array::normal({c_.rows, c_.heads, c_.n + c_.r}, c_.dtype, 1);
      ref.interleaved = interleaved, ref.transposed = transposed;
      const Values want = ref::rotate_heads(x.values(), ref);
      rotate_heads(s_, {.x_THw = x.tensor(),
                        .pos_T = pos_T.tensor(),
                        .cos_sin_Pr = table.tensor(),
                        .interleaved = interleaved,
                        .transposed = transposed});
      // Two products, their sum, a table entry and the result are rounded.
      testing::expect_close("x", x.values(), want, eps() + 4 * testing::epsilon(DType::f32), 0);
    }
  }
}

TEST_P(MlaTest, KeysAndValuesAreMovedExactly) {
  const Shape w{c_.rows, c_.heads, c_.n + c_.v};
  Array kv = Array::normal(w, c_.dtype, 1), rope = Array::normal({c_.rows, c_.r}, c_.dtype, 2);
  Array k = Array::poisoned({c_.rows, c_.heads, c_.n + c_.r}, c_.dtype),
        v = Array::poisoned({c_.rows, c_.heads, c_.v}, c_.dtype);
  latent_kv_fwd(s_, {.k_THd = k.tensor(), .v_THv = v.tensor(), .kv_THw = kv.tensor(), .k_rope_Tr = rope.tensor()});
  const ref::LatentKv shape{c_.rows, c_.heads, c_.n, c_.r, c_.v};
  const ref::KeysValues want = ref::latent_kv_fwd(kv.values(), rope.values(), shape);
  EXPECT_EQ(k.values(), want.k);
  EXPECT_EQ(v.values(), want.v);

  Array dkv = Array::poisoned(w, c_.dtype), drope = Array::poisoned({c_.rows, c_.r}, c_.dtype);
  latent_kv_bwd(s_,
                {.dkv_THw = dkv.tensor(), .dk_rope_Tr = drope.tensor(), .dk_THd = k.tensor(), .dv_THv = v.tensor()});
  const ref::LatentGrads grads = ref::latent_kv_bwd(want, shape);
  EXPECT_EQ(dkv.values(), grads.kv);
  testing::expect_close("dk_rope", drope.values(), grads.k_rope,
                        eps() + testing::epsilon(DType::f32) * static_cast<double>(c_.heads), 0);
}

TEST(Mla, ReferenceBackwardsAreTheTransposes) {
  const ref::LatentKv shape{3, 2, 3, 4, 5};
  const Values kv = Array::normal({3, 2, 8}, DType::f32, 1).values(),
               rope = Array::normal({3, 4}, DType::f32, 2).values();
  const ref::KeysValues d{Array::normal({3, 2, 7}, DType::f32, 3).values(),
                          Array::normal({3, 2, 5}, DType::f32, 4).values()};
  const auto loss = [&](const Values& kv_at, const Values& rope_at) {
    const ref::KeysValues out = ref::latent_kv_fwd(kv_at, rope_at, shape);
    return testing::dot(d.k, out.k) + testing::dot(d.v, out.v);
  };
  const ref::LatentGrads grads = ref::latent_kv_bwd(d, shape);
  testing::expect_gradient(
      "dkv", [&](const Values& x) { return loss(x, rope); }, kv, grads.kv);
  testing::expect_gradient(
      "dk_rope", [&](const Values& x) { return loss(kv, x); }, rope, grads.k_rope);

  const Values x = Array::normal({3, 2, 7}, DType::f32, 5).values();
  for (const bool interleaved : {false, true}) {
    const ref::RotateHeads forward{{0, 3, 9}, {1, 0.3}, 2, 7, 1.5, interleaved, false};
    ref::RotateHeads backward = forward;
    backward.transposed = true;
    testing::expect_gradient(
        "dx", [&](const Values& at) { return testing::dot(d.k, ref::rotate_heads(at, forward)); }, x,
        ref::rotate_heads(d.k, backward));
  }
}

TEST(Mla, SameBitsForAnyTeam) {
  testing::expect_same_bits_for_any_team([](Stream& s) {
    Array dk = Array::normal({70, 3, 9}, DType::bf16, 1), dv = Array::normal({70, 3, 5}, DType::bf16, 2);
    Array dkv({70, 3, 10}, DType::bf16), drope({70, 4}, DType::bf16);
    latent_kv_bwd(
        s, {.dkv_THw = dkv.tensor(), .dk_rope_Tr = drope.tensor(), .dk_THd = dk.tensor(), .dv_THv = dv.tensor()});
    return std::vector<Array>{dkv, drope};
  });
}

TEST(Mla, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array x({4, 2, 6}, DType::f32), pos({4}, DType::i32), table({9, 8}, DType::f32), k({4, 2, 6}, DType::f32),
      v({4, 2, 3}, DType::f32), rope({4, 6}, DType::f32), ints({4, 2, 6}, DType::i32);
  const auto rotate = [&](Array& of) {
    return testing::error_of(
        [&] { rotate_heads(s, {.x_THw = of.tensor(), .pos_T = pos.tensor(), .cos_sin_Pr = table.tensor()}); });
  };
  EXPECT_EQ(rotate(ints), "rotate_heads: x must be f32 or bf16 with 3 dims; got i32[4, 2, 6]");
  EXPECT_EQ(rotate(x),
            "rotate_heads: cos_sin must be [positions, r], r even and at most the width of a head; got f32[9, 8] for x "
            "f32[4, 2, 6]");
  EXPECT_EQ(testing::error_of([&] {
              latent_kv_fwd(
                  s, {.k_THd = k.tensor(), .v_THv = v.tensor(), .kv_THw = x.tensor(), .k_rope_Tr = rope.tensor()});
            }),
            "latent_kv_fwd: k must be wider than k_rope; got f32[4, 2, 6] and f32[4, 6]");
}

}  // namespace
}  // namespace moebius
