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
  std::filesystem::create_symlink("nowhere", dir.path("link"));  // a rename to it would fail at the end
  expect_refused(run_moebius(dir, {"export", "checkpoint", "link"}), 2, "got one that exists");
  std::filesystem::create_symlink("loop", dir.path("loop"));
  expect_refused(run_moebius(dir, {"export", "loop", "other"}), 4, "[loop]; check the path, its disk and this");
  expect_refused(run_moebius(dir, {"export", "checkpoint", ""}), 2,
                 "error: expected the name of a folder to make; got an empty one");
  expect_refused(run_moebius(dir, {"export", "checkpoint", "other", "--dtype", "f16"}), 2,
                 "--dtype: expected f32, bf16 or fp8_block; got \"f16\"");
  expect_refused(run_moebius(dir, {"export", "nowhere", "other"}), 3, "expected a folder; got nothing there");
  expect_refused(run_moebius(dir, {"import", "checkpoint", "other"}), 3, "a checkpoint already");
}

// A model of many small tensors, which takes many times longer to write than a signal to arrive.
void write_many_tensors(const TestDir& dir) {
  constexpr int64_t kLayers = 300;
  nlohmann::json config = nlohmann::json::parse(read_file(kCase + "/config.json"));
  config["num_hidden_layers"] = kLayers;
  std::filesystem::create_directory(dir.path("model"));
  write_file_atomic(dir.path("model/config.json"), config.dump());
  const std::vector<float> zeros(97 * 24);
  const std::string first = "model.layers.0.";
  std::vector<SafetensorsTensor> tensors;
  const SafetensorsFile file = SafetensorsFile::open(kCase + "/model.safetensors");
  for (const SafetensorsEntry& e : file.entries()) {
    if (e.name.starts_with("model.layers.1.")) continue;
    const bool is_of_layers = e.name.starts_with(first);
    for (int64_t layer = 0; layer < (is_of_layers ? kLayers : 1); ++layer) {
      const std::string name =
          is_of_layers ? fmt::format("model.layers.{}.{}", layer, e.name.substr(first.size())) : e.name;
      tensors.push_back({{name, e.dtype, e.shape}, zeros.data()});
    }
  }
  write_safetensors(dir.path("model/model.safetensors"), tensors);
}

TEST(CliExport, ASignalLeavesNothing) {
  TestDir dir;
  write_many_tensors(dir);
  const auto expect_ended = [&](int signal, std::vector<std::string> words, const char* result) {
    words.insert(words.end(), {"--shard-bytes", "1"});
    const Ran ran = run_and_signal(dir, words, signal);
    EXPECT_EQ(ran.code, 128 + signal) << ran.err;
    EXPECT_EQ(ran.out, "");
    EXPECT_THAT(ran.err, testing::HasSubstr(fmt::format("signal {}: ended without {}", signal, result)));
    EXPECT_EQ(dir.num_files(), 3) << words[0];  // the model and the two outputs
  };
  expect_ended(SIGTERM, {"import", "model", "out"}, "a checkpoint");
  expect_ended(SIGINT, {"export", "model", "out"}, "a folder");
  expect_ended(SIGTERM, {"upcycle", "model", "out", "--experts", "2", "--top-k", "1"}, "a folder");
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
