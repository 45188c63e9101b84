// Each op of a pass of one token, beside the ops that it replaces, which have tests of their own: the bits are
// the same.
#include "ops/one_token/one_token.h"

#include "device/gpu_limits.h"
#include "ops/experts/few_rows.h"
#include "ops/gemm/gemm.h"
#include "ops/permute/permute.h"
#include "ops/routing/route_testing.h"
#include "ops/routing/router_logits_few.h"

namespace moebius {
namespace {

using testing::Array;
using testing::Values;

// The inputs and results of a norm of one row.
struct NormRow {
  NormRow(int64_t width, bool has_residual)
      : x(Array::normal({1, width}, DType::bf16, 1)),
        residual(has_residual ? Array::normal({1, width}, DType::bf16, 2) : Array()),
        w(Array::normal({width}, DType::bf16, 3)),
        y(Array::poisoned({1, width}, DType::bf16)),
        sum(has_residual ? Array::poisoned({1, width}, DType::bf16) : Array()),
        rstd(Array::poisoned({1}, DType::f32)) {}
  RmsNormFwd op() {
    return {.y_TD = y.tensor(),
            .rstd_T = rstd.tensor(),
            .sum_TD = sum.tensor(),
            .x_TD = x.tensor(),
            .residual_TD = residual.tensor(),
            .w_D = w.tensor(),
            .eps = 1e-5f};
  }
  std::vector<std::vector<unsigned char>> bytes() const { return {y.bytes(), sum.bytes(), rstd.bytes()}; }
  Array x, residual, w, y, sum, rstd;
};

TEST(OneToken, NormGemmHasTheBitsOfBothOps) {
  testing::on_each_device([](Stream& s) {
    for (const auto& [N, K] : std::vector<std::array<int64_t, 2>>{
             {16, 8}, {48, 264}, {272, 2048}, {6400, 264}, {64, 2056}, {80, 2304}, {40, 72}}) {
      Array w = Array::normal({N, K}, DType::bf16, 4), bias = Array::normal({N}, DType::bf16, 5);
      for (const bool has_residual : {true, false}) {
        NormRow one(K, has_residual), two(K, has_residual);
        Array got = Array::poisoned({1, N}, DType::bf16), want = Array::poisoned({1, N}, DType::bf16);
        norm_gemm(s, {.c_TN = got.tensor(), .norm = one.op(), .w_ND = w.tensor(), .bias_N = bias.tensor()});
        rms_norm_fwd(s, two.op());
        gemm(s, {.c_MN = want.tensor(),
                 .a = two.y.tensor(),
                 .b = w.tensor(),
                 .bias_N = bias.tensor(),
                 .trans_b = true,
                 .few_rows = true});
        EXPECT_EQ(got.bytes(), want.bytes()) << N << " x " << K;
        EXPECT_EQ(one.bytes(), two.bytes()) << N << " x " << K;
      }
    }
  });
}

TEST(OneToken, NormRouterLogitsHasTheBitsOfBothOps) {
  testing::on_each_device([](Stream& s) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      for (const auto& [E, D] : std::vector<std::array<int64_t, 2>>{{1, 8}, {7, 72}, {128, 2048}, {3, 4104}, {5, 33}}) {
        NormRow one(D, true), two(D, true);
        Array w = Array::normal({E, D}, dtype, 4), bias = Array::normal({E}, DType::f32, 5);
        Array got = Array::poisoned({1, E}, DType::f32), want = Array::poisoned({1, E}, DType::f32);
        const auto logits = [&](Array& to, NormRow& norm) {
          return RouterLogitsFwd{
              .logits_TE = to.tensor(), .x_TD = norm.y.tensor(), .w_ED = w.tensor(), .bias_E = bias.tensor()};
        };
        NormRouterLogits both{.logits = logits(got, one), .norm = one.op()};
        RouterLogitsFwd alone = logits(want, two);
        Array scratch = Array::poisoned({RouterLogitsFwd::scratch_bytes(alone, s)}, DType::u8);
        both.logits.scratch = alone.scratch = scratch.tensor();
        norm_router_logits(s, both);
        rms_norm_fwd(s, two.op());
        router_logits_few(s, alone);
        EXPECT_EQ(got.bytes(), want.bytes()) << E << " x " << D;
        EXPECT_EQ(one.bytes(), two.bytes()) << E << " x " << D;
      }
    }
  });
}

