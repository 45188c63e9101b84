// A model with quantised products on every kind of layout. With fp8_block weights may be held, rows be sent, and
// pre-activations be saved, in 8 bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "tests/distributed/layout_run.h"
#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

struct QuantisedLayoutCase {
  const char* name;
  int ranks;
  ParallelSpec layout;
  LayoutModel model = {.quantised = true};
  // The sums of a token may round otherwise than on one rank: shares of them are added over ranks, or a rank has fewer
  // rows, for which the products of some CPUs have another order.
  bool rounds_otherwise() const { return layout.tp > 1 || layout.etp > 1 || layout.cp > 1; }
};

void PrintTo(const QuantisedLayoutCase& c, std::ostream* out) { *out << c.name << " on " << c.ranks << " ranks"; }

constexpr auto kAllToAll = DispatcherKind::alltoall, kDirect = DispatcherKind::direct,
               kAllGather = DispatcherKind::allgather;
const LayoutModel kNarrow{.quantised = true, .narrow_rows = true}, kHeld{.quantised = true, .held_in_8_bits = true},
    kBoth{.quantised = true, .narrow_rows = true, .held_in_8_bits = true}, kTied{.tied = true, .quantised = true},
    kSaved{.quantised = true, .saved_in_8_bits = true},
    kAll{.quantised = true, .narrow_rows = true, .held_in_8_bits = true, .saved_in_8_bits = true};

const QuantisedLayoutCase kCases[] = {
    {"dp2", 2, {}},
    {"dp4", 4, {}},
    {"dp2_held", 2, {}, kHeld},
    {"dp4_held", 4, {}, kHeld},
    {"tp2", 2, {.tp = 2}},
    {"tp2_dp2_held", 4, {.tp = 2}, kHeld},
    {"tp2_tied", 2, {.tp = 2}, kTied},
    {"cp2", 2, {.cp = 2}},
    {"cp2_ring", 2, {.cp = 2, .cp_comm = CpComm::ring}},
    {"cp2_alltoall", 2, {.cp = 2, .cp_comm = CpComm::alltoall}},
    {"tp2_cp2", 4, {.tp = 2, .cp = 2}},
    {"tp2_cp2_ring_dp2_held", 8, {.tp = 2, .cp = 2, .cp_comm = CpComm::ring}, kHeld},
    {"pp2", 2, {.pp = 2}},
    {"pp4", 4, {.pp = 4}},
    {"pp2_vpp2_held", 2, {.pp = 2, .vpp = 2}, kHeld},
    {"pp2_dp2_tied", 4, {.pp = 2}, kTied},
    {"tp2_pp2", 4, {.tp = 2, .pp = 2}},
    {"ep2", 2, {.ep = 2, .dispatcher = kAllGather}},
    {"ep2_alltoall", 2, {.ep = 2, .dispatcher = kAllToAll}},
    {"ep2_direct", 2, {.ep = 2, .dispatcher = kDirect}},
    {"ep2_narrow", 2, {.ep = 2, .dispatcher = kAllGather}, kNarrow},
    {"ep2_alltoall_narrow", 2, {.ep = 2, .dispatcher = kAllToAll}, kNarrow},
    {"ep2_direct_narrow", 2, {.ep = 2, .dispatcher = kDirect}, kNarrow},
    {"ep4_alltoall_both", 4, {.ep = 4, .dispatcher = kAllToAll}, kBoth},
    {"ep2_edp2_both", 4, {.ep = 2, .dispatcher = kAllGather}, kBoth},
    {"ep4_direct_both", 4, {.ep = 4, .dispatcher = kDirect}, kBoth},
    {"ep2_over_tp2_narrow", 2, {.tp = 2, .ep = 2, .dispatcher = kAllGather}, kNarrow},
    {"ep4_over_tp2_cp2", 4, {.tp = 2, .cp = 2, .ep = 4, .dispatcher = kAllToAll}},
    {"etp2", 2, {.etp = 2, .dispatcher = kAllGather}},
    {"etp2_ep2_alltoall_narrow", 4, {.ep = 2, .etp = 2, .dispatcher = kAllToAll}, kNarrow},
    {"etp2_ep2_direct_both", 4, {.ep = 2, .etp = 2, .dispatcher = kDirect}, kBoth},
    {"pp2_ep2_both", 4, {.pp = 2, .ep = 2, .dispatcher = kAllGather}, kBoth},
    {"dp2_saved", 2, {}, kSaved},
    {"tp2_saved", 2, {.tp = 2}, kSaved},
    {"cp2_saved", 2, {.cp = 2}, kSaved},
    {"pp2_vpp2_saved", 2, {.pp = 2, .vpp = 2}, kSaved},
    {"ep2_direct_saved", 2, {.ep = 2, .dispatcher = kDirect}, kSaved},
    {"etp2_ep2_alltoall_saved", 4, {.ep = 2, .etp = 2, .dispatcher = kAllToAll}, kSaved},
    {"pp4_zb_h1", 4, {.pp = 4, .schedule = PipelineSchedule::zb_h1}},
    {"pp2_zb_h1_ep2_all", 4, {.pp = 2, .ep = 2, .schedule = PipelineSchedule::zb_h1, .dispatcher = kAllGather}, kAll},
    {"pp2_ep2_all", 4, {.pp = 2, .ep = 2, .dispatcher = kAllGather}, kAll},
    {"tp2_cp2_pp2_ep4", 8, {.tp = 2, .cp = 2, .pp = 2, .ep = 4, .dispatcher = kAllGather}},
    {"cp4_hierarchical", 4, {.cp = 4, .cp_comm = CpComm::hierarchical, .cp_inner = 2}},
    {"pp2_cp2", 4, {.cp = 2, .pp = 2}},
    {"ep4_two_level", 4, {.ep = 4, .dispatcher = DispatcherKind::two_level, .ranks_per_node = 2}},
    {"ep2_over_tp2_direct", 2, {.tp = 2, .ep = 2, .dispatcher = kDirect}},
    {"ep2_over_cp2_alltoall", 2, {.cp = 2, .ep = 2, .dispatcher = kAllToAll}},
    {"etp2_over_tp2", 2, {.tp = 2, .etp = 2, .dispatcher = kAllGather}},
    {"pp2_ep2_alltoall", 4, {.pp = 2, .ep = 2, .dispatcher = kAllToAll}},
};

