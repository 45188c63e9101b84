// Compares whole training steps of a tiny model that are computed in two ways. The numbers must
// be the same.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/equivalence/tiny.h"

namespace moebius {
namespace {

using namespace testing;

class Training : public ::testing::TestWithParam<DType> {};

TEST_P(Training, SameRunTwiceIsBitwiseEqual) {
  Engine a(tiny_engine(tiny_model(), 2, GetParam(), 2)), b(tiny_engine(tiny_model(), 2, GetParam(), 2));
  EXPECT_EQ(train(a, 4, 4), train(b, 4, 4));
  EXPECT_EQ(all_elements(a, false), all_elements(b, false));
}

TEST_P(Training, ThreadsDoNotChangeABit) {
  Engine one(tiny_engine(tiny_model(), 4, GetParam(), 1));
  const auto expected = train(one, 3, 4);
  for (int threads : {2, 3, 5}) {
    Engine many(tiny_engine(tiny_model(), 4, GetParam(), threads));
    EXPECT_EQ(train(many, 3, 4), expected) << threads << " threads";
    EXPECT_EQ(all_elements(many, false), all_elements(one, false)) << threads << " threads";
  }
}

TEST_P(Training, LearnsTheSameBatchByHeart) {
  Engine engine(tiny_engine(tiny_model(), 2, GetParam(), 2));
  init_params(engine);
  double first = 0, last = 0;
  for (int64_t step = 1; step <= 60; ++step) {
    fill_random(engine.batch(), engine.spec().model, 1, 0, 2);
    engine.forward_backward();
    last = engine.loss();
    if (step == 1) first = last;
    EngineTestAccess::optimizer_step(engine, step, 1e-2);
    engine.end_of_step();
  }
  EXPECT_LT(last, 0.2 * first);
}

// Tests each name of memory.recompute separately, and "layer", which is all of them. Less memory is
// kept, and no bit changes.
void expect_recompute_changes_no_bit(const ModelSpec& model, DType dtype, PrecisionRecipe recipe = {},
                                     PrecisionChoice activations = {}) {
  EngineSpec spec = tiny_engine(model, 2, dtype, 2);
  spec.precision.recipe = recipe;
  spec.precision.activations = activations;
  Engine kept(spec);
  const std::vector<double> expected = train(kept, 2, 4);
  for (const auto& [name, flag] : kRecomputeNames) {
    SCOPED_TRACE(name);
    if (flag == &RecomputeSpec::mla_up_proj && model.kv_lora_rank == 0) continue;
    spec.recompute = {};
    spec.recompute.*flag = true;
    Engine recomputed(spec);
    EXPECT_EQ(train(recomputed, 2, 4), expected);
    EXPECT_EQ(all_elements(recomputed, false), all_elements(kept, false));
    EXPECT_LT(recomputed.plan().bytes(Life::saved), kept.plan().bytes(Life::saved));
    EXPECT_EQ(EngineTestAccess::stack_high_water(recomputed), recomputed.plan().bytes(Life::stack));
    EXPECT_NE(recomputed.plan().table().find("that backward recomputes"), std::string::npos);
  }
}

// The layers differ in what they keep, and each keeps what its own names leave.
TEST_P(Training, RecomputeOfSomeLayersChangesNoBit) {
  EngineSpec spec = tiny_engine(latent_model(), 2, GetParam(), 2);
  Engine kept(spec);
  const std::vector<double> expected = train(kept, 2, 4);
  const auto saved = [](const Engine& engine) { return engine.plan().bytes(Life::saved); };
  int64_t saves = 0;
  for (int64_t layer = 0; layer < spec.model.num_layers; ++layer) {
    spec.recompute.ranges = {{.what = &RecomputeSpec::layer, .first = layer, .last = layer}};
    saves += saved(kept) - saved(Engine(spec));
  }
  spec.recompute = {.norm = true};
  spec.recompute.ranges = {{.what = &RecomputeSpec::mla_up_proj, .first = 1, .last = 1},
                           {.what = &RecomputeSpec::layer, .first = 0, .last = 0}};
  Engine some(spec);
  EXPECT_EQ(train(some, 2, 4), expected);
  EXPECT_EQ(all_elements(some, false), all_elements(kept, false));
  EXPECT_EQ(EngineTestAccess::stack_high_water(some), some.plan().bytes(Life::stack));
  spec.recompute = {.layer = true};
  EXPECT_EQ(saved(kept) - saved(Engine(spec)), saves);
}

TEST_P(Training, RecomputeChangesNoBit) { expect_recompute_changes_no_bit(tiny_model(), GetParam()); }
TEST_P(Training, RecomputeChangesNoBitOfLatentAttention) {
  expect_recompute_changes_no_bit(latent_model(), GetParam());
}
TEST_P(Training, RecomputeChangesNoBitOfMultiTokenPrediction) {
  expect_recompute_changes_no_bit(mtp_model(), GetParam());
}

// Tests each name of memory.offload separately. What is on the host takes no memory of the device but in two slots, and
// no bit changes.
void expect_offload_changes_no_bit(const ModelSpec& model, DType dtype, PrecisionRecipe recipe = {},
                                   PrecisionChoice activations = {}) {
  EngineSpec spec = tiny_engine(model, 2, dtype, 2);
  spec.precision.recipe = recipe;
  spec.precision.activations = activations;
  Engine kept(spec);
  const std::vector<double> expected = train(kept, 2, 4);
  const auto expect_same = [&](const OffloadSpec& offload, const RecomputeSpec& recompute = {}) {
    spec.offload = offload;
    spec.recompute = recompute;
    Engine moved(spec);
    EXPECT_EQ(train(moved, 2, 4), expected);
    EXPECT_EQ(all_elements(moved, false), all_elements(kept, false));
    EXPECT_EQ(EngineTestAccess::stack_high_water(moved), moved.plan().bytes(Life::stack));
    const MemoryPlan& plan = moved.plan();
    EXPECT_EQ(plan.bytes(Life::host), plan.offloaded_bytes());
    EXPECT_GT(plan.offloaded_bytes(), 0);
    EXPECT_LE(plan.bytes(Life::offload_even) + plan.bytes(Life::offload_odd), plan.offloaded_bytes());
    if (recompute != RecomputeSpec{}) return;
    EXPECT_EQ(plan.bytes(Life::stack), kept.plan().bytes(Life::stack));
    if (dtype == DType::f32) {  // in bf16, tensors of both dtypes are next to each other, with gaps
      EXPECT_EQ(plan.bytes(Life::saved) + plan.offloaded_bytes(), kept.plan().bytes(Life::saved));
    }
  };
  for (const auto& [name, flag] : kRecomputeNames) {
    SCOPED_TRACE(name);
    if (flag == &RecomputeSpec::mla_up_proj && model.kv_lora_rank == 0) continue;
    OffloadSpec offload;
    offload.tensors.*flag = true;
    expect_same(offload);
  }
  expect_same({.layer_input = true});
  expect_same({.layer_input = true}, {.layer = true});
  expect_same({.tensors = {.layer = true}}, {.qkv = true, .expert_up = true});
  for (const double fraction : {0.3, 0.5, 0.9}) expect_same({.tensors = {.layer = true}, .fraction = fraction});
}

TEST_P(Training, OffloadChangesNoBit) { expect_offload_changes_no_bit(tiny_model(), GetParam()); }
TEST_P(Training, OffloadChangesNoBitOfLatentAttention) { expect_offload_changes_no_bit(latent_model(), GetParam()); }
TEST_P(Training, OffloadChangesNoBitOfMultiTokenPrediction) { expect_offload_changes_no_bit(mtp_model(), GetParam()); }

// With more layers each slot is used again and again; only two layers of the device are taken.
TEST_P(Training, OffloadOfManyLayersTakesTwoOfTheDevice) {
  ModelSpec model = tiny_model();
  model.num_layers = 7;
  model.moe_layers.assign(7, true);
  model.check();
  EngineSpec spec = tiny_engine(model, 2, GetParam(), 2);
  Engine kept(spec);
  spec.offload.tensors.layer = true;
  Engine moved(spec);
  EXPECT_EQ(train(moved, 3, 6), train(kept, 3, 6));
  EXPECT_EQ(all_elements(moved, false), all_elements(kept, false));
  for (const Life slot : {Life::offload_even, Life::offload_odd})
    EXPECT_EQ(7 * moved.plan().bytes(slot), moved.plan().bytes(Life::host));
  // The last two layers stay where they are, since their backward pass comes at once.
  run_micro_batches(moved, 4, 6);
  const int64_t one_layer = moved.model().offload()->bytes_to_host() / (3 * 5);
  EXPECT_GT(one_layer, 0);
  EXPECT_LE(7 * one_layer, moved.plan().offloaded_bytes());
  EXPECT_EQ(moved.model().offload()->bytes_to_host(), 3 * 5 * one_layer);
  moved.end_of_step();
  EXPECT_EQ(moved.model().offload()->bytes_to_host(), 0);
}

// Training with quantised products.
class QuantisedTraining : public ::testing::TestWithParam<PrecisionRecipe> {
 protected:
  static EngineSpec spec(int threads, const ModelSpec& model = tiny_model()) {
    EngineSpec spec = tiny_engine(model, 2, DType::bf16, threads);
    spec.precision.recipe = GetParam();
    return spec;
  }
};

TEST_P(QuantisedTraining, ThreadsDoNotChangeABit) {
  Engine one(spec(1));
  const auto expected = train(one, 3, 4);
  for (const int threads : {2, 3}) {
    Engine many(spec(threads));
    EXPECT_EQ(train(many, 3, 4), expected) << threads << " threads";
    EXPECT_EQ(all_elements(many, false), all_elements(one, false)) << threads << " threads";
  }
}

TEST_P(QuantisedTraining, RecomputeChangesNoBit) {
  expect_recompute_changes_no_bit(tiny_model(), DType::bf16, GetParam());
}

TEST_P(QuantisedTraining, OffloadChangesNoBit) { expect_offload_changes_no_bit(tiny_model(), DType::bf16, GetParam()); }

TEST_P(QuantisedTraining, LatentAttentionGivesTheSameBitsTwice) {
  Engine a(spec(2, latent_model())), b(spec(2, latent_model()));
  EXPECT_EQ(train(a, 2, 4), train(b, 2, 4));
}

TEST_P(QuantisedTraining, LearnsTheSameBatchByHeart) {
  Engine engine(spec(2));
  init_params(engine);
  double first = 0, last = 0;
  for (int64_t step = 1; step <= 60; ++step) {
    fill_random(engine.batch(), engine.spec().model, 1, 0, 2);
    engine.batch().scalars.set_step(step);  // another draw
    engine.forward_backward();
    last = engine.loss();
    if (step == 1) first = last;
    EngineTestAccess::optimizer_step(engine, step, 1e-2);
    engine.end_of_step();
  }
  EXPECT_LT(last, 0.2 * first);
}

// Kept products are computed as without a recipe: a pattern that keeps all of them changes no bit.
TEST_P(QuantisedTraining, KeepingAllProductsEqualsTrainingWithoutARecipe) {
  EngineSpec kept = spec(2), plain = spec(2);
  kept.precision.keep = {"*"};
  plain.precision.recipe = PrecisionRecipe::none;
  Engine a(kept), b(plain), quantised(spec(2));
  const auto expected = train(b, 2, 4);
  EXPECT_EQ(train(a, 2, 4), expected);
  EXPECT_NE(train(quantised, 2, 4), expected);
}

INSTANTIATE_TEST_SUITE_P(Recipes, QuantisedTraining,
                         ::testing::Values(PrecisionRecipe::fp8_block, PrecisionRecipe::fp8_tensor,
                                           PrecisionRecipe::mxfp8, PrecisionRecipe::nvfp4),
                         [](const auto& info) { return name_of(info.param); });

TEST(ActivationsInEightBits, RecomputeAndOffloadChangeNoBit) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    expect_recompute_changes_no_bit(tiny_model(), dtype, PrecisionRecipe::fp8_block, PrecisionChoice::recipe);
    expect_offload_changes_no_bit(tiny_model(), dtype, PrecisionRecipe::fp8_block, PrecisionChoice::recipe);
  }
  expect_recompute_changes_no_bit(mtp_model(), DType::bf16, PrecisionRecipe::fp8_block, PrecisionChoice::recipe);
}

