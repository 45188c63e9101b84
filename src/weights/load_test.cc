#include "weights/load.h"
#include "io/convert_elements.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "checkpoint/store.h"
#include "comm/transport/threads.h"
#include "engine/engine.h"
#include "hub/hf_names.h"
#include "io/safetensors.h"
#include "io/testing.h"
#include "weights/source.h"

namespace moebius {
namespace {

ModelSpec tiny(bool tied = false) {
  return model_spec_from_hf({{"model_type", "mixtral"},
                             {"vocab_size", 11},
                             {"hidden_size", 8},
                             {"intermediate_size", 5},
                             {"num_hidden_layers", 1},
                             {"num_attention_heads", 2},
                             {"num_key_value_heads", 1},
                             {"num_local_experts", 3},
                             {"num_experts_per_tok", 2},
                             {"max_position_embeddings", 16},
                             {"tie_word_embeddings", tied}},
                            "test");
}

Engine make(const ModelSpec& model, DType compute, ModelUse use) {
  return Engine({.model = model, .precision = {.compute = compute}, .use = use, .shape = {.batch = 1, .seq = 2}});
}

struct HostTensor {
  SafetensorsDecl decl;
  std::vector<char> bytes;
};

// The model's own parts as a Hugging Face folder: element i of every tensor is i / 8, exact in
// bf16 and f16.
class Folder {
 public:
  Folder(const ModelSpec& spec, DType dtype) {
    write_file_atomic(dir_.path("config.json"), hf_from_model_spec(spec).dump());
    Engine engine = make(spec, DType::f32, ModelUse::inference);
    for (const Param& p : engine.model().params().all()) {
      for (const ParamPart& part : p.spec.parts) {
        std::vector<int64_t> shape;
        for (int i = 0; i < part.shape.rank(); ++i) shape.push_back(part.shape[i]);
        add(hf_name(HfFamily::mixtral, part.name), shape, dtype);
      }
    }
  }
  void add(const std::string& name, const std::vector<int64_t>& shape, DType dtype, float shift = 0) {
    int64_t n = 1;
    for (const int64_t dim : shape) n *= dim;
    HostTensor& t = tensors_[name];
    t = {{name, dtype, shape}, std::vector<char>(n * size_of(dtype))};
    for (int64_t i = 0; i < n; ++i) {
      const float x = static_cast<float>(i) / 8 + shift;
      const _Float16 half = static_cast<_Float16>(x);
      const bf16 brain = to_bf16(x);
      const void* from = dtype == DType::f32    ? static_cast<const void*>(&x)
                         : dtype == DType::bf16 ? static_cast<const void*>(&brain)
                                                : &half;
      std::memcpy(t.bytes.data() + i * size_of(dtype), from, size_of(dtype));
    }
  }
  void remove(const std::string& name) { ASSERT_EQ(tensors_.erase(name), 1u) << name; }
  std::string write() const {
    std::vector<SafetensorsTensor> list;
    for (const auto& [name, t] : tensors_) list.push_back({t.decl, t.bytes.data()});
    write_safetensors(dir_.path("model.safetensors"), list);
    return dir_.path();
  }

