// Experts over ranks in bf16: loads of every kind, and every way to run a step. On a GPU the kernels are those of its
// architecture. Ranks may share one; where each has one, the last steps are replayed CUDA graphs.
#include "device/accelerator.h"
#include "tests/distributed/expert_run.h"
#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

// The experts that tokens choose.
enum class Load {
  even,
  skewed,    // most tokens choose the two of the first rank first
  two,       // all tokens choose these: the other ranks are empty
  one,       // all tokens choose one, and no other
  capacity,  // experts drop what is above their capacity; they are chosen evenly
  two_capacity,
  four,  // tokens choose four of the eight, so that every token is sent to both of two ranks
};

struct Case {
  const char* name;
  int ranks;
  MeshShape mesh;
  DispatcherKind dispatcher;
  Load load = Load::even;
  PipelineSpec pipeline = {};
  KernelChoice kernels = KernelChoice::automatic;  // of a GPU
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name << " on " << c.ranks << " ranks"; }

double skew_of(Load load) {
  switch (load) {
    case Load::even:
    case Load::capacity:
    case Load::four:
      return 0;
    case Load::skewed:
      return 1;
    default:
      return 100;
  }
}

EngineSpec spec_of(const Case& c, DeviceKind device) {
  EngineSpec spec = expert_spec(c.mesh, c.dispatcher, device, DType::bf16);
  spec.pipeline = c.pipeline;
  spec.kernels = c.kernels;
  if (c.load == Load::one) spec.model.top_k = 1;
  if (c.load == Load::four) spec.model.top_k = 4;
  if (c.load == Load::capacity || c.load == Load::two_capacity) spec.balance.capacity_factor = 0.9;
  return spec;
}

const Case kCases[] = {
    {"ep2_direct", 2, {.dp = 2, .ep = 2}, DispatcherKind::direct},
    {"ep2_direct_skewed", 2, {.dp = 2, .ep = 2}, DispatcherKind::direct, Load::skewed},
    {"ep2_direct_one", 2, {.dp = 2, .ep = 2}, DispatcherKind::direct, Load::one},
    {"ep2_direct_capacity", 2, {.dp = 2, .ep = 2}, DispatcherKind::direct, Load::capacity},
    {"ep2_direct_four", 2, {.dp = 2, .ep = 2}, DispatcherKind::direct, Load::four},
    {"ep2_allgather_one", 2, {.dp = 2, .ep = 2}, DispatcherKind::allgather, Load::one},
    {"ep2_alltoall_two_capacity", 2, {.dp = 2, .ep = 2}, DispatcherKind::alltoall, Load::two_capacity},
    {"ep4_direct_two", 4, {.dp = 4, .ep = 4}, DispatcherKind::direct, Load::two},
    {"ep4_direct_two_capacity", 4, {.dp = 4, .ep = 4}, DispatcherKind::direct, Load::two_capacity},
    {"ep4_two_level", 4, {.dp = 4, .ep = 4, .ranks_per_node = 2}, DispatcherKind::two_level},
    {"ep4_two_level_two", 4, {.dp = 4, .ep = 4, .ranks_per_node = 2}, DispatcherKind::two_level, Load::two},
    {"ep4_allgather_capacity", 4, {.dp = 4, .ep = 4}, DispatcherKind::allgather, Load::capacity},
    {"etp2_ep2_direct_skewed", 4, {.dp = 4, .etp = 2, .ep = 2}, DispatcherKind::direct, Load::skewed},
    {"etp2_ep2_direct_four", 4, {.dp = 4, .etp = 2, .ep = 2}, DispatcherKind::direct, Load::four},
    {"pp2_ep2_direct_two", 4, {.dp = 2, .pp = 2, .ep = 2}, DispatcherKind::direct, Load::two, {.layout = "Ett|tL"}},
};

std::vector<Case> portable_cases() {
  std::vector<Case> cases;
  for (Case c : kCases) {
    c.kernels = KernelChoice::portable;
    cases.push_back(c);
  }
  return cases;
}

class ExpertsInBf16 : public ::testing::TestWithParam<Case> {
 protected:
  static void on_gpu(void (*body)(Transport& world, DeviceKind device)) {
    const std::string why = Accelerator::why_missing();
    if (!why.empty()) GTEST_SKIP() << why;
    run_ranks(GetParam().ranks, [&](Transport& world) { body(world, DeviceKind::cuda); });
  }
  static void on_cpu(void (*body)(Transport& world, DeviceKind device)) {
    run_ranks(GetParam().ranks, [&](Transport& world) { body(world, DeviceKind::cpu); });
  }
  static TrainedExperts train(Transport& world, const EngineSpec& spec) {
    const Load load = GetParam().load;
    return train_experts(world, spec, skew_of(load), load == Load::one ? 1 : 2);
  }

