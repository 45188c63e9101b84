// A frozen base in 8 bits computes what the same weights in bf16 compute, bit for bit, and takes less memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "checkpoint/tensor_slice.h"
#include "core/narrow_float.h"
#include "device/accelerator.h"
#include "io/files.h"
#include "io/safetensors.h"
#include "io/testing.h"
#include "ops/quantize/quantize.h"
#include "tests/equivalence/tiny.h"
#include "weights/import.h"
#include "weights/load.h"

namespace moebius {
namespace {

using namespace testing;
using ::testing::HasSubstr;

constexpr char kConfig[] = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 160,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
  "intermediate_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
  "hidden_act": "silu", "attention_bias": false, "num_experts": 4, "num_experts_per_tok": 2,
  "moe_intermediate_size": 128, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [0],
  "tie_word_embeddings": false, "torch_dtype": "bfloat16")";

// Folders of one model: its projections in E4M3 with scales of blocks that are no powers of two, or all in bf16.
class LoraBase8 : public ::testing::Test {
 protected:
  void SetUp() override {
    write(dir_.path("fp8"), true);
    write(dir_.path("bf16"), false);
  }

  static bool is_projection(const std::string& name) { return name.ends_with("_proj.weight"); }

  void write(const std::string& folder, bool fp8) {
    std::filesystem::create_directories(folder);
    const std::string blocks =
        R"(, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
             "weight_block_size": [128, 128]})";
    write_file_atomic(folder + "/config.json", std::string(kConfig) + (fp8 ? blocks : "") + "}");
    const ModelSpec model = read_model_spec(folder);
    std::deque<std::vector<std::byte>> memory;
    std::vector<SafetensorsTensor> tensors;
    const auto add = [&](const std::string& name, DType dtype, const std::vector<int64_t>& shape) {
      int64_t numel = 1;
      for (const int64_t dim : shape) numel *= dim;
      memory.emplace_back(static_cast<size_t>(numel * size_of(dtype)));
      tensors.push_back({{name, dtype, shape}, memory.back().data()});
      return memory.back().data();
    };
    const ModelCatalog catalog(model, false);
    for (const ParamPart& part : catalog.parts()) {
      if (part.name.ends_with(".last_load")) continue;
      const Rng rng(3, RngSite::bench, 0, key_of(part.name.c_str()));
      const auto draw = [&](int64_t i) { return part.name.ends_with("norm.weight") ? 1.0f : 0.1f * rng.normal(i); };
      const std::vector<int64_t> shape = dims_of(part.shape);
      if (fp8 && is_projection(part.name)) {
        auto* data = reinterpret_cast<uint8_t*>(add(part.name, DType::f8_e4m3, shape));
        for (int64_t i = 0; i < part.shape.numel(); ++i) data[i] = to_f8_e4m3(1000 * draw(i)).bits;
        const std::vector<int64_t> blocks_of = {div_ceil(shape[0], int64_t{128}), div_ceil(shape[1], int64_t{128})};
        auto* scales = reinterpret_cast<float*>(add(part.name + "_scale_inv", DType::f32, blocks_of));
        for (int64_t i = 0; i < blocks_of[0] * blocks_of[1]; ++i)
          scales[i] = 0.001f * (1.0f + 0.1f * static_cast<float>(i));
      } else {
        auto* data = reinterpret_cast<bf16*>(add(part.name, DType::bf16, shape));
        for (int64_t i = 0; i < part.shape.numel(); ++i) data[i] = from_f32<bf16>(draw(i));
      }
    }
    write_safetensors(folder + "/model.safetensors", tensors);
  }

  EngineSpec spec_of(const std::string& folder, LoraBase base, double dropout = 0) {
    EngineSpec spec = tiny_engine(read_model_spec(dir_.path(folder)), 2, DType::bf16, 2);
    spec.balance = {};
    spec.lora = {.rank = 4, .alpha = 8, .dropout = dropout, .targets = {"self_attn.*", "mlp.*"}, .base = base};
    return spec;
  }

  std::unique_ptr<Engine> started(const EngineSpec& spec, const std::string& folder) {
    auto engine = std::make_unique<Engine>(spec);
    Stream s = engine->stream();
    engine->model().params().init(s, spec.seed);
    load_weights(s, engine->model(), dir_.path(folder));
    return engine;
  }

  static std::vector<double> losses(Engine& engine) {
    std::vector<double> all;
    for (int64_t step = 1; step <= 4; ++step) {
      all.push_back(run_micro_batches(engine, step, 4));
      EngineTestAccess::optimizer_step(engine, step, 1e-2);
      engine.end_of_step();
    }
    return all;
  }

  // Expects the same bits of frozen weights, except those of the parameter `changed`.
  static void expect_same_base(const Engine& got, const Engine& want, const std::string& changed) {
    for (const Param& p : want.model().params().all()) {
      if (p.spec.kind == ParamKind::adapter) continue;
      const Param& other = *std::find_if(got.model().params().all().begin(), got.model().params().all().end(),
                                         [&](const Param& q) { return q.spec.name == p.spec.name; });
      const bool is_same = std::memcmp(p.w.data, other.w.data, static_cast<size_t>(p.w.num_bytes())) == 0;
      EXPECT_EQ(is_same, changed.empty() || !p.spec.name.starts_with(changed)) << p.spec.name;
    }
  }
  static int64_t projections(const Engine& engine) {
    int64_t numel = 0;
    for (const Param& p : engine.model().params().all())
      if (p.spec.kind != ParamKind::adapter && is_projection(p.spec.parts.front().name)) numel += p.w.numel();
    return numel;
  }

  TestDir dir_;
};