 private:
  TestDir dir_;
  std::map<std::string, HostTensor> tensors_;
};

// Every part holds i / 8.
void expect_counted(Engine& engine) {
  for (const Param& p : engine.model().params().all()) {
    for (const ParamPart& part : p.spec.parts) {
      const Tensor t = part_of(p.w, part), master = part_of(p.master(), part);
      for (int64_t i = 0; i < t.numel(); ++i) {
        const float got = t.dtype == DType::f32 ? t.ptr<float>()[i] : to_f32(t.ptr<bf16>()[i]);
        ASSERT_EQ(got, static_cast<float>(i) / 8) << part.name << " " << i;
        ASSERT_TRUE(!p.has_master || master.ptr<float>()[i] == got) << part.name;
      }
    }
  }
}

TEST(Weights, EveryDtypeOnDiskIntoEveryUse) {
  for (const DType on_disk : {DType::f32, DType::bf16, DType::f16}) {
    const Folder folder(tiny(), on_disk);
    const std::string path = folder.write();
    for (const DType compute : {DType::f32, DType::bf16}) {
      for (const ModelUse use : {ModelUse::inference, ModelUse::training}) {
        Engine engine = make(read_model_spec(path), compute, use);
        Stream s = engine.stream();
        load_weights(s, engine.model(), path);
        expect_counted(engine);
      }
    }
  }
}

void load(const std::string& path, const ModelSpec& spec) {
  Engine engine = make(spec, DType::f32, ModelUse::inference);
  Stream s = engine.stream();
  load_weights(s, engine.model(), path);
}

TEST(Weights, ListsMissingUnexpectedAndMisshapenTogether) {
  Folder folder(tiny(), DType::f32);
  folder.remove("model.norm.weight");
  folder.add("model.layers.7.input_layernorm.weight", {8}, DType::f32);
  folder.add("lm_head.weight", {8, 11}, DType::f32);
  const std::string path = folder.write();
  expect_error(ErrorKind::input, "got 3 problems", [&] { load(path, tiny()); });
  expect_error(ErrorKind::input, "expected a tensor \"model.norm.weight\"; got none", [&] { load(path, tiny()); });
  expect_error(ErrorKind::input, "unexpected tensor \"model.layers.7.input_layernorm.weight\"",
               [&] { load(path, tiny()); });
  expect_error(ErrorKind::input, "expected [11, 8] for lm_head.weight; got [8, 11]", [&] { load(path, tiny()); });
}

TEST(Weights, TiedHeadMayBePresentWhenItIsEqual) {
  Folder folder(tiny(true), DType::bf16);
  load(folder.write(), tiny(true));
  folder.add("lm_head.weight", {11, 8}, DType::bf16);
  load(folder.write(), tiny(true));
  folder.add("lm_head.weight", {11, 8}, DType::bf16, /*shift=*/1);
  expect_error(ErrorKind::input, "\"lm_head.weight\" differs from \"model.embed_tokens.weight\"",
               [&] { load(folder.write(), tiny(true)); });
}

TEST(Weights, OldRotaryBuffersAreIgnored) {
  Folder folder(tiny(), DType::f32);
  folder.add("model.layers.0.self_attn.rotary_emb.inv_freq", {3}, DType::f32);
  load(folder.write(), tiny());
}

TEST(Weights, TensorsWithoutElementsAreIgnored) {
  Folder folder(tiny(), DType::f32);
  folder.add("model.layers.0.mlp.shared_experts.up_proj.weight", {0, 8}, DType::f32);
  load(folder.write(), tiny());
}

TEST(Weights, RefusesIntegerWeights) {
  const std::vector<int32_t> ints(6);
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  expect_error(ErrorKind::input, "expected f32, bf16, f16 or f64; got i32", [&] {
    std::vector<float> to(6);
    convert_elements(s, tensor_of(to.data(), {6}), ints.data(), DType::i32, "w");
  });
}

TEST(Weights, HalfPrecisionHasSubnormalsAndInfinities) {
  const std::vector<uint16_t> bits{0x0001, 0x8001, 0x03ff, 0x0400, 0x3c00, 0xc000, 0x7bff, 0x7c00, 0xfc00, 0x7e00};
  std::vector<float> got(bits.size());
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  convert_elements(s, tensor_of(got.data(), {static_cast<int64_t>(got.size())}), bits.data(), DType::f16, "w");
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> want{0x1p-24f, -0x1p-24f, 1023 * 0x1p-24f, 0x1p-14f, 1.0f, -2.0f, 65504.0f, inf, -inf};
  for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(got[i], want[i]) << i;
  EXPECT_TRUE(std::isnan(got.back()));
}

TEST(Weights, CountsNonFiniteValues) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf(""), most = 3e38f;
  const std::vector<float> f32{0, inf, 1, -inf, nan, -nan, most, -most, 1e-45f};
  EXPECT_EQ(count_not_finite(f32.data(), DType::f32, 9), 4);
  EXPECT_EQ(count_not_finite(f32.data(), DType::f32, 1), 0);
  const std::vector<double> f64(f32.begin(), f32.end());
  EXPECT_EQ(count_not_finite(f64.data(), DType::f64, 9), 4);
  std::vector<bf16> brain;
  for (const float x : f32) brain.push_back(to_bf16(x));
  EXPECT_EQ(count_not_finite(brain.data(), DType::bf16, 9), 4);
  const std::vector<uint16_t> half{0x7c00, 0xfc00, 0x7e01, 0x7bff, 0x0001};
  EXPECT_EQ(count_not_finite(half.data(), DType::f16, 5), 3);
  EXPECT_EQ(count_not_finite(half.data(), DType::i16, 5), 0);
}

// An element that a narrower dtype makes infinite is counted when it is narrowed, exact to
// the last bit.
TEST(Weights, CountsValuesThatOverflowInTheTargetDtype) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  const std::vector<float> f32{1, inf, nan, 0x1.fep127f, std::nextafter(0x1.ffp127f, 0.0f), 0x1.ffp127f, -0x1.ffp127f};
  EXPECT_EQ(count_not_finite(f32.data(), DType::f32, 7, DType::f32), 2);
  EXPECT_EQ(count_not_finite(f32.data(), DType::f32, 7, DType::bf16), 4);
  const std::vector<double> f64{1, 1e39, -1e39, 3.4e38, std::nextafter(0x1.ffffffp127, 0.0), 0x1.ffffffp127};
  EXPECT_EQ(count_not_finite(f64.data(), DType::f64, 6, DType::f64), 0);
  EXPECT_EQ(count_not_finite(f64.data(), DType::f64, 6, DType::f32), 3);
  EXPECT_EQ(count_not_finite(f64.data(), DType::f64, 6, DType::bf16), 5);
  // The same as converting says.
  std::vector<float> narrow(6);
  convert_elements(narrow.data(), DType::f32, f64.data(), DType::f64, 6, "w");
  EXPECT_EQ(count_not_finite(narrow.data(), DType::f32, 6), 3);
  std::vector<bf16> brain(7);
  convert_elements(brain.data(), DType::bf16, f32.data(), DType::f32, 7, "w");
  EXPECT_EQ(count_not_finite(brain.data(), DType::bf16, 7), 4);
}