// Returns the first case of each layout.
std::vector<QuantisedLayoutCase> distinct_layouts() {
  std::vector<QuantisedLayoutCase> distinct;
  for (const QuantisedLayoutCase& c : kCases) {
    const auto same = [&](const QuantisedLayoutCase& other) {
      return other.ranks == c.ranks && other.layout == c.layout;
    };
    if (std::ranges::none_of(distinct, same)) distinct.push_back(c);
  }
  return distinct;
}

// The outcome of one rank, computed once for each model.
const LayoutOutcome& alone(const LayoutModel& what) {
  static std::mutex mutex;
  static std::map<LayoutModel, LayoutOutcome> all;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = all.try_emplace(what);
  if (is_new) found->second = train_alone(what, 1);
  return found->second;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / (norm + 1e-12));
}

struct Bounds {
  double loss, norm, params;  // relative
};
constexpr Bounds kSameNumbers{1e-6, 1e-6, 1e-6}, kRounding{4e-4, 1e-3, 2e-3};

class QuantisedLayouts : public ::testing::TestWithParam<QuantisedLayoutCase> {};

// One step is compared. Where the sums of a token are those of one rank, each number that is quantised is the same bit
// for bit, and only the order in which gradients are added differs. Elsewhere a sum differs by some 2^-22 of itself,
// and a few of the 10^6 numbers that a step quantises are so near a tie that they round the other way. Such a number
// errs by up to 2^-3 of itself, as one term of sums of 256. In measurements that moved the loss by up to 1.1e-4 of
// itself, the norm by 2.6e-4 and parameters by 7.3e-4. In a second step all weights differ in their last bits, so it
// has such numbers on every layout. QuantisedWeights shows that the weights of a step arrive.
// The blocks of tp and etp are held to 2e-6 by QuantisedMoeRanks (src/model/moe/moe_ranks_test.cc).
TEST_P(QuantisedLayouts, TrainTheModelOfOneRank) {
  const QuantisedLayoutCase& c = GetParam();
  const Bounds bounds = c.rounds_otherwise() ? kRounding : kSameNumbers;
  run_ranks(c.ranks, [&](Transport& world) {
    const LayoutOutcome got = train_on(world, c.model, c.layout, 1);
    if (world.rank() != 0) return;
    const LayoutOutcome& want = alone(c.model);
    EXPECT_NEAR(got.steps[0].loss / want.steps[0].loss, 1, bounds.loss);
    EXPECT_NEAR(got.steps[0].grad_norm / want.steps[0].grad_norm, 1, bounds.norm);
    for (const auto& [name, expected] : want.first)
      EXPECT_LE(distance(got.first.at(name), expected), bounds.params) << name;
  });
}