  // Other keys, and a dispatcher that adds in the same order: not a bit changes.
  static void expect_ways_change_no_bit(Transport& world, DeviceKind device) {
    const Case& c = GetParam();
    const EngineSpec plain = spec_of(c, device);
    const TrainedExperts want = train(world, plain);
    EXPECT_NE(want.losses.front(), want.losses.back());
    const auto same = [&](const char* what, void (*change)(EngineSpec&)) {
      SCOPED_TRACE(what);
      EngineSpec spec = plain;
      change(spec);
      expect_same(train(world, spec), want);
      if (device == DeviceKind::cpu || c.dispatcher == DispatcherKind::alltoall) return;
      spec.graph = true;
      expect_same(train(world, spec), want);
    };
    same("nothing", [](EngineSpec&) {});
    same("work during the exchange of rows", [](EngineSpec& spec) { spec.expert_overlap = ExpertOverlap::layer; });
    // Portable kernels do not compute a part of the rows.
    if (c.dispatcher == DispatcherKind::direct && c.kernels == KernelChoice::automatic) {
      same("parts of the rows during the exchange",
           [](EngineSpec& spec) { spec.expert_overlap = ExpertOverlap::batch_split; });
      same("the same, recomputed", [](EngineSpec& spec) {
        spec.expert_overlap = ExpertOverlap::batch_split;
        spec.recompute.expert_up = true;
      });
      same("the same, with a budget", [](EngineSpec& spec) {
        spec.expert_overlap = ExpertOverlap::batch_split;
        spec.expert_rows = 0.5;
      });
    }
    same("recompute layer", [](EngineSpec& spec) { spec.recompute.layer = true; });
    same("recompute parts, with a budget", [](EngineSpec& spec) {
      spec.recompute.norm = spec.recompute.qkv = spec.recompute.expert_up = true;
      spec.expert_rows = 0.5;
    });
    if (c.dispatcher == DispatcherKind::direct || c.dispatcher == DispatcherKind::two_level)
      same("all-gather", [](EngineSpec& spec) { spec.dispatcher = DispatcherKind::allgather; });
  }

  // The same sequences on one rank. Sums over ranks have one more rounding, and a logit of this model is about 1, of
  // which bf16 keeps 2^-9.
  static void expect_model_of_one_rank(Transport& world, DeviceKind device) {
    constexpr double kRounding = 0x1p-6;
    const Case& c = GetParam();
    const TrainedExperts got = train(world, spec_of(c, device));
    if (world.rank() != 0) return;
    EngineSpec alone = spec_of(c, device);
    alone.mesh = {};
    alone.pipeline = {};
    alone.dispatcher = DispatcherKind::automatic;
    alone.num_micro_batches *= c.mesh.dp;
    const TrainedExperts want = train(*make_self_transport(), alone);
    for (size_t i = 0; i < want.losses.size(); ++i)
      EXPECT_NEAR(got.losses[i], want.losses[i], kRounding * want.losses[i]) << "step " << i + 1;
  }
};

TEST_P(ExpertsInBf16, ExecutionOptionsChangeNoBit) { on_cpu(expect_ways_change_no_bit); }
TEST_P(ExpertsInBf16, ExecutionOptionsChangeNoBitOnAGpu) { on_gpu(expect_ways_change_no_bit); }
TEST_P(ExpertsInBf16, RanksTrainTheModelOfOneRank) { on_cpu(expect_model_of_one_rank); }
TEST_P(ExpertsInBf16, RanksTrainTheModelOfOneRankOnAGpu) { on_gpu(expect_model_of_one_rank); }

class PortableExpertsInBf16 : public ExpertsInBf16 {};

TEST_P(PortableExpertsInBf16, ExecutionOptionsChangeNoBitOnAGpu) { on_gpu(expect_ways_change_no_bit); }
TEST_P(PortableExpertsInBf16, RanksTrainTheModelOfOneRankOnAGpu) { on_gpu(expect_model_of_one_rank); }

std::string name_of_case(const ::testing::TestParamInfo<Case>& info) {
  return fmt::format("{}_on_{}", info.param.name, info.param.ranks);
}
INSTANTIATE_TEST_SUITE_P(Everywhere, ExpertsInBf16, ::testing::ValuesIn(kCases), name_of_case);
INSTANTIATE_TEST_SUITE_P(Everywhere, PortableExpertsInBf16, ::testing::ValuesIn(portable_cases()), name_of_case);

}  // namespace
}  // namespace moebius