TEST_F(LoraBase8, ReleasedFp8WeightsEqualTheSameWeightsInBf16BitForBit) {
  const auto wide = started(spec_of("fp8", LoraBase::compute, 0.1), "fp8"),
             held = started(spec_of("fp8", LoraBase::fp8_block, 0.1), "fp8");
  const std::vector<double> want = losses(*wide);
  EXPECT_EQ(losses(*held), want);
  EXPECT_LT(want.back(), want.front());
  EXPECT_EQ(all_elements(*held, false), all_elements(*wide, false));
  // A byte an element instead of two; scales are f32, a block each, and tensors are padded.
  const int64_t saved = wide->plan().bytes(Life::param) - held->plan().bytes(Life::param), numel = projections(*wide);
  EXPECT_GT(saved, numel * 95 / 100 - 64 * 1024);
  EXPECT_LE(saved, numel);
  for (const Param& p : held->model().params().all()) {
    const bool is_base = is_projection(p.spec.parts.front().name) && p.spec.kind != ParamKind::adapter;
    EXPECT_EQ(p.w.dtype == DType::f8_e4m3, is_base) << p.spec.name;
  }
}

// An import holds the values in f32, with the scales.
TEST_F(LoraBase8, ImportedFp8WeightsStayAsTheyWereReleased) {
  import_hugging_face({.out = dir_.path("imported"), .model = dir_.path("fp8")});
  const EngineSpec spec = spec_of("fp8", LoraBase::fp8_block);
  expect_same_base(*started(spec, "imported"), *started(spec, "fp8"), "");
}

// Attention has another adapter, which is added to it.
TEST_F(LoraBase8, MatricesBesideAMergedAdapterStayAsTheyWereReleased) {
  std::filesystem::create_directory(dir_.path("adapter"));
  write_file_atomic(dir_.path("adapter/adapter_config.json"), R"({"peft_type": "LORA", "r": 1, "lora_alpha": 1})");
  const std::vector<float> a(160, 0.5f), b(256, 0.5f);
  const std::string layer = "base_model.model.model.layers.1.self_attn.q_proj.";
  write_safetensors(dir_.path("adapter/adapter_model.safetensors"),
                    {{{layer + "lora_A.weight", DType::f32, {1, 160}}, a.data()},
                     {{layer + "lora_B.weight", DType::f32, {256, 1}}, b.data()}});
  const EngineSpec spec = spec_of("fp8", LoraBase::fp8_block);
  const auto merged = std::make_unique<Engine>(spec);
  Stream s = merged->stream();
  load_weights(s, merged->model(), dir_.path("fp8"), {.path = dir_.path("adapter")});
  expect_same_base(*merged, *started(spec, "fp8"), "model.layers.1.self_attn.qkv");
}