struct AttentionCase {
  int64_t H, G, max_tokens, window;
  int32_t pos, sequence;
  bool has_norms = true;
};

// The attention of one token, by one kernel or by two ops, with a cache of its own.
class AttentionOfToken {
 public:
  explicit AttentionOfToken(const AttentionCase& c)
      : c_(c),
        qkv_(Array::normal({1, (c.H + 2 * c.G) * kWidth}, DType::bf16, 1)),
        table_(Array::normal({c.max_tokens, kWidth}, DType::f32, 2)),
        q_norm_(c.has_norms ? Array::normal({kWidth}, DType::bf16, 3) : Array()),
        k_norm_(c.has_norms ? Array::normal({kWidth}, DType::bf16, 4) : Array()),
        k_cache_(Array::normal({3 * c.max_tokens, c.G, kWidth}, DType::bf16, 5)),
        v_cache_(Array::normal({3 * c.max_tokens, c.G, kWidth}, DType::bf16, 6)),
        q_(Array::poisoned({1, c.H, kWidth}, DType::bf16)),
        k_(Array::poisoned({1, c.G, kWidth}, DType::bf16)),
        v_(Array::poisoned({1, c.G, kWidth}, DType::bf16)),
        o_(Array::poisoned({1, c.H, kWidth}, DType::bf16)),
        lse_(Array::poisoned({1, c.H}, DType::f32)),
        pos_(Array::of_ints({1}, {c.pos})),
        sequence_(Array::of_ints({1}, {c.sequence})) {}
  RotatedAttention op(const Stream& s) {
    CachedAttentionFwd attention{.o_NHd = o_.tensor(),
                                 .lse_NH = lse_.tensor(),
                                 .k_UGd = k_cache_.tensor(),
                                 .v_UGd = v_cache_.tensor(),
                                 .q_NHd = q_.tensor(),
                                 .k_NGd = k_.tensor(),
                                 .v_NGd = v_.tensor(),
                                 .pos_N = pos_.tensor(),
                                 .sequence_N = sequence_.tensor(),
                                 .max_tokens = c_.max_tokens,
                                 .window = c_.window,
                                 .scale = 0.09f};
    scratch_ = Array::poisoned({CachedAttentionFwd::scratch_bytes(attention, s)}, DType::u8);
    attention.scratch = scratch_.tensor();
    return {.attention = attention,
            .rope = {.q_THd = q_.tensor(),
                     .k_TGd = k_.tensor(),
                     .v_TGd = v_.tensor(),
                     .qkv_TC = qkv_.tensor(),
                     .pos_T = pos_.tensor(),
                     .cos_sin_Pd = table_.tensor(),
                     .q_norm_A = q_norm_.tensor(),
                     .k_norm_B = k_norm_.tensor(),
                     .eps = 1e-6f}};
  }
  std::vector<std::vector<unsigned char>> results() const {
    return {o_.bytes(), lse_.bytes(), k_cache_.bytes(), v_cache_.bytes()};
  }

 private:
  static constexpr int64_t kWidth = 128;
  AttentionCase c_;
  Array qkv_, table_, q_norm_, k_norm_, k_cache_, v_cache_, q_, k_, v_, o_, lse_, pos_, sequence_, scratch_;
};

TEST(OneToken, RotatedAttentionHasTheBitsOfBothOps) {
  const std::vector<AttentionCase> cases = {
      {32, 2, 130, 0, 0, 1},    {32, 2, 130, 0, 63, 0},        {32, 2, 130, 0, 64, 2}, {32, 2, 200, 0, 199, 1},
      {4, 2, 512, 100, 511, 0}, {8, 1, 130, 0, 100, 2, false}, {6, 2, 64, 7, 30, 1},
  };
  testing::on_each_device([&](Stream& s) {
    for (const AttentionCase& c : cases) {
      SCOPED_TRACE(fmt::format("{} heads, position {} of {}", c.H, c.pos, c.max_tokens));
      AttentionOfToken one(c), two(c);
      rotated_attention(s, one.op(s));
      const RotatedAttention separate = two.op(s);
      rope_fwd(s, separate.rope);
      cached_attention_fwd(s, separate.attention);
      EXPECT_EQ(one.results(), two.results());
    }
  });
}

struct ExpertsCase {
  int64_t E, K, D, F;
  RouteRule rule = {};
  bool is_gpt_oss = false;  // with its activation and biases, and a bias of the choice
};

