// Compares `data build` with Megatron-LM's preprocessing. The data is tests/golden/data/token_data,
// written by tools/token_data_golden.py.
#include <gtest/gtest.h>

#include <filesystem>

#include "data/data_build.h"
#include "io/files.h"
#include "io/testing.h"

namespace moebius {
namespace {

const std::string kData = MOEBIUS_SOURCE_DIR "/tests/golden/data";

struct Case {
  const char *style, *end_of_document;
};

class TokenDataGolden : public testing::TestWithParam<Case> {};

TEST_P(TokenDataGolden, SameBytes) {
  const auto [style, end_of_document] = GetParam();
  TestDir dir;
  std::filesystem::copy(kData + "/tokenizers/" + style, dir.path("tokenizer"));
  write_file_atomic(dir.path("tokenizer/tokenizer_config.json"),
                    fmt::format(R"({{"eos_token":"{}"}})", end_of_document));
  const auto tokenizer = open_tokenizer(dir.path("tokenizer"));
  for (const int threads : {1, 3}) {
    build_dataset({.inputs = {kData + "/token_data/documents.jsonl"},
                   .out_prefix = dir.path("p"),
                   .replace = true,
                   .threads = threads},
                  *tokenizer);
    for (const char* file : {".bin", ".idx"})
      EXPECT_TRUE(read_file(dir.path("p") + file) == read_file(kData + "/token_data/" + style + file)) << file;
  }
}

INSTANTIATE_TEST_SUITE_P(Styles, TokenDataGolden,
                         testing::Values(Case{"gpt2", "<|endoftext|>"}, Case{"llama3", "<|end_of_text|>"},
                                         Case{"qwen2", "<|endoftext|>"}),
                         [](const auto& info) { return std::string(info.param.style); });

}  // namespace
}  // namespace moebius
