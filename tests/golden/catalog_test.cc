// The catalog says word for word what models declare, for every family; the catalogs of the ranks
// of a mesh together list every element once.
#include "model/catalog.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "checkpoint/tensor_slice.h"
#include "engine/engine.h"
#include "io/files.h"
#include "io/testing.h"
#include "weights/load.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;

std::string text_of(const ParamSpec& spec, bool frozen) {
  std::string text = fmt::format("{} {} kind {} frozen {} trained {}:", spec.name, to_string(spec.shape),
                                 static_cast<int>(spec.kind), frozen, spec.trainable);
  for (const ParamPart& part : spec.parts) text += fmt::format(" {} {}", part.name, to_string(part.shape));
  return text;
}

std::vector<std::string> texts(const Model& model) {
  std::vector<std::string> all;
  for (const Param& p : model.params().all()) all.push_back(text_of(p.spec, p.frozen));
  return all;
}

std::vector<std::string> texts(const ModelCatalog& catalog) {
  std::vector<std::string> all;
  for (const auto& [spec, frozen] : catalog.params()) all.push_back(text_of(spec, frozen));
  return all;
}

// The model itself, as an engine builds it, on a plan that is not bound.
void expect_catalog_of(const EngineSpec& spec) {
  const Mesh one_rank{MeshShape{}};
  MemoryPlan plan;
  const Model model({.model = spec.model,
                     .balance = spec.balance,
                     .precision = spec.precision,
                     .mesh = one_rank,
                     .plan = plan,
                     .use = spec.use,
                     .shape = spec.shape,
                     .max_positions = spec.shape.seq,
                     .freeze = spec.freeze});
  const ModelCatalog catalog({.model = spec.model,
                              .use = spec.use,
                              .balance = spec.balance,
                              .freeze = spec.freeze,
                              .num_mtp = spec.shape.num_mtp});
  EXPECT_FALSE(catalog.params().empty());
  EXPECT_EQ(texts(catalog), texts(model));
  EXPECT_EQ(catalog.holds_mtp(), model.holds_mtp());
  if (holds_mtp_modules(spec.use, spec.shape.num_mtp) || spec.model.num_mtp_layers == 0) {
    EXPECT_EQ(texts(model.whole_catalog()), texts(model));
  }
}

std::vector<std::string> golden_models() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(MOEBIUS_SOURCE_DIR "/tests/golden/data"))
    if (fs::exists(entry.path() / "config.json")) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

ModelSpec golden_model(const std::string& name) {
  return read_model_spec(MOEBIUS_SOURCE_DIR "/tests/golden/data/" + name);
}

TEST(Catalog, EqualsTheDeclarationsOfEveryFamily) {
  const std::vector<std::string> names = golden_models();
  EXPECT_GT(names.size(), 20u);
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const ModelSpec model = golden_model(name);
    for (const ModelUse use : {ModelUse::inference, ModelUse::training}) {
      expect_catalog_of({.model = model, .use = use, .shape = {.batch = 1, .seq = 4}});
      expect_catalog_of({.model = model,
                         .balance = {.global_aux = true, .aux_coeff = 0.01},
                         .use = use,
                         .shape = {.batch = 1, .seq = 4, .num_mtp = model.num_mtp_layers},
                         .freeze = {"*.self_attn.*", "model.norm.weight"}});
    }
  }
}

TEST(Catalog, EqualsTheDeclarationsOfEveryRecipe) {
  int64_t num_recipes = 0;
  for (const auto& entry : fs::directory_iterator(MOEBIUS_SOURCE_DIR "/recipes")) {
    if (entry.path().extension() != ".toml") continue;
    SCOPED_TRACE(entry.path().string());
    EngineSpec spec = training_engine_spec(parse_run_spec(read_file(entry.path().string()), entry.path().string(), {}));
    spec.pipeline = {};  // the whole model on one rank, whatever stages the recipe has
    expect_catalog_of(spec);
    ++num_recipes;
  }
  EXPECT_GT(num_recipes, 5);
}

// A name is on one stage; its shards over tp, or ep and etp, tile it.
void expect_tiled(const ModelSpec& model, const MeshShape& shape) {
  std::map<std::string, std::vector<TensorSlice>> slices;
  for (int rank = 0; rank < shape.world(); ++rank) {
    const auto world = make_dry_run_transport(rank, static_cast<int>(shape.world()));
    const Mesh mesh(shape, *world);
    const ModelCatalog of_rank({.model = model, .mesh = &mesh});
    for (const ParamPart& part : of_rank.parts()) {
      const TensorSlice slice{dims_of(part.shape), part.shard, 0, part.local_shape().numel()};
      auto& of_name = slices[part.name];
      if (std::find(of_name.begin(), of_name.end(), slice) == of_name.end()) of_name.push_back(slice);
    }
  }
  const ModelCatalog whole(model);
  EXPECT_EQ(slices.size(), whole.parts().size());
  for (const ParamPart& part : whole.parts()) {
    EXPECT_EQ(part.local_shape().numel(), part.shape.numel()) << part.name;
    ASSERT_TRUE(slices.contains(part.name)) << part.name;
    EXPECT_EQ(slices[part.name][0].shape, dims_of(part.shape)) << part.name;
    EXPECT_EQ(partition_problem(slices[part.name]), "") << part.name;
  }
}

TEST(Catalog, ShardsOfAMeshTileTheModel) {
  for (const char* name : {"qwen3_moe_v5", "deepseek_v3_mtp", "mixtral_v4", "llama_v4"}) {
    SCOPED_TRACE(name);
    const ModelSpec model = golden_model(name);
    expect_tiled(model, {.tp = 2, .dp = 2, .edp = 4});
    if (model.num_experts > 0) expect_tiled(model, {.tp = 2, .dp = 2, .etp = 2, .ep = 2});
  }
}

TEST(Catalog, StagesPartitionTheModel) {
  const ModelSpec model = golden_model("qwen3_moe_v5");
  ASSERT_GE(model.num_layers, 2);
  const ModelCatalog first({.model = model, .stages = {{.embedding = true, .num_layers = 1}}});
  const ModelCatalog rest({.model = model,
                           .stages = {{.first_layer = 1,
                                       .num_layers = model.num_layers - 1,
                                       .norm = true,
                                       .num_mtp = model.num_mtp_layers,
                                       .loss = true}}});
  std::vector<std::string> names = texts(first), others = texts(rest);
  names.insert(names.end(), others.begin(), others.end());
  EXPECT_EQ(names, texts(ModelCatalog(model)));
}

TEST(Catalog, ErrorNamesTheWrongFreezePattern) {
  const ModelSpec model = golden_model("llama_v4");
  const auto check = [&](const std::vector<std::string>& freeze) {
    check_freeze(ModelCatalog({.model = model, .freeze = freeze}), freeze);
  };
  check({"*.mlp.*"});
  expect_error(ErrorKind::usage, "\"model.nrom.weight\" matches none, the nearest is",
               [&] { check({"model.nrom.weight"}); });
  expect_error(ErrorKind::usage, "got patterns that match every parameter", [&] { check({"*"}); });
}

}  // namespace
}  // namespace moebius
