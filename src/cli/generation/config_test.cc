#include "cli/generation/config.h"

#include <gtest/gtest.h>

#include "io/files.h"
#include "io/testing.h"

namespace moebius {
namespace {

class ReadGenerationConfig : public ::testing::Test {
 protected:
  GenerationConfig read(const std::string& text, const SamplingChoices& given = {}) {
    write_file_atomic(dir_.path("generation_config.json"), text);
    return read_generation_config(dir_.path(), /*vocab_size=*/100, given);
  }
  void refuse(const std::string& text, const std::string& message) {
    expect_error(ErrorKind::input, "generation_config.json: " + message, [&] { read(text); });
  }
  TestDir dir_;
};

TEST_F(ReadGenerationConfig, ReadsEndIdsAndSamplingOfAReleasedModel) {
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
  EXPECT_EQ(added_rules(given, config.sampling), "") << "they have no effect at temperature 0";
  EXPECT_EQ(added_rules({.top_k = 3}, config.sampling), "temperature 0.6, top-p 0.95");
  EXPECT_EQ(read(R"({"eos_token_id": 3})").end_ids, (std::vector<int32_t>{3}));
}

TEST_F(ReadGenerationConfig, MissingFileSetsNothing) {
  for (const std::string& dir : {std::string(), dir_.path()}) {
    const GenerationConfig config = read_generation_config(dir, 100, {});
    EXPECT_TRUE(config.end_ids.empty());
    EXPECT_EQ(added_rules({}, config.sampling), "");
  }
}

TEST_F(ReadGenerationConfig, WrongValuesAreNamed) {
  refuse("[]", "expected an object; got array; correct the file");
  refuse(R"({"eos_token_id": "</s>"})", "eos_token_id: expected ids; got \"</s>\"");
  refuse(R"({"eos_token_id": [-1]})", "eos_token_id: expected ids; got -1");
  refuse(R"({"temperature": "0.6"})",
         "temperature: expected a number of at least 0; got \"0.6\"; correct the file, or "
         "give --temperature");
  refuse(R"({"top_k": 2.5})", "top_k: expected an integer of at least 0; got 2.5; correct the file, or give --top-k");
  refuse(R"({"top_k": 10000000000000000000})", "top_k: expected an integer of at least 0; got 10000000000000000000");
  refuse(R"({"top_p": 0})", "top_p: expected a number in (0, 1]; got 0; correct the file, or give --top-p");
  refuse(R"({"min_p": 1.5})", "min_p: expected a number in [0, 1]; got 1.5");
  refuse(R"({"repetition_penalty": -1})", "repetition_penalty: expected a number above 0; got -1");
  refuse(R"({"do_sample": "no"})", "do_sample: expected true or false; got \"no\"");
}

TEST_F(ReadGenerationConfig, OptionsTakePrecedenceOverTheFile) {
  EXPECT_FALSE(read(R"({"temperature": "wrong"})", {.temperature = 0}).sampling.temperature.has_value());
  EXPECT_EQ(read(R"({"temperature": "wrong", "top_k": 4})", {.temperature = 0}).sampling.top_k, 4);
}

TEST_F(ReadGenerationConfig, WithoutSamplingTheTemperatureIs0) {
  EXPECT_EQ(read(R"({"do_sample": false, "temperature": 0.6})").sampling.temperature, 0);
  EXPECT_EQ(read(R"({"do_sample": true, "temperature": 0.6})").sampling.temperature, 0.6);
  EXPECT_FALSE(read(R"({"do_sample": false})", {.temperature = 0.8}).sampling.temperature.has_value());
}

}  // namespace
}  // namespace moebius
