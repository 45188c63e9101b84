#include "ops/attention/attention_sink.h"

#include <algorithm>
#include <limits>

#include "ops/attention/attention.h"
#include "ops/attention/attention_ref.h"
#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

struct Case {
  int64_t rows, heads, width;
  double sink;  // all sinks are near it
  DType dtype = DType::f32;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (Case c : {Case{0, 2, 4, 0}, {1, 1, 1, 0}, {7, 3, 5, 0}, {67, 4, 64, 3}, {300, 2, 33, -2}, {9, 2, 8, 60}}) {
      c.dtype = dtype;
      all.push_back(c);
    }
  }
  return all;
}

class AttentionSinkTest : public testing::DeviceTest<Case> {
 protected:
  AttentionSinkTest() {
    const Case& c = this->c();
    o_ = Array::normal({c.rows, c.heads, c.width}, c.dtype, 1);
    dout_ = Array::normal({c.rows, c.heads, c.width}, c.dtype, 2);
    lse_ = Array::normal({c.rows, c.heads}, DType::f32, 3, 2.0);
    Values sinks = Array::normal({c.heads}, DType::f32, 4).values();
    for (double& x : sinks) x += c.sink;
    sink_ = Array::of({c.heads}, DType::f32, sinks);
  }
  Array o_, dout_, lse_, sink_;
};
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionSinkTest, ::testing::ValuesIn(testing::on_each_device(cases())));

TEST_P(AttentionSinkTest, ForwardEqualsTheReference) {
  Values o = o_.values(), lse = lse_.values();
  ref::attention_sink_fwd(o, lse, sink_.values());
  attention_sink_fwd(s_, {.o_THd = o_.tensor(), .lse_TH = lse_.tensor(), .sink_H = sink_.tensor()});
  testing::expect_close("o", o_.values(), o, 8 * testing::epsilon(DType::f32) + testing::epsilon(c().dtype), 1e-12);
  testing::expect_close("lse", lse_.values(), lse, 8 * testing::epsilon(DType::f32), 1e-12);
}

// p is good to eps |sink - lse|; products are sums of `width` terms, added over `rows`.
TEST_P(AttentionSinkTest, BackwardEqualsTheReferenceAndAdds) {
  Array dsink = Array::normal({c().heads}, DType::f32, 5);
  // p is at most 1 in a model, where the log-sum has the sink in it.
  Values lse = lse_.values();
  for (size_t i = 0; i < lse.size(); ++i) lse[i] = std::max(lse[i], sink_.values()[i % c().heads]);
  Array bounded = Array::of({c().rows, c().heads}, DType::f32, lse);
  Values want = ref::attention_sink_bwd(dout_.values(), o_.values(), bounded.values(), sink_.values());
  const Values before = dsink.values();
  for (size_t h = 0; h < want.size(); ++h) want[h] += before[h];
  attention_sink_bwd(s_, {.dsink_H = dsink.tensor(),
                          .do_THd = dout_.tensor(),
                          .o_THd = o_.tensor(),
                          .lse_TH = bounded.tensor(),
                          .sink_H = sink_.tensor()});
  const double terms = std::sqrt(static_cast<double>(c().rows * c().width));
  testing::expect_close("dsink", dsink.values(), want, 64 * testing::epsilon(DType::f32),
                        8 * testing::epsilon(DType::f32) * terms);
}

// The definition, by a softmax over keys and sink; and that the backward of attention needs no more
// than what is left.
TEST(AttentionSink, WithAttentionItIsASoftmaxOverKeysAndSink) {
  ref::Attention at{
      .batch = 2, .rows = 5, .kv_rows = 5, .heads = 4, .kv_heads = 2, .width = 3, .window = 3, .scale = 0.7};
  at.q = Array::normal({10, 4, 3}, DType::f32, 1).values();
  at.k = Array::normal({10, 2, 3}, DType::f32, 2).values();
  at.v = Array::normal({10, 2, 3}, DType::f32, 3).values();
  at.sink = Array::normal({4}, DType::f32, 5).values();
  const Values dout = Array::normal({10, 4, 3}, DType::f32, 4).values();
  const ref::AttentionOut want = ref::attention_fwd(at);
  testing::on_each_device([&](Stream& s) {
    const auto f32 = [](Shape shape, const Values& x) { return Array::of(shape, DType::f32, x); };
    Array q = f32({10, 4, 3}, at.q), k = f32({10, 2, 3}, at.k), v = f32({10, 2, 3}, at.v), dy = f32({10, 4, 3}, dout),
          sink = f32({4}, at.sink), o = q, lse({10, 4}, DType::f32), dq = q, dk = k, dv = v,
          dsink = f32({4}, {0, 0, 0, 0});
    AttentionFwd fwd{.o_THd = o.tensor(),
                     .lse_TH = lse.tensor(),
                     .q_THd = q.tensor(),
                     .k_UGd = k.tensor(),
                     .v_UGd = v.tensor(),
                     .batch = 2,
                     .window = 3,
                     .scale = 0.7f};
    Array fwd_scratch({AttentionFwd::scratch_bytes(fwd, s)}, DType::u8);
    fwd.scratch = fwd_scratch.tensor();
    attention_fwd(s, fwd);
    attention_sink_fwd(s, {.o_THd = o.tensor(), .lse_TH = lse.tensor(), .sink_H = sink.tensor()});
    AttentionBwd bwd{.dq_THd = dq.tensor(),
                     .dk_TGd = dk.tensor(),
                     .dv_TGd = dv.tensor(),
                     .do_THd = dy.tensor(),
                     .o_THd = o.tensor(),
                     .lse_TH = lse.tensor(),
                     .q_THd = q.tensor(),
                     .k_TGd = k.tensor(),
                     .v_TGd = v.tensor(),
                     .batch = 2,
                     .window = 3,
                     .scale = 0.7f};
    Array bwd_scratch({AttentionBwd::scratch_bytes(bwd, s)}, DType::u8);
    bwd.scratch = bwd_scratch.tensor();
    attention_bwd(s, bwd);
    attention_sink_bwd(s, {.dsink_H = dsink.tensor(),
                           .do_THd = dy.tensor(),
                           .o_THd = o.tensor(),
                           .lse_TH = lse.tensor(),
                           .sink_H = sink.tensor()});
    constexpr double error = 32 * 0x1p-23;
    testing::expect_close("o", o.values(), want.o, error, error);
    testing::expect_close("lse", lse.values(), want.lse, error, error);
    // Derivatives of the softmax over keys and sink, by differences of its definition.
    const auto check = [&](const char* what, Values ref::Attention::*x, const Values& gradient) {
      Values differences;
      for (size_t i = 0; i < (at.*x).size(); ++i) {
        const auto loss = [&, x](double by) {
          ref::Attention moved = at;
          (moved.*x)[i] += by;
          return testing::dot(dout, ref::attention_fwd(moved).o);
        };
        differences.push_back((loss(1e-5) - loss(-1e-5)) / 2e-5);
      }
      testing::expect_close(what, gradient, differences, error, error);
    };
    check("dq", &ref::Attention::q, dq.values());
    check("dk", &ref::Attention::k, dk.values());
    check("dv", &ref::Attention::v, dv.values());
    check("dsink", &ref::Attention::sink, dsink.values());
  });
}

