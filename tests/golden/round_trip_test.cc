// Imports every golden model as a checkpoint and exports it again: the same names, bits,
// config and files.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <set>

#include "checkpoint/list.h"
#include "config/hf/keys.h"
#include "hub/hf_folder.h"
#include "hub/hf_names.h"
#include "infer/parity.h"
#include "io/json_text.h"
#include "io/testing.h"
#include "weights/export.h"
#include "weights/import.h"
#include "weights/load.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;

const std::string kData = MOEBIUS_SOURCE_DIR "/tests/golden/data";

std::vector<std::string> cases() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(kData)) {
    if (fs::exists(entry.path() / "config.json")) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<char> bytes_of(const HfFolder& folder, const std::string& name) {
  std::vector<char> bytes(folder.at(name).bytes);
  folder.read(name, bytes.data());
  return bytes;
}

void expect_same_tensors(const HfFolder& got, const HfFolder& want) {
  ASSERT_EQ(got.names(), want.names());
  for (const std::string& name : want.names()) {
    EXPECT_EQ(got.at(name).dtype, want.at(name).dtype) << name;
    EXPECT_EQ(got.at(name).shape, want.at(name).shape) << name;
    EXPECT_EQ(bytes_of(got, name), bytes_of(want, name)) << name;
  }
}

class RoundTrip : public testing::TestWithParam<std::string> {
 protected:
  std::string source() const { return kData + "/" + GetParam(); }
  std::vector<char> logits(const std::string& model) const {
    const std::string out = dir_.path("forward.safetensors");
    write_parity({.out = out, .model = model, .tokens = source() + "/tokens.safetensors"});
    const SafetensorsFile file = SafetensorsFile::open(out);
    std::vector<char> bytes(file.at("logits").bytes);
    file.read(file.at("logits"), bytes.data());
    return bytes;
  }
  // Imports `model` as a checkpoint and exports it again.
  std::string forward_backward(const std::string& model, std::optional<DType> dtype = std::nullopt) {
    const std::string checkpoint = dir_.path(fmt::format("checkpoint{}", count_)),
                      out = dir_.path(fmt::format("out{}", count_));
    ++count_;
    import_hugging_face({.out = checkpoint, .model = model, .shard_bytes = 30000});
    EXPECT_TRUE(verify_checkpoint(checkpoint).ok());
    export_hugging_face({.out = out, .model = checkpoint, .dtype = dtype, .shard_bytes = 30000});
    return out;
  }
  TestDir dir_;
  int count_ = 0;
};

TEST_P(RoundTrip, TensorsBitForBitInF32AndBf16) {
  const std::string f32 = forward_backward(source());
  EXPECT_TRUE(fs::exists(f32 + "/model.safetensors.index.json"));
  expect_same_tensors(HfFolder::open(f32), HfFolder::open(source()));
  expect_same_tensors(HfFolder::open(forward_backward(f32, DType::f32)), HfFolder::open(source()));

  const std::string bf16 = forward_backward(source(), DType::bf16);
  const HfFolder rounded = HfFolder::open(bf16);
  for (const std::string& name : rounded.names()) {
    const bool is_bias = name.ends_with(".e_score_correction_bias");
    EXPECT_EQ(rounded.at(name).dtype, is_bias ? DType::f32 : DType::bf16) << name;
  }
  expect_same_tensors(HfFolder::open(forward_backward(bf16)), rounded);
  // The conversion from bf16 to f32 and back loses nothing.
  expect_same_tensors(HfFolder::open(forward_backward(forward_backward(bf16, DType::f32), DType::bf16)), rounded);
}

TEST_P(RoundTrip, ConfigKeepsTheModelAndEveryOtherKey) {
  const std::string out = forward_backward(source(), DType::bf16);
  const nlohmann::json before = read_json(source() + "/config.json"), after = read_json(out + "/config.json");
  ModelSpec want = read_model_spec(source()), got = read_model_spec(out);
  want.source = got.source = {};
  EXPECT_EQ(got, want);
  EXPECT_EQ(after.at("torch_dtype"), "bfloat16");
  for (const auto& [key, value] : before.items()) {
    if (has_hf_key(want.family, key) || key == "dtype" || key == "torch_dtype") continue;
    EXPECT_EQ(after.value(key, nlohmann::json("none")), value) << key;
  }
}

TEST_P(RoundTrip, CheckpointAndExportComputeTheSame) {
  const std::string out = forward_backward(source());
  EXPECT_EQ(logits(out), logits(source()));
  EXPECT_EQ(logits(dir_.path("checkpoint0")), logits(source()));
}

// Models with packed weights are exported unpacked, so they have tests of their own.
std::vector<std::string> unpacked_cases() {
  std::vector<std::string> names = cases();
  std::erase_if(names, [](const std::string& name) {
    return read_json(kData + "/" + name + "/config.json").contains("quantization_config");
  });
  return names;
}

INSTANTIATE_TEST_SUITE_P(Cases, RoundTrip, testing::ValuesIn(unpacked_cases()),
                         [](const auto& info) { return info.param; });

// Packed tensors are exported in a dtype that holds them exactly, the others in f32 as stored.
class PackedRoundTrip : public RoundTrip {
 protected:
  static DType dtype_of(const std::string& name) {
    const bool in_4_bits = name.ends_with(".experts.gate_up_proj") || name.ends_with(".experts.down_proj");
    return in_4_bits ? DType::bf16 : DType::f32;
  }
};

TEST_P(PackedRoundTrip, ExportIsUnpackedAndGivesTheSameLogits) {
  const std::string out = forward_backward(source());
  EXPECT_EQ(logits(out), logits(source()));
  EXPECT_FALSE(read_json(out + "/config.json").contains("quantization_config"));
  const HfFolder folder = HfFolder::open(out);
  for (const std::string& name : folder.names()) EXPECT_EQ(folder.at(name).dtype, dtype_of(name)) << name;
  expect_same_tensors(HfFolder::open(forward_backward(out)), folder);
}

INSTANTIATE_TEST_SUITE_P(Cases, PackedRoundTrip, testing::Values("deepseek_v3_fp8", "gpt_oss_mxfp4"),
                         [](const auto& info) { return info.param; });

// A model that was released in 8-bit floats comes out of a checkpoint with the bits that were released, and its
// quantization_config; and so from its folder.
class BlockFp8RoundTrip : public RoundTrip {
 protected:
  void expect_released(const std::string& model) {
    const std::string out = dir_.path(fmt::format("released{}", count_++));
    export_hugging_face({.out = out, .model = model, .block_fp8 = true, .shard_bytes = 30000});
    expect_same_tensors(HfFolder::open(out), HfFolder::open(source()));
    EXPECT_EQ(read_json(out + "/config.json").at("quantization_config"),
              read_json(source() + "/config.json").at("quantization_config"));
    EXPECT_EQ(logits(out), logits(source()));
  }
};

TEST_P(BlockFp8RoundTrip, HasTheReleasedBits) {
  const std::string checkpoint = dir_.path("imported");
  import_hugging_face({.out = checkpoint, .model = source(), .shard_bytes = 30000});
  expect_released(checkpoint);
  expect_released(source());
}

INSTANTIATE_TEST_SUITE_P(Cases, BlockFp8RoundTrip, testing::Values("deepseek_v3_fp8"),
                         [](const auto& info) { return info.param; });

// Other models get blocks of 128 x 128, and the modules that stay as they are are named.
class MadeBlockFp8 : public RoundTrip {};

TEST_P(MadeBlockFp8, ReadsBackThePackedValues) {
  const std::string out = dir_.path("packed"), plain = dir_.path("plain");
  export_hugging_face({.out = out, .model = source(), .block_fp8 = true});
  const HfFolder packed = HfFolder::open(out), original = HfFolder::open(source());
  const nlohmann::json config = read_json(out + "/config.json").at("quantization_config");
  EXPECT_EQ(config.at("quant_method"), "fp8");
  EXPECT_EQ(config.at("weight_block_size"), (nlohmann::json{128, 128}));
  const nlohmann::json kept = config.at("modules_to_not_convert");
  for (const std::string& name : original.names()) {
    const bool is_packed = packed.at(name).dtype == DType::f8_e4m3;
    const std::string module = name.substr(0, name.rfind('.'));
    const bool is_matrix = original.at(name).shape.size() == 2 && !name.ends_with("embed_tokens.weight");
    EXPECT_EQ(is_packed, is_matrix && std::find(kept.begin(), kept.end(), module) == kept.end()) << name;
    EXPECT_EQ(packed.find(name + "_scale_inv") != nullptr, is_packed) << name;
    if (!is_packed) {
      EXPECT_EQ(bytes_of(packed, name), bytes_of(original, name)) << name;
    }
  }
  EXPECT_EQ(packed.at("model.layers.1.mlp.experts.0.up_proj.weight").dtype, DType::f8_e4m3);
  EXPECT_EQ(packed.find("model.layers.1.mlp.gate.weight_scale_inv"), nullptr);
  // Unpacked and packed again it is the same.
  export_hugging_face({.out = plain, .model = out, .dtype = DType::f32});
  EXPECT_EQ(logits(plain), logits(out));
  EXPECT_NE(logits(plain), logits(source()));
  const std::string again = dir_.path("again");
  export_hugging_face({.out = again, .model = out, .block_fp8 = true});
  expect_same_tensors(HfFolder::open(again), packed);
}

INSTANTIATE_TEST_SUITE_P(Cases, MadeBlockFp8,
                         testing::Values("qwen3_moe_v4_bias_packed", "deepseek_v3_v4_packed", "qwen2_moe_v5"),
                         [](const auto& info) { return info.param; });

TEST(BlockFp8Export, RefusesExpertsInOneTensor) {
  const TestDir dir;
  expect_error(
      ErrorKind::input, "export --dtype fp8_block: expected a family with a tensor for each expert; got ",
      [&] { export_hugging_face({.out = dir.path("out"), .model = kData + "/gpt_oss_v4", .block_fp8 = true}); });
}

// A released model with multi-token prediction, edited: tensors are in its folder or missing.
class MtpFolder : public testing::Test {
 protected:
  MtpFolder() {
    fs::create_directories(hub());
    fs::copy_file(source() + "/config.json", hub() + "/config.json");
  }
  static std::string source() { return kData + "/deepseek_v3_mtp"; }
  std::string hub() const { return dir_.path("hub"); }
  // Writes its tensors except those that `leaves_out` selects. `edit` may change the bytes
  // of the others.
  void write(const std::function<bool(const std::string&)>& leaves_out,
             const std::function<void(const std::string&, std::vector<char>&)>& edit = {}) {
    const HfFolder from = HfFolder::open(source());
    std::deque<std::vector<char>> bytes;
    std::vector<SafetensorsTensor> tensors;
    for (const std::string& name : from.names()) {
      if (leaves_out(name)) continue;
      bytes.push_back(bytes_of(from, name));
      if (edit) edit(name, bytes.back());
      tensors.push_back({{name, from.at(name).dtype, from.at(name).shape}, bytes.back().data()});
    }
    write_safetensors(hub() + "/model.safetensors", tensors);
  }
  static bool is_module(const std::string& name) { return name.starts_with("model.layers.2."); }
  TestDir dir_;
};

TEST_F(MtpFolder, LoadsWithoutAModuleNamedOnlyInConfig) {
  write(is_module);
  const std::string notice =
      ": num_nextn_predict_layers is 1, but there are no tensors of model.layers.2: "
      "the model is taken without multi-token prediction";
  using Notices = std::vector<std::string>;
  EXPECT_EQ(import_hugging_face({.out = dir_.path("c"), .model = hub()}).notices, (Notices{hub() + notice}));
  EXPECT_EQ(export_hugging_face({.out = dir_.path("out"), .model = dir_.path("c")}).notices,
            (Notices{dir_.path("c") + notice}));
  expect_same_tensors(HfFolder::open(dir_.path("out")), HfFolder::open(hub()));
  EXPECT_EQ(read_json(dir_.path("out/config.json")).at("num_nextn_predict_layers"), 1);
  const std::string tokens = source() + "/tokens.safetensors";
  const double loss = write_parity({.out = dir_.path("a"), .model = hub(), .tokens = tokens}).loss;
  EXPECT_EQ(write_parity({.out = dir_.path("b"), .model = source(), .tokens = tokens}).loss, loss);
  EXPECT_EQ(write_parity({.out = dir_.path("b"), .model = dir_.path("c"), .tokens = tokens}).loss, loss);
}

TEST_F(MtpFolder, APartialModuleIsRefused) {
  write([](const std::string& name) { return name == "model.layers.2.eh_proj.weight"; });
  expect_error(ErrorKind::input, "model.layers.2.eh_proj.weight",
               [&] { import_hugging_face({.out = dir_.path("c"), .model = hub()}); });
}

TEST_F(MtpFolder, SharedTensorsMustBeEqual) {
  const auto nothing = [](const std::string&) { return false; };
  const std::string copy = "model.layers.2.shared_head.head.weight";
  write(nothing, [&](const std::string& name, std::vector<char>& bytes) { bytes[3] ^= name == copy ? 1 : 0; });
  expect_error(ErrorKind::input,
               "\"" + copy + "\" differs from \"lm_head.weight\", which multi-token prediction shares",
               [&] { import_hugging_face({.out = dir_.path("c"), .model = hub()}); });
}

TEST_F(MtpFolder, ComparisonNeedsGradientsAndAModule) {
  write([](const std::string&) { return false; });
  const std::string tokens = source() + "/tokens.safetensors";
  expect_error(ErrorKind::usage, "forward: --mtp: expected --grads too",
               [&] { write_parity({.out = dir_.path("a"), .model = hub(), .tokens = tokens, .mtp_coeff = 0.1}); });
  expect_error(ErrorKind::usage, "forward: --mtp: expected a coefficient above 0; got -1", [&] {
    write_parity({.out = dir_.path("a"), .model = hub(), .tokens = tokens, .gradients = true, .mtp_coeff = -1});
  });
  expect_error(ErrorKind::usage, "forward: --mtp: expected a model with multi-token prediction", [&] {
    write_parity({.out = dir_.path("a"),
                  .model = kData + "/deepseek_v3_v5",
                  .tokens = kData + "/deepseek_v3_v5/tokens.safetensors",
                  .gradients = true,
                  .mtp_coeff = 0.1});
  });
}

// Writes the experts of each layer as two tensors, as transformers has them in memory.
// `transposed`: in before out.
void write_fused(const std::string& to, const std::string& from, bool transposed) {
  const HfFolder folder = HfFolder::open(from);
  fs::create_directories(to);
  fs::copy_file(from + "/config.json", to + "/config.json");
  const HfFamily family = hf_family(folder.config().at("model_type").get<std::string>());
  std::map<std::string, std::vector<std::vector<float>>> fused;  // by tensor, for each expert in order: [out, in]
  std::map<std::string, std::vector<int64_t>> shape;             // shapes of one expert
  std::vector<std::pair<SafetensorsDecl, std::vector<float>>> tensors;
  const int64_t num_experts = read_model_spec(from).num_experts;
  for (const std::string& name : folder.names()) {
    std::vector<float> values(folder.at(name).bytes / sizeof(float));
    folder.read(name, values.data());
    const auto expert = parse_expert_name(canonical_name(family, name));
    if (!expert) {
      tensors.push_back({{name, DType::f32, folder.at(name).shape}, values});
      continue;
    }
    const bool is_down = expert->projection == ExpertProjection::down;
    const std::string key = expert->prefix + (is_down ? "mlp.experts.down_proj" : "mlp.experts.gate_up_proj");
    fused[key].resize(num_experts);
    shape[key] = folder.at(name).shape;
    if (!is_down) shape[key][0] *= 2;
    std::vector<float>& all = fused[key][expert->expert];
    all.insert(expert->projection == ExpertProjection::gate ? all.begin() : all.end(), values.begin(), values.end());
  }
  for (const auto& [key, experts] : fused) {
    const int64_t out = shape[key][0], in = shape[key][1];
    std::vector<float> all;
    for (const std::vector<float>& expert : experts) {
      for (int64_t i = 0; i < out * in; ++i) all.push_back(expert[transposed ? i % out * in + i / out : i]);
    }
    tensors.push_back({{key, DType::f32, {num_experts, transposed ? in : out, transposed ? out : in}}, all});
  }
  std::vector<SafetensorsTensor> list;
  for (const auto& [decl, values] : tensors) list.push_back({decl, values.data()});
  write_safetensors(to + "/model.safetensors", list);
}

TEST(FusedExperts, OfEitherOrientationAreTheSameModel) {
  for (const char* name :
       {"mixtral_v4", "qwen2_moe_v5", "qwen3_moe_v5", "olmoe_v4_packed", "deepseek_v2_v4", "deepseek_v3_v5"}) {
    const TestDir dir;
    const std::string source = kData + "/" + name;
    for (const bool transposed : {false, true}) {
      const std::string fused = dir.path(transposed ? "in_out" : "out_in");
      write_fused(fused, source, transposed);
      EXPECT_LT(HfFolder::open(fused).names().size(), HfFolder::open(source).names().size()) << name;
      export_hugging_face({.out = fused + "-out", .model = fused});
      expect_same_tensors(HfFolder::open(fused + "-out"), HfFolder::open(source));
    }
  }
}

// A single case, with the files that hub folders have next to the weights.
class Export : public testing::Test {
 protected:
  Export() {
    fs::create_directories(hub() + "/assets");
    fs::create_directories(hub() + "/.cache");
    for (const char* name : {"config.json", "model.safetensors"})
      fs::copy_file(kData + "/llama_v4/" + name, hub() + "/" + name);
    for (const char* name : {"tokenizer.json", "README.md", "assets/logo.txt", ".cache/lock", "pytorch_model.bin",
                             "pytorch_model.bin.index.json"}) {
      write_file_atomic(hub() + "/" + name, std::string("content of ") + name);
    }
  }
  std::string hub() const { return dir_.path("hub"); }
  TestDir dir_;
};

std::set<std::string> files_below(const std::string& dir) {
  std::set<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(dir)) {
    if (entry.is_regular_file()) names.insert(fs::relative(entry.path(), dir).string());
  }
  return names;
}

