// Whole models on a GPU that chooses kernels as another GPU would: by the shared memory and the multiprocessors of an
// A100 or of an RTX 4090. The instructions are those of the GPU at hand. Skipped where there is no GPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "device/accelerator.h"
#include "device/gpu_limits.h"
#include "ops/attention/portable_attention_config.h"
#include "ops/grouped_gemm/portable_gemm_config.h"
#include "tests/equivalence/gpu_specs.h"

namespace moebius {
namespace {

struct OtherGpu {
  const char* name;
  GpuLimits limits;
};
void PrintTo(const OtherGpu& gpu, std::ostream* out) { *out << gpu.name; }

// The small ones have fewer multiprocessors than any such GPU. So their products have large tiles, over which blocks
// walk. On the others the products of these small models have the tiles that they have on an H100 or H200 too, and
// attention alone has other configs.
const OtherGpu kOtherGpus[] = {{"A100", documented_gpu_limits(8, 0, 108)},
                               {"RTX_4090", documented_gpu_limits(8, 9, 128)},
                               {"small_A100", documented_gpu_limits(8, 0, 2)},
                               {"small_Ada", documented_gpu_limits(8, 9, 2)}};

class OnGpuAsAnother : public ::testing::TestWithParam<OtherGpu> {
 protected:
  using SpecOn = EngineSpec (*)(DeviceKind, DType, bool);

  void SetUp() override {
    const std::string why = Accelerator::why_missing();
    if (!why.empty()) GTEST_SKIP() << why;
  }
  static EngineSpec portable(SpecOn spec_on, bool graph = true) {
    EngineSpec spec = spec_on(DeviceKind::cuda, DType::bf16, graph);
    spec.kernels = KernelChoice::portable;
    return spec;
  }
  static EngineSpec as_other(EngineSpec spec) {
    spec.gpu_limits = GetParam().limits;
    return spec;
  }
};

constexpr EngineSpec (*kModels[])(DeviceKind, DType, bool) = {wide_spec_on, documents_on, balanced_on, recomputed_on,
                                                              wide_latent_on};

struct Configs {
  std::vector<PortableGemmConfig> products;  // of the experts: up, down, their gradients, and that of down_proj
  std::vector<PortableAttentionConfig> attention;
};

// Returns the configs that the portable kernels of this model have on a GPU with these limits.
Configs configs_of(const EngineSpec& spec, const GpuLimits& limits) {
  const ModelSpec& m = spec.model;
  const int64_t D = m.hidden_size, F = m.moe_intermediate_size, E = m.num_experts;
  const int64_t R = spec.shape.batch * spec.shape.seq * m.top_k;
  const auto product = [&](int64_t rows, int64_t columns, GroupedEpilogue epilogue) {
    return choose_portable_config({.num_experts = E, .m = rows, .n = columns, .epilogue = epilogue}, limits);
  };
  Configs c{.products = {product(R, 2 * F, GroupedEpilogue::gated_activation), product(R, D, GroupedEpilogue::store),
                         product(R, F, GroupedEpilogue::gated_activation_bwd), product(R, D, GroupedEpilogue::store),
                         product(D, F, GroupedEpilogue::add_f32)}};
  for (const AttentionPass pass : {AttentionPass::fwd, AttentionPass::dq, AttentionPass::dkv})
    c.attention.push_back(choose_portable_attention(pass, m.head_dim, limits));
  return c;
}

// Without this the tests below could compare a GPU with itself.
TEST_P(OnGpuAsAnother, ChoosesOtherConfigsThanThisGpu) {
  const GpuLimits own = query_gpu_limits(), other = GetParam().limits;
  if (own.shared_bytes_per_block == other.shared_bytes_per_block) GTEST_SKIP() << "the limits of this GPU";
  int64_t products = 0, attention = 0;
  for (const auto model : kModels) {
    const EngineSpec spec = portable(model);
    const Configs here = configs_of(spec, own), there = configs_of(spec, other);
    products += here.products != there.products;
    attention += here.attention != there.attention;
  }
  EXPECT_GT(attention, 0);
  if (other.num_multiprocessors > 2) return;
  EXPECT_GT(products, 0);
  const PortableGemmConfig large = other.shared_bytes_per_block > kMinSharedBytes ? kPortableDeep : kPortableWide;
  EXPECT_EQ(configs_of(portable(wide_spec_on), other).products.front(), large);
}

// Returns the bytes that `config` predicts for this GPU, without using one.
int64_t predicted_bytes(EngineSpec spec) {
  spec.counts_for_hopper = limits_of_gpu(spec).is_hopper();
  spec.gpu_limits.reset();
  spec.device = DeviceKind::null;
  return Engine(spec).plan().total_bytes();
}

TEST_P(OnGpuAsAnother, PortableKernelsHaveTheBitsOfThisGpu) {
  for (const auto model : kModels) {
    Engine own(portable(model)), other(as_other(portable(model)));
    const Stream s = other.stream();
    EXPECT_EQ(gpu_limits(s), GetParam().limits);
    EXPECT_EQ(train(initialised(other), 5), train(initialised(own), 5));
    EXPECT_EQ(masters(other), masters(own));
  }
}

TEST_P(OnGpuAsAnother, CapturingChangesNoBit) {
  for (const auto model : {wide_spec_on, documents_on}) {
    Engine captured(as_other(portable(model))), eager(as_other(portable(model, false)));
    EXPECT_EQ(train(initialised(captured), 5), train(initialised(eager), 5));
    EXPECT_EQ(masters(captured), masters(eager));
  }
}

TEST_P(OnGpuAsAnother, PredictedMemoryIsWhatIsUsed) {
  for (const auto model : kModels) {
    for (const KernelChoice kernels : {KernelChoice::portable, KernelChoice::automatic}) {
      EngineSpec spec = as_other(portable(model));
      spec.kernels = kernels;
      Engine engine(spec);
      train(initialised(engine), 1);
      EXPECT_EQ(EngineTestAccess::stack_high_water(engine), engine.plan().bytes(Life::stack)) << name_of(kernels);
      EXPECT_EQ(predicted_bytes(spec), engine.plan().total_bytes()) << name_of(kernels);
    }
  }
}

TEST_P(OnGpuAsAnother, OffloadingChangesNoBit) {
  for (const bool graph : {false, true}) {
    EngineSpec spec = as_other(portable(wide_spec_on, graph));
    Engine kept(spec);
    spec.offload.tensors.layer = true;
    Engine moved(spec);
    EXPECT_GT(moved.plan().offloaded_bytes(), 0);
    EXPECT_EQ(train(initialised(moved), 5), train(initialised(kept), 5));
    EXPECT_EQ(masters(moved), masters(kept));
  }
}

double rms_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum / static_cast<double>(a.size()));
}

