// A frozen base of adapters in blocks of few bits, sharded over the ranks that hold it: the bits of a whole base, on
// every layout, and from checkpoint to checkpoint.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <filesystem>
#include <utility>

#include "core/narrow_float.h"
#include "core/rng.h"
#include "io/files.h"
#include "io/safetensors.h"
#include "tests/distributed/checkpoint_files.h"
#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"
#include "weights/load.h"

namespace moebius {
namespace {

// Halves of all sides are multiples of 128.
constexpr char kFp8Config[] = R"({
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 60, "hidden_size": 256,
  "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
  "intermediate_size": 256, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
  "hidden_act": "silu", "attention_bias": false, "num_experts": 4, "num_experts_per_tok": 2,
  "moe_intermediate_size": 256, "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [0],
  "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                          "weight_block_size": [128, 128]}})";

// Halves of the sides of experts are multiples of 32.
constexpr char kMxfp4Config[] = R"({
  "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 60, "hidden_size": 64,
  "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
  "num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": true, "hidden_act": "silu",
  "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "sliding_window": 4,
  "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
  "swiglu_limit": 7.0, "tie_word_embeddings": false, "torch_dtype": "float32",
  "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
    "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}})";

// Writes a folder of a released model, with random weights.
class BaseFolder {
 public:
  BaseFolder(std::string folder, LoraBase base) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_);
    const bool is_fp8 = base == LoraBase::fp8_block;
    write_file_atomic(folder_ + "/config.json", is_fp8 ? kFp8Config : kMxfp4Config);
    is_fp8 ? add_fp8() : add_mxfp4();
    write_safetensors(folder_ + "/model.safetensors", tensors_);
  }

 private:
  template <class T>
  T* add(const std::string& name, DType dtype, const std::vector<int64_t>& shape) {
    int64_t numel = 1;
    for (const int64_t dim : shape) numel *= dim;
    memory_.emplace_back(static_cast<size_t>(numel * size_of(dtype)));
    tensors_.push_back({{name, dtype, shape}, memory_.back().data()});
    return reinterpret_cast<T*>(memory_.back().data());
  }
  static Rng rng(const std::string& name) { return Rng(3, RngSite::bench, 0, key_of(name.c_str())); }

  void add_f32(const std::string& name, const std::vector<int64_t>& shape) {
    float* data = add<float>(name, DType::f32, shape);
    int64_t numel = 1;
    for (const int64_t dim : shape) numel *= dim;
    for (int64_t i = 0; i < numel; ++i) data[i] = name.ends_with("norm.weight") ? 1.0f : 0.1f * rng(name).normal(i);
  }

  // Projections in E4M3, with scales of blocks that are no powers of two.
  void add_fp8() {
    const ModelCatalog catalog(read_model_spec(folder_), false);
    for (const ParamPart& part : catalog.parts()) {
      if (part.name.ends_with(".last_load")) continue;
      const std::vector<int64_t> shape = dims_of(part.shape);
      if (!part.name.ends_with("_proj.weight")) {
        add_f32(part.name, shape);
        continue;
      }
      auto* data = add<uint8_t>(part.name, DType::f8_e4m3, shape);
      for (int64_t i = 0; i < part.shape.numel(); ++i) data[i] = to_f8_e4m3(100 * rng(part.name).normal(i)).bits;
      const std::vector<int64_t> blocks = {shape[0] / 128, shape[1] / 128};
      auto* scales = add<float>(part.name + "_scale_inv", DType::f32, blocks);
      for (int64_t i = 0; i < blocks[0] * blocks[1]; ++i) scales[i] = 0.001f * (1.0f + 0.1f * static_cast<float>(i));
    }
  }