TEST(Weights, LoadingReportsOverflow) {
  Folder folder(tiny(), DType::f32);
  folder.add("model.layers.0.self_attn.q_proj.weight", {8, 8}, DType::f32, 3.4e38f);  // beyond bf16
  const std::string path = folder.write();
  for (const DType compute : {DType::f32, DType::bf16}) {
    Engine engine = make(tiny(), compute, ModelUse::inference);
    Stream s = engine.stream();
    const size_t tensors = load_weights(s, engine.model(), path).size();
    EXPECT_EQ(tensors, compute == DType::bf16 ? 1u : 0u);
  }
}

TEST(Weights, LoadingWarnsOfNonFiniteTensors) {
  Folder folder(tiny(), DType::f32);
  folder.add("model.norm.weight", {8}, DType::f32, std::numeric_limits<float>::infinity());
  const std::string path = folder.write();
  Engine engine = make(tiny(), DType::bf16, ModelUse::training);
  Stream s = engine.stream();
  const std::vector<NotFinite> found = load_weights(s, engine.model(), path);
  EXPECT_EQ(found, (std::vector<NotFinite>{{"model.norm.weight", 8}}));
  EXPECT_EQ(not_finite_warning("here", found),
            "weights of here: expected finite numbers; got 8 that are NaN or infinite in 1 tensor (model.norm.weight), "
            "as they are or in the dtype they are put into; what is computed from them will be, too: fetch or train "
            "the model again");
  EXPECT_EQ(not_finite_warning("here", {}), "");
}

TEST(Weights, ErrorListsTheSupportedFolders) {
  TestDir dir;
  expect_error(ErrorKind::input,
               "expected a Hugging Face folder (config.json), a checkpoint (manifest.json) or a run's folder",
               [&] { read_model_spec(dir.path()); });
  expect_error(ErrorKind::input, "got nothing there", [&] { read_model_spec(dir.path("none")); });
}

