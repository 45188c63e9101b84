// The largest logits of heads, against plain loops.
#include <gtest/gtest.h>

#include <cmath>

#include "ops/attention/attention.h"
#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  std::string name;
  int64_t batch, rows, kv_rows, heads, kv_heads, width;
  DType dtype = DType::f32;
  int64_t window = 0;
  bool documents = false, is_part = false;
  int64_t q_first = 0, kv_first = 0;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const std::string d = "_" + std::string(name_of(dtype));
    all.push_back({"one" + d, 1, 1, 1, 1, 1, 1, dtype});
    all.push_back({"odd_width" + d, 2, 37, 37, 3, 1, 13, dtype});
    all.push_back({"groups" + d, 2, 130, 130, 4, 2, 64, dtype});
    all.push_back({"window" + d, 1, 150, 150, 2, 1, 128, dtype, 20});
    all.push_back({"documents" + d, 2, 140, 140, 2, 2, 72, dtype, 0, true});
    all.push_back({"later_queries" + d, 1, 40, 170, 2, 1, 128, dtype});
    all.push_back({"latent" + d, 1, 100, 100, 2, 2, 192, dtype});
    all.push_back({"wide" + d, 1, 70, 70, 2, 1, 256, dtype});
    all.push_back({"part" + d, 1, 80, 90, 2, 1, 64, dtype, 0, false, true, 100, 60});
    all.push_back({"part_that_sees_nothing" + d, 1, 20, 30, 2, 1, 64, dtype, 0, false, true, 10, 60});
  }
  return all;
}

class MaxLogitTest : public testing::DeviceTest<Case> {};

TEST_P(MaxLogitTest, IsTheLargestOfThePairsThatAreSeen) {
  const Case& p = c();
  const int64_t T = p.batch * p.rows, U = p.batch * p.kv_rows, H = p.heads, d = p.width;
  Array q = Array::normal({T, H, d}, p.dtype, 1), k = Array::normal({U, p.kv_heads, d}, p.dtype, 2),
        v = Array::normal({U, p.kv_heads, d}, p.dtype, 3), o = Array::poisoned({T, H, d}, p.dtype),
        lse = Array::poisoned({T, H}, DType::f32);
  const int64_t document = 33;
  std::vector<int32_t> starts(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t)
    starts[static_cast<size_t>(t)] = static_cast<int32_t>(t % p.rows / document * document);
  Array doc_start = Array::of_ints({T}, starts);
  const float scale = 0.5f;
  const Values x = q.values(), y = k.values();
  Values want(static_cast<size_t>(H));
  want[0] = 1e-3;  // of an earlier micro-batch; it stays where no key is attended
  Array max = Array::of({H}, DType::f32, want);
  for (int64_t t = 0; t < T; ++t) {
    const int64_t b = t / p.rows, i = t % p.rows, position = (p.is_part ? p.q_first : p.kv_rows - p.rows) + i;
    for (int64_t j = 0; j < p.kv_rows; ++j) {
      const int64_t at = (p.is_part ? p.kv_first : 0) + j;
      const bool seen = at <= position && (p.window == 0 || at > position - p.window) &&
                        (!p.documents || at >= starts[static_cast<size_t>(t)]);
      for (int64_t h = 0; seen && h < H; ++h) {
        double sum = 0;
        const int64_t g = h / (H / p.kv_heads), u = b * p.kv_rows + j;
        for (int64_t e = 0; e < d; ++e)
          sum += x[static_cast<size_t>((t * H + h) * d + e)] * y[static_cast<size_t>((u * p.kv_heads + g) * d + e)];
        want[static_cast<size_t>(h)] = std::max(want[static_cast<size_t>(h)], scale * sum);
      }
    }
  }
  AttentionFwd a{.o_THd = o.tensor(),
                 .lse_TH = lse.tensor(),
                 .max_logit_H = max.tensor(),
                 .q_THd = q.tensor(),
                 .k_UGd = k.tensor(),
                 .v_UGd = v.tensor(),
                 .doc_start_T = p.documents ? doc_start.tensor() : Tensor{},
                 .batch = p.batch,
                 .window = p.window,
                 .scale = scale,
                 .is_part = p.is_part,
                 .q_first = p.q_first,
                 .kv_first = p.kv_first};
  testing::SharedBytes scratch(AttentionFwd::scratch_bytes(a, s_) + 256);
  a.scratch = {.data = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(scratch.data()) + 255) / 256 * 256),
               .shape = {scratch.num_bytes() - 256},
               .dtype = DType::u8};
  attention_fwd(s_, a);
  // Sums of d products in f32 err by d eps of their terms at most; products of bf16 are exact.
  testing::expect_close("max_logit", max.values(), want, 1e-5, 1e-5);
}

INSTANTIATE_TEST_SUITE_P(Shapes, MaxLogitTest, ::testing::ValuesIn(testing::on_each_device(cases())),
                         [](const auto& info) {
                           return info.param.c.name + "_" + std::string(name_of(info.param.device));
                         });

}  // namespace
}  // namespace moebius
