// Attention in parts of a sequence: what parts give, merged, is what the whole gives.
#include <limits>
#include <span>

#include "ops/attention/attention.h"
#include "ops/attention/attention_merge.h"
#include "ops/cpu/testing.h"

namespace moebius {
namespace {

using testing::Array;

constexpr int64_t S = 37, H = 4, G = 2, d = 3;
// Sums of at most S terms of magnitude sqrt(d), in another order.
constexpr double kTolerance = 32 * 0x1p-23;

struct Sequence {
  Array q = Array::normal({S, H, d}, DType::f32, 1), k = Array::normal({S, G, d}, DType::f32, 2),
        v = Array::normal({S, G, d}, DType::f32, 3), dout = Array::normal({S, H, d}, DType::f32, 4), starts;
};

// Documents that begin at 0, 11 and 30.
Array document_starts() {
  std::vector<int32_t> starts(S);
  for (int64_t i = 0; i < S; ++i) starts[i] = i < 11 ? 0 : i < 30 ? 11 : 30;
  return Array::of_ints({S}, starts);
}

template <class Op>
void run(Stream& s, Op a, void (*op)(Stream&, const Op&)) {
  Array scratch({Op::scratch_bytes(a, s)}, DType::u8);
  a.scratch = scratch.tensor();
  op(s, a);
}

void add_to(Array& sum, int64_t begin, const Array& part) {
  const testing::Values x = part.values();
  const int64_t row = sum.tensor().dim(1) * sum.tensor().dim(2);
  for (size_t i = 0; i < x.size(); ++i) sum.tensor().ptr<float>()[begin * row + i] += static_cast<float>(x[i]);
}

struct Outcome {
  Array o{{S, H, d}, DType::f32}, lse{{S, H}, DType::f32}, dq{{S, H, d}, DType::f32}, dk{{S, G, d}, DType::f32},
      dv{{S, G, d}, DType::f32};
};

Outcome whole(Stream& s, Sequence& x, int64_t window) {
  Outcome out;
  run(s,
      AttentionFwd{.o_THd = out.o.tensor(),
                   .lse_TH = out.lse.tensor(),
                   .q_THd = x.q.tensor(),
                   .k_UGd = x.k.tensor(),
                   .v_UGd = x.v.tensor(),
                   .doc_start_T = x.starts.tensor(),
                   .window = window},
      attention_fwd);
  run(s,
      AttentionBwd{.dq_THd = out.dq.tensor(),
                   .dk_TGd = out.dk.tensor(),
                   .dv_TGd = out.dv.tensor(),
                   .do_THd = x.dout.tensor(),
                   .o_THd = out.o.tensor(),
                   .lse_TH = out.lse.tensor(),
                   .q_THd = x.q.tensor(),
                   .k_TGd = x.k.tensor(),
                   .v_TGd = x.v.tensor(),
                   .doc_start_T = x.starts.tensor(),
                   .window = window},
      attention_bwd);
  return out;
}

struct Span {
  int64_t begin, end;
  Tensor of(const Tensor& x) const { return x.empty() ? x : x.rows(begin, end); }
};
const std::vector<Span> kQueries{{0, 5}, {5, 24}, {24, S}}, kKeys{{20, S}, {0, 7}, {7, 20}};

Outcome in_parts(Stream& s, Sequence& x, int64_t window, Outcome& all) {
  Outcome out;
  for (float& lse : std::span(out.lse.tensor().ptr<float>(), S * H)) lse = -std::numeric_limits<float>::infinity();
  for (const Span& q : kQueries) {
    for (const Span& kv : kKeys) {
      const int64_t rows = q.end - q.begin, kv_rows = kv.end - kv.begin;
      Array o = Array::poisoned({rows, H, d}, DType::f32), lse = Array::poisoned({rows, H}, DType::f32), dq = o;
      Array dk = Array::poisoned({kv_rows, G, d}, DType::f32), dv = dk;
      run(s,
          AttentionFwd{.o_THd = o.tensor(),
                       .lse_TH = lse.tensor(),
                       .q_THd = q.of(x.q.tensor()),
                       .k_UGd = kv.of(x.k.tensor()),
                       .v_UGd = kv.of(x.v.tensor()),
                       .doc_start_T = q.of(x.starts.tensor()),
                       .window = window,
                       .is_part = true,
                       .q_first = q.begin,
                       .kv_first = kv.begin},
          attention_fwd);
      attention_merge(s, {.o_THd = q.of(out.o.tensor()),
                          .lse_TH = q.of(out.lse.tensor()),
                          .part_THd = o.tensor(),
                          .part_lse_TH = lse.tensor()});
      run(s,
          AttentionBwd{.dq_THd = dq.tensor(),
                       .dk_TGd = dk.tensor(),
                       .dv_TGd = dv.tensor(),
                       .do_THd = q.of(x.dout.tensor()),
                       .o_THd = q.of(all.o.tensor()),
                       .lse_TH = q.of(all.lse.tensor()),
                       .q_THd = q.of(x.q.tensor()),
                       .k_TGd = kv.of(x.k.tensor()),
                       .v_TGd = kv.of(x.v.tensor()),
                       .doc_start_T = q.of(x.starts.tensor()),
                       .window = window,
                       .is_part = true,
                       .q_first = q.begin,
                       .kv_first = kv.begin},
          attention_bwd);
      add_to(out.dq, q.begin, dq);
      add_to(out.dk, kv.begin, dk);
      add_to(out.dv, kv.begin, dv);
    }
  }
  return out;
}

TEST(AttentionParts, MergeToTheWhole) {
  ThreadPool pool(2);
  Stream s(DeviceKind::cpu, pool);
  for (const bool documents : {false, true}) {
    for (const int64_t window : {0, 9}) {
      SCOPED_TRACE(fmt::format("documents {}, window {}", documents, window));
      Sequence x;
      if (documents) x.starts = document_starts();
      Outcome want = whole(s, x, window);
      const Outcome got = in_parts(s, x, window, want);
      testing::expect_close("o", got.o.values(), want.o.values(), kTolerance, kTolerance);
      testing::expect_close("lse", got.lse.values(), want.lse.values(), kTolerance, kTolerance);
      testing::expect_close("dq", got.dq.values(), want.dq.values(), kTolerance, kTolerance);
      testing::expect_close("dk", got.dk.values(), want.dk.values(), kTolerance, kTolerance);
      testing::expect_close("dv", got.dv.values(), want.dv.values(), kTolerance, kTolerance);
    }
  }
}

TEST(AttentionParts, AreRefusedOnAGpuAndAtNegativePositions) {
  ThreadPool pool(1);
  Stream gpu(DeviceKind::null, pool, nullptr, DeviceKind::cuda), cpu(DeviceKind::cpu, pool);
  Array q({4, 1, 2}, DType::f32), lse({4, 1}, DType::f32);
  AttentionFwd a{.o_THd = q.tensor(),
                 .lse_TH = lse.tensor(),
                 .q_THd = q.tensor(),
                 .k_UGd = q.tensor(),
                 .v_UGd = q.tensor(),
                 .is_part = true};
  EXPECT_EQ(testing::error_of([&] { attention_fwd(gpu, a); }),
            "attention_fwd: parts of a sequence run on the CPU, not yet on a GPU; set parallel.cp = 1");
  a.kv_first = -1;
  EXPECT_EQ(testing::error_of([&] { attention_fwd(cpu, a); }),
            "attention_fwd: positions must not be negative; got 0 of q and -1 of k");
}

}  // namespace
}  // namespace moebius