// A checkpoint as training writes it: masters and state, with moments.
class Saved {
 public:
  explicit Saved(bool with_recipe = true) : engine_(make(tiny(), DType::bf16, ModelUse::training)) {
    Stream s = engine_.stream();
    engine_.model().params().init(s, 3);
    for (const Param& p : engine_.model().params().all()) {
      for (const ParamPart& part : p.spec.parts) {
        tensors_.push_back({part.name, part_of(p.master(), part)});
        tensors_.push_back({"adam_m." + part.name, part_of(p.master(), part)});
      }
    }
    meta_["model"] = hf_from_model_spec(tiny());
    if (!with_recipe) return;
    RunSpec run;
    run.model = tiny();
    run.train = {.steps = 1, .global_batch = 1, .micro_batch = 1, .seq_len = 7};
    run.optimizer.lr = 1e-3;
    meta_["recipe"] = to_toml(run, /*with_provenance=*/false);
  }
  std::string write() {
    CheckpointStore(dir_.path("checkpoints"), 0, false).save(5, tensors_, meta_);
    return dir_.path();
  }
  Engine engine_;
  std::vector<NamedTensor> tensors_;
  nlohmann::json meta_;
  TestDir dir_;
};

// Weights that are held in 8 bits come from their masters.
TEST(Weights, ShardsInEightBitsAreNotReadAsBf16) {
  Saved saved;
  const std::string path = saved.write();
  run_threads(2, {.timeout_s = 60}, [&](Transport& world) {
    const auto whole_weights = [&](bool fsdp) {
      EngineSpec spec{.model = tiny(),
                      .precision = {.compute = DType::bf16,
                                    .recipe = PrecisionRecipe::fp8_block,
                                    .weights = PrecisionChoice::recipe},
                      .use = ModelUse::training,
                      .shape = {.batch = 1, .seq = 2}};
      spec.mesh = {.dp = 2, .edp = 2};
      spec.fsdp = fsdp;
      spec.world = &world;
      Engine engine(spec);
      Stream s = engine.stream();
      load_weights(s, engine.model(), path);
      std::map<std::string, std::vector<char>> bytes;
      for (const Param& p : engine.model().params().all()) {
        if (p.is_quantised() || p.shards_weights()) continue;
        const char* const first = static_cast<const char*>(p.w.data);
        bytes[p.spec.name].assign(first, first + p.w.num_bytes());
      }
      return bytes;
    };
    const auto sharded = whole_weights(true);
    EXPECT_FALSE(sharded.empty());
    auto whole = whole_weights(false);
    for (const auto& [name, bytes] : sharded) EXPECT_EQ(bytes, whole[name]) << name;
  });
}

TEST(Weights, CheckpointByRunFolderStepFolderAndDtype) {
  Saved saved;
  const std::string run = saved.write();
  for (const std::string& path : {run, run + "/checkpoints", run + "/checkpoints/step-00000005"}) {
    EXPECT_EQ(hf_from_model_spec(read_model_spec(path)), hf_from_model_spec(tiny()));
    Engine engine = make(read_model_spec(path), DType::bf16, ModelUse::inference);
    Stream s = engine.stream();
    load_weights(s, engine.model(), path);
    auto want = saved.engine_.model().params().all().begin();
    for (const Param& p : engine.model().params().all()) {
      EXPECT_EQ(std::memcmp(p.w.data, want->w.data, p.w.num_bytes()), 0) << p.spec.name;
      ++want;
    }
  }
  EXPECT_EQ(read_run_spec(run)->train.seq_len, 7);
}

TEST(Weights, CheckpointsMayNotLackOrAddTensors) {
  Saved saved;
  saved.tensors_[0].name = "renamed";
  const std::string run = saved.write();
  expect_error(ErrorKind::input, "got 1 missing (model.embed_tokens.weight), 1 unexpected (renamed)",
               [&] { load(run, tiny()); });
}

TEST(Weights, CheckpointWithoutARecipeIsRefused) {
  Saved saved(/*with_recipe=*/false);
  expect_error(ErrorKind::input, "expected \"recipe\" in its meta data; got none",
               [&] { read_run_spec(saved.write()); });
}

}  // namespace
}  // namespace moebius
