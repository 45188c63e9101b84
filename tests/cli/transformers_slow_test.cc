// Compares Moebius with Hugging Face's libraries, if there is a Python that has them.
#include <cstdlib>

#include "io/safetensors.h"
#include "tests/cli/finetune.h"

namespace moebius {
namespace {

// Returns a Python that can import these modules. It is MOEBIUS_PYTHON from the environment or the
// configuration, or else python3.
// Returns an empty string if there is none.
std::string python_with(const std::string& modules) {
  const char* named = std::getenv("MOEBIUS_PYTHON");
  const std::string program = named ? named : MOEBIUS_PYTHON;
  const std::string command = quoted(program) + " -c " + quoted("import " + modules) + " > /dev/null 2>&1";
  return !program.empty() && std::system(command.c_str()) == 0 ? program : "";
}

// Returns the output of a script of this folder.
std::string say(const TestDir& dir, const std::string& python, const std::string& script,
                const std::vector<std::string>& words) {
  std::string command =
      "cd " + quoted(dir.path()) + " && " + quoted(python) + " " + quoted(MOEBIUS_SOURCE_DIR "/tests/cli/" + script);
  for (const std::string& word : words) command += " " + quoted(word);
  EXPECT_EQ(std::system((command + " > said 2> noise").c_str()), 0) << read_file(dir.path("noise"));
  return read_file(dir.path("said"));
}

// A fine-tuned model and every golden model are exported, and the fine-tuned one also in blocks of FP8. There are no
// missing or unexpected keys, and tokenizer and logits are the same.
class Transformers : public FineTune {
 protected:
  void SetUp() override {
    if (python_.empty())
      GTEST_SKIP() << "needs Python with torch, transformers and safetensors; set MOEBIUS_PYTHON to one that has them";
    FineTune::SetUp();
  }
  void write_forward(const std::string& folder) {
    std::vector<int32_t> tokens(2 * 21);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * i % 97);
    write_safetensors(dir_.path(folder + ".tokens"), {{{"tokens", DType::i32, {2, 21}}, tokens.data()}});
    run({"forward", folder, "--tokens", folder + ".tokens", "--out", folder + ".logits", "--dtype", "f32"});
    folders_.push_back(folder);
  }
  void export_golden_models() {
    for (const auto& entry : std::filesystem::directory_iterator(kGolden)) {
      if (!std::filesystem::exists(entry.path() / "config.json")) continue;
      const std::string name = entry.path().filename().string();
      run({"export", entry.path().string(), name});
      write_forward(name);
    }
  }
  const std::string python_ = python_with("torch, transformers, safetensors");
  std::vector<std::string> folders_;
};

TEST_F(Transformers, LoadsATunedModelAndEveryFamily) {
  tune();
  write_forward("Tuned");
  export_golden_models();
  run({"export", "Tuned", "TunedInBlocks", "--dtype", "fp8_block"});
  write_forward("TunedInBlocks");
  const std::string said = say(dir_, python_, "load_in_transformers.py", folders_);
  ASSERT_GT(folders_.size(), 15u);
  for (const std::string& folder : folders_) EXPECT_THAT(said, testing::HasSubstr(folder + ": as it should be\n"));
}

// Random Unicode, prose and code pass through the whole of `data build`.
TEST(Tokenizers, HaveTheIdsOfHuggingFacesLibrary) {
  const std::string python = python_with("tokenizers");
  if (python.empty()) GTEST_SKIP() << "needs Python with tokenizers; set MOEBIUS_PYTHON to one that has it";
  const TestDir dir;
  std::vector<std::string> words{built_program("moebius"), dir.path()}, styles;
  for (const auto& entry : std::filesystem::directory_iterator(kGolden + "/tokenizers")) {
    if (!entry.is_directory()) continue;
    words.push_back(entry.path().string());
    styles.push_back(entry.path().filename().string());
  }
  ASSERT_GT(styles.size(), 5u);
  for (const char* text : {"--", "README.md", "DESIGN.md", "src/tokenizer/bpe.cc", "dev"})
    words.push_back(*text == '-' ? text : std::string(MOEBIUS_SOURCE_DIR "/") + text);
  const std::string said = say(dir, python, "compare_tokenizers.py", words);
  for (const std::string& style : styles) EXPECT_THAT(said, testing::HasSubstr(style + ": as it should be\n"));
}

}  // namespace
}  // namespace moebius
