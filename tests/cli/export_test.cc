// Import and export of models, as a user meets them.
#include <nlohmann/json.hpp>

#include "io/safetensors.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

const std::string kCase = MOEBIUS_SOURCE_DIR "/tests/golden/data/llama_v4";

TEST(CliExport, RoundTrips) {
  TestDir dir;
  const Ran in = run_moebius(dir, {"import", kCase, "checkpoint"});
  EXPECT_EQ(in.code, 0) << in.err;
  EXPECT_THAT(in.out, testing::HasSubstr("imported 21 tensors"));
  EXPECT_EQ(run_moebius(dir, {"checkpoint", "verify", "checkpoint"}).code, 0);
  const Ran out =
      run_moebius(dir, {"export", "checkpoint", "out", "--dtype", "bf16", "--shard-bytes", "9000", "--json"});
  const nlohmann::json said = nlohmann::json::parse(out.out, nullptr, /*allow_exceptions=*/false);
  EXPECT_EQ(said.value("tensors", 0), 21) << out.out << out.err;
  EXPECT_GT(said.value("shards", 0), 1);
  expect_refused(run_moebius(dir, {"export", "checkpoint", "out"}), 2, "got one that exists");
  expect_refused(run_moebius(dir, {"export", "checkpoint", "other", "--dtype", "f16"}), 2, "f16");
  expect_refused(run_moebius(dir, {"export", "nowhere", "other"}), 3, "expected a folder; got nothing there");
  expect_refused(run_moebius(dir, {"import", "checkpoint", "other"}), 3, "a checkpoint already");
}

// Lists the tensors that patterns of train.freeze match, in any kind of folder.
TEST(CliCheckpoint, ListsTheTensorsOfOneCheckpointOrFolder) {
  TestDir dir;
  const Ran folder = run_moebius(dir, {"checkpoint", "ls", MOEBIUS_SOURCE_DIR "/tests/golden/data/mixtral_v4"});
  ASSERT_EQ(folder.code, 0) << folder.err;
  EXPECT_THAT(folder.out,
              testing::ContainsRegex("\nmodel.layers.0.mlp.experts.1.up_proj.weight  f32.[0-9]+, [0-9]+.\n"));
  ASSERT_EQ(run_moebius(dir, {"import", kCase, "checkpoint"}).code, 0);
  const Ran imported = run_moebius(dir, {"checkpoint", "ls", "checkpoint"});
  EXPECT_THAT(imported.out, testing::HasSubstr("model.layers.1.mlp.down_proj.weight  f32["));
  EXPECT_EQ(std::count(imported.out.begin(), imported.out.end(), '\n'), 21);
  const Ran ran = run_moebius(dir, {"checkpoint", "ls", "checkpoint", "--json"});
  const nlohmann::json said = nlohmann::json::parse(ran.out, nullptr, /*allow_exceptions=*/false);
  EXPECT_EQ(said.value("tensors", nlohmann::json::array()).size(), 21u) << ran.out << ran.err;
}

}  // namespace
}  // namespace moebius