  // Experts in E2M1, with random codes and a scale for each 32 of them.
  void add_mxfp4() {
    constexpr int64_t D = 64, I = 64, E = 4, kHeads = 4, kKvHeads = 2, kHead = 10;
    add_f32("model.embed_tokens.weight", {60, D});
    add_f32("lm_head.weight", {60, D});
    add_f32("model.norm.weight", {D});
    const auto add_linear = [&](const std::string& name, int64_t out, int64_t in) {
      add_f32(name + ".weight", {out, in});
      add_f32(name + ".bias", {out});
    };
    const auto add_blocks = [&](const std::string& name, int64_t out, int64_t in) {
      auto* codes = add<uint8_t>(name + "_blocks", DType::u8, {E, out, in / 32, 16});
      for (int64_t i = 0; i < E * out * in / 2; ++i) codes[i] = static_cast<uint8_t>(rng(name).bits(i)[0]);
      auto* scales = add<uint8_t>(name + "_scales", DType::u8, {E, out, in / 32});
      for (int64_t i = 0; i < E * out * in / 32; ++i) scales[i] = static_cast<uint8_t>(122 + i % 3);
      add_f32(name + "_bias", {E, out});
    };
    for (int64_t layer = 0; layer < 4; ++layer) {
      const std::string of = fmt::format("model.layers.{}.", layer);
      add_f32(of + "input_layernorm.weight", {D});
      add_f32(of + "post_attention_layernorm.weight", {D});
      add_linear(of + "self_attn.q_proj", kHeads * kHead, D);
      add_linear(of + "self_attn.k_proj", kKvHeads * kHead, D);
      add_linear(of + "self_attn.v_proj", kKvHeads * kHead, D);
      add_linear(of + "self_attn.o_proj", D, kHeads * kHead);
      add_f32(of + "self_attn.sinks", {kHeads});
      add_linear(of + "mlp.router", E, D);
      add_blocks(of + "mlp.experts.gate_up_proj", 2 * I, D);
      add_blocks(of + "mlp.experts.down_proj", D, I);
    }
  }

  std::string folder_;
  std::deque<std::vector<std::byte>> memory_;
  std::vector<SafetensorsTensor> tensors_;
};

struct BaseCase {
  const char* name;
  LoraBase base;
  int ranks;
  ParallelSpec layout;
};

void PrintTo(const BaseCase& c, std::ostream* out) { *out << c.name << " on " << c.ranks << " ranks"; }

const LayoutModel kAdapters{.lora = true, .dropout = true};

EngineSpec spec_of(Transport& world, const BaseCase& c, const std::string& folder, const LayoutWay& way) {
  EngineSpec spec = layout_engine_spec(world, kAdapters, c.layout, way);
  spec.model = read_model_spec(folder);
  spec.balance = {};
  spec.precision.compute = DType::bf16;
  spec.lora.base = c.base;
  return spec;
}

// Expects that blocks and scales are held as shares where other ranks have them too, and only there.
void expect_shares(const Engine& engine, LoraBase base) {
  const DType held = base == LoraBase::mxfp4 ? DType::f4_e2m1 : DType::f8_e4m3;
  int64_t num_held = 0;
  for (const Param& p : engine.model().params().all()) {
    if (p.w.dtype != held && p.w.dtype != DType::e8m0 && !p.spec.name.ends_with("_scale_inv")) continue;
    ++num_held;
    const bool is_shared = engine.spec().fsdp && engine.mesh().group(p.spec.grad_axis).size() > 1;
    EXPECT_EQ(p.shards_weights(), is_shared || engine.spec().offload_weights) << p.spec.name;
    EXPECT_FALSE(p.has_grad) << p.spec.name;
  }
  EXPECT_GT(num_held, 0);
}

struct Outcome {
  std::vector<double> losses;
  CheckpointBytes adapters;
};

// Trains two steps in each way, each by an engine that resumes from the checkpoint of the one before.
Outcome train(const BaseCase& c, const std::string& folder, const std::string& dir,
              const std::vector<LayoutWay>& ways) {
  Outcome outcome;
  for (int64_t i = 0; i < std::ssize(ways); ++i) {
    run_threads(c.ranks, test_world(), [&](Transport& world) {
      Control control(world);
      Engine engine(spec_of(world, c, folder, ways[i]));
      expect_shares(engine, c.base);
      init_layout(engine, kAdapters);
      Stream s = engine.stream();
      EXPECT_TRUE(load_weights(s, engine.model(), folder).empty());
      engine.gather_weights(s);
      if (i > 0) load_checkpoint(engine, control, fmt::format("{}/step-{:08}", dir, 2 * i));
      for (int64_t step = 2 * i + 1; step <= 2 * i + 2; ++step) {
        const StepReport report = layout_step(engine, kAdapters, step);
        if (world.rank() == 0) outcome.losses.insert(outcome.losses.end(), {report.loss, report.grad_norm});
      }
      save_checkpoint(engine, control, dir, 2 * i + 2);
    });
  }
  outcome.adapters = contents_of(fmt::format("{}/step-{:08}", dir, 2 * std::ssize(ways)));
  return outcome;
}

