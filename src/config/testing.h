// Shared by the tests of this folder: a tiny model, the smallest recipe, the text of
// an expected error.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "config/run_spec.h"
#include "core/error.h"

namespace moebius {

// Odd sizes, every number different: 3 layers, the first dense; 3 experts, top 2, a
// gated shared expert.
inline ModelSpec tiny_model() {
  return {.vocab_size = 11,
          .hidden_size = 12,
          .num_layers = 3,
          .num_heads = 2,
          .num_kv_heads = 1,
          .head_dim = 4,
          .intermediate_size = 20,
          .max_position_embeddings = 33,
          .qk_norm = QkNorm::per_head,
          .moe_layers = {false, true, true},
          .num_experts = 3,
          .top_k = 2,
          .moe_intermediate_size = 6,
          .shared_intermediate_size = 5,
          .shared_expert_gate = true};
}

// Returns the text of the Error that call throws; the test fails when it throws none or one
// of another kind.
inline std::string error_text(ErrorKind kind, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

// Together the smallest recipe that passes its check.
inline const std::string kModel =
    "[model]\nvocab_size = 11\nhidden_size = 12\nnum_hidden_layers = 3\nnum_attention_heads = 2\nhead_dim = 4\n"
    "max_position_embeddings = 33\nnum_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 6\n";
inline const std::string kRest =
    "[train]\nsteps = 9\nglobal_batch = 6\nmicro_batch = 3\nseq_len = 7\n[optimizer]\nlr = 0.5\n";

using Sets = std::vector<std::string>;

inline RunSpec parse(const Sets& sets = {}) { return parse_run_spec(kModel + kRest, "r.toml", sets); }
inline std::string parse_error(const Sets& sets) {
  return error_text(ErrorKind::usage, [&] { parse(sets); });
}
inline std::string check_error(const Sets& sets, int64_t world_size = 1) {
  const RunSpec spec = parse(sets);
  return error_text(ErrorKind::usage, [&] { spec.check(world_size); });
}
inline RunSpec without_provenance(RunSpec spec) {
  spec.provenance.clear();
  return spec;
}
inline RunSpec read_back(const RunSpec& spec, bool with_provenance) {
  return parse_run_spec(to_toml(spec, with_provenance), "again.toml", {});
}

// A folder with a config.json of this content, removed at the end.
class ConfigFolder {
 public:
  explicit ConfigFolder(const std::string& content)
      : path_(std::filesystem::path(testing::TempDir()) / ("config_test_" + std::to_string(std::random_device()()))) {
    std::filesystem::create_directories(path_);
    std::ofstream(path_ / "config.json") << content;
  }
  ~ConfigFolder() { std::filesystem::remove_all(path_); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace moebius
