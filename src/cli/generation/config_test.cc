#include "cli/generation/config.h"

#include <gtest/gtest.h>

#include "io/files.h"
#include "io/testing.h"

namespace moebius {
namespace {

class ReadGenerationConfig : public ::testing::Test {
 protected:
  GenerationConfig read(const std::string& text) {
    write_file_atomic(dir_.path("generation_config.json"), text);
    return read_generation_config(dir_.path(), /*vocab_size=*/100);
  }
  void refuse(const std::string& text, const std::string& message) {
    expect_error(ErrorKind::input, "generation_config.json: " + message, [&] { read(text); });
  }
  TestDir dir_;
};

TEST_F(ReadGenerationConfig, EndsAndRulesOfAReleasedModel) {
  const GenerationConfig config =
      read(R"({"bos_token_id": 9, "do_sample": true, "eos_token_id": [7, 5, 100], "temperature": 0.6, "top_k": 20,)"
           R"( "top_p": 0.95, "min_p": null})");
  EXPECT_EQ(config.end_ids, (std::vector<int32_t>{7, 5}));  // 100 is outside the vocabulary
  EXPECT_EQ(added_rules({}, config.sampling), "temperature 0.6, top-k 20, top-p 0.95");
  const SamplingChoices given{.temperature = 0, .repetition_penalty = 1.5};
  const Sampling s = sampling_of(given, config.sampling);
  EXPECT_EQ(s.temperature, 0);
  EXPECT_EQ(s.top_k, 20);
  EXPECT_EQ(s.top_p, 0.95);
  EXPECT_EQ(s.min_p, 0);
  EXPECT_EQ(s.repetition_penalty, 1.5);
  EXPECT_EQ(added_rules(given, config.sampling), "top-k 20, top-p 0.95");
  EXPECT_EQ(read(R"({"eos_token_id": 3})").end_ids, (std::vector<int32_t>{3}));
}

TEST_F(ReadGenerationConfig, WithoutAFileNothingIsSet) {
  for (const std::string& dir : {std::string(), dir_.path()}) {
    const GenerationConfig config = read_generation_config(dir, 100);
    EXPECT_TRUE(config.end_ids.empty());
    EXPECT_EQ(added_rules({}, config.sampling), "");
  }
}

TEST_F(ReadGenerationConfig, WrongValuesAreNamed) {
  refuse("[]", "expected an object; got array; correct the file");
  refuse(R"({"eos_token_id": "</s>"})", "eos_token_id: expected ids; got \"</s>\"");
  refuse(R"({"eos_token_id": [-1]})", "eos_token_id: expected ids; got -1");
  refuse(R"({"temperature": "0.6"})", "temperature: expected a number; got \"0.6\"; correct the file");
  refuse(R"({"top_k": 2.5})", "top_k: expected a whole number; got 2.5");
  refuse(R"({"top_p": 0})", "generate: top-p must be in (0, 1]; got 0; correct the file");
}

}  // namespace
}  // namespace moebius