class LoraBaseLayouts : public ::testing::TestWithParam<BaseCase> {};

TEST_P(LoraBaseLayouts, AShardedBaseChangesNoBit) {
  const BaseCase& c = GetParam();
  const TestDir dir;
  const std::string folder = dir.path("base");
  const BaseFolder base(folder, c.base);
  RecomputeSpec layer;
  layer.layer = true;
  const LayoutWay whole{.num_micro_batches = 2}, sharded{.fsdp = true, .num_micro_batches = 2},
      serial{.overlap = false, .recompute = layer, .fsdp = true, .num_micro_batches = 2};
  const Outcome expected = train(c, folder, dir.path("whole"), {whole, whole});
  const auto expect_same = [&](const char* name, const std::vector<LayoutWay>& ways) {
    SCOPED_TRACE(name);
    const Outcome got = train(c, folder, dir.path(name), ways);
    EXPECT_EQ(got.losses, expected.losses);
    EXPECT_EQ(got.adapters.size(), expected.adapters.size());
    for (const auto& [tensor, bytes] : expected.adapters)
      EXPECT_TRUE(got.adapters.contains(tensor) && got.adapters.at(tensor) == bytes) << tensor;
  };
  EXPECT_NE(expected.losses[0], expected.losses[4]);
  expect_same("sharded", {sharded, serial});
  expect_same("turned", {serial, whole});
  LayoutWay host = sharded, serial_host = serial;
  host.offload_weights = serial_host.offload_weights = true;
  expect_same("host", {host, serial_host});
  MeshShape mesh = mesh_shape(c.layout, c.ranks);
  mesh.fsdp_shard = 2;
  if (group_size(mesh, Axis::dp_cp) % 4 != 0) return;
  LayoutWay shards = sharded;
  shards.fsdp_shard = 2;
  expect_same("shards", {shards, shards});
}

constexpr LoraBase kFp8 = LoraBase::fp8_block, kMxfp4 = LoraBase::mxfp4;

const BaseCase kCases[] = {
    {"fp8_alone", kFp8, 1, {}},
    {"fp8_dp3", kFp8, 3, {}},
    {"fp8_dp4", kFp8, 4, {}},
    {"fp8_cp2", kFp8, 2, {.cp = 2}},
    {"fp8_tp2_dp2", kFp8, 4, {.tp = 2}},
    {"fp8_ep2_edp2", kFp8, 4, {.ep = 2}},
    {"fp8_etp2_edp2", kFp8, 4, {.etp = 2}},
    {"fp8_pp2_dp2", kFp8, 4, {.pp = 2}},
    {"fp8_tp2_ep2_pp2", kFp8, 8, {.tp = 2, .pp = 2, .ep = 2}},
    {"mxfp4_alone", kMxfp4, 1, {}},
    {"mxfp4_dp3", kMxfp4, 3, {}},
    {"mxfp4_dp4", kMxfp4, 4, {}},
    {"mxfp4_tp2_dp2", kMxfp4, 4, {.tp = 2}},
    {"mxfp4_ep2_edp2_direct", kMxfp4, 4, {.ep = 2, .dispatcher = DispatcherKind::direct}},
    {"mxfp4_etp2_edp2", kMxfp4, 4, {.etp = 2}},
    {"mxfp4_pp2_vpp2_dp2", kMxfp4, 4, {.pp = 2, .vpp = 2}},
};

INSTANTIATE_TEST_SUITE_P(Threads, LoraBaseLayouts, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace moebius