// Blocks of 32 have other scales, as blocks in other places would. Few numbers then round in another way, since scales
// are powers of two, and still the bounds of the same numbers tell.
TEST(QuantisedLayout, OtherBlocksExceedTheBounds) {
  const LayoutModel what{.quantised = true};
  const std::unique_ptr<Transport> self = make_self_transport();
  EngineSpec spec = layout_engine_spec(*self, what, {});
  spec.precision.recipe = PrecisionRecipe::mxfp8;
  Engine engine(spec);
  init_layout(engine, what);
  const StepReport other = layout_step(engine, what, 1), &blocks = alone(what).steps[0];
  EXPECT_GT(std::abs(other.loss / blocks.loss - 1), 10 * kSameNumbers.loss);
  EXPECT_GT(std::abs(other.grad_norm / blocks.grad_norm - 1), 10 * kSameNumbers.norm);
}

INSTANTIATE_TEST_SUITE_P(Everywhere, QuantisedLayouts, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return fmt::format("{}_on_{}", info.param.name, info.param.ranks); });

TEST(QuantisedLayout, ThirtySixAreDistinct) { EXPECT_EQ(distinct_layouts().size(), 36); }

// A model whose gradients of weights are quantised too, as they are by default.
struct QuantisedGradients {
  const char* name;
  PrecisionRecipe recipe;
  DType compute = DType::f32;
  int64_t seq = 8;          // tokens; a micro-batch has two sequences
  int64_t sequences = 8;    // of a step
  uint64_t first_seed = 7;  // with which the fewest layouts had a number near a tie, on one CPU
  std::vector<std::string> keep = {};

  LayoutModel model() const {
    return {.seq = seq,
            .sequences = sequences,
            .quantised = true,
            .recipe = recipe,
            .weight_gradients = WeightGradientPrecision::recipe,
            .keep = keep};
  }
  LayoutWay way(int64_t micro_batch = 0) const { return {.compute = compute, .micro_batch = micro_batch}; }
};

void PrintTo(const QuantisedGradients& c, std::ostream* out) { *out << c.name; }

// Returns whether ranks add shares of a token's sums. All-to-all sends whole rows, which are added as on one rank. With
// cp the gradients of keys and values are sums over ranks.
bool adds_shares(const ParallelSpec& layout) {
  return layout.tp > 1 || layout.etp > 1 || layout.cp > 1 || (layout.ep > 1 && layout.dispatcher != kAllToAll);
}

// The rule of blocks: a product of dW has the tokens that a rank computes together. For dense layers these are the
// tokens of a micro-batch over cp. For experts they are those of the ep * etp ranks that share them, where tp * cp
// ranks have one micro-batch. `micro_batch`: sequences, of 2 on one rank.
// With fp8_tensor all ranks have one scale. With nvfp4 the rows of experts are apart by micro-batch, and blocks have 16
// tokens, so that pieces of cp may consist of whole blocks.
bool has_blocks_of_one_rank(const QuantisedGradients& model, const std::string& name, const ParallelSpec& layout,
                            int64_t micro_batch) {
  const bool is_expert = name.find(".experts.") != std::string::npos;
  if (model.recipe == PrecisionRecipe::fp8_tensor) return true;
  if (model.recipe == PrecisionRecipe::nvfp4) {
    if (is_expert) return layout.ep * layout.etp >= layout.tp * layout.cp;
    return layout.cp == 1 || model.seq % (2 * layout.cp * 16) == 0;
  }
  return is_expert ? micro_batch * layout.ep * layout.etp == 2 * layout.tp * layout.cp : micro_batch == 2 * layout.cp;
}

// Adam's first update of a weight is a smooth function of its gradient. So this distance of updates is about that of
// gradients, and it does not depend on the size of the weights.
double distance_of_updates(const std::vector<float>& got, const std::vector<float>& want,
                           const std::vector<float>& start) {
  std::vector<float> a(got.size()), b(got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    a[i] = got[i] - start[i];
    b[i] = want[i] - start[i];
  }
  return distance(a, b);
}