// In a captured step, from the same folder.
TEST_F(LoraBase8, EqualsBf16OnAGpuBitForBit) {
  if (const std::string why = Accelerator::why_missing(); !why.empty()) GTEST_SKIP() << why;
  const auto run = [&](LoraBase base, KernelChoice kernels) {
    EngineSpec spec = spec_of("fp8", base, 0.1);
    spec.device = DeviceKind::cuda;
    spec.kernels = kernels;
    const auto engine = started(spec, "fp8");
    std::vector<double> all;
    for (int64_t step = 1; step <= 5; ++step) {
      fill_random(engine->batch(), spec.model, step, 0, 2);
      engine->step(step, 1e-2);
      all.push_back(engine->loss());
      engine->end_of_step();
    }
    return all;
  };
  for (const KernelChoice kernels : {KernelChoice::automatic, KernelChoice::portable}) {
    const std::vector<double> want = run(LoraBase::compute, kernels);
    EXPECT_EQ(run(LoraBase::fp8_block, kernels), want) << name_of(kernels);
    EXPECT_NE(want.front(), want.back());
  }
}

TEST_F(LoraBase8, OtherWeightsAreQuantisedWhenTheyAreRead) {
  const auto held = started(spec_of("bf16", LoraBase::fp8_block), "bf16"),
             wide = started(spec_of("bf16", LoraBase::compute), "bf16");
  // The same weights, rounded to blocks of E4M3 and back.
  Stream s = wide->stream();
  for (const Param& p : wide->model().params().all()) {
    if (p.spec.kind == ParamKind::adapter || !is_projection(p.spec.parts.front().name)) continue;
    std::vector<uint8_t> data(p.w.numel());
    std::vector<float> scales(scale_shape(ScaleLayout::square_blocks, p.w.shape).numel());
    const Operand q({.data = data.data(), .shape = p.w.shape, .dtype = DType::f8_e4m3},
                    {.data = scales.data(), .shape = scale_shape(ScaleLayout::square_blocks, p.w.shape)},
                    ScaleLayout::square_blocks);
    quantize(s, {.q = q, .x_RC = p.w});
    dequantize(s, {.x = p.w, .q = q});
  }
  EXPECT_EQ(losses(*held), losses(*wide));
}

// The experts of a released gpt_oss, in MXFP4.
TEST_F(LoraBase8, Mxfp4ExpertsEqualTheSameWeightsInBf16BitForBit) {
  const std::string folder = MOEBIUS_SOURCE_DIR "/tests/golden/data/gpt_oss_mxfp4";
  const auto run = [&](LoraBase base) {
    EngineSpec spec = tiny_engine(read_model_spec(folder), 2, DType::bf16, 2);
    spec.balance = {};
    spec.lora = {.rank = 4, .alpha = 8, .targets = {"*"}, .base = base};
    auto engine = std::make_unique<Engine>(spec);
    Stream s = engine->stream();
    engine->model().params().init(s, spec.seed);
    load_weights(s, engine->model(), folder);
    return engine;
  };
  const auto wide = run(LoraBase::compute), held = run(LoraBase::mxfp4);
  const std::vector<double> want = losses(*wide);
  EXPECT_EQ(losses(*held), want);
  EXPECT_LT(want.back(), want.front());
  EXPECT_EQ(all_elements(*held, false), all_elements(*wide, false));
  for (const Param& p : held->model().params().all())
    EXPECT_EQ(p.w.dtype == DType::f4_e2m1, p.spec.kind == ParamKind::experts && p.w.dtype != DType::e8m0)
        << p.spec.name;
}

TEST_F(LoraBase8, Mxfp4NeedsReleasedWeights) {
  EngineSpec spec = spec_of("bf16", LoraBase::mxfp4);
  try {
    started(spec, "bf16");
    FAIL() << "expected an error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::input);
    EXPECT_THAT(e.what(), HasSubstr("model.layers.1.mlp.experts.0.gate_proj.weight in MXFP4, since lora.base = "
                                    "\"mxfp4\" holds experts as they are read"));
  }
}

TEST_F(LoraBase8, RefusesMatricesThatShareABlock) {
  EngineSpec spec = spec_of("fp8", LoraBase::fp8_block);
  spec.model.num_kv_heads = 1;
  spec.device = DeviceKind::null;
  try {
    const Engine engine(spec);
    FAIL() << "expected an error";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("lora.base = \"fp8_block\" has blocks of 128 rows: "
                                    "model.layers.0.self_attn.k_proj.weight has 64 and is stored with other matrices"));
  }
}

}  // namespace
}  // namespace moebius