// The experts of one token, by both ways.
class ExpertsOfToken {
 public:
  explicit ExpertsOfToken(const ExpertsCase& c)
      : c_(c),
        x_(Array::normal({1, c.D}, DType::bf16, 1)),
        logits_(Array::normal({1, c.E}, DType::f32, 2)),
        w1_(Array::normal({c.E, 2 * c.F, c.D}, DType::bf16, 3, 1 / std::sqrt(static_cast<double>(c.D)))),
        w2_(Array::normal({c.E, c.D, c.F}, DType::bf16, 4, 1 / std::sqrt(static_cast<double>(c.F)))),
        topk_(Array::poisoned({1, c.K}, DType::i32)),
        weight_(Array::poisoned({1, c.K}, DType::f32)),
        a_(Array::poisoned({c.K, c.F}, DType::bf16)),
        y_(Array::poisoned({1, c.D}, DType::bf16)) {
    if (!c.is_gpt_oss) return;
    bias_ = Array::normal({c.E}, DType::f32, 5);
    b1_ = Array::normal({c.E, 2 * c.F}, DType::bf16, 6);
    b2_ = Array::normal({c.E, c.D}, DType::bf16, 7);
    activation_ = {.alpha = 1.702f, .limit = 0.75f, .shift = 1.0f};
  }
  TokenExperts op() {
    return {.y_1D = y_.tensor(),
            .topk_1K = topk_.tensor(),
            .weight_1K = weight_.tensor(),
            .a_KF = a_.tensor(),
            .logits_1E = logits_.tensor(),
            .bias_E = bias_.tensor(),
            .x_1D = x_.tensor(),
            .w1_e2FD = w1_.tensor(),
            .w2_eDF = w2_.tensor(),
            .b1_e2F = b1_.tensor(),
            .b2_eD = b2_.tensor(),
            .rule = c_.rule,
            .activation = activation_};
  }
  std::vector<unsigned char> y_bytes() const { return y_.bytes(); }
  std::vector<unsigned char> weight_bytes() const { return weight_.bytes(); }
  // Runs the separate ops, and compares.
  void expect_equal(Stream& s) {
    testing::Routing route(1, c_.E, c_.K);
    route.run(s, logits_, bias_, c_.rule);
    Array h = Array::poisoned({c_.K, 2 * c_.F}, DType::bf16), a = Array::poisoned({c_.K, c_.F}, DType::bf16),
          y = Array::poisoned({c_.K, c_.D}, DType::bf16), out = Array::poisoned({1, c_.D}, DType::bf16);
    const Route plan = route.plan.route();
    ExpertUp up{.h_R2F = h.tensor(),
                .a_RF = a.tensor(),
                .x_TD = x_.tensor(),
                .w1_e2FD = w1_.tensor(),
                .b1_e2F = b1_.tensor(),
                .rows = {plan.offsets_E1, plan.row_token_R},
                .activation = activation_,
                .few_rows = true};
    Array up_scratch = Array::poisoned({ExpertUp::scratch_bytes(up, s)}, DType::u8);
    up.scratch = up_scratch.tensor();
    expert_up(s, up);
    ExpertDown down{.y_RD = y.tensor(),
                    .a_RF = a.tensor(),
                    .w2_eDF = w2_.tensor(),
                    .b2_eC = b2_.tensor(),
                    .rows = {.offsets_e1 = plan.offsets_E1},
                    .few_rows = true};
    Array down_scratch = Array::poisoned({ExpertDown::scratch_bytes(down, s)}, DType::u8);
    down.scratch = down_scratch.tensor();
    expert_down_after_up(s, down);
    combine(s,
            {.out_TD = out.tensor(), .y_RD = y.tensor(), .pair_row_TK = plan.pair_row_TK, .weight_TK = plan.weight_TK});
    EXPECT_EQ(topk_.bytes(), route.plan.topk.bytes());
    EXPECT_EQ(weight_.bytes(), route.plan.weight.bytes());
    const Values rows = route.plan.pair_row.values(), want = a.values(), got = a_.values();
    for (int64_t k = 0; k < c_.K; ++k) {  // rows are in the order of choices here, and of experts there
      const auto row = static_cast<int64_t>(rows[k]);
      EXPECT_TRUE(std::equal(got.begin() + k * c_.F, got.begin() + (k + 1) * c_.F, want.begin() + row * c_.F)) << k;
    }
    EXPECT_EQ(y_.bytes(), out.bytes());
  }

