#include "plan/memory/rank_memory.h"

#include <gtest/gtest.h>

#include <limits>

#include "engine/engine.h"
#include "io/testing.h"

namespace moebius {
namespace {

const std::string kRecipes = std::string(MOEBIUS_SOURCE_DIR) + "/recipes/";

struct Layout {
  const char* name;
  const char* recipe;
  int64_t ranks;
  std::vector<std::string> set;
};

// clang-format off
const Layout kLayouts[] = {
    {"one_rank", "tiny_cpu.toml", 1, {}},
    {"data", "tiny_cpu.toml", 4, {"train.global_batch=16"}},
    {"experts", "tiny_cpu.toml", 4, {"parallel.ep=2", "train.global_batch=16"}},
    {"experts_by_width", "tiny_cpu.toml", 4, {"parallel.ep=2", "parallel.etp=2", "train.global_batch=16"}},
    {"tensor_with_uneven_vocabulary", "tiny_cpu.toml", 2, {"parallel.tp=2"}},
    {"context", "tiny_cpu.toml", 2, {"parallel.cp=2"}},
    {"pipeline", "tiny_cpu.toml", 3, {"parallel.pp=3", "train.global_batch=16"}},
    {"pipeline_without_overlap", "tiny_cpu.toml", 3,
     {"parallel.pp=3", "train.global_batch=16", "parallel.overlap=false"}},
    {"direct", "tiny_cpu.toml", 2, {"parallel.ep=2", "parallel.dispatcher=\"direct\""}},
    {"direct_with_half_a_budget", "tiny_cpu.toml", 4,
     {"parallel.ep=4", "memory.expert_rows=0.5", "parallel.dispatcher=\"direct\"", "train.global_batch=16"}},
    {"alltoall_with_a_budget", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "parallel.pp=2", "parallel.vpp=2", "parallel.dispatcher=\"alltoall\""}},
    {"without_a_budget", "qwen3_30b_a3b.toml", 16, {"parallel.ep=8", "memory.expert_rows=0"}},
    {"direct_with_chunks_of_many_ranks", "qwen3_30b_a3b.toml", 128,
     {"parallel.ep=128", "parallel.dispatcher=\"direct\"", "memory.recompute=[\"norm\", \"qkv\"]"}},
    {"deepseek_on_1024", "deepseek_v3_1024_h100.toml", 1024, {}},
    {"deepseek_on_256", "deepseek_v3_256_gpus.toml", 256, {}},
    {"qwen3_on_256", "qwen3_235b_256_h100.toml", 256, {}},
    {"tied_over_a_pipeline", "bench_dense_3b.toml", 4, {"run.device=\"cpu\"", "parallel.pp=4", "train.freeze=[\"*mlp*\"]"}},
    {"recompute", "tiny_cpu.toml", 1, {"memory.recompute=[\"norm\", \"qkv\", \"expert_up\"]"}},
    {"recompute_of_layers", "tiny_cpu.toml", 2, {"parallel.ep=2", "memory.recompute=[\"layer\"]"}},
    {"recompute_of_some_layers", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "parallel.pp=2", "parallel.vpp=2", "memory.recompute=[\"qkv\", \"expert_up:0-6,40\", \"layer:20-30\"]"}},
    {"recompute_of_latent_attention", "deepseek_v3_256_gpus.toml", 256,
     {"memory.recompute=[\"mla_up_proj:0-40\", \"norm:61\", \"expert_up:3-61\"]"}},
    {"documents", "tiny_cpu.toml", 1, {"data.separate_documents=true"}},
    {"frozen", "tiny_cpu.toml", 1, {"train.freeze=[\"*experts*\"]"}},
    {"frozen_below", "tiny_cpu.toml", 1, {"train.freeze=[\"model.embed_tokens.*\", \"model.layers.0.*\", \"model.layers.1.*\"]"}},
    {"frozen_below_is_the_widest", "tiny_cpu.toml", 1,
     {"model.intermediate_size=4096", "train.freeze=[\"model.embed_tokens.*\", \"model.layers.0.*\"]"}},
    {"frozen_below_a_pipeline", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "parallel.pp=2", "memory.expert_rows=0",
      "train.freeze=[\"model.embed_tokens.*\", \"model.layers.[0-8].*\"]"}},
    {"frozen_below_what_is_on_the_host", "qwen3_30b_a3b.toml", 2,
     {"parallel.pp=2", "train.freeze=[\"model.embed_tokens.*\", \"model.layers.[0-8].*\"]",
      "memory.offload=[\"layer\"]", "memory.offload_fraction=0.3"}},
    {"adapters", "tiny_cpu.toml", 1, {"lora.rank=4", "lora.targets=[\"*\"]", "precision.compute=\"bf16\""}},
    {"adapters_of_a_layer", "tiny_cpu.toml", 1, {"lora.rank=4", "lora.targets=[\"model.layers.1.*\"]"}},
    {"adapters_of_experts", "tiny_cpu.toml", 4,
     {"parallel.ep=2", "parallel.etp=2", "train.global_batch=16", "lora.rank=4", "lora.targets=[\"mlp.experts.*\"]"}},
    {"adapters_on_a_gpu", "qwen3_30b_a3b.toml", 4,
     {"parallel.tp=2", "parallel.ep=2", "lora.rank=16", "lora.targets=[\"self_attn.*\", \"mlp.experts.*\"]"}},
    {"quantised", "tiny_cpu.toml", 1, {"precision.recipe=\"nvfp4\"", "precision.keep=[\"*.o_proj.*\"]"}},
    {"quantised_on_a_gpu", "qwen3_30b_a3b.toml", 16, {"parallel.ep=8", "precision.recipe=\"fp8_block\""}},
    {"weights_and_rows_in_8_bits_on_a_gpu", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "precision.recipe=\"fp8_block\"", "precision.weights=\"recipe\"", "precision.dispatch=\"recipe\""}},
    {"activations_in_8_bits_on_a_gpu", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "precision.recipe=\"fp8_block\"", "precision.activations=\"recipe\""}},
    {"activations_in_8_bits_of_some_layers", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "parallel.pp=2", "precision.recipe=\"fp8_block\"", "precision.activations=\"recipe\"",
      "precision.keep=[\"model.layers.[0-9].mlp.experts.*\"]"}},
    {"activations_in_8_bits_without_a_budget", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "parallel.pp=2", "precision.recipe=\"fp8_block\"", "precision.activations=\"recipe\"",
      "memory.expert_rows=0"}},
    {"activations_in_8_bits", "tiny_cpu.toml", 1,
     {"precision.recipe=\"fp8_block\"", "precision.activations=\"recipe\""}},
    {"weights_in_8_bits", "tiny_cpu.toml", 4,
     {"parallel.ep=2", "train.global_batch=16", "precision.recipe=\"fp8_block\"", "precision.weights=\"recipe\"",
      "precision.compute=\"bf16\"", "precision.keep=[\"*.o_proj.*\"]"}},
    {"weights_in_8_bits_of_f32", "tiny_cpu.toml", 1,
     {"precision.recipe=\"fp8_block\"", "precision.weights=\"recipe\"", "precision.compute=\"f32\""}},
    {"moments_in_blocks", "qwen3_30b_a3b.toml", 4, {"parallel.ep=2", "optimizer.state=\"8bit\""}},
    {"sums_in_bf16", "tiny_cpu.toml", 2, {"parallel.ep=2", "precision.compute=\"bf16\"", "optimizer.grad=\"bf16\""}},
    {"on_the_host", "qwen3_30b_a3b.toml", 4,
     {"parallel.ep=2", "parallel.pp=2", "optimizer.state=\"8bit\"", "optimizer.master=\"bf16_remainder\"",
      "optimizer.offload=true"}},
    {"some_states_on_the_host", "qwen3_30b_a3b.toml", 4,
     {"parallel.ep=2", "parallel.pp=2", "optimizer.state=\"8bit\"", "optimizer.master=\"bf16_remainder\"",
      "optimizer.offload=true", "optimizer.offload_buffer=20"}},
    {"some_states_and_all_sums_on_the_host", "qwen3_30b_a3b_one_gpu.toml", 1,
     {"optimizer.offload_grad=true", "optimizer.fuse_grad=false", "optimizer.offload_buffer=9.5"}},
    {"all_states_in_the_buffer_and_sums_on_the_host", "qwen3_30b_a3b_one_gpu.toml", 1,
     {"optimizer.offload_grad=true", "optimizer.fuse_grad=false", "optimizer.offload_buffer=1000"}},
    {"all_states_in_the_buffer", "tiny_cpu.toml", 1, {"optimizer.offload=true", "optimizer.offload_buffer=1"}},
    {"some_states_of_muon", "tiny_cpu.toml", 4,
     {"parallel.ep=2", "parallel.etp=2", "train.global_batch=16", "optimizer.name=\"muon\"", "optimizer.offload=true",
      "optimizer.offload_buffer=1e-4"}},
    {"some_states_of_sharded_layers", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "run.graph=false", "parallel.fsdp=true", "parallel.shard_gradients=true",
      "optimizer.state=\"8bit\"", "optimizer.offload=true", "optimizer.offload_buffer=1"}},
    {"activations_on_the_host", "tiny_cpu.toml", 1, {"memory.offload=[\"layer_input\", \"qkv\", \"expert_up\"]"}},
    {"half_of_the_activations_on_the_host", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "parallel.pp=2", "parallel.vpp=2", "memory.offload=[\"layer_input\", \"attention\"]",
      "memory.offload_fraction=0.5", "memory.recompute=[\"qkv\", \"expert_up:0-6,40\"]", "optimizer.offload=true"}},
    {"latent_attention_on_the_host", "deepseek_v3_256_gpus.toml", 256,
     {"memory.offload=[\"layer\"]", "memory.offload_fraction=0.7"}},
    {"weights_on_the_host", "qwen3_30b_a3b_one_gpu.toml", 1, {"memory.offload=[\"weights\"]"}},
    {"weights_on_the_host_without_overlap", "tiny_cpu.toml", 1,
     {"memory.offload=[\"weights\"]", "parallel.overlap=false", "train.freeze=[\"model.layers.0.*\"]"}},
    {"quantised_weights_on_the_host", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "parallel.fsdp=true", "memory.offload=[\"weights\"]", "precision.recipe=\"fp8_block\"",
      "precision.weights=\"recipe\"", "optimizer.offload=true"}},
    {"shards_of_two_ranks_on_the_host", "qwen3_30b_a3b.toml", 32,
     {"parallel.tp=2", "parallel.ep=4", "parallel.fsdp=true", "parallel.fsdp_shard=4", "memory.offload=[\"weights\"]",
      "parallel.shard_gradients=true", "train.freeze=[\"model.layers.[0-8].*\"]"}},
    {"sharded_weights", "tiny_cpu.toml", 4, {"train.global_batch=16", "parallel.fsdp=true"}},
    {"sharded_weights_without_overlap", "tiny_cpu.toml", 4,
     {"train.global_batch=16", "parallel.ep=2", "parallel.fsdp=true", "parallel.overlap=false"}},
    {"shards_of_two_ranks", "qwen3_30b_a3b.toml", 32,
     {"parallel.tp=2", "parallel.ep=4", "parallel.fsdp=true", "parallel.fsdp_shard=4",
      "train.freeze=[\"model.layers.[0-8].*\"]"}},
    {"sharded_weights_that_are_quantised", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=16", "parallel.fsdp=true", "precision.recipe=\"fp8_block\""}},
    {"sharded_weights_in_8_bits", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "parallel.fsdp=true", "precision.recipe=\"fp8_block\"", "precision.weights=\"recipe\""}},
    {"clipped_heads", "tiny_cpu.toml", 4,
     {"train.global_batch=16", "parallel.tp=2", "model.qk_norm=false", "optimizer.qk_clip=100"}},
    {"sharded_gradients", "tiny_cpu.toml", 4,
     {"train.global_batch=16", "parallel.ep=2", "parallel.shard_gradients=true", "precision.compute=\"bf16\""}},
    {"sharded_weights_and_gradients", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "parallel.pp=2", "parallel.vpp=2", "run.graph=false", "parallel.fsdp=true",
      "parallel.shard_gradients=true", "optimizer.state=\"8bit\"", "optimizer.offload=true"}},
    {"sharded_weights_of_which_some_are_frozen", "qwen3_30b_a3b.toml", 16,
     {"parallel.tp=2", "parallel.ep=4", "run.graph=false", "parallel.fsdp=true",
      "train.freeze=[\"model.embed_tokens.*\", \"model.layers.[0-8].*\", \"*.mlp.gate.*\"]"}},
    {"sharded_weights_beside_sums_in_bf16", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "run.graph=false", "parallel.fsdp=true", "optimizer.grad=\"bf16\""}},
    {"sharded_sums_in_bf16", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "run.graph=false", "parallel.shard_gradients=true", "optimizer.grad=\"bf16\"",
      "optimizer.master=\"bf16_remainder\""}},
    {"sharded_sums_in_bf16_on_the_host", "tiny_cpu.toml", 4,
     {"train.global_batch=16", "parallel.fsdp=true", "parallel.shard_gradients=true", "precision.compute=\"bf16\"",
      "optimizer.grad=\"bf16\"", "optimizer.offload=true", "optimizer.offload_grad=true"}},
    {"sharded_base_of_adapters", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "run.graph=false", "parallel.fsdp=true", "lora.rank=16",
      "lora.targets=[\"self_attn.*\", \"mlp.experts.*\"]"}},
    {"base_of_adapters_in_8_bits", "lora_qwen3_30b_a3b.toml", 1, {"lora.base=\"fp8_block\""}},
    {"base_of_adapters_in_4_bits", "lora_qwen3_30b_a3b.toml", 4,
     {"parallel.ep=2", "lora.base=\"mxfp4\"", "run.device=\"cpu\""}},
    {"sharded_base_in_8_bits", "lora_qwen3_30b_a3b.toml", 8,
     {"parallel.tp=2", "parallel.ep=4", "parallel.pp=2", "parallel.fsdp=true", "lora.base=\"fp8_block\""}},
    {"shards_of_a_base_in_8_bits", "lora_qwen3_30b_a3b.toml", 16,
     {"parallel.ep=4", "parallel.fsdp=true", "parallel.fsdp_shard=4", "lora.base=\"fp8_block\""}},
    {"sharded_base_in_4_bits", "lora_qwen3_30b_a3b.toml", 16,
     {"parallel.ep=4", "parallel.fsdp=true", "lora.base=\"mxfp4\""}},
    {"sharded_base_and_gradients_of_adapters", "tiny_cpu.toml", 4,
     {"train.global_batch=16", "parallel.tp=2", "parallel.fsdp=true", "parallel.shard_gradients=true", "lora.rank=4",
      "lora.targets=[\"*\"]", "precision.compute=\"bf16\""}},
    {"muon_in_blocks", "bench_olmoe_1b_7b.toml", 4,
     {"parallel.ep=2", "train.global_batch=32", "optimizer.name=\"muon\"", "optimizer.momentum=0.95",
      "optimizer.state=\"8bit\""}},
    {"muon", "tiny_cpu.toml", 4, {"parallel.ep=2", "parallel.etp=2", "train.global_batch=16", "optimizer.name=\"muon\""}},
    {"all_on_the_host", "qwen3_30b_a3b_one_gpu.toml", 1, {"optimizer.offload_grad=true", "optimizer.fuse_grad=false"}},
    {"fused_sums_of_gradients", "qwen3_30b_a3b_one_gpu.toml", 1, {"memory.recompute=[\"norm\"]", "memory.offload=[]"}},
    {"tied", "bench_dense_3b.toml", 4, {"run.device=\"cpu\"", "parallel.pp=2", "parallel.tp=2"}},
    {"interleaved", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=4", "parallel.tp=2", "parallel.pp=2", "parallel.vpp=2", "parallel.dispatcher=\"alltoall\""}},
    {"zero_bubble", "qwen3_30b_a3b.toml", 16, {"parallel.ep=4", "parallel.pp=4", "parallel.schedule=\"zb_h1\""}},
    {"zero_bubble_with_recompute_and_offload", "qwen3_30b_a3b.toml", 16,
     {"parallel.ep=8", "parallel.pp=2", "parallel.schedule=\"zb_h1\"", "memory.recompute=[\"qkv\", \"expert_up\"]",
      "memory.offload=[\"attention\"]", "memory.offload_fraction=0.5"}},
    {"zero_bubble_and_multi_token_prediction", "deepseek_v3.toml", 256,
     {"parallel.pp=4", "parallel.ep=64", "parallel.layout=\"Et*15|t*16|t*16|t*14mL\"", "parallel.schedule=\"zb_h1\""}},
    {"multi_token_prediction", "deepseek_v3.toml", 256,
     {"parallel.pp=4", "parallel.vpp=4", "parallel.ep=64", "parallel.layout=\"Et*4|(tttt|)*14tmL\"",
      "moe.rank_rows_factor=1.5", "parallel.dispatcher=\"alltoall\""}},
    {"head_by_itself", "deepseek_v3.toml", 1024,
     {"parallel.tp=2", "parallel.pp=8", "parallel.vpp=4", "parallel.ep=64",
      "parallel.layout=\"Et*3|(tt|)*29m|L\""}},
};
// clang-format on