// The distances of updates of the matrices whose products are quantised, by name.
std::map<std::string, double> distances_of_matrices(const LayoutOutcome& got, const LayoutOutcome& want,
                                                    const LayoutOutcome& start) {
  std::map<std::string, double> distances;
  for (const auto& [name, weights] : want.first)
    if (name.ends_with("_proj.weight"))
      distances[name] = distance_of_updates(got.first.at(name), weights, start.last.at(name));
  return distances;
}

// Sums over micro-batches in another order differ by a few 2^-24.
constexpr double kSumsOfMicroBatches = 4e-6;
// A scale is a power of two. So another block changes only what is below the normal range of E4M3 with one of the
// two scales, by at most 2^-9 of the larger scale. The largest number of that block is above 224 scales. So the change
// is at most 2^-16 of that number. That is taken to be at most 8 times the root mean square, in both operands of dW.
constexpr double kOtherBlocks = 2 * 8 * 0x1p-16;
// No such bound is known of nvfp4: its scales are rounded, and so every number changes. This one tells gradients from
// unrelated ones, and no more.
constexpr double kOtherBlocksOfNvfp4 = 0.4;
// Where ranks add shares, nearly every run of nvfp4 has some number that rounds the other way. The runs in which few do
// are within these bounds: kRounding, and this one of updates.
constexpr double kFewTiesOfNvfp4 = 2e-2;

struct OneRank {
  LayoutOutcome start, trained;
};

OneRank on_one_rank(const LayoutModel& model, const LayoutWay& way = {}) {
  const std::unique_ptr<Transport> self = make_self_transport();
  return {train_on(*self, model, {}, 0, way), train_on(*self, model, {}, 1, way)};
}

// Returns what differs by more than the order of sums and, where blocks differ, by more than kOtherBlocks; empty if
// nothing does. The numbers are the same but for the ties of QuantisedLayouts.
std::string differences(const QuantisedGradients& model, const QuantisedLayoutCase& c, int64_t micro_batch,
                        const LayoutOutcome& got, const OneRank& alone) {
  std::string found;
  const auto check = [&](const std::string& what, double difference, double bound) {
    if (!(difference <= bound)) found += fmt::format("{} differs by {:.1e}\n", what, difference);
  };
  const LayoutOutcome& want = alone.trained;
  const std::map<std::string, double> distances = distances_of_matrices(got, want, alone.start);
  const auto is_loose = [&](const std::string& name) {
    return model.recipe == PrecisionRecipe::nvfp4 && distances.contains(name) &&
           !has_blocks_of_one_rank(model, name, c.layout, micro_batch);
  };
  const bool has_loose = std::ranges::any_of(distances, [&](const auto& of) { return is_loose(of.first); });
  const bool has_ties = model.recipe == PrecisionRecipe::nvfp4 && adds_shares(c.layout);
  const Bounds& same_numbers = has_ties ? kRounding : kSameNumbers;
  check("loss", std::abs(got.steps[0].loss / want.steps[0].loss - 1), c.layout.pp == c.ranks ? 0 : same_numbers.loss);
  const double of_norm = std::abs(got.steps[0].grad_norm / want.steps[0].grad_norm - 1);
  check("norm", of_norm, has_loose ? kOtherBlocksOfNvfp4 : same_numbers.norm);
  const double clipping = has_loose ? 2 * of_norm : 0;  // of all updates, by that norm
  for (const auto& [name, expected] : want.first)
    if (!has_loose) check(name, distance(got.first.at(name), expected), same_numbers.params);
  for (const auto& [name, by] : distances) {
    const bool same = has_blocks_of_one_rank(model, name, c.layout, micro_batch) && !adds_shares(c.layout);
    const double bound = has_ties ? kFewTiesOfNvfp4 : same ? kSumsOfMicroBatches : kOtherBlocks;
    check("update of " + name, by, is_loose(name) ? kOtherBlocksOfNvfp4 : bound + clipping);
  }
  return found;
}

// In about half of the runs where ranks add shares, some number is so near a tie that it rounds the other way. Which
// runs these are depends on the order of sums, and so on the CPU. So such a layout needs the numbers of one rank with
// one of these seeds, and others need them with the first. OperandsOfTwoRanks
// (src/precision/product_precision_test.cc) compares the bytes of scales that ranks share.
constexpr uint64_t kMoreSeeds[] = {77, 301, 19, 31, 5, 11, 17};