TEST(AttentionSink, AQueryWithoutKeysAttendsOnlyToTheSink) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array o = Array::of({1, 1, 2}, DType::f32, {0, 0}), sink = Array::of({1}, DType::f32, {1.5}),
        lse = Array::of({1, 1}, DType::f32, {-std::numeric_limits<double>::infinity()});
  attention_sink_fwd(s, {.o_THd = o.tensor(), .lse_TH = lse.tensor(), .sink_H = sink.tensor()});
  EXPECT_EQ(lse.values(), Values{1.5});
  EXPECT_EQ(o.values(), (Values{0, 0}));
}

TEST(AttentionSink, SameBitsForAnyTeam) {
  testing::expect_same_bits_for_any_team([](Stream& s) {
    Array o = Array::normal({300, 3, 7}, DType::bf16, 1), lse = Array::normal({300, 3}, DType::f32, 2), dy = o,
          sink = Array::normal({3}, DType::f32, 3), dsink = sink;
    attention_sink_fwd(s, {.o_THd = o.tensor(), .lse_TH = lse.tensor(), .sink_H = sink.tensor()});
    attention_sink_bwd(s, {.dsink_H = dsink.tensor(),
                           .do_THd = dy.tensor(),
                           .o_THd = o.tensor(),
                           .lse_TH = lse.tensor(),
                           .sink_H = sink.tensor()});
    return std::vector<Array>{o, lse, dsink};
  });
}

TEST(AttentionSink, BadArgumentsAreNamed) {
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  Array o({4, 3, 2}, DType::f32), lse({4, 3}, DType::f32), sink({2}, DType::f32), ints({4, 3, 2}, DType::i32);
  const auto error = [&](const Tensor& out) {
    return testing::error_of(
        [&] { attention_sink_fwd(s, {.o_THd = out, .lse_TH = lse.tensor(), .sink_H = sink.tensor()}); });
  };
  EXPECT_EQ(error(ints.tensor()), "attention_sink_fwd: o must be f32 or bf16 [rows, heads, d]; got i32[4, 3, 2]");
  EXPECT_EQ(error(o.tensor()), "attention_sink_fwd: sink must be f32[3]; got f32[2]");
  EXPECT_EQ(testing::error_of([&] {
              attention_sink_bwd(s, {.dsink_H = sink.tensor(),
                                     .do_THd = lse.tensor(),
                                     .o_THd = o.tensor(),
                                     .lse_TH = lse.tensor(),
                                     .sink_H = lse.tensor().view({12}).rows(0, 3)});
            }),
            "attention_sink_bwd: do must be f32[4, 3, 2]; got f32[4, 3]");
}

TEST(AttentionSink, NullDeviceCounts) {
  const Tensor o = testing::null_tensor({5, 3, 4}), lse = testing::null_tensor({5, 3}),
               sink = testing::null_tensor({3});
  const Cost fwd =
      testing::cost_on_null([&](Stream& s) { attention_sink_fwd(s, {.o_THd = o, .lse_TH = lse, .sink_H = sink}); });
  EXPECT_EQ(fwd.flops, 60);
  EXPECT_EQ(fwd.bytes, 2 * 4 * (60 + 15));
  const Cost bwd = testing::cost_on_null([&](Stream& s) {
    attention_sink_bwd(s, {.dsink_H = sink, .do_THd = o, .o_THd = o, .lse_TH = lse, .sink_H = sink});
  });
  EXPECT_EQ(bwd.flops, 120);
  EXPECT_EQ(bwd.bytes, 4 * (120 + 15));
}

}  // namespace
}  // namespace moebius
