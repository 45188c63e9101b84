// What Moebius writes, loaded in transformers.
#include <cstdlib>

#include "io/safetensors.h"
#include "tests/cli/finetune.h"

namespace moebius {
namespace {

// Python with torch and transformers: MOEBIUS_PYTHON in the environment or at configuration, else python3.
std::string python() {
  const char* named = std::getenv("MOEBIUS_PYTHON");
  const std::string program = named ? named : MOEBIUS_PYTHON;
  const bool has_modules =
      !program.empty() &&
      std::system((quoted(program) + " -c 'import torch, transformers, safetensors' > /dev/null 2>&1").c_str()) == 0;
  return has_modules ? program : "";
}

// What was fine-tuned, and every golden model, exported: no missing and no unexpected keys, the
// tokenizer, the logits.
class Transformers : public FineTune {
 protected:
  void SetUp() override {
    if (python().empty())
      GTEST_SKIP() << "wants Python with torch, transformers and safetensors; set MOEBIUS_PYTHON to one that has them";
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
  std::string load_all() {
    std::string command = "cd " + quoted(dir_.path()) + " && " + quoted(python()) + " " +
                          quoted(MOEBIUS_SOURCE_DIR "/tests/cli/load_in_transformers.py");
    for (const std::string& folder : folders_) command += " " + quoted(folder);
    EXPECT_EQ(std::system((command + " > said 2> noise").c_str()), 0) << read_file(dir_.path("noise"));
    return read_file(dir_.path("said"));
  }
  std::vector<std::string> folders_;
};

TEST_F(Transformers, LoadsWhatWasFineTunedAndEveryFamily) {
  tune();
  write_forward("Tuned");
  export_golden_models();
  const std::string said = load_all();
  ASSERT_GT(folders_.size(), 15u);
  for (const std::string& folder : folders_) EXPECT_THAT(said, testing::HasSubstr(folder + ": as it should be\n"));
}

}  // namespace
}  // namespace moebius
