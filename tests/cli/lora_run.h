// The guide's run with adapters instead of frozen parts, on a small model.
#pragma once

#include "io/safetensors.h"
#include "tests/cli/finetune.h"

namespace moebius {

class LoraRun : public FineTune {
 protected:
  void SetUp() override {
    FineTune::SetUp();
    prepare();
  }
  // `train` of the guide's recipe with adapters; later sets win.
  static std::vector<std::string> with_adapters(const std::vector<std::string>& more = {}) {
    std::vector<std::string> words;
    for (const std::string& set :
         {std::string("train.freeze=[]"), std::string("moe.balance=\"none\""), std::string("moe.aux_coeff=0"),
          std::string("lora.rank=4"), std::string("lora.alpha=8"),
          std::string("lora.targets=[\"self_attn.*\", \"mlp.experts.*\", \"mlp.gate\"]")})
      words.insert(words.end(), {"--set", set});
    for (const std::string& set : more) words.insert(words.end(), {"--set", set});
    return words;
  }
  SafetensorsFile adapter(const std::string& folder) {
    return SafetensorsFile::open(dir_.path(folder + "/adapter_model.safetensors"));
  }
  static std::vector<char> bytes_of(const SafetensorsFile& file, const SafetensorsEntry& entry) {
    std::vector<char> bytes(entry.bytes);
    file.read(entry, bytes.data());
    return bytes;
  }
  void expect_same_adapters(const std::string& a, const std::string& b) {
    const SafetensorsFile one = adapter(a), other = adapter(b);
    ASSERT_EQ(one.entries().size(), other.entries().size());
    for (const SafetensorsEntry& entry : one.entries())
      EXPECT_EQ(bytes_of(one, entry), bytes_of(other, other.at(entry.name))) << entry.name;
  }
  void expect_training_refused(const std::vector<std::string>& sets, int code, const std::string& text) {
    std::vector<std::string> words{"train", "tune.toml"};
    for (const std::string& set : kSmall) words.insert(words.end(), {"--set", set});
    const std::vector<std::string> more = with_adapters(sets);
    words.insert(words.end(), more.begin(), more.end());
    expect_refused(run_moebius(dir_, words), code, text);
  }
};

}  // namespace moebius
