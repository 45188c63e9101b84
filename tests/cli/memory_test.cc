// Memory of the commands that process whole models. It must not grow with the model.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/safetensors.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

constexpr int64_t kLayers = 12, kDim = 512, kWidth = 1024;
constexpr int64_t kTensorBytes = kWidth * kDim * 4;

// Writes a llama in f32 with 12 layers of 10 MiB. Its weights are zeros that take no space
// on the disk.
int64_t write_model(const std::string& folder) {
  std::filesystem::create_directory(folder);
  const nlohmann::json config = {{"model_type", "llama"},        {"vocab_size", 256},
                                 {"hidden_size", kDim},          {"intermediate_size", kWidth},
                                 {"num_hidden_layers", kLayers}, {"num_attention_heads", 8},
                                 {"num_key_value_heads", 8},     {"max_position_embeddings", 64}};
  write_file_atomic(folder + "/config.json", config.dump());
  std::vector<SafetensorsDecl> decls{{"model.embed_tokens.weight", DType::f32, {256, kDim}},
                                     {"lm_head.weight", DType::f32, {256, kDim}},
                                     {"model.norm.weight", DType::f32, {kDim}}};
  for (int64_t l = 0; l < kLayers; ++l) {
    const std::string layer = fmt::format("model.layers.{}.", l);
    for (const char* name : {"input_layernorm", "post_attention_layernorm"})
      decls.push_back({layer + name + ".weight", DType::f32, {kDim}});
    for (const char* name : {"q_proj", "k_proj", "v_proj", "o_proj"})
      decls.push_back({layer + "self_attn." + name + ".weight", DType::f32, {kDim, kDim}});
    for (const char* name : {"gate_proj", "up_proj"})
      decls.push_back({layer + "mlp." + name + ".weight", DType::f32, {kWidth, kDim}});
    decls.push_back({layer + "mlp.down_proj.weight", DType::f32, {kDim, kWidth}});
  }
  const std::string path = folder + "/model.safetensors";
  const int64_t bytes = SafetensorsWriter(path, std::move(decls)).file_bytes();
  std::filesystem::resize_file(path, bytes);
  return bytes;
}

// Returns the largest resident set of the command, in bytes.
int64_t peak_of(const TestDir& dir, const std::vector<std::string>& words) {
  const pid_t child = ::fork();
  if (child == 0) {
    std::vector<char*> argv;
    const std::string program = built_program("moebius");
    argv.push_back(const_cast<char*>(program.c_str()));
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    ::setenv("ASAN_OPTIONS", "quarantine_size_mb=1", 1);  // a sanitizer would keep freed memory
    const int nowhere = ::open("/dev/null", O_WRONLY);
    ::dup2(nowhere, STDOUT_FILENO);
    ::dup2(nowhere, STDERR_FILENO);
    if (::chdir(dir.path().c_str()) == 0) ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  int status = 0;
  rusage usage{};
  EXPECT_EQ(::wait4(child, &status, 0, &usage), child);
  EXPECT_EQ(status, 0) << words[0];
  return usage.ru_maxrss * 1024;
}

TEST(CliMemory, ModelsAreCopiedTensorByTensor) {
  const TestDir dir;
  const int64_t model = write_model(dir.path("model"));
  ASSERT_GT(model, 30 * kTensorBytes);
  const int64_t alone = peak_of(dir, {"--help"});
  const std::vector<std::vector<std::string>> commands{{"import", "model", "checkpoint"},
                                                       {"export", "checkpoint", "out", "--dtype", "bf16"},
                                                       {"upcycle", "model", "moe", "--experts", "2", "--top-k", "1"}};
  for (const std::vector<std::string>& words : commands) EXPECT_LT(peak_of(dir, words) - alone, model / 2) << words[0];
}

}  // namespace
}  // namespace moebius