std::vector<double> losses_of(const EngineSpec& spec) {
  Engine engine(spec);
  return train(initialised(engine), 20);
}

// With run.kernels = "auto" such a GPU has portable kernels, and cuDNN's attention. The bound is that of
// OnGpu.LossesAreThoseOfTheCpu.
TEST_P(OnGpuAsAnother, AutomaticChoiceHasNoHopperKernelsAndTheLossesOfTheCpu) {
  EngineSpec spec = as_other(portable(wide_spec_on));
  spec.kernels = KernelChoice::automatic;
  EXPECT_FALSE(gpu_kernels(spec).has_hopper_kernels());
  const auto gpu = losses_of(spec), cpu = losses_of(wide_spec_on(DeviceKind::cpu, DType::bf16, true)),
             exact = losses_of(wide_spec_on(DeviceKind::cpu, DType::f32, true));
  EXPECT_LE(rms_difference(gpu, exact), 2 * rms_difference(cpu, exact));
}

TEST_P(OnGpuAsAnother, SettingsOfHopperAreRefused) {
  const auto error = [](const EngineSpec& spec) {
    try {
      Engine engine(spec);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("not refused");
  };
  const GpuLimits& limits = GetParam().limits;
  const std::string has = fmt::format("this one has {}.{}", limits.capability_major, limits.capability_minor);
  EXPECT_THAT(
      error(as_other(quantised_on(DeviceKind::cuda, PrecisionRecipe::fp8_block))),
      ::testing::AllOf(::testing::HasSubstr("precision.recipe = \"fp8_block\" needs a GPU of compute capability 9.0"),
                       ::testing::HasSubstr(has)));
  EngineSpec fuses = as_other(wide_spec_on(DeviceKind::cuda, DType::bf16, true));
  fuses.optimizer->grad = GradFormat::bf16;
  fuses.optimizer->fuse_grad = true;
  EXPECT_THAT(error(fuses),
              ::testing::AllOf(::testing::HasSubstr("optimizer.fuse_grad = true needs"), ::testing::HasSubstr(has)));
}

INSTANTIATE_TEST_SUITE_P(Limits, OnGpuAsAnother, ::testing::ValuesIn(kOtherGpus),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace moebius