// Returns how many micro-batches a scale of fp8_tensor covers where experts get the rows of several at once.
int64_t batches_of_scale(const ParallelSpec& layout) {
  return std::max<int64_t>(1, layout.ep * layout.etp / (layout.tp * layout.cp));
}

// Runs the model on one rank and on each of the layouts. micro_batch: sequences of a micro-batch on a layout;
// of_one_rank: on one rank.
void expect_gradients_of_one_rank(const QuantisedGradients& model, const std::vector<QuantisedLayoutCase>& layouts,
                                  int64_t micro_batch = 2, int64_t of_one_rank = 2) {
  const bool is_cut = micro_batch != of_one_rank;
  std::vector<uint64_t> seeds{model.first_seed};
  seeds.insert(seeds.end(), std::begin(kMoreSeeds), std::end(kMoreSeeds));
  std::map<uint64_t, OneRank> alone;
  for (const QuantisedLayoutCase& c : layouts) {
    std::string all;
    for (const uint64_t seed : seeds) {
      LayoutModel with_seed = model.model();
      with_seed.seed = seed;
      if (!alone.contains(seed)) alone[seed] = on_one_rank(with_seed, model.way(is_cut ? of_one_rank : 0));
      std::string found;
      run_threads(c.ranks, test_world(), [&](Transport& world) {
        const LayoutOutcome got = train_on(world, with_seed, c.layout, 1, model.way(is_cut ? micro_batch : 0));
        if (world.rank() == 0) found = differences(model, c, micro_batch, got, alone[seed]);
      });
      all += found.empty() ? "" : fmt::format("with seed {}\n{}", seed, found);
      if (found.empty() || !adds_shares(c.layout)) {
        EXPECT_EQ(found, "") << c.name << " on " << c.ranks << " ranks";
        all.clear();
        break;
      }
    }
    EXPECT_EQ(all, "") << c.name << " on " << c.ranks << " ranks";
  }
}

class QuantisedGradientsOnLayouts : public ::testing::TestWithParam<QuantisedGradients> {};

// In bf16 a sum of shares is rounded otherwise in most tokens. fp8_tensor leaves out the two layouts of 8 ranks;
// SharedScalesAreThoseOfOneMicroBatch has those on which a scale covers several micro-batches. nvfp4, which takes long,
// has one layout of each kind.
TEST_P(QuantisedGradientsOnLayouts, AreThoseOfOneRank) {
  const QuantisedGradients& model = GetParam();
  const bool is_tensor = model.recipe == PrecisionRecipe::fp8_tensor, is_nv = model.recipe == PrecisionRecipe::nvfp4;
  const std::set<std::string> of_nv = {"cp2_ring",        "pp2_vpp2_held",    "ep2_alltoall",
                                       "ep4_direct_both", "ep4_over_tp2_cp2", "etp2_ep2_alltoall_narrow"};
  std::vector<QuantisedLayoutCase> layouts;
  for (const QuantisedLayoutCase& c : distinct_layouts()) {
    if (model.compute == DType::bf16 && adds_shares(c.layout)) continue;
    if (is_nv && !of_nv.contains(c.name)) continue;
    if (is_tensor && (c.ranks > 4 || batches_of_scale(c.layout) > 1)) continue;
    layouts.push_back(c);
  }
  EXPECT_GE(layouts.size(), is_nv ? 6u : is_tensor ? 7u : model.compute == DType::bf16 ? 10u : 36u);
  expect_gradients_of_one_rank(model, layouts);
}

constexpr auto kBlock = PrecisionRecipe::fp8_block, kTensor = PrecisionRecipe::fp8_tensor, kMx = PrecisionRecipe::mxfp8,
               kNv = PrecisionRecipe::nvfp4;
const QuantisedGradients kGradients[] = {
    {"fp8_block", kBlock},
    {.name = "mxfp8", .recipe = kMx, .first_seed = 13},
    {"fp8_tensor", kTensor},
    {"nvfp4", kNv},
    {"fp8_block_in_bf16", kBlock, DType::bf16},
    {"fp8_tensor_in_bf16", kTensor, DType::bf16},
};

INSTANTIATE_TEST_SUITE_P(Recipes, QuantisedGradientsOnLayouts, ::testing::ValuesIn(kGradients),
                         [](const auto& info) { return std::string(info.param.name); });