TEST_F(Export, CopiesOtherFilesOfTheFolder) {
  const std::set<std::string> want{"README.md", "assets/logo.txt", "config.json", "model.safetensors",
                                   "tokenizer.json"};
  EXPECT_EQ(import_hugging_face({.out = dir_.path("c"), .model = hub()}).num_files, 3);
  EXPECT_EQ(export_hugging_face({.out = dir_.path("from_checkpoint"), .model = dir_.path("c")}).num_files, 3);
  EXPECT_EQ(export_hugging_face({.out = dir_.path("from_hub/"), .model = hub()}).num_files, 3);
  for (const char* out : {"from_checkpoint", "from_hub"}) {
    EXPECT_EQ(files_below(dir_.path(out)), want) << out;
    EXPECT_EQ(read_file(dir_.path(out) + "/tokenizer.json"), "content of tokenizer.json");
  }
  fs::create_directories(dir_.path("more"));
  write_file_atomic(dir_.path("more/vocab.json"), "{}");
  export_hugging_face({.out = dir_.path("chosen"), .model = dir_.path("c"), .files = dir_.path("more")});
  EXPECT_EQ(files_below(dir_.path("chosen")),
            (std::set<std::string>{"config.json", "model.safetensors", "vocab.json"}));
}

TEST_F(Export, IndexCountsAllTensorsShardsAndBytes) {
  const ExportResult r = export_hugging_face({.out = dir_.path("out"), .model = hub(), .shard_bytes = 5000});
  const nlohmann::json index = read_json(dir_.path("out/model.safetensors.index.json"));
  EXPECT_EQ(index.at("metadata").at("total_size"), r.bytes);
  EXPECT_EQ(static_cast<int64_t>(index.at("weight_map").size()), r.num_tensors);
  EXPECT_GT(r.num_shards, 2);
  std::set<std::string> files;
  for (const auto& [name, file] : index.at("weight_map").items()) files.insert(file.get<std::string>());
  EXPECT_EQ(static_cast<int64_t>(files.size()), r.num_shards);
  EXPECT_EQ(*files.begin(), fmt::format("model-00001-of-{:05}.safetensors", r.num_shards));
}