TEST(QuantisedPatterns, APatternThatKeepsNothingIsAnError) {
  EngineSpec spec = tiny_engine(tiny_model(), 2, DType::bf16, 1);
  spec.precision = {.recipe = PrecisionRecipe::fp8_block, .keep = {"*.q_prj.*"}};
  try {
    Engine engine(spec);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("precision.keep: expected patterns (*, ? and [classes]) of parameter names; "
                                         "\"*.q_prj.*\" matches none, the nearest is q_proj"),
              std::string::npos)
        << e.what();
  }
}

// The modules are held but not computed. The model is trained as without them, and they
// do not change.
TEST_P(Training, DisabledMultiTokenPredictionEqualsAModelWithoutIt) {
  EngineSpec off = tiny_engine(mtp_model(), 2, GetParam(), 1);
  off.shape.num_mtp = 0;
  Engine held(off), without(tiny_engine(tiny_model(), 2, GetParam(), 1)), fresh(off);
  EXPECT_EQ(train(held, 3, 4), train(without, 3, 4));
  EXPECT_EQ(all_elements(held, false), all_elements(without, false));
  init_params(fresh);
  int64_t idle = 0;
  for (size_t i = 0; i < held.model().params().all().size(); ++i) {
    const Param &p = held.model().params().all()[i], &q = fresh.model().params().all()[i];
    if (p.has_grad) continue;
    ++idle;
    EXPECT_TRUE(p.frozen) << p.spec.name;
    EXPECT_EQ(std::memcmp(p.w.data, q.w.data, p.w.num_bytes()), 0) << p.spec.name;
  }
  EXPECT_GT(idle, 2 * 10);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Training, ::testing::Values(DType::f32, DType::bf16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// These losses are defined on sequences or on the global batch. The rounding is that of sums of
// about 10^3 f32 products in another order.
TEST(TrainingSplit, MicroBatchSplitChangesRoundingOnly) {
  const auto spec = [](int64_t batch) {
    EngineSpec s = tiny_engine(mtp_model(), batch, DType::f32, 2);
    s.balance.aux = false;
    s.balance.global_aux = true;
    s.balance.jitter = 0.05;
    return s;
  };
  Engine whole(spec(6)), split(spec(2));
  init_params(whole);
  init_params(split);
  for (int64_t step = 1; step <= 3; ++step) {
    const double a = run_micro_batches(whole, step, 6), b = run_micro_batches(split, step, 6);
    EXPECT_NEAR(a, b, 1e-5 * std::abs(a)) << "step " << step;
    EXPECT_LT(relative_l2(all_elements(split, true), all_elements(whole, true)), 1e-5) << "step " << step;
    for (Engine* e : {&whole, &split}) {
      EngineTestAccess::optimizer_step(*e, step, 1e-3);
      e->end_of_step();
    }
  }
}

void copy_params(Engine& to, Engine& from) {
  for (size_t k = 0; k < from.model().params().all().size(); ++k) {
    const Tensor& t = from.model().params().all()[k].w;
    std::copy_n(t.ptr<float>(), t.numel(), to.model().params().all()[k].w.ptr<float>());
  }
}

// Returns a random unit direction plus that of the gradient, so that the derivative along it is not
// small by chance.
std::vector<float> probe_direction(const Param& p) {
  const int64_t n = p.w.numel();
  const Rng rng(5, RngSite::bench, 0, key_of(p.spec.name.c_str()));
  const float* dw = p.dw.ptr<float>();
  double random_norm = 0, grad_norm = 0;
  for (int64_t i = 0; i < n; ++i) {
    random_norm += std::pow(rng.normal(i), 2);
    grad_norm += double{dw[i]} * dw[i];
  }
  std::vector<float> direction(n);
  for (int64_t i = 0; i < n; ++i) {
    direction[i] = static_cast<float>(rng.normal(i) / std::sqrt(random_norm) + dw[i] / (std::sqrt(grad_norm) + 1e-30));
  }
  return direction;
}

// Returns everything discrete in the last pass: the choices, the drops, and the counts inside the
// balance losses.
std::vector<float> choices(Engine& engine) {
  std::vector<float> all;
  for (const auto& layer : engine.model().moe_layers()) {
    const Router::Saved& saved = layer.saved->router;
    for (const Tensor& t : {saved.route.topk_TK, saved.route.pair_row_TK})
      all.insert(all.end(), t.ptr<int32_t>(), t.ptr<int32_t>() + t.numel());
    all.insert(all.end(), saved.dsbar_SE.ptr<float>(), saved.dsbar_SE.ptr<float>() + saved.dsbar_SE.numel());
  }
  return all;
}

struct Probe {
  double objective;
  std::vector<float> choices;
};

// Returns the objective with p moved by h along the direction.
Probe probe(Engine& engine, const EngineSpec& spec, const Param& p, const std::vector<float>& direction, double h) {
  Engine moved(spec);
  copy_params(moved, engine);
  const auto& params = moved.model().params().all();
  const auto same =
      std::find_if(params.begin(), params.end(), [&](const Param& q) { return q.spec.name == p.spec.name; });
  for (size_t i = 0; i < direction.size(); ++i) same->w.ptr<float>()[i] += static_cast<float>(h * direction[i]);
  const double value = run_micro_batches(moved, 1, spec.shape.batch);
  return {value, choices(moved)};
}

// Compares every gradient with central differences. The objective is smooth between changes of a
// choice, so the step shrinks until neither side changes one.
// A step of h has an error of h^2, and the noise of f32 (2e-7 of an objective of about 5) over h.
void expect_gradients_match_differences(const EngineSpec& spec) {
  Engine engine(spec);
  init_params(engine);
  run_micro_batches(engine, 1, spec.shape.batch);
  const std::vector<float> here = choices(engine);
  int64_t compared = 0, total = 0;
  for (const Param& p : engine.model().params().all()) {
    if (!p.has_grad) continue;
    ++total;
    const std::vector<float> direction = probe_direction(p);
    double expected = 0;
    for (size_t i = 0; i < direction.size(); ++i) expected += double{p.dw.ptr<float>()[i]} * direction[i];
    for (const double h : {4e-3, 1e-3, 2.5e-4}) {
      const Probe plus = probe(engine, spec, p, direction, h), minus = probe(engine, spec, p, direction, -h);
      if (plus.choices != here || minus.choices != here) continue;
      EXPECT_NEAR((plus.objective - minus.objective) / (2 * h), expected, 0.01 * std::abs(expected) + 1e-6 / h)
          << p.spec.name << " h " << h;
      ++compared;
      break;
    }
  }
  EXPECT_GE(compared, total * 9 / 10) << "of " << total << " parameters";
}

TEST(TrainingGradients, AreTheDerivativeOfTheScalar) {
  EngineSpec spec = tiny_engine(tiny_model(), 2, DType::f32, 1);
  spec.balance.global_aux = true;
  expect_gradients_match_differences(spec);
}

TEST(TrainingGradients, AreTheDerivativeOfTheScalarWithLatentAttention) {
  expect_gradients_match_differences(tiny_engine(latent_model(), 2, DType::f32, 1));
}

TEST(TrainingGradients, AreTheDerivativeOfTheScalarWithMultiTokenPrediction) {
  expect_gradients_match_differences(tiny_engine(mtp_model(), 2, DType::f32, 1));
  ModelSpec tied = mtp_model(latent_model());
  tied.tie_word_embeddings = true;
  expect_gradients_match_differences(tiny_engine(tied, 2, DType::f32, 1));
}

TEST(TrainingGradients, AreTheDerivativeOfTheScalarWithSigmoidGroupsAndBias) {
  ModelSpec model = tiny_model();
  model.score = ScoreFunction::sigmoid;
  model.n_group = 3;
  model.topk_group = 2;
  model.routed_scaling_factor = 1.7;
  model.expert_bias = true;
  model.shared_expert_gate = false;
  model.tie_word_embeddings = true;
  EngineSpec spec = tiny_engine(model, 2, DType::f32, 1);
  spec.balance.capacity_factor = 1.0;
  expect_gradients_match_differences(spec);
}

// Two documents in one row give the same results as in two rows.
TEST(TrainingDocuments, SeparateDocumentsEqualSingleOnes) {
  const ModelSpec model = tiny_model();
  Engine packed(tiny_engine(model, 1, DType::f32, 1)), alone(tiny_engine(model, 2, DType::f32, 1));
  init_params(packed);
  init_params(alone);
  const int cut = 4, S = 9;
  fill_random(packed.batch(), model, 1, 0, 1);
  MicroBatch &p = packed.batch(), &a = alone.batch();
  fill_random(a, model, 1, 0, 2);
  for (int i = cut; i < S; ++i) {
    p.pos_T.ptr<int32_t>()[i] = i - cut;
    p.doc_start_T.ptr<int32_t>()[i] = cut;
    p.segment_T.ptr<int32_t>()[i] = 1;
    // Row 0 of `alone` starts with the first document, and row 1 with the second.
    a.token_T.ptr<int32_t>()[S + i - cut] = p.token_T.ptr<int32_t>()[i];
    a.target_T.ptr<int32_t>()[S + i - cut] = p.target_T.ptr<int32_t>()[i];
  }
  packed.forward_backward();
  alone.forward_backward();
  const float *loss_p = packed.model().token_loss().ptr<float>(), *loss_a = alone.model().token_loss().ptr<float>();
  for (int i = 0; i < cut; ++i) EXPECT_NEAR(loss_p[i], loss_a[i], 1e-5) << i;
  for (int i = cut; i < S; ++i) EXPECT_NEAR(loss_p[i], loss_a[S + i - cut], 1e-5) << i;
}

// Evaluation between steps changes no bit of the training: no weights, no expert biases, no
// reported numbers.
TEST(TrainingEvaluation, LeavesTrainingAsItWas) {
  ModelSpec model = mtp_model();
  model.expert_bias = true;
  EngineSpec spec = tiny_engine(model, 2, DType::f32, 1);
  spec.balance.bias = spec.balance.global_aux = true;
  Engine plain(spec);
  spec.offload.tensors.layer = true;  // an evaluation uses the slots, and leaves what is on the host
  Engine evaluated(spec);
  init_params(plain);
  init_params(evaluated);
  for (int64_t step = 1; step <= 4; ++step) {
    EXPECT_EQ(run_micro_batches(plain, step, 4), run_micro_batches(evaluated, step, 4)) << "step " << step;
    for (Engine* e : {&plain, &evaluated}) {
      EngineTestAccess::optimizer_step(*e, step, 1e-2);
      e->end_of_step();
    }
    evaluated.batch().training = false;
    evaluated.forward();
    *evaluated.model().loss_sum().ptr<double>() = 0;
  }
  const auto &a = plain.model().params().all(), &b = evaluated.model().params().all();
  for (size_t i = 0; i < a.size(); ++i) {
    const float *x = a[i].master().ptr<float>(), *y = b[i].master().ptr<float>();
    EXPECT_TRUE(std::equal(x, x + a[i].w.numel(), y)) << a[i].spec.name;
  }
}

// The bytes planned on the null device are those that are allocated.
TEST(TrainingMemory, TheNullDevicePlansTheSameBytes) {
  EngineSpec spec = tiny_engine(mtp_model(), 3, DType::bf16, 2);
  spec.offload = {.layer_input = true, .tensors = {.qkv = true}, .fraction = 0.5};
  Engine real(spec);
  spec.device = DeviceKind::null;
  Engine counted(spec);
  EXPECT_EQ(real.plan().total_bytes(), counted.plan().total_bytes());
  train(real, 1, 3);
  EXPECT_EQ(EngineTestAccess::stack_high_water(real), real.plan().bytes(Life::stack))
      << "the dry run must take the same path as the step";
}

}  // namespace
}  // namespace moebius