 private:
  ExpertsCase c_;
  Array x_, logits_, w1_, w2_, topk_, weight_, a_, y_, bias_, b1_, b2_;
  GatedActivation activation_;
};

TEST(OneToken, ExpertsHaveTheBitsOfTheirOps) {
  const std::vector<ExpertsCase> cases = {
      {.E = 3, .K = 2, .D = 1552, .F = 264, .rule = {.normalize = true}},
      {.E = 128, .K = 8, .D = 16, .F = 768, .rule = {.normalize = true}},
      {.E = 5, .K = 3, .D = 48, .F = 40},
      {.E = 5, .K = 5, .D = 144, .F = 264, .rule = {.score = ScoreFunction::sigmoid, .normalize = true, .scale = 2.5f}},
      {.E = 8, .K = 4, .D = 96, .F = 776, .is_gpt_oss = true},
      {.E = 144, .K = 6, .D = 16, .F = 1024, .rule = {.num_groups = 6, .topk_groups = 2}},
      {.E = 1, .K = 1, .D = 16, .F = 8},
  };
  testing::on_each_device([&](Stream& s) {
    for (const ExpertsCase& c : cases) {
      SCOPED_TRACE(fmt::format("{} of {} experts of {} x {}", c.K, c.E, c.D, c.F));
      ExpertsOfToken experts(c);
      EXPECT_EQ(takes(s, experts.op()), s.device() == DeviceKind::cuda && uses_hopper_kernels(s));
      if (!takes(s, experts.op())) continue;
      token_experts(s, experts.op());
      experts.expect_equal(s);
    }
  });
}

// Layers may share the memory of logits and of x. Kernels of a token overlap, and must not read what an earlier
// one had.
TEST(OneToken, ExpertsReadTheLogitsOfTheirOwnToken) {
  testing::on_each_device([](Stream& s) {
    const ExpertsCase c{.E = 128, .K = 8, .D = 64, .F = 264, .rule = {.normalize = true}};
    ExpertsOfToken experts(c);
    if (!takes(s, experts.op())) return;
    constexpr int kTokens = 12;
    Array gate = Array::normal({c.E, c.D}, DType::bf16, 9), norm_w = Array::normal({c.D}, DType::bf16, 10),
          rstd({1}, DType::f32);
    std::vector<Array> x, y, weight;
    for (int i = 0; i < kTokens; ++i) {
      x.push_back(Array::normal({1, c.D}, DType::bf16, 20 + i));
      y.push_back(Array::poisoned({1, c.D}, DType::bf16));
      weight.push_back(Array::poisoned({1, c.K}, DType::f32));
    }
    const auto choose = [&](int i) {
      const TokenExperts op = experts.op();
      norm_router_logits(
          s, {.logits = {.logits_TE = op.logits_1E, .x_TD = op.x_1D, .w_ED = gate.tensor()},
              .norm = {.y_TD = op.x_1D, .rstd_T = rstd.tensor(), .x_TD = x[i].tensor(), .w_D = norm_w.tensor()}});
    };
    for (int i = 0; i < kTokens; ++i) {  // nothing waits for the device here
      choose(i);
      TokenExperts op = experts.op();
      op.y_1D = y[i].tensor();
      op.weight_1K = weight[i].tensor();
      token_experts(s, op);
    }
    for (int i = 0; i < kTokens; ++i) {
      choose(i);
      token_experts(s, experts.op());
      experts.expect_equal(s);
      EXPECT_EQ(y[i].bytes(), experts.y_bytes()) << i;
      EXPECT_EQ(weight[i].bytes(), experts.weight_bytes()) << i;
    }
  });
}

TEST(OneToken, OtherExpertsAreLeftToOtherOps) {
  testing::on_each_device([](Stream& s) {
    ExpertsOfToken experts({.E = 5, .K = 3, .D = 48, .F = 40});
    TokenExperts op = experts.op();
    op.rule.choice = RouteChoice::forced;
    EXPECT_FALSE(takes(s, op));
    EXPECT_EQ(testing::error_of([&] { token_experts(s, op); }),
              "token_experts: this GPU has no kernels for 5 experts of 48 x 40; run the other ops");
  });
}

}  // namespace
}  // namespace moebius