TEST_F(Export, AddsTheMissingArchitectureToTheConfig) {
  nlohmann::json config = read_json(hub() + "/config.json");
  config.erase("architectures");
  write_file_atomic(hub() + "/config.json", config.dump());
  export_hugging_face({.out = dir_.path("out"), .model = hub()});
  EXPECT_EQ(read_json(dir_.path("out/config.json")).at("architectures"), nlohmann::json{"LlamaForCausalLM"});
}

TEST_F(Export, RefusesAndLeavesNothingBehind) {
  const int64_t before = dir_.num_files();
  expect_error(ErrorKind::usage, "expected the name of a folder to make; got one that exists",
               [&] { export_hugging_face({.out = hub(), .model = hub()}); });
  expect_error(ErrorKind::input, "expected a folder of files to copy; got " + dir_.path("none"),
               [&] { export_hugging_face({.out = dir_.path("out"), .model = hub(), .files = dir_.path("none")}); });
  nlohmann::json config = read_json(hub() + "/config.json");
  config["num_hidden_layers"] = 1;
  write_file_atomic(hub() + "/config.json", config.dump());
  expect_error(ErrorKind::input, "unexpected tensor \"model.layers.1.",
               [&] { import_hugging_face({.out = dir_.path("out"), .model = hub()}); });
  config["model_type"] = "moebius";
  write_file_atomic(hub() + "/config.json", config.dump());
  expect_error(ErrorKind::input, "for which Hugging Face has no class",
               [&] { export_hugging_face({.out = dir_.path("out"), .model = hub()}); });
  EXPECT_EQ(dir_.num_files(), before);
}

TEST_F(Export, AnImportedCheckpointIsNotImportedAgain) {
  import_hugging_face({.out = dir_.path("c"), .model = hub()});
  EXPECT_FALSE(read_run_spec(dir_.path("c")).has_value());
  expect_error(ErrorKind::input, "a checkpoint already; use it as it is",
               [&] { import_hugging_face({.out = dir_.path("d"), .model = dir_.path("c")}); });
}

}  // namespace
}  // namespace moebius