// A micro-batch has 160 tokens: one block of 128 and a part of another. Layouts with other micro-batches have other
// blocks, which ep over two of them makes those of one rank again for experts.
TEST(QuantisedGradients, SeveralBlocksOfTokens) {
  const QuantisedGradients model{"fp8_block", kBlock, DType::f32, 80};
  expect_gradients_of_one_rank(model, {{"dp2", 2, {}}, {"pp2", 2, {.pp = 2}}});
  const std::vector<QuantisedLayoutCase> cut = {{"dp2", 2, {}}, {"ep2", 2, {.ep = 2, .dispatcher = kAllToAll}}};
  expect_gradients_of_one_rank(model, cut, 1);
  expect_gradients_of_one_rank(model, cut, 4);
}

// With fp8_tensor experts that get the rows of several micro-batches have one scale for all of them. So their numbers
// are those of one rank whose micro-batches are as large; dense layers are not quantised here, since theirs are not.
TEST(QuantisedGradients, SharedScalesAreThoseOfOneMicroBatch) {
  const QuantisedGradients model{
      .name = "fp8_tensor",
      .recipe = kTensor,
      .keep = {"*.self_attn.*", "*.mlp.gate_proj.*", "*.mlp.up_proj.*", "*.mlp.down_proj.*", "*.shared_expert*"}};
  std::map<int64_t, std::vector<QuantisedLayoutCase>> by_batches;
  for (const QuantisedLayoutCase& c : distinct_layouts())
    if (c.ranks <= 4 && batches_of_scale(c.layout) > 1) by_batches[batches_of_scale(c.layout)].push_back(c);
  EXPECT_EQ(by_batches.size(), 2u);
  for (const auto& [batches, layouts] : by_batches) expect_gradients_of_one_rank(model, layouts, 2, 2 * batches);
}

// Pieces of cp consist of whole blocks of 16 tokens, so all gradients are those of one rank.
TEST(QuantisedGradients, WholeBlocksOnRanksOfContext) {
  const QuantisedGradients model{.name = "nvfp4", .recipe = kNv, .seq = 64, .sequences = 2};
  expect_gradients_of_one_rank(model, {{"ep2_over_cp2", 2, {.cp = 2, .ep = 2, .dispatcher = kAllToAll}}});
}

// The names that precision.keep takes out change neither the draws nor the scales of the others.
TEST(QuantisedGradients, KeptProductsOnLayouts) {
  const QuantisedGradients model{.name = "kept", .recipe = kNv, .keep = {"*.o_proj.*", "model.layers.1.mlp.experts.*"}};
  expect_gradients_of_one_rank(model, {{"ep2_over_tp2", 2, {.tp = 2, .ep = 2, .dispatcher = kAllGather}},
                                       {"etp2", 2, {.etp = 2, .dispatcher = kAllGather}}});
}

// Latents are expanded by the rank that has their tokens, so layouts have the draws of one rank with every exchange.
TEST(QuantisedGradients, LatentAttentionDrawsAsOneRank) {
  const LayoutModel latent{.latent_qkv = true,
                           .seq = 64,
                           .sequences = 2,
                           .quantised = true,
                           .recipe = PrecisionRecipe::nvfp4,
                           .weight_gradients = WeightGradientPrecision::recipe};
  const StepReport want = on_one_rank(latent).trained.steps[0];
  for (const CpComm comm : {CpComm::allgather, CpComm::ring, CpComm::alltoall}) {
    run_threads(2, test_world(), [&](Transport& world) {
      const StepReport got = train_on(world, latent, {.cp = 2, .cp_comm = comm}, 1).steps[0];
      EXPECT_NEAR(got.loss / want.loss, 1, 1e-4);
      EXPECT_NEAR(got.grad_norm / want.grad_norm, 1, 3e-4) << "method " << static_cast<int>(comm);
    });
  }
}

TEST(QuantisedGradients, WeightGradientsInComputeExceedTheBounds) {
  const LayoutModel quantised = kGradients[0].model();
  LayoutModel plain = quantised;
  plain.weight_gradients = WeightGradientPrecision::compute;
  const OneRank want = on_one_rank(quantised), other = on_one_rank(plain);
  const std::map<std::string, double> moved = distances_of_matrices(other.trained, want.trained, want.start);
  EXPECT_GE(moved.size(), 64u);
  for (const auto& [name, by] : moved) EXPECT_GE(by, 50 * kOtherBlocks) << name;
}

}  // namespace
}  // namespace moebius
