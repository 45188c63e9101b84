#include "hub/fused_experts.h"

#include <cmath>
#include <numeric>

#include "core/dtype.h"
#include "hub/tensor_source.h"
#include "io/files.h"
#include "io/testing.h"

namespace moebius {
namespace {

const std::string kExperts = "model.layers.0.mlp.experts.";
constexpr int64_t kE = 3, kI = 2, kH = 5;

// The tensors of a folder, u8 or f32. Element i is i (mod 256).
struct Disk {
  std::string name;
  DType dtype;
  std::vector<int64_t> shape;
};

HfFolder folder_with(const TestDir& dir, const std::vector<Disk>& tensors, const std::string& config = "{}") {
  write_file_atomic(dir.path("config.json"), config);
  std::vector<std::vector<float>> floats;
  std::vector<std::vector<uint8_t>> bytes;
  floats.reserve(tensors.size());
  bytes.reserve(tensors.size());
  std::vector<SafetensorsTensor> all;
  for (const Disk& t : tensors) {
    int64_t numel = 1;
    for (const int64_t dim : t.shape) numel *= dim;
    floats.emplace_back(numel);
    bytes.emplace_back(numel);
    std::iota(floats.back().begin(), floats.back().end(), 0.0f);
    std::iota(bytes.back().begin(), bytes.back().end(), uint8_t{0});
    const void* data = t.dtype == DType::f32 ? static_cast<const void*>(floats.back().data()) : bytes.back().data();
    all.push_back({{t.name, t.dtype, t.shape}, data});
  }
  write_safetensors(dir.path("model.safetensors"), all);
  return HfFolder::open(dir.path());
}

WantedTensor wanted(const std::string& name, std::vector<int64_t> shape, int64_t num_experts = kE) {
  return {.name = kExperts + name, .shape = std::move(shape), .num_experts = num_experts};
}

std::vector<float> read(const HfFolder& folder, const WantedTensor& what) {
  const TensorSource source = locate_tensor(folder, HfFamily::gpt_oss, what);
  std::vector<float> values(source.rows * source.cols);
  EXPECT_EQ(source.dtype, DType::f32);
  read_tensor(folder, source, values.data());
  return values;
}

// Columns alternate between gate and up, and in comes before out.
TEST(FusedExperts, GptOssTensorsAreSplit) {
  const TestDir dir;
  const HfFolder folder = folder_with(dir, {{kExperts + "gate_up_proj", DType::f32, {kE, kH, 2 * kI}},
                                            {kExperts + "gate_up_proj_bias", DType::f32, {kE, 2 * kI}},
                                            {kExperts + "down_proj", DType::f32, {kE, kI, kH}},
                                            {kExperts + "down_proj_bias", DType::f32, {kE, kH}}});
  for (int64_t e = 0; e < kE; ++e) {
    const std::string expert = std::to_string(e);
    const auto gate = read(folder, wanted(expert + ".gate_proj.weight", {kI, kH}));
    const auto up = read(folder, wanted(expert + ".up_proj.weight", {kI, kH}));
    const auto down = read(folder, wanted(expert + ".down_proj.weight", {kH, kI}));
    const auto gate_bias = read(folder, wanted(expert + ".gate_proj.bias", {kI}));
    const auto up_bias = read(folder, wanted(expert + ".up_proj.bias", {kI}));
    const auto down_bias = read(folder, wanted(expert + ".down_proj.bias", {kH}));
    for (int64_t i = 0; i < kI; ++i) {
      EXPECT_EQ(gate_bias[i], e * 2 * kI + 2 * i);
      EXPECT_EQ(up_bias[i], e * 2 * kI + 2 * i + 1);
      for (int64_t h = 0; h < kH; ++h) {
        EXPECT_EQ(gate[i * kH + h], (e * kH + h) * 2 * kI + 2 * i);
        EXPECT_EQ(up[i * kH + h], (e * kH + h) * 2 * kI + 2 * i + 1);
        EXPECT_EQ(down[h * kI + i], (e * kI + i) * kH + h);
        EXPECT_EQ(down_bias[h], e * kH + h);
      }
    }
  }
}

TEST(FusedExperts, PartsAreReadSeparately) {
  const TestDir dir;
  const HfFolder folder = folder_with(dir, {{kExperts + "gate_up_proj", DType::f32, {kE, kH, 2 * kI}}});
  const TensorSource up = locate_tensor(folder, HfFamily::gpt_oss, wanted("1.up_proj.weight", {kI, kH}));
  std::vector<float> values(2);
  read_tensor(folder, part_of(up, 1, 2, 2, 4), values.data());
  EXPECT_EQ(values, (std::vector<float>{(kH + 2) * 2 * kI + 3, (kH + 3) * 2 * kI + 3}));
}

TEST(FusedExperts, JoiningInvertsSplitting) {
  std::vector<float> fused(kE * kH * 2 * kI, -1), own(kI * kH);
  for (const char* projection : {"gate_proj", "up_proj"}) {
    for (int64_t e = 0; e < kE; ++e) {
      const auto place =
          fused_place(HfFamily::gpt_oss, kExperts + std::to_string(e) + "." + projection + ".weight", {kI, kH}, kE);
      ASSERT_TRUE(place.has_value());
      EXPECT_EQ(place->name, kExperts + "gate_up_proj");
      EXPECT_EQ(place->shape, (std::vector<int64_t>{kE, kH, 2 * kI}));
      for (int64_t r = 0; r < kI; ++r) {
        for (int64_t c = 0; c < kH; ++c)
          own[r * kH + c] = static_cast<float>(place->offset + r * place->row_stride + c * place->col_stride);
      }
      // The expert's plane is read separately.
      const int64_t plane = kH * 2 * kI;
      put_into_fused(fused.data() + e * plane, own.data(), *place, e * plane, sizeof(float));
    }
  }
  for (size_t i = 0; i < fused.size(); ++i) EXPECT_EQ(fused[i], i);
  EXPECT_FALSE(fused_place(HfFamily::canonical, kExperts + "0.up_proj.weight", {kI, kH}, kE).has_value());
  EXPECT_FALSE(fused_place(HfFamily::gpt_oss, "model.layers.0.self_attn.sinks", {4}, kE).has_value());
}

constexpr const char* kPacked = R"({"quantization_config": {"quant_method": "mxfp4"}})";
// Two experts with rows of two blocks, and 4 rows in the fused gate and up.
const Disk kBlocks{kExperts + "gate_up_proj_blocks", DType::u8, {2, 4, 2, 16}};
const Disk kScales{kExperts + "gate_up_proj_scales", DType::u8, {2, 4, 2}};

// The layout is [E, out, in], with rows that alternate between gate and up. Byte i is i, and block
// b has scale b.
TEST(FusedExperts, Mxfp4RowsAlternateBetweenGateAndUp) {
  const TestDir dir;
  const HfFolder folder = folder_with(dir, {kBlocks, kScales}, kPacked);
  const TensorSource up = locate_tensor(folder, HfFamily::gpt_oss, wanted("1.up_proj.weight", {2, 64}, 2));
  EXPECT_EQ(up.dtype, DType::bf16);
  EXPECT_EQ(up.scale_name, kScales.name);
  std::vector<bf16> got(2 * 64);
  read_tensor(folder, up, got.data());
  const float values[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  const auto want = [&](int64_t row, int64_t col) {  // row is one of the 8 rows of both experts
    const int64_t at = row * 64 + col, byte = at / 2 % 256, bits = at % 2 == 0 ? byte % 16 : byte / 16;
    return std::ldexp(values[bits % 8] * (bits < 8 ? 1.0f : -1.0f), static_cast<int>(at / 32) - 127);
  };
  for (int64_t r = 0; r < 2; ++r) {
    for (int64_t c = 0; c < 64; ++c) EXPECT_EQ(to_f32(got[r * 64 + c]), want(4 + 2 * r + 1, c)) << r << " " << c;
  }
  // A part that begins and ends within blocks.
  std::vector<bf16> few(7);
  read_tensor(folder, part_of(up, 1, 2, 30, 37), few.data());
  for (int64_t c = 0; c < 7; ++c) EXPECT_EQ(to_f32(few[c]), want(7, 30 + c)) << c;
}

struct Refused {
  std::vector<Disk> tensors;
  const char* config;
  WantedTensor wanted;
  std::string text;
};

TEST(FusedExperts, RefusesMissingAndMismatchedTensors) {
  const std::string name = kExperts + "gate_up_proj";
  const WantedTensor up = wanted("1.up_proj.weight", {2, 64}, 2);
  const Refused cases[] = {
      {{},
       "{}",
       up,
       "expected a tensor \"" + name + "\" or \"" + name +
           "_blocks\"; got none; gpt_oss has no tensors of single experts"},
      {{{kExperts + "1.up_proj.weight", DType::f32, {2, 64}}}, "{}", up, "gpt_oss has no tensors of single experts"},
      {{{name, DType::f32, {2, 4, 64}}},
       "{}",
       up,
       "expected f32, bf16, f16 or f64 [2, 64, 4] for \"" + name + "\"; got f32 [2, 4, 64]"},
      {{{name, DType::u8, {2, 64, 4}}}, "{}", up, "got u8 [2, 64, 4]"},
      {{{name, DType::f32, {2, 64, 4}}, kBlocks, kScales}, kPacked, up, "got both; keep one of them"},
      {{kBlocks}, kPacked, up, "expected the scales \"" + name + "_scales\" of \"" + name + "_blocks\"; got none"},
      {{kBlocks, kScales}, "{}", up, "expected a quantization_config of quant_method \"mxfp4\" in config.json"},
      {{{kBlocks.name, DType::u8, {2, 4, 1, 16}}, kScales},
       kPacked,
       up,
       "expected u8 [2, 4, 2, 16] for \"" + kBlocks.name + "\"; got u8 [2, 4, 1, 16]"},
      {{{kBlocks.name, DType::f32, {2, 4, 2, 16}}, kScales}, kPacked, up, "got f32 [2, 4, 2, 16]"},
      {{kBlocks, {kScales.name, DType::u8, {2, 4, 2, 1}}},
       kPacked,
       up,
       "expected u8 [2, 4, 2] for \"" + kScales.name + "\"; got u8 [2, 4, 2, 1]"},
      {{kBlocks, kScales},
       kPacked,
       wanted("1.up_proj.weight", {2, 60}, 2),
       "expected rows of whole blocks of 32 numbers in \"" + kBlocks.name + "\"; got rows of 60 by config.json"},
      {{{name + "_bias", DType::f32, {2, 3}}},
       "{}",
       wanted("1.up_proj.bias", {2}, 2),
       "expected f32, bf16, f16 or f64 [2, 4] for \"" + name + "_bias\"; got f32 [2, 3]"},
      {{kBlocks, kScales},
       kPacked,
       wanted("1.up_proj.bias", {2}, 2),
       "expected a tensor \"" + name + "_bias\"; got none"},
  };
  for (const Refused& each : cases) {
    const TestDir dir;
    std::vector<Disk> tensors = each.tensors;
    tensors.push_back({"another", DType::f32, {1}});
    const HfFolder folder = folder_with(dir, tensors, each.config);
    expect_error(ErrorKind::input, each.text, [&] { locate_tensor(folder, HfFamily::gpt_oss, each.wanted); });
  }
}

TEST(FusedExperts, RefusesAScaleThatIsNotANumber) {
  const TestDir dir;
  // Byte 255 of the scales belongs to the last of 256 rows.
  const HfFolder folder = folder_with(dir,
                                      {{kExperts + "down_proj_blocks", DType::u8, {1, 256, 1, 16}},
                                       {kExperts + "down_proj_scales", DType::u8, {1, 256, 1}}},
                                      kPacked);
  const TensorSource down = locate_tensor(folder, HfFamily::gpt_oss, wanted("0.down_proj.weight", {256, 32}, 1));
  std::vector<bf16> got(256 * 32);
  read_tensor(folder, part_of(down, 0, 255, 0, 32), got.data());
  expect_error(ErrorKind::input,
               "expected scales from 0 to 254 in \"" + kExperts + "down_proj_scales\"; got 255, which is not a number",
               [&] { read_tensor(folder, down, got.data()); });
}

}  // namespace
}  // namespace moebius
