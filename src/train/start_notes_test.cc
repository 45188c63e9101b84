#include "train/start_notes.h"

#include <functional>
#include <nlohmann/json.hpp>

#include "config/check/expert_rows_bound.h"
#include "model/gpu_products.h"
#include "train/loader.h"
#include "train/precision_note.h"
#include "train/testing.h"

namespace moebius {
namespace {

using moebius::testing::tiny_run;
using moebius::testing::write_dataset;
using ::testing::HasSubstr;

std::string all_notes(const RunSpec& run, int64_t num_ranks = 1) {
  std::string text;
  const GpusFound gpus{.built_with = 13000,
                       .driver = 13000,
                       .visible = {{.name = "NVIDIA L40S", .capability_major = 8, .capability_minor = 9}}};
  for (const StartNote& note : start_notes(run, resolve_dispatcher(run), gpus, num_ranks))
    text += (note.is_warning ? "warning: " : "") + note.text + "\n";
  return text;
}

RunSpec quiet_run() {
  RunSpec run = tiny_run();
  run.train.steps = 20;
  run.optimizer.lr = 1e-3;
  run.moe.aux = true;
  run.checkpoint.every = 5;
  return run;
}

const std::string kLocal = "dispatcher local: each rank holds all experts of its layers (parallel.ep * etp = 1)\n";

TEST(StartNotes, AnOrdinaryRunNotesOnlyItsDispatcher) { EXPECT_EQ(all_notes(quiet_run()), kLocal); }

TEST(StartNotes, SayThatAMachineFileHasNoEffect) {
  RunSpec run = quiet_run();
  run.machine = "h100";
  EXPECT_THAT(all_notes(run), HasSubstr("warning: --machine h100: its rates have no effect here, since the dispatcher "
                                        "is not chosen by predicted times\n"));
}

TEST(StartNotes, TheDispatcherAndWhy) {
  RunSpec run = quiet_run();
  run.parallel.ep = 3;
  const std::string rows = expert_rows_text(run) + "\n";
  EXPECT_THAT(rows, HasSubstr("memory.expert_rows = \"auto\" is "));
  EXPECT_EQ(all_notes(run),
            "dispatcher alltoall: chosen by \"auto\" because parallel.ep = 3 is above top-k = 2, so that it sends less "
            "than all-gather\n" +
                rows);
  run.device = DeviceKind::cuda;
  EXPECT_EQ(
      all_notes(run),
      "run.kernels = \"auto\": NVIDIA L40S (compute capability 8.9): portable kernels, and cuDNN's attention where "
      "this build and the shape allow it; native code for 8.0\n"
      "dispatcher allgather: chosen by \"auto\" because run.graph is on and all-to-all cannot be captured in CUDA "
      "graphs; with run.graph = false \"auto\" is all-to-all, which sends less (parallel.ep = 3, top-k = 2)\n" +
          rows);
}

// Returns the widths and tokens of Qwen3-30B-A3B, whose products were timed.
RunSpec quantised_run() {
  RunSpec run = quiet_run();
  run.device = DeviceKind::cuda;
  run.train.micro_batch = 8;
  run.train.seq_len = 4096;
  run.precision.recipe = PrecisionRecipe::fp8_block;
  ModelSpec& m = run.model;
  m.hidden_size = 2048;
  m.num_heads = 32;
  m.num_kv_heads = 4;
  m.head_dim = 128;
  m.num_experts = 128;
  m.top_k = 8;
  m.moe_intermediate_size = 768;
  m.moe_layers.assign(m.num_layers, true);
  return run;
}

// Products of the shapes of quantised_run(), of which some are slower with the recipe.
constexpr MeasuredProduct kSlowProducts[] = {
    {{false, 32768, 5120, 2048}, {0.8, 0.6}, {0.8, 0.6}, PassPair{1, 1.25}},
    {{false, 32768, 2048, 4096}, {0.6, 0.5}, {0.6, 0.5}, {}},
    {{true, 2048, 1536, 2048}, {4, 3}, {4, 3}, PassPair{4, 5}},
};

std::string precision_text(const RunSpec& run, std::span<const MeasuredProduct> measured) {
  const std::optional<StartNote> note = precision_note(run, measured);
  return note ? note->text : "";
}

TEST(StartNotes, ProductsThatTheRecipeMakesSlower) {
  RunSpec run = quantised_run();
  EXPECT_EQ(precision_text(run, kSlowProducts),
            "precision.recipe = \"fp8_block\": gradients of weights took more time than in bf16 on an H200, in shapes "
            "like these: model.layers.0.self_attn.qkv_proj.weight 1.25, model.layers.0.mlp.experts.gate_up_proj 1.25 "
            "times; set precision.weight_gradients = \"compute\", or time yours with `moebius bench precision`");
  run.precision.keep = {"*.self_attn.*"};
  EXPECT_THAT(precision_text(run, kSlowProducts),
              HasSubstr("these: model.layers.0.mlp.experts.gate_up_proj 1.25 times"));
  run.precision.weight_gradients = WeightGradientPrecision::compute;
  EXPECT_EQ(precision_text(run, kSlowProducts), "");
}

// A pass that was not timed makes no product slower, and takes no part in the time of all passes.
TEST(StartNotes, ProductsThatAreSlowerInAllTimedPasses) {
  const MeasuredProduct products[] = {{{true, 2048, 1536, 2048}, {4, 5}, {4, 4.2}, {}}};
  EXPECT_THAT(precision_text(quantised_run(), products),
              HasSubstr("products took more time than in bf16 on an H200, in shapes like these: "
                        "model.layers.0.mlp.experts.gate_up_proj 1.15 times; name them in precision.keep"));
}

// A scale for a whole tensor costs one more pass over it, so gradients of these experts' weights are slower.
TEST(StartNotes, WeightGradientsThatFp8TensorMakesSlower) {
  RunSpec run = quantised_run();
  run.precision.recipe = PrecisionRecipe::fp8_tensor;
  const auto text = [&] { return precision_text(run, measured_products(run.precision.recipe)); };
  EXPECT_THAT(text(), HasSubstr("precision.recipe = \"fp8_tensor\": gradients of weights took more time than in bf16 "
                                "on an H200, in shapes like these: model.layers.0.mlp.experts.gate_up_proj"));
  run.precision.has_f8_kernels = false;
  EXPECT_EQ(text(), "") << "emulated products have other times";
  run.precision.has_f8_kernels = true;
  run.precision.weight_gradients = WeightGradientPrecision::compute;
  EXPECT_EQ(text(), "");
}

TEST(StartNotes, RecipesThatQuantiseNothing) {
  RunSpec run = quantised_run();
  run.precision.keep = {"*"};
  EXPECT_THAT(all_notes(run), HasSubstr("precision.recipe = \"fp8_block\" quantises nothing: precision.keep names "
                                        "every product"));
  run.precision.keep = {"*.self_attn.*"};
  EXPECT_THAT(all_notes(run), ::testing::Not(HasSubstr("quantises nothing")));
}

TEST(StartNotes, ActivationsThatAreNotKeptInTheRecipesFormat) {
  RunSpec run = quantised_run();
  run.precision.activations = PrecisionChoice::recipe;
  EXPECT_THAT(all_notes(run), ::testing::Not(HasSubstr("precision.activations")));
  run.precision.keep = {"*.down_proj*"};
  EXPECT_THAT(all_notes(run), HasSubstr("precision.activations = \"recipe\" saves no memory: precision.keep names "
                                        "every down_proj"));
}

// The shapes of Qwen3-30B-A3B were timed, and fp8_block makes none of their passes slower than in bf16.
TEST(StartNotes, NoWarningOfProductsThatTheRecipeMakesFaster) {
  EXPECT_THAT(all_notes(quantised_run()), ::testing::Not(HasSubstr("precision.recipe")));
}

TEST(StartNotes, NoWarningOfProductsWhereNoneWasTimed) {
  for (const auto& change : std::vector<std::function<void(RunSpec&)>>{
           [](RunSpec& run) { run.precision.recipe = PrecisionRecipe::none; },
           [](RunSpec& run) { run.device = DeviceKind::cpu; },
           [](RunSpec& run) { run.kernels = KernelChoice::portable; },
           [](RunSpec& run) { run.train.seq_len = 100; },
           [](RunSpec& run) { run.parallel.tp = 2; },
       }) {
    RunSpec run = quantised_run();
    change(run);
    EXPECT_EQ(precision_text(run, kSlowProducts), "");
  }
}

TEST(StartNotes, RecipesThatAreEmulated) {
  const std::string emulated = " is emulated on a GPU: operands are quantised, and multiplied in bf16; ";
  for (const auto recipe : {PrecisionRecipe::fp8_tensor, PrecisionRecipe::mxfp8, PrecisionRecipe::nvfp4}) {
    RunSpec run = quantised_run();
    run.precision = {.compute = DType::bf16, .recipe = recipe};
    run.kernels = KernelChoice::portable;
    EXPECT_THAT(all_notes(run), HasSubstr(fmt::format("precision.recipe = \"{}\"{}", name_of(recipe), emulated)));
    run.device = DeviceKind::cpu;
    const std::string on_cpu = fmt::format(
        "precision.recipe = \"{}\" is emulated: operands are quantised, and multiplied in bf16", name_of(recipe));
    const bool is_native = recipe == PrecisionRecipe::fp8_tensor;
    EXPECT_EQ(all_notes(run).find(on_cpu) == std::string::npos, is_native) << all_notes(run);
  }
  EXPECT_THAT(all_notes(quantised_run()), ::testing::Not(HasSubstr("emulated")));
}

// Products of fp8_tensor run on Hopper's kernels where these take them.
TEST(StartNotes, ProductsOfScalesOfTensors) {
  RunSpec run = quantised_run();
  run.precision = {.compute = DType::bf16, .recipe = PrecisionRecipe::fp8_tensor};
  EXPECT_EQ(gpu_products_text(run, true),
            "precision.recipe = \"fp8_tensor\": Hopper's FP8 kernels compute all quantised products");
  EXPECT_EQ(
      gpu_products_text(run, false),
      "precision.recipe = \"fp8_tensor\" on a Hopper GPU: its FP8 kernels compute all quantised products; on other "
      "GPUs all are emulated (operands are quantised, and multiplied in bf16)");
  EXPECT_THAT(all_notes(run), HasSubstr("is emulated on a GPU")) << "an L40S has none of these kernels";
  run.model.moe_intermediate_size = 776;  // no multiple of 16; gate and up together are one
  EXPECT_EQ(gpu_products_text(run, true),
            "precision.recipe = \"fp8_tensor\": Hopper's FP8 kernels compute the products of "
            "model.layers.*.self_attn.qkv_proj.weight, model.layers.*.self_attn.o_proj.weight, "
            "model.layers.*.mlp.experts.gate_up_proj; emulated (operands are quantised, and multiplied in bf16): "
            "model.layers.*.mlp.experts.down_proj");
  EXPECT_THAT(gpu_products_text(run, false), ::testing::EndsWith("experts.down_proj; on other GPUs all are emulated"));
  run.model.swiglu_limit = 7;
  EXPECT_THAT(gpu_products_text(run, true), HasSubstr("in bf16): model.layers.*.mlp.experts.gate_up_proj, "
                                                      "model.layers.*.mlp.experts.down_proj"));
  run.precision.compute = DType::f32;
  EXPECT_THAT(gpu_products_text(run, true),
              HasSubstr("is emulated on a GPU: operands are quantised, and multiplied in f32"));
}

// The gate of a shared expert, eh_proj and what precision.keep names are never quantised.
TEST(StartNotes, NameNoProductThatIsNeverQuantised) {
  RunSpec run = quantised_run();
  run.precision = {.compute = DType::bf16, .recipe = PrecisionRecipe::fp8_tensor, .keep = {"*.self_attn.*"}};
  run.train.mtp_coeff = 0.1;
  run.model.num_mtp_layers = 1;
  run.model.shared_intermediate_size = 776;
  run.model.shared_expert_gate = true;
  EXPECT_EQ(
      gpu_products_text(run, true),
      "precision.recipe = \"fp8_tensor\": Hopper's FP8 kernels compute the products of "
      "model.layers.*.mlp.experts.gate_up_proj, model.layers.*.mlp.experts.down_proj, "
      "model.layers.*.mlp.shared_experts.gate_up_proj.weight; emulated (operands are quantised, and multiplied in "
      "bf16): model.layers.*.mlp.shared_experts.down_proj.weight");
  run.model.shared_intermediate_size = 768;
  EXPECT_THAT(gpu_products_text(run, true), HasSubstr("compute all quantised products"));
  // A product of the shape of eh_proj was slower, and no other has one like it.
  run.precision = {.compute = DType::bf16, .recipe = PrecisionRecipe::fp8_block, .keep = {"*.self_attn.*", "*.mlp.*"}};
  constexpr MeasuredProduct kLikeJoin[] = {{{false, 32768, 2048, 4096}, {0.6, 0.9}, {0.6, 0.9}, {}}};
  EXPECT_EQ(precision_text(run, kLikeJoin), "");
}

TEST(StartNotes, Fp8KernelsAreThoseOfTheGpusOfTheRun) {
  const GpuFound h200{.name = "NVIDIA H200", .capability_major = 9, .capability_minor = 0},
      l40s{.name = "NVIDIA L40S", .capability_major = 8, .capability_minor = 9};
  const auto has = [](std::vector<GpuFound> visible, int64_t num_ranks, KernelChoice kernels) {
    RunSpec run = quantised_run();
    run.kernels = kernels;
    set_f8_kernels(run, {.visible = std::move(visible)}, num_ranks);
    return run.precision.has_f8_kernels;
  };
  constexpr KernelChoice kAuto = KernelChoice::automatic;
  EXPECT_TRUE(has({}, 2, kAuto)) << "no GPU is known";
  EXPECT_TRUE(has({h200, l40s}, 1, kAuto)) << "the run has one rank";
  EXPECT_FALSE(has({h200, l40s}, 2, kAuto));
  EXPECT_FALSE(has({l40s, h200}, 1, kAuto));
  EXPECT_FALSE(has({}, 1, KernelChoice::portable));
}

TEST(StartNotes, ActivationsInEightBitsThatAreNotKept) {
  RunSpec run = quantised_run();
  run.precision.activations = PrecisionChoice::recipe;
  const auto saves_nothing = HasSubstr("warning: precision.activations = \"recipe\" saves no memory: memory.recompute");
  EXPECT_THAT(all_notes(run), ::testing::Not(saves_nothing));
  run.memory.recompute.expert_up = true;
  EXPECT_THAT(all_notes(run), saves_nothing);
  run.model.shared_intermediate_size = 768;
  EXPECT_THAT(all_notes(run), ::testing::Not(saves_nothing));
  run.memory.recompute.shared_expert = true;
  EXPECT_THAT(all_notes(run), saves_nothing);
  run.model.moe_layers[0] = false;
  EXPECT_THAT(all_notes(run), ::testing::Not(saves_nothing));
  run.memory.recompute.ranges = {{&RecomputeSpec::mlp, 0, 0}};
  EXPECT_THAT(all_notes(run), saves_nothing);
  run.precision.activations = PrecisionChoice::compute;
  EXPECT_THAT(all_notes(run), ::testing::Not(saves_nothing));
}

TEST(StartNotes, TheKernelsOfAGpu) {
  RunSpec run = quiet_run();
  run.device = DeviceKind::cuda;
  run.kernels = KernelChoice::portable;
  EXPECT_EQ(all_notes(run),
            "run.kernels = \"portable\": NVIDIA L40S (compute capability 8.9): portable kernels only, without cuDNN's "
            "attention; native code for 8.0\n" +
                kLocal);
}

TEST(StartNotes, TheKernelsOfEachKindOfGpu) {
  RunSpec run = quiet_run();
  run.device = DeviceKind::cuda;
  const GpuFound l40s{.name = "NVIDIA L40S", .capability_major = 8, .capability_minor = 9};
  const GpusFound gpus{
      .built_with = 13000, .driver = 13000, .visible = {l40s, l40s, {.name = "NVIDIA B200", .capability_major = 10}}};
  const std::string text = start_notes(run, resolve_dispatcher(run), gpus, 1).front().text;
  EXPECT_EQ(text.find("L40S"), text.rfind("L40S")) << text;
  EXPECT_THAT(text, HasSubstr("native code for 8.0; NVIDIA B200 (compute capability 10.0): portable kernels"));
}

TEST(StartNotes, KeysThatHaveNoEffectInThisRun) {
  RunSpec run = quiet_run();
  run.parallel.fsdp = true;
  EXPECT_EQ(all_notes(run), kLocal +
                                "warning: parallel.fsdp = true shards nothing: no two ranks hold the same weights of a "
                                "layer (dp * cp = 1, edp = 1); remove it, or use more ranks\n");
  EXPECT_EQ(all_notes(run, 2), kLocal);
}

TEST(StartNotes, SavesOnlyAtTheEnd) {
  RunSpec run = quiet_run();
  run.checkpoint.every = 0;
  EXPECT_THAT(all_notes(run), HasSubstr("checkpoint.every = 0: saved only after the last step and on SIGTERM"));
}

TEST(StartNotes, MissingLoadBalancing) {
  RunSpec run = quiet_run();
  run.moe.aux = false;
  EXPECT_EQ(all_notes(run), kLocal + "moe.balance = \"none\": no loss or bias balances the load of the experts\n");
  run.model.source = nlohmann::json{{"router_aux_loss_coef", 0.001}};
  EXPECT_THAT(all_notes(run), HasSubstr("experts (router_aux_loss_coef = 0.001 of the config.json is not used)"));
  for (bool BalanceSpec::*balance : {&BalanceSpec::bias, &BalanceSpec::sinkhorn, &BalanceSpec::force_balance}) {
    run.moe = {};
    run.moe.*balance = true;
    EXPECT_EQ(all_notes(run), kLocal);
  }
  run.moe = {};
  run.model.moe_layers = {false};
  EXPECT_EQ(all_notes(run), "") << "a dense model";
}

TEST(StartNotes, AnOnlyStepWithLearningRateZero) {
  RunSpec run = quiet_run();
  run.train.steps = 1;
  for (const auto schedule : {LrSchedule::cosine, LrSchedule::linear, LrSchedule::wsd}) {
    run.optimizer.schedule = schedule;
    EXPECT_THAT(all_notes(run), HasSubstr("warning: train.steps = 1: the last step has the learning rate "
                                          "optimizer.min_lr = 0, so no weight changes"));
  }
  RunSpec warm = run, low = run;
  warm.optimizer.warmup_steps = 1;
  low.optimizer.min_lr = 1e-4;
  run.optimizer.schedule = LrSchedule::constant;
  for (const RunSpec& learns : {warm, low, run}) EXPECT_EQ(all_notes(learns), kLocal);
}

TEST(StartNotes, RandomWeights) {
  RunSpec run = tiny_run();
  run.seed = 7;
  StartNote note = random_weights_note(run);
  EXPECT_FALSE(note.is_warning);
  EXPECT_EQ(note.text, "weights are random (run.seed = 7): model.init_from is not set");
  run.model_hf = "some/folder";
  note = random_weights_note(run);
  EXPECT_TRUE(note.is_warning);
  EXPECT_THAT(note.text, HasSubstr("for its weights set model.init_from = \"some/folder\""));
}

// a: 6 samples of 7 tokens, b: 3.
TEST(StartNotes, HowOftenTheDataIsRead) {
  const TestDir dir;
  RunSpec run = tiny_run();
  run.train.steps = 9;
  const std::string a = write_dataset(dir, "a", 47), b = write_dataset(dir, "b", 24);
  run.data.train = {{a, 1}};
  EXPECT_EQ(data_text(run, Loader(run.data.train, run, true).order()),
            "data: 28 tokens per step; 9 steps read " + a + " 6.00 times");
  run.data.train = {{a, 3}, {b, 1}};
  EXPECT_THAT(data_text(run, Loader(run.data.train, run, true).order()),
              HasSubstr("9 steps read " + a + " 4.50 times, " + b + " 3.00 times"));
  run.data.train = {{a, 1}, {b, 1}};
  for (const char* name : {"c", "d", "e"}) run.data.train.push_back({write_dataset(dir, name, 24), 1});
  EXPECT_THAT(data_text(run, Loader(run.data.train, run, true).order()),
              HasSubstr("9 steps read each of 5 datasets 1.20 to 2.40 times"));
}

}  // namespace
}  // namespace moebius
