#include "hub/hf_folder.h"

#include <limits>
#include <numeric>

#include "hub/hf_names.h"
#include "hub/tensor_source.h"
#include "io/testing.h"

namespace moebius {
namespace {

// Writes f32 tensors that count up from `first`.
void write_file(const std::string& path, const std::vector<SafetensorsDecl>& decls, float first = 0) {
  std::vector<std::vector<float>> data;
  std::vector<SafetensorsTensor> tensors;
  for (const SafetensorsDecl& d : decls) {
    const int64_t numel = std::accumulate(d.shape.begin(), d.shape.end(), int64_t{1}, std::multiplies<>());
    data.emplace_back(numel);
    std::iota(data.back().begin(), data.back().end(), first);
  }
  for (size_t i = 0; i < decls.size(); ++i) tensors.push_back({decls[i], data[i].data()});
  write_safetensors(path, tensors, {{"format", "pt"}});
}

SafetensorsDecl f32(const std::string& name, std::vector<int64_t> shape) {
  return {name, DType::f32, std::move(shape)};
}

void write_config(const TestDir& dir, const std::string& text = "{\"model_type\":\"qwen3_moe\"}") {
  write_file_atomic(dir.path("config.json"), text);
}

void refuse(const TestDir& dir, const std::string& text) {
  expect_error(ErrorKind::input, text, [&] { HfFolder::open(dir.path()); });
}

HfFolder folder_with(const TestDir& dir, const std::vector<SafetensorsDecl>& decls) {
  write_config(dir);
  write_file(dir.path("model.safetensors"), decls);
  return HfFolder::open(dir.path());
}

TEST(HfFolder, SingleFile) {
  const TestDir dir;
  HfFolder folder = folder_with(dir, {f32("b", {2}), f32("a", {3})});
  EXPECT_EQ(folder.config()["model_type"], "qwen3_moe");
  EXPECT_THAT(folder.names(), testing::ElementsAre("a", "b"));
  float a[3];
  folder.read("a", a);
  EXPECT_EQ(a[2], 2);
  folder.read("a", 4, 8, a);
  EXPECT_EQ(a[0], 1);
  EXPECT_EQ(folder.find("c"), nullptr);
  expect_error(ErrorKind::input, "expected a tensor \"c\"; got 2 others", [&] { folder.at("c"); });
}

TEST(HfFolder, AccountsForEveryTensor) {
  const TestDir dir;
  HfFolder folder = folder_with(dir, {f32("c", {1}), f32("b", {1}), f32("a", {1})});
  folder.consume("b");
  folder.consume("b");
  EXPECT_THAT(folder.unconsumed(), testing::ElementsAre("a", "c"));
  expect_error(ErrorKind::input, "expected a tensor \"x\"", [&] { folder.consume("x"); });
  EXPECT_EQ(name_list({"a", "b", "c"}, 2), "a, b and 1 more");
  EXPECT_EQ(name_list({"a", "b"}), "a, b");
}

TEST(HfFolder, Shards) {
  const TestDir dir;
  write_config(dir);
  write_file(dir.path("x-1.safetensors"), {f32("a", {1}), f32("b", {1})}, 1);
  write_file(dir.path("x-2.safetensors"), {f32("c", {1})}, 5);
  const std::string index = dir.path("model.safetensors.index.json");
  write_file_atomic(
      index,
      R"({"metadata":{"total_size":12},"weight_map":{"a":"x-1.safetensors","b":"x-1.safetensors","c":"x-2.safetensors"}})");
  const HfFolder folder = HfFolder::open(dir.path());
  float c;
  folder.read("c", &c);
  EXPECT_EQ(c, 5);
  EXPECT_EQ(folder.names().size(), 3u);

  write_file_atomic(index, R"({"weight_map":{"a":"x-1.safetensors","c":"x-2.safetensors","d":"x-2.safetensors"}})");
  refuse(dir, "got 1 that are not in the file it names (d) and 1 in the files that it does not name (b)");
  write_file_atomic(index, R"({"weight_map":{"a":"x-1.safetensors","b":"x-2.safetensors","c":"x-2.safetensors"}})");
  refuse(dir, "got 1 that are not in the file it names (b)");
  write_file_atomic(index, R"({"weight_map":{"a":"x-3.safetensors"}})");
  refuse(dir, "x-3.safetensors: No such file");
  write_file(dir.path("x-2.safetensors"), {f32("c", {1}), f32("a", {1})});
  write_file_atomic(index, R"({"weight_map":{"a":"x-1.safetensors","b":"x-1.safetensors","c":"x-2.safetensors"}})");
  refuse(dir, "expected each tensor in one file; got \"a\" in");
}

TEST(HfFolder, OpensTheReferenceModelsAndFindsEachTensorByItsCanonicalName) {
  for (const auto& sub : std::filesystem::directory_iterator(MOEBIUS_SOURCE_DIR "/tests/golden/data")) {
    if (!std::filesystem::exists(sub.path() / "config.json")) continue;
    HfFolder folder = HfFolder::open(sub.path().string());
    const HfFamily family = hf_family(folder.config().at("model_type").get<std::string>());
    for (const std::string& name : folder.names()) {
      const WantedTensor wanted{.name = canonical_name(family, name), .shape = folder.at(name).shape};
      EXPECT_EQ(locate_tensor(folder, family, wanted).hf_name, name);
      folder.consume(name);
    }
    EXPECT_THAT(folder.unconsumed(), testing::IsEmpty());
  }
}

TEST(HfFolderRefuse, IndexFiles) {
  const TestDir dir;
  write_config(dir);
  const std::string index = dir.path("model.safetensors.index.json");
  for (const char* name : {"../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "a\\\\x.safetensors",
                           "a\\u0000.safetensors", "..safetensors", "x.bin"}) {
    write_file_atomic(index, std::string(R"({"weight_map":{"a":")") + name + "\"}}");
    refuse(dir, "expected the name of a .safetensors file in the folder; got");
  }
  write_file_atomic(index, R"({"weight_map":{"a":1}})");
  refuse(dir, "expected a file name for \"a\"; got 1");
  for (const char* text : {"{}", "[]", R"({"weight_map":[]})", R"({"weight_map":{}})"}) {
    write_file_atomic(index, text);
    refuse(dir, "expected an object \"weight_map\"");
  }
}

TEST(HfFolderRefuse, WeightsThatAreNotRead) {
  const TestDir dir;
  write_config(dir);
  write_file(dir.path("model-00001-of-00001.safetensors"), {f32("a", {1})});
  const std::string index = dir.path("model.safetensors.index.json");
  write_file_atomic(index, R"({"weight_map":{"a":"model-00001-of-00001.safetensors"}})");
  write_file(dir.path("consolidated.safetensors"), {f32("other", {1})});
  HfFolder::open(dir.path());  // a copy in another layout is ignored

  write_file(dir.path("model-99999-of-99999.safetensors"), {f32("b", {1})});
  refuse(dir,
         "expected no model*.safetensors other than those of model.safetensors.index.json; got 1 that it does not name "
         "(model-99999-of-99999.safetensors); remove them");
  write_file(dir.path("model.safetensors"), {f32("a", {1})});
  refuse(dir, "expected model.safetensors or model.safetensors.index.json; got both");
  std::filesystem::remove(index);
  refuse(dir,
         "expected no model*.safetensors other than model.safetensors; got 2 that it does not name "
         "(model-00001-of-00001.safetensors, model-99999-of-99999.safetensors)");
}

TEST(HfFolderRefuse, WhatIsNoModelFolder) {
  const TestDir dir;
  expect_error(ErrorKind::input, "expected a folder; got nothing there", [&] { HfFolder::open(dir.path("none")); });
  refuse(dir, "config.json: No such file or directory");
  write_config(dir, "[]");
  expect_error(ErrorKind::input, "expected a folder; got a file", [&] { HfFolder::open(dir.path("config.json")); });
  refuse(dir, "config.json: expected an object; got array");
  write_config(dir, "{\"a\":1,\"a\":2}");
  refuse(dir, "config.json: expected JSON with distinct keys");
  write_config(dir);
  refuse(dir, "expected model.safetensors or model.safetensors.index.json; got neither");
  write_file_atomic(dir.path("pytorch_model.bin"), "x");
  refuse(dir, "got pytorch_model.bin, a pickle, which can run code when it is loaded; convert it with transformers");
}

TEST(HfNames, MixtralSpellsRoutersAndExpertsItsOwnWay) {
  const std::string l = "model.layers.11.";
  const std::vector<std::pair<std::string, std::string>> pairs{
      {l + "mlp.gate.weight", l + "block_sparse_moe.gate.weight"},
      {l + "mlp.experts.7.gate_proj.weight", l + "block_sparse_moe.experts.7.w1.weight"},
      {l + "mlp.experts.7.up_proj.weight", l + "block_sparse_moe.experts.7.w3.weight"},
      {l + "mlp.experts.10.down_proj.weight", l + "block_sparse_moe.experts.10.w2.weight"},
      {l + "self_attn.q_proj.weight", l + "self_attn.q_proj.weight"},
      {"lm_head.weight", "lm_head.weight"}};
  for (const auto& [canonical, mixtral] : pairs) {
    EXPECT_EQ(hf_name(HfFamily::mixtral, canonical), mixtral);
    EXPECT_EQ(canonical_name(HfFamily::mixtral, mixtral), canonical);
    EXPECT_EQ(hf_name(HfFamily::canonical, canonical), canonical);
    EXPECT_EQ(canonical_name(HfFamily::canonical, canonical), canonical);
  }
}

TEST(HfNames, Qwen2MoeHasOneSharedExpert) {
  const std::string canonical = "model.layers.1.mlp.shared_experts.up_proj.weight";
  const std::string hub = "model.layers.1.mlp.shared_expert.up_proj.weight";
  EXPECT_EQ(hf_name(HfFamily::qwen2_moe, canonical), hub);
  EXPECT_EQ(canonical_name(HfFamily::qwen2_moe, hub), canonical);
  const std::string gate = "model.layers.1.mlp.shared_expert_gate.weight";
  EXPECT_EQ(hf_name(HfFamily::qwen2_moe, gate), gate);
  EXPECT_EQ(canonical_name(HfFamily::qwen2_moe, gate), gate);
}

TEST(HfNames, Families) {
  EXPECT_EQ(hf_family("mixtral"), HfFamily::mixtral);
  EXPECT_EQ(hf_family("qwen3_moe"), HfFamily::canonical);
  expect_error(
      ErrorKind::input,
      "expected model_type gpt_oss, mixtral, qwen2_moe, deepseek_v2, deepseek_v3, llama, mistral, olmoe, qwen2, qwen3, "
      "qwen3_moe; got \"gpt2\"",
      [] { hf_family("gpt2"); });
}

TEST(HfNames, ExpertNames) {
  const auto name = parse_expert_name("model.layers.3.mlp.experts.12.down_proj.weight");
  ASSERT_TRUE(name.has_value());
  EXPECT_EQ(name->prefix, "model.layers.3.");
  EXPECT_EQ(name->expert, 12);
  EXPECT_EQ(name->projection, ExpertProjection::down);
  for (const char* other :
       {"model.layers.3.mlp.gate_proj.weight", "model.layers.3.mlp.experts.gate_up_proj",
        "model.layers.3.mlp.experts.-1.up_proj.weight", "model.layers.3.mlp.experts.1.up_proj.scale"}) {
    EXPECT_FALSE(parse_expert_name(other).has_value()) << other;
  }
}

TEST(HfNames, GptOssHasARouterAndFusedExperts) {
  const std::string l = "model.layers.2.";
  for (const char* what : {"weight", "bias"}) {
    EXPECT_EQ(hf_name(HfFamily::gpt_oss, l + "mlp.gate." + what), l + "mlp.router." + what);
    EXPECT_EQ(canonical_name(HfFamily::gpt_oss, l + "mlp.router." + what), l + "mlp.gate." + what);
  }
  EXPECT_EQ(hf_name(HfFamily::gpt_oss, l + "self_attn.sinks"), l + "self_attn.sinks");
  EXPECT_EQ(hf_name(HfFamily::gpt_oss, l + "mlp.experts.3.up_proj.weight"), l + "mlp.experts.gate_up_proj");
  EXPECT_EQ(hf_name(HfFamily::gpt_oss, l + "mlp.experts.3.gate_proj.bias"), l + "mlp.experts.gate_up_proj_bias");
  EXPECT_EQ(hf_name(HfFamily::gpt_oss, l + "mlp.experts.3.down_proj.bias"), l + "mlp.experts.down_proj_bias");
}

constexpr int64_t kE = 3, kI = 2, kH = 5;
const std::string kExperts = "model.layers.0.mlp.experts.";

std::vector<float> read_expert(const HfFolder& folder, const std::string& name, int64_t rows, int64_t cols) {
  const TensorSource source =
      locate_tensor(folder, HfFamily::mixtral, {.name = kExperts + name, .shape = {rows, cols}, .num_experts = kE});
  EXPECT_EQ(source.rows, rows);
  EXPECT_EQ(source.cols, cols);
  std::vector<float> values(rows * cols);
  read_tensor(folder, source, values.data());
  return values;
}

TEST(TensorSource, PerExpertTensorsInEitherSpelling) {
  const TestDir dir;
  const HfFolder folder = folder_with(dir, {f32("model.layers.0.block_sparse_moe.experts.1.w3.weight", {kI, kH}),
                                            f32(kExperts + "1.down_proj.weight", {kH, kI})});
  EXPECT_EQ(read_expert(folder, "1.up_proj.weight", kI, kH)[9], 9);
  EXPECT_EQ(read_expert(folder, "1.down_proj.weight", kH, kI)[3], 3);
}

TEST(TensorSource, FusedOutIn) {
  const TestDir dir;
  const HfFolder folder =
      folder_with(dir, {f32(kExperts + "gate_up_proj", {kE, 2 * kI, kH}), f32(kExperts + "down_proj", {kE, kH, kI})});
  for (int64_t e = 0; e < kE; ++e) {
    const std::string expert = std::to_string(e);
    const auto gate = read_expert(folder, expert + ".gate_proj.weight", kI, kH);
    const auto up = read_expert(folder, expert + ".up_proj.weight", kI, kH);
    const auto down = read_expert(folder, expert + ".down_proj.weight", kH, kI);
    for (int64_t i = 0; i < kI; ++i) {
      for (int64_t h = 0; h < kH; ++h) {
        EXPECT_EQ(gate[i * kH + h], (e * 2 * kI + i) * kH + h);
        EXPECT_EQ(up[i * kH + h], (e * 2 * kI + kI + i) * kH + h);
        EXPECT_EQ(down[h * kI + i], (e * kH + h) * kI + i);
      }
    }
  }
}

TEST(TensorSource, FusedInOut) {
  const TestDir dir;
  const HfFolder folder =
      folder_with(dir, {f32(kExperts + "gate_up_proj", {kE, kH, 2 * kI}), f32(kExperts + "down_proj", {kE, kI, kH})});
  for (int64_t e = 0; e < kE; ++e) {
    const std::string expert = std::to_string(e);
    const auto gate = read_expert(folder, expert + ".gate_proj.weight", kI, kH);
    const auto up = read_expert(folder, expert + ".up_proj.weight", kI, kH);
    const auto down = read_expert(folder, expert + ".down_proj.weight", kH, kI);
    for (int64_t i = 0; i < kI; ++i) {
      for (int64_t h = 0; h < kH; ++h) {
        EXPECT_EQ(gate[i * kH + h], (e * kH + h) * 2 * kI + i);
        EXPECT_EQ(up[i * kH + h], (e * kH + h) * 2 * kI + kI + i);
        EXPECT_EQ(down[h * kI + i], (e * kI + i) * kH + h);
      }
    }
  }
}

TEST(TensorSource, EveryElementSizeIsTransposed) {
  for (const DType dtype : {DType::u8, DType::bf16, DType::f32, DType::f64}) {
    const TestDir dir;
    write_config(dir);
    const int64_t size = size_of(dtype);
    std::vector<char> disk(2 * 3 * size), want(disk.size()), got(disk.size());  // E = 1, in 2, out 3
    for (int64_t in = 0; in < 2; ++in) {
      for (int64_t out = 0; out < 3; ++out)
        disk[(in * 3 + out) * size] = want[(out * 2 + in) * size] = static_cast<char>(1 + in * 3 + out);
    }
    write_safetensors(dir.path("model.safetensors"), {{{kExperts + "down_proj", dtype, {1, 2, 3}}, disk.data()}});
    const HfFolder folder = HfFolder::open(dir.path());
    read_tensor(folder,
                locate_tensor(folder, HfFamily::canonical,
                              {.name = kExperts + "0.down_proj.weight", .shape = {3, 2}, .num_experts = 1}),
                got.data());
    EXPECT_EQ(got, want);
  }
}

// Where one tensor's shape fits both orientations, the other tensor decides: gate_up where 2I = H,
// down where I = H.
TEST(TensorSource, TheOtherFusedTensorShowsTheOrientation) {
  const WantedTensor up{.name = kExperts + "1.up_proj.weight", .shape = {2, 4}, .num_experts = kE};
  const WantedTensor down{.name = kExperts + "1.down_proj.weight", .shape = {3, 3}, .num_experts = kE};
  for (const bool out_in : {true, false}) {
    const TestDir dir, square;
    const std::vector<int64_t> clear_down = out_in ? std::vector<int64_t>{kE, 4, 2} : std::vector<int64_t>{kE, 2, 4};
    const HfFolder folder =
        folder_with(dir, {f32(kExperts + "gate_up_proj", {kE, 4, 4}), f32(kExperts + "down_proj", clear_down)});
    const TensorSource at = locate_tensor(folder, HfFamily::canonical, up);
    EXPECT_EQ(at.offset, out_in ? 16 + 8 : 16 + 2);
    EXPECT_EQ(at.row_stride, out_in ? 4 : 1);

    const std::vector<int64_t> clear_up = out_in ? std::vector<int64_t>{kE, 6, 3} : std::vector<int64_t>{kE, 3, 6};
    const HfFolder other =
        folder_with(square, {f32(kExperts + "gate_up_proj", clear_up), f32(kExperts + "down_proj", {kE, 3, 3})});
    EXPECT_EQ(locate_tensor(other, HfFamily::canonical, down).row_stride, out_in ? 3 : 1);
  }
}

TEST(TensorSource, RefusesAnOrientationThatNothingShows) {
  const WantedTensor up{.name = kExperts + "1.up_proj.weight", .shape = {2, 4}, .num_experts = kE};
  const auto refuse_up = [&](const std::vector<SafetensorsDecl>& decls, const std::string& text) {
    const TestDir dir;
    const HfFolder folder = folder_with(dir, decls);
    expect_error(ErrorKind::input, text, [&] { locate_tensor(folder, HfFamily::canonical, up); });
  };
  const SafetensorsDecl square = f32(kExperts + "gate_up_proj", {kE, 4, 4});
  const std::string open = "got [3, 4, 4], where [E, out, in] and [E, in, out] are the same, and no \"" + kExperts +
                           "down_proj\" of [3, 4, 2] or [3, 2, 4] that would show it; fetch that, or save one tensor";
  refuse_up({square}, open);
  refuse_up({square, f32(kExperts + "down_proj", {kE, 4, 4})}, open);
}

TEST(TensorSource, RefusesFusedTensorsThatDisagree) {
  const TestDir dir;
  const HfFolder folder =
      folder_with(dir, {f32(kExperts + "gate_up_proj", {kE, 2 * kI, kH}), f32(kExperts + "down_proj", {kE, kI, kH})});
  for (const bool is_down : {false, true}) {
    const WantedTensor wanted{.name = kExperts + (is_down ? "0.down_proj.weight" : "0.gate_proj.weight"),
                              .shape = is_down ? std::vector<int64_t>{kH, kI} : std::vector<int64_t>{kI, kH},
                              .num_experts = kE};
    expect_error(ErrorKind::input, "to have the same orientation; got [",
                 [&] { locate_tensor(folder, HfFamily::canonical, wanted); });
  }
}

TEST(TensorSource, RefusesMissingAndMismatchedTensors) {
  const TestDir dir;
  const HfFolder folder = folder_with(
      dir, {f32("a", {4}), f32(kExperts + "gate_up_proj", {kE, 4, 5}), f32(kExperts + "0.up_proj.weight", {2, 5})});
  const auto locate = [&](const std::string& name, std::vector<int64_t> shape, int64_t num_experts) {
    return [=, &folder] { locate_tensor(folder, HfFamily::canonical, {name, shape, num_experts}); };
  };
  expect_error(ErrorKind::input, "expected [2, 2] for a; got [4] in \"a\"; check that config.json",
               locate("a", {2, 2}, 0));
  expect_error(ErrorKind::input, "expected a tensor \"b\"; got none", locate("b", {4}, 0));
  expect_error(ErrorKind::input,
               "expected a tensor \"" + kExperts + "0.down_proj.weight\" or \"" + kExperts + "down_proj\"; got none",
               locate(kExperts + "0.down_proj.weight", {5, 2}, 3));
  expect_error(ErrorKind::input, "expected [4, 4, 5] or [4, 5, 4] for \"" + kExperts + "gate_up_proj\"; got [3, 4, 5]",
               locate(kExperts + "1.up_proj.weight", {2, 5}, 4));
  expect_error(ErrorKind::input,
               "once; got it as " + kExperts + "0.up_proj.weight, " + kExperts + "gate_up_proj; keep one",
               locate(kExperts + "0.up_proj.weight", {2, 5}, 3));
}

// Returns a matrix of 3 x 4 eight-bit floats, all 1.5, in blocks of 2 x 3.
HfFolder fp8_folder(const TestDir& dir, const std::vector<int64_t>& scale_shape, bool with_config = true,
                    float last_scale = 12) {
  write_config(dir, with_config ? R"({"quantization_config":{"quant_method":"fp8","weight_block_size":[2,3]}})" : "{}");
  const std::vector<uint8_t> packed(12, 0x3c);
  std::vector<float> scale{2, 4, 6, 8, 10, 12};
  if (last_scale != 12) scale[3] = last_scale;
  std::vector<SafetensorsTensor> tensors{{{"w", DType::f8_e4m3, {3, 4}}, packed.data()}};
  if (!scale_shape.empty()) tensors.push_back({{"w_scale_inv", DType::f32, scale_shape}, scale.data()});
  write_safetensors(dir.path("model.safetensors"), tensors, {});
  return HfFolder::open(dir.path());
}

TEST(TensorSource, EightBitFloatsAreUnpackedWithTheirScales) {
  const TestDir dir;
  const HfFolder folder = fp8_folder(dir, {2, 2});
  const TensorSource source = locate_tensor(folder, HfFamily::canonical, {"w", {3, 4}});
  EXPECT_EQ(source.dtype, DType::f32);
  EXPECT_EQ(source.scale_name, "w_scale_inv");
  std::vector<float> got(12);
  read_tensor(folder, source, got.data());
  EXPECT_EQ(got, (std::vector<float>{3, 3, 3, 6, 3, 3, 3, 6, 9, 9, 9, 12}));
}

TEST(TensorSource, APartOfEightBitFloatsHasTheScalesOfItsPlace) {
  const TestDir dir;
  const HfFolder folder = fp8_folder(dir, {2, 2});
  const TensorSource source = locate_tensor(folder, HfFamily::canonical, {"w", {3, 4}});
  std::vector<float> whole(12);
  read_tensor(folder, source, whole.data());
  for (int64_t top = 0; top < 3; ++top)
    for (int64_t left = 0; left < 4; ++left) {
      std::vector<float> got((3 - top) * (4 - left)), want;
      read_tensor(folder, part_of(source, top, 3, left, 4), got.data());
      for (int64_t r = top; r < 3; ++r) want.insert(want.end(), &whole[r * 4 + left], &whole[r * 4] + 4);
      EXPECT_EQ(got, want) << "from " << top << ", " << left;
    }
}

// Released folders of qwen3 have such scales.
TEST(TensorSource, ScalesMayHaveSixteenBits) {
  const std::vector<uint8_t> packed(12, 0x3c);
  const std::vector<bf16> brain{to_bf16(2), to_bf16(4), to_bf16(6), to_bf16(0.375f)};
  const std::vector<_Float16> half{2, 4, 6, _Float16(0.375f)};
  for (const auto& [dtype, scales] :
       std::vector<std::pair<DType, const void*>>{{DType::bf16, brain.data()}, {DType::f16, half.data()}}) {
    const TestDir dir;
    write_config(dir, R"({"quantization_config":{"quant_method":"fp8","weight_block_size":[2,3]}})");
    write_safetensors(dir.path("model.safetensors"),
                      {{{"w", DType::f8_e4m3, {3, 4}}, packed.data()}, {{"w_scale_inv", dtype, {2, 2}}, scales}}, {});
    const HfFolder folder = HfFolder::open(dir.path());
    EXPECT_EQ(read_scales(folder, "w_scale_inv", 1, 3), (std::vector<float>{4, 6, 0.375f}));
    const TensorSource source = locate_tensor(folder, HfFamily::canonical, {"w", {3, 4}});
    std::vector<float> got(8);
    read_tensor(folder, part_of(source, 1, 3, 0, 4), got.data());
    EXPECT_EQ(got, (std::vector<float>{3, 3, 3, 6, 9, 9, 9, 0.5625f}));
  }
}

TEST(TensorSource, RefusesZeroNegativeAndNonFiniteScales) {
  for (const auto& [scale, text] : std::vector<std::pair<float, std::string>>{
           {0.0f, "expected scales above 0 in \"w_scale_inv\" for blocks that are not all 0; got 0"},
           {-1.0f, "expected scales of 0 or more in \"w_scale_inv\"; got -1"},
           {std::numeric_limits<float>::quiet_NaN(), "got nan"},
           {std::numeric_limits<float>::infinity(), "got inf"}}) {
    const TestDir dir;
    const HfFolder folder = fp8_folder(dir, {2, 2}, true, scale);
    const TensorSource source = locate_tensor(folder, HfFamily::canonical, {"w", {3, 4}});
    std::vector<float> got(12);
    expect_error(ErrorKind::input, text, [&] { read_tensor(folder, source, got.data()); });
    read_tensor(folder, part_of(source, 0, 2, 0, 4), got.data());  // the block belongs to the last row
  }
}

TEST(TensorSource, RefusesEightBitFloatsWithoutTheirScales) {
  const auto refuse = [](const std::vector<int64_t>& scale_shape, bool with_config, const std::string& text) {
    const TestDir dir;
    const HfFolder folder = fp8_folder(dir, scale_shape, with_config);
    expect_error(ErrorKind::input, text, [&] { locate_tensor(folder, HfFamily::canonical, {"w", {3, 4}}); });
  };
  refuse({2, 2}, false,
         "expected a quantization_config of quant_method \"fp8\" in config.json, since \"w\" is f8_e4m3");
  refuse({}, true, "expected the scales \"w_scale_inv\" of an f8_e4m3 tensor; got none; fetch them");
  refuse({2, 3}, true,
         "expected f32, bf16 or f16 [2, 2] for \"w_scale_inv\", one scale for each block of 2 x 3; got f32 [2, 3]; "
         "correct weight_block_size in config.json, or fetch the folder again");
  const TestDir dir;
  write_config(dir);
  const std::vector<uint8_t> packed(2 * 6 * 5);
  write_safetensors(dir.path("model.safetensors"),
                    {{{"model.layers.0.mlp.experts.gate_up_proj", DType::f8_e4m3, {2, 6, 5}}, packed.data()}}, {});
  const HfFolder folder = HfFolder::open(dir.path());
  expect_error(
      ErrorKind::input, "got f8_e4m3: experts in one tensor have no scales here; save one tensor per expert", [&] {
        locate_tensor(folder, HfFamily::canonical, {"model.layers.0.mlp.experts.1.gate_proj.weight", {3, 5}, 2});
      });
}

}  // namespace
}  // namespace moebius
