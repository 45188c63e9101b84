#include "hub/peft_experts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"

namespace moebius {
namespace {

using testing::HasSubstr;

const ExpertAdapters kSizes{.num_experts = 3, .hidden = 8, .intermediate = 5, .rank = 2};
const std::string kLayer = "model.layers.1.";

// An element of an adapter in a tensor of all experts.
int64_t at(const FusedPlace& place, int64_t row, int64_t col) {
  return place.offset + row * place.row_stride + col * place.col_stride;
}
FusedPlace place_of(const ExpertAdapters& x, const std::string& part) {
  const auto place = expert_adapter_place(x, kLayer + "mlp.experts." + part + ".weight");
  EXPECT_TRUE(place) << part;
  return place.value_or(FusedPlace{});
}

// PEFT views A as [experts, rank, in] and B as [out, rank, experts].
TEST(ExpertAdapterPlace, IsThatOfPeft) {
  const int64_t E = 3, r = 2, H = 8, I = 5;
  const FusedPlace a = place_of(kSizes, "2.gate_up_proj.lora_A"), gate = place_of(kSizes, "2.gate_proj.lora_B"),
                   up = place_of(kSizes, "2.up_proj.lora_B"), down = place_of(kSizes, "1.down_proj.lora_B");
  EXPECT_EQ(a.name, kLayer + "mlp.experts.base_layer.lora_A.weight");
  EXPECT_EQ(a.shape, (std::vector<int64_t>{E * r, H}));
  EXPECT_EQ(at(a, 1, 7), (2 * r + 1) * H + 7);
  EXPECT_EQ(gate.name, kLayer + "mlp.experts.base_layer.lora_B.weight");
  EXPECT_EQ(gate.shape, (std::vector<int64_t>{2 * I, r * E}));
  EXPECT_EQ(at(gate, 4, 1), (4 * r + 1) * E + 2);
  EXPECT_EQ(at(up, 4, 1), ((I + 4) * r + 1) * E + 2);
  EXPECT_EQ(down.name, kLayer + "mlp.experts.lora_B.weight");
  EXPECT_EQ(at(down, 6, 1), (6 * r + 1) * E + 1);
  EXPECT_EQ(place_of(kSizes, "1.down_proj.lora_A").shape, (std::vector<int64_t>{E * r, I}));
  ExpertAdapters alone = kSizes;
  alone.has_down = false;
  EXPECT_EQ(place_of(alone, "0.up_proj.lora_B").name, kLayer + "mlp.experts.lora_B.weight");
}

TEST(ExpertAdapterPlace, AlternatesInGptOss) {
  ExpertAdapters x = kSizes;
  x.family = HfFamily::gpt_oss;
  EXPECT_EQ(at(place_of(x, "2.gate_proj.lora_B"), 4, 1), (8 * 2 + 1) * 3 + 2);
  EXPECT_EQ(at(place_of(x, "2.up_proj.lora_B"), 4, 1), (9 * 2 + 1) * 3 + 2);
  EXPECT_EQ(at(place_of(x, "2.down_proj.lora_B"), 4, 1), (4 * 2 + 1) * 3 + 2);
}

// Before 0.19 PEFT multiplied in the other order: its A holds what is B here.
TEST(ExpertAdapterPlace, HasAAndBExchangedBeforePeft019) {
  ExpertAdapters x = kSizes;
  x.is_exchanged = true;
  const int64_t E = 3, r = 2, H = 8, I = 5;
  const FusedPlace a = place_of(x, "2.gate_up_proj.lora_A"), up = place_of(x, "2.up_proj.lora_B");
  EXPECT_EQ(a.name, kLayer + "mlp.experts.base_layer.lora_B.weight");
  EXPECT_EQ(a.shape, (std::vector<int64_t>{H, r * E}));
  EXPECT_EQ(at(a, 1, 7), (7 * r + 1) * E + 2);
  EXPECT_EQ(up.name, kLayer + "mlp.experts.base_layer.lora_A.weight");
  EXPECT_EQ(up.shape, (std::vector<int64_t>{E * r, 2 * I}));
  EXPECT_EQ(at(up, 4, 1), (2 * r + 1) * 2 * I + I + 4);
}

TEST(ExpertAdapterPlace, OfStackedAdaptersIsInTwoBlocks) {
  ExpertAdapters x = kSizes;
  x.are_stacked = true;
  const int64_t E = 3, r = 2, H = 8, I = 5;
  const FusedPlace gate_a = place_of(x, "2.gate_proj.lora_A"), up_a = place_of(x, "2.up_proj.lora_A"),
                   gate_b = place_of(x, "2.gate_proj.lora_B"), up_b = place_of(x, "2.up_proj.lora_B");
  EXPECT_EQ(gate_a.shape, (std::vector<int64_t>{E * 2 * r, H}));
  EXPECT_EQ(up_b.shape, (std::vector<int64_t>{2 * I, 2 * r * E}));
  EXPECT_EQ(at(gate_a, 1, 7), (2 * 2 * r + 1) * H + 7);
  EXPECT_EQ(at(up_a, 1, 7), (2 * 2 * r + r + 1) * H + 7);
  EXPECT_EQ(at(gate_b, 4, 1), (4 * 2 * r + 1) * E + 2);
  EXPECT_EQ(at(up_b, 4, 1), ((I + 4) * 2 * r + r + 1) * E + 2);
  EXPECT_EQ(place_of(x, "0.down_proj.lora_A").shape, (std::vector<int64_t>{E * r, I}));
}

TEST(ExpertAdapterPlace, OfASharedWideAHasTwiceTheRank) {
  ExpertAdapters x = kSizes;
  x.share_wide_a = true;
  const int64_t E = 3, r = 2, H = 8, I = 5;
  const FusedPlace a = place_of(x, "2.gate_up_proj.lora_A"), up = place_of(x, "2.up_proj.lora_B");
  EXPECT_EQ(a.shape, (std::vector<int64_t>{E * 2 * r, H}));
  EXPECT_EQ(a.rows, 2 * r);
  EXPECT_EQ(at(a, 3, 7), (2 * 2 * r + 3) * H + 7);
  EXPECT_EQ(up.shape, (std::vector<int64_t>{2 * I, 2 * r * E}));
  EXPECT_EQ(up.cols, 2 * r);
  EXPECT_EQ(at(up, 4, 3), ((I + 4) * 2 * r + 3) * E + 2);
  EXPECT_EQ(place_of(x, "0.down_proj.lora_A").shape, (std::vector<int64_t>{E * r, I}));
  EXPECT_EQ(place_of(x, "0.down_proj.lora_A").rows, r);
}

TEST(ExpertAdapterPairs, OfTwiceTheRankAreStackedIfTheyHaveTwoBlocks) {
  const int64_t E = 3, r = 2, I = 5;
  const ExpertAdapterPair pair{kLayer, {.shape = {E * 2 * r, 8}}, {.shape = {2 * I, 2 * r * E}}};
  EXPECT_FALSE(is_exchanged(kSizes, {pair}, "0.21.0", "adapter"));
  EXPECT_TRUE(is_stacked(kSizes, pair));
  ExpertAdapters stacked = kSizes, shared = kSizes;
  stacked.are_stacked = shared.share_wide_a = true;
  EXPECT_EQ(parts_of_pair(stacked, pair).at(2), kLayer + "mlp.experts.0.up_proj.lora_A.weight");
  EXPECT_EQ(parts_of_pair(shared, pair).at(3), kLayer + "mlp.experts.1.gate_up_proj.lora_A.weight");
  for (const HfFamily family : {HfFamily::canonical, HfFamily::gpt_oss}) {
    ExpertAdapters x = kSizes;
    x.family = family;
    x.are_stacked = true;
    std::vector<std::byte> b(static_cast<size_t>(2 * I * 2 * r * E) * 4);
    for (const char* part : {"1.gate_proj.lora_B", "2.up_proj.lora_B"}) {
      const FusedPlace place = place_of(x, part);
      for (int64_t row = 0; row < I; ++row) b[static_cast<size_t>(at(place, row, 1)) * 4 + 3] = std::byte{0x40};
    }
    EXPECT_TRUE(has_two_blocks(x, b, DType::f32));
    b[static_cast<size_t>(at(place_of(x, "1.gate_proj.lora_B"), 0, 1) + r * E) * 4 + 3] = std::byte{0x40};
    EXPECT_FALSE(has_two_blocks(x, b, DType::f32));
  }
}

TEST(ExpertAdapterPlace, IsOnlyForExperts) {
  for (const char* name :
       {"model.layers.0.mlp.gate_proj.lora_A.weight", "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.0.gate_up_proj.lora_B.weight", "model.layers.0.mlp.experts.lora_A"})
    EXPECT_FALSE(expert_adapter_place(kSizes, name)) << name;
  EXPECT_EQ(layer_of_expert_adapter("model.layers.3.mlp.experts"), "model.layers.3.");
  EXPECT_EQ(layer_of_expert_adapter("model.layers.3.mlp.experts.base_layer"), "model.layers.3.");
  EXPECT_FALSE(layer_of_expert_adapter("model.layers.3.mlp.experts.0.up_proj"));
  EXPECT_FALSE(layer_of_expert_adapter("model.layers.3.mlp.gate"));
}

ExpertAdapterPair pair_of(std::vector<int64_t> a, std::vector<int64_t> b) {
  return {
      kLayer, {.name = "x.lora_A.weight", .shape = std::move(a)}, {.name = "x.lora_B.weight", .shape = std::move(b)}};
}

TEST(ExpertAdapterPairs, AreDistinguishedByShape) {
  const auto gate_up = pair_of({6, 8}, {10, 6}), down = pair_of({6, 5}, {8, 6}),
             gate_up_before = pair_of({6, 10}, {8, 6}), down_before = pair_of({6, 8}, {5, 6});
  EXPECT_FALSE(is_exchanged(kSizes, {gate_up, down}, "0.18.0", "adapter"));
  EXPECT_TRUE(is_exchanged(kSizes, {gate_up_before, down_before}, "0.21.0", "adapter"));
  EXPECT_EQ(matrix_of_pair(kSizes, gate_up), ExpertMatrix::gate_up);
  EXPECT_EQ(matrix_of_pair(kSizes, gate_up_before), ExpertMatrix::gate_up);
  EXPECT_EQ(matrix_of_pair(kSizes, down), ExpertMatrix::down);
  EXPECT_EQ(matrix_of_pair(kSizes, down_before), ExpertMatrix::down);
  EXPECT_EQ(parts_of_pair(kSizes, down).size(), 6u);
  EXPECT_EQ(parts_of_pair(kSizes, gate_up).at(4), kLayer + "mlp.experts.1.gate_proj.lora_B.weight");
}

// 2I = H: the other parameter's shape tells the order, else the version does.
TEST(ExpertAdapterPairs, OfAnAmbiguousShapeFollowTheOtherPairOrTheVersion) {
  ExpertAdapters x = kSizes;
  x.hidden = 10;
  const auto gate_up = pair_of({6, 10}, {10, 6});
  EXPECT_FALSE(is_exchanged(x, {gate_up, pair_of({6, 5}, {10, 6})}, "0.18.0", "adapter"));
  EXPECT_TRUE(is_exchanged(x, {gate_up, pair_of({6, 10}, {5, 6})}, "0.19.0", "adapter"));
  EXPECT_TRUE(is_exchanged(x, {gate_up}, "0.18.1", "adapter"));
  EXPECT_TRUE(is_exchanged(x, {gate_up}, "", "adapter"));
  EXPECT_FALSE(is_exchanged(x, {gate_up}, "0.19.0.dev0", "adapter"));
  EXPECT_FALSE(is_exchanged(x, {gate_up}, "1.0.0", "adapter"));
  x.family = HfFamily::gpt_oss;
  EXPECT_FALSE(is_exchanged(x, {gate_up}, "0.18.1", "adapter"));
}

TEST(ExpertAdapterPairs, OfOtherShapesAreNamed) {
  const auto refusal = [](const std::vector<ExpertAdapterPair>& pairs) -> std::string {
    try {
      is_exchanged(kSizes, pairs, "0.21.0", "adapter A");
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::input);
      return e.what();
    }
    return "";
  };
  EXPECT_THAT(
      refusal({pair_of({6, 9}, {10, 6})}),
      HasSubstr("adapter A: expected adapters of 3 experts [10, 8] and [8, 5] with rank 2, as PEFT stores those of "
                "gate_up_proj and down_proj; got x.lora_A.weight [6, 9] and x.lora_B.weight [10, 6]"));
  EXPECT_THAT(refusal({pair_of({4, 8}, {10, 4})}), HasSubstr("got x.lora_A.weight [4, 8]"));
  EXPECT_THAT(refusal({pair_of({6, 8}, {10, 6}), pair_of({6, 8}, {5, 6})}), HasSubstr("in the order of one version"));
}

}  // namespace
}  // namespace moebius