class RankMemories : public testing::TestWithParam<Layout> {};

// Life by life, to the byte, the plan of an engine on the null device.
TEST_P(RankMemories, EqualThoseOfTheEngine) {
  const Layout& l = GetParam();
  const RunSpec run = load_run_spec(kRecipes + l.recipe, l.set);
  const EngineSpec spec = planned_engine_spec(run, l.ranks);
  const StageLayout layout = stages_of(spec);
  PartLibrary library;
  LayoutParts parts(library, spec);
  for (int64_t pp_rank = 0; pp_rank < spec.mesh.pp; ++pp_rank) {
    const PipelineUse use = pipeline_use(spec.pipeline, spec.mesh.pp, pp_rank);
    const RankMemory memory = rank_memory(parts, layout, use, pp_rank);
    const bool uneven = spec.model.vocab_size % spec.mesh.tp != 0;
    const int rank = rank_in_dense_view(spec.mesh, {.tp = uneven ? spec.mesh.tp - 1 : 0, .pp = pp_rank});
    const auto world = make_dry_run_transport(rank, static_cast<int>(spec.mesh.world()));
    EngineSpec null = spec;
    null.device = DeviceKind::null;
    null.world = world.get();
    const Engine engine(null);
    for (int life = 0; life < kNumLives; ++life)
      EXPECT_EQ(memory.life[life], engine.plan().bytes(static_cast<Life>(life)))
          << name_of(static_cast<Life>(life)) << " of pp rank " << pp_rank;
    EXPECT_EQ(memory.spill_bytes, engine.plan().spill_bytes()) << "pp rank " << pp_rank;
    if (spec.target == DeviceKind::cuda) {
      EXPECT_EQ(memory.total(), engine.device_memory().total_bytes());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, RankMemories, testing::ValuesIn(kLayouts),
                         [](const auto& info) { return info.param.name; });

// Rows of experts that a budget keeps are in a pool on the device. `layer` moves all else.
TEST(RankMemories, BudgetedExpertRowsAreNotOffloaded) {
  const auto resolve = [](const std::string& offload, const std::string& budget) {
    const EngineSpec spec = planned_engine_spec(
        load_run_spec(kRecipes + "tiny_cpu.toml", {"parallel.ep=2", "memory.offload=" + offload, budget}), 2);
    const StageLayout layout = stages_of(spec);
    PartLibrary library;
    LayoutParts parts(library, spec);
    const int64_t planned = rank_memory(parts, layout, pipeline_use(spec.pipeline, 1, 0), 0).of(Life::host);
    EngineSpec null = spec;
    null.device = DeviceKind::null;
    EXPECT_EQ(Engine(null).plan().bytes(Life::host), planned);
    return planned;
  };
  const std::string none = "memory.expert_rows=0", some = "memory.expert_rows=1.25";
  EXPECT_GT(resolve("[\"expert_up\"]", none), 0);
  EXPECT_GT(resolve("[\"layer\"]", none), resolve("[\"layer\"]", some));
  expect_error(ErrorKind::usage,
               "memory.offload \"expert_up\" cannot move the rows of experts that several ranks share: they are in the "
               "pool of memory.expert_rows, on the device; remove the name, or set memory.expert_rows = 0, which plans "
               "and moves the worst case",
               [&] { resolve("[\"expert_up\"]", some); });
}

// The recipes promise this.
TEST(RankMemories, OfLargeModelsFitTheirGpus) {
  const std::tuple<const char*, int64_t, double> all[] = {
      {"deepseek_v3_1024_h100.toml", 1024, 62}, {"deepseek_v3_256_gpus.toml", 256, 136},
      {"deepseek_v3_128k.toml", 1024, 57},      {"qwen3_235b_256_h100.toml", 256, 58},
      {"qwen3_235b_a22b_128k.toml", 256, 54},   {"qwen3_235b_a22b_128k.toml", 128, 64}};
  for (const auto& [recipe, ranks, gib] : all) {
    const EngineSpec spec = planned_engine_spec(load_run_spec(kRecipes + recipe, {}), ranks);
    const StageLayout layout = stages_of(spec);
    PartLibrary library;
    LayoutParts parts(library, spec);
    for (int64_t r = 0; r < spec.mesh.pp; ++r) {
      const RankMemory memory = rank_memory(parts, layout, pipeline_use(spec.pipeline, spec.mesh.pp, r), r);
      EXPECT_LE(static_cast<double>(memory.total()) / (1 << 30), gib) << recipe << " pp rank " << r;
    }
  }
}

// In attention's backward pass of a long sequence the gradient of its input, and its input if the weight gradients
// alone read it, 0.5 GiB each, have no memory at the same time as the gradients of q, k and v. With one of them the
// stack is above 4.7 GiB.
TEST(RankMemories, LongSequenceStackHoldsNoAttentionInputDuringItsBackward) {
  const RunSpec run = load_run_spec(kRecipes + "bench_qwen3_30b_a3b_128k.toml", {});
  const EngineSpec spec = planned_engine_spec(run, 1);
  PartLibrary library;
  LayoutParts parts(library, spec);
  const RankMemory memory = rank_memory(parts, stages_of(spec), pipeline_use(spec.pipeline, 1, 0), 0);
  EXPECT_LT(static_cast<double>(memory.of(Life::stack)) / (1 << 30), 4.6);
}

// Sections of heads hold a quarter of q, k, v and o, of their gradients and of the gradient of o. For all heads these
// stacks would be 4.53, 9.06, 9.50 and 11.53 GiB, and with cp 5.64 and 10.12 GiB.
TEST(RankMemories, LongSequenceStackHoldsASectionOfHeads) {
  const auto stack_of = [](const std::vector<std::string>& set, int ranks = 1) {
    const EngineSpec spec = planned_engine_spec(load_run_spec(kRecipes + "bench_qwen3_30b_a3b_256k.toml", set), ranks);
    PartLibrary library;
    LayoutParts parts(library, spec);
    const RankMemory memory = rank_memory(parts, stages_of(spec), pipeline_use(spec.pipeline, 1, 0), 0);
    return static_cast<double>(memory.of(Life::stack)) / (1 << 30);
  };
  EXPECT_LT(stack_of({"train.seq_len=131072", "memory.recompute=[\"norm\"]"}), 3.75);
  EXPECT_LT(stack_of({"memory.recompute=[\"norm\", \"expert_up\"]"}), 6.8);
  EXPECT_LT(stack_of({"memory.recompute=[\"norm\", \"qkv\", \"expert_up\"]"}), 8.3);
  EXPECT_LT(stack_of({"memory.recompute=[\"layer\"]"}), 10.4);
  for (const char* comm : {"allgather", "ring"}) {
    EXPECT_LT(stack_of({"memory.recompute=[\"norm\", \"expert_up\"]", "parallel.cp=2",
                        fmt::format("parallel.cp_comm={}", comm)},
                       2),
              4.5);
  }
}

// Recomputed projections are on the stack only where they are read. If they were held, the stacks would be 7.66, 6.28
// and 14.59 GiB, and 55.19 GiB with latent attention.
TEST(RankMemories, LongSequenceStackHoldsNoProjectionWhileOtherOpsRun) {
  const std::string qwen = "bench_qwen3_30b_a3b_256k.toml", qkv = "memory.recompute=[\"norm\", \"qkv\", \"expert_up\"]";
  const auto stack_of = [](const std::string& recipe, const std::vector<std::string>& set) {
    const EngineSpec spec = planned_engine_spec(load_run_spec(kRecipes + recipe, set), 1);
    PartLibrary library;
    LayoutParts parts(library, spec);
    const RankMemory memory = rank_memory(parts, stages_of(spec), pipeline_use(spec.pipeline, 1, 0), 0);
    return static_cast<double>(memory.of(Life::stack)) / (1 << 30);
  };
  EXPECT_LT(stack_of(qwen, {"train.seq_len=131072"}), 6);
  EXPECT_LT(stack_of(qwen, {"train.seq_len=131072", qkv}), 4.8);
  EXPECT_LT(stack_of(qwen, {}), 11.6);
  const std::vector<std::string> one_rank = {"model.num_hidden_layers=2",
                                             "model.first_k_dense_replace=1",
                                             "model.num_nextn_predict_layers=0",
                                             "parallel.tp=1",
                                             "parallel.cp=1",
                                             "parallel.pp=1",
                                             "parallel.ep=1",
                                             "parallel.layout=",
                                             "parallel.dispatcher=auto",
                                             "train.global_batch=1",
                                             "moe.rank_rows_factor=0"};
  EXPECT_LT(stack_of("deepseek_v3_128k.toml", one_rank), 45);
}

// A shared expert of this width has 30 GiB of scratch for all rows, and 7.5 for a chunk.
TEST(RankMemories, SharedExpertOfALongSequenceHasScratchForAChunk) {
  const RunSpec run = load_run_spec(kRecipes + "bench_qwen3_30b_a3b_128k.toml", {"memory.recompute=[\"layer\"]"});
  EngineSpec spec = planned_engine_spec(run, 1);
  spec.model.shared_intermediate_size = 20480;
  PartLibrary library;
  LayoutParts parts(library, spec);
  const RankMemory memory = rank_memory(parts, stages_of(spec), pipeline_use(spec.pipeline, 1, 0), 0);
  EXPECT_LT(static_cast<double>(memory.of(Life::stack)) / (1 << 30), 11);
}

// More ranks that share the experts leave each with fewer of them, and with no more of anything else than that saves.
TEST(RankMemories, DoNotGrowWithTheNumberOfRanksThatShareExperts) {
  int64_t before = std::numeric_limits<int64_t>::max(), saved = before;
  for (const int64_t ep : {2, 4, 8, 16, 32, 64, 128}) {
    const RunSpec run = load_run_spec(kRecipes + "qwen3_30b_a3b.toml",
                                      {fmt::format("parallel.ep={}", ep), "parallel.dispatcher=\"direct\"",
                                       "memory.recompute=[\"norm\", \"qkv\"]", "memory.expert_rows=1.25"});
    const EngineSpec spec = planned_engine_spec(run, 128);
    PartLibrary library;
    LayoutParts parts(library, spec);
    const RankMemory memory = rank_memory(parts, stages_of(spec), pipeline_use(spec.pipeline, 1, 0), 0);
    EXPECT_LE(memory.total(), before) << "ep = " << ep;
    before = memory.total();
    // With 8 experts or fewer on a rank, the index has as many columns as the rank has experts.
    EXPECT_LE(static_cast<double>(memory.of(Life::saved)), 1.01 * static_cast<double>(saved)) << "ep = " << ep;
    if (ep == 16) saved = memory.of(Life::saved);
  }
}

// By name. The first layer of a part copies the stream where a later one adds to it in its norm: the
// bytes of both together are the same.
std::string counted_as(const std::string& op) { return op == "copy" ? "rms_norm_fwd" : op; }

// The work of the parts equals the counters of the passes of a whole model: the same arithmetic and bytes of
// every op, and the same bytes of every group.
TEST(Parts, AddUpToTheModel) {
  for (const std::vector<std::string>& set : std::vector<std::vector<std::string>>{
           {}, {"parallel.ep=2"}, {"parallel.tp=2", "parallel.ep=2", "memory.recompute=[\"norm\", \"expert_up\"]"}}) {
    const RunSpec run = load_run_spec(kRecipes + "tiny_cpu.toml", set);
    const int64_t ranks = set.empty() ? 1 : 2;
    const EngineSpec spec = planned_engine_spec(run, ranks);
    PartLibrary library;
    LayoutParts parts(library, spec);
    std::map<std::string, Cost> ops, counted;
    std::map<std::string, double> sent;
    const auto add = [&](const PartWork& part) {
      for (const PassWork* pass : {&part.forward, &part.loss, &part.backward}) {
        for (const OpWork& op : pass->ops) ops[counted_as(op.name)] += op.cost;
        for (const SentWork& s : pass->sent) sent[std::string(name_of(s.axis))] += s.wire_bytes;
      }
    };
    for (int64_t i = 0; i < spec.model.num_layers; ++i) add(parts.layer(i));
    add(parts.ends(stages_of(spec).stages[0]));
    EngineSpec null = spec;
    null.device = DeviceKind::null;
    const int rank = spec.model.vocab_size % spec.mesh.tp == 0 ? 0 : 1;
    const auto world = make_dry_run_transport(rank, static_cast<int>(ranks));
    null.world = world.get();
    Engine engine(null);
    Trace trace;
    engine.batch(0).training = true;
    engine.forward_backward(0);  // stores gradients; a part adds to them, as the passes that are counted
    engine.set_trace(&trace);
    engine.forward_backward(0);
    std::map<std::string, double> counted_sent;
    for (const auto& [name, total] : trace.totals()) {
      const size_t space = name.find(' ');
      if (space == std::string::npos)
        counted[counted_as(name)] += total.cost;
      else
        counted_sent[name.substr(0, space)] += total.cost.bytes;
    }
    for (const auto& [name, cost] : counted) {
      EXPECT_NEAR(ops[name].bytes, cost.bytes, 64) << name;  // one sum is cleared once, not in every part
      if (name != "rms_norm_fwd") {
        EXPECT_DOUBLE_EQ(ops[name].flops, cost.flops) << name;
      }
    }
    for (const char* exchanged : {"dp_cp", "tp_cp_dp", "edp"}) {  // by the optimizer, which no part has
      EXPECT_GE(counted_sent[exchanged], sent[exchanged]) << exchanged;
      counted_sent.erase(exchanged);
      sent.erase(exchanged);
    }
    EXPECT_EQ(counted_sent, sent);
    EXPECT_EQ(sent.empty(), set.empty());
  }
}

// A library holds the parts of several runs apart: models, balance and precision of the same layout.
TEST(Parts, LibraryKeepsPartsOfDifferentRunsApart) {
  PartLibrary library;
  const auto forward = [&](const std::vector<std::string>& set) {
    const EngineSpec spec = planned_engine_spec(load_run_spec(kRecipes + "tiny_cpu.toml", set), 1);
    return LayoutParts(library, spec).layer(spec.model.num_layers - 1).forward.flops();
  };
  const double narrow = forward({}), wide = forward({"model.moe_intermediate_size=1024"});
  EXPECT_GT(wide, narrow);
  EXPECT_EQ(forward({}), narrow);
}

}  // namespace
}  // namespace moebius
