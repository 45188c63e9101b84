// Compares the mathematics with transformers, in every case of tests/golden/data. README.md there
// describes the cases.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "device/accelerator.h"
#include "infer/generate.h"
#include "infer/parity.h"
#include "io/safetensors.h"
#include "io/testing.h"
#include "model/device_support.h"
#include "weights/load.h"

namespace moebius {
namespace {

const std::string kData = MOEBIUS_SOURCE_DIR "/tests/golden/data";

std::vector<std::string> cases() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kData)) {
    if (std::filesystem::exists(entry.path() / "config.json")) names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

template <class T>
std::vector<T> read_as(const SafetensorsFile& file, const SafetensorsEntry& entry) {
  EXPECT_EQ(entry.dtype, dtype_of<T>) << entry.name;
  std::vector<T> values(entry.bytes / sizeof(T));
  file.read(entry, values.data());
  return values;
}

double dot(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}
double norm(const std::vector<float>& a) { return std::sqrt(dot(a, a)); }
// Returns the cosine. That of two zeros is 1, because an expert without tokens has no gradient on
// either side.
double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  return norm(a) + norm(b) == 0 ? 1.0 : dot(a, b) / (norm(a) * norm(b));
}

double max_abs(const std::vector<float>& a) {
  double largest = 0;
  for (const float x : a) largest = std::max(largest, std::abs(static_cast<double>(x)));
  return largest;
}
double max_abs_diff(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i) largest = std::max(largest, std::abs(static_cast<double>(a[i]) - b[i]));
  return largest;
}

// The tolerances are those of tools/golden.py --check. Sums of up to 97 products in f32, a few
// layers deep, have errors of about 1e-6 of their largest term.
void expect_f32_gate(const std::string& name, const std::vector<float>& got, const std::vector<float>& want) {
  if (name.starts_with("grad.")) {
    EXPECT_GE(cosine(got, want), 1 - 1e-6) << name;
    EXPECT_NEAR(norm(got), norm(want), 1e-4 * norm(want)) << name;
  } else if (name == "loss" || name == "mtp_loss") {
    EXPECT_NEAR(got[0], want[0], 1e-6 * std::abs(want[0]));
  } else {
    EXPECT_LE(max_abs_diff(got, want), 2e-5 * max_abs(want)) << name;
  }
}

// Runs every case on every device of the machine that this build can use.
class Golden : public testing::TestWithParam<std::tuple<std::string, DeviceKind>> {
 protected:
  static std::string name() { return std::get<0>(GetParam()); }
  SafetensorsFile forward(DType compute, bool gradients, double mtp_coeff = 0,
                          KernelChoice kernels = KernelChoice::automatic) {
    const std::string folder = kData + "/" + name(), out = dir_.path("out.safetensors");
    write_parity({.out = out,
                  .model = folder,
                  .tokens = folder + "/tokens.safetensors",
                  .gradients = gradients,
                  .mtp_coeff = mtp_coeff,
                  .compute = compute,
                  .device = std::get<1>(GetParam()),
                  .kernels = kernels,
                  .threads = 2});
    return SafetensorsFile::open(out);
  }
  SafetensorsFile expected() const { return SafetensorsFile::open(kData + "/" + name() + "/expected.safetensors"); }

 private:
  TestDir dir_;
};

double mtp_coeff(const SafetensorsFile& want) {
  const SafetensorsEntry* coeff = want.find("mtp_coeff");
  return coeff ? read_as<float>(want, *coeff)[0] : 0;
}

TEST_P(Golden, LogitsLossRoutesAndGradientsInF32) {
  const SafetensorsFile want = expected(), got = forward(DType::f32, true, mtp_coeff(want));
  size_t compared = 0;
  for (const SafetensorsEntry& entry : want.entries()) {
    if (entry.name == "token_loss" || entry.name == "mtp_coeff") continue;  // `loss` is the mean of the first
    const SafetensorsEntry* mine = got.find(entry.name);
    ASSERT_NE(mine, nullptr) << entry.name;
    ASSERT_EQ(mine->shape, entry.shape) << entry.name;
    if (entry.name.starts_with("router.")) {
      EXPECT_EQ(read_as<int32_t>(got, *mine), read_as<int32_t>(want, entry)) << entry.name;
    } else {
      expect_f32_gate(entry.name, read_as<float>(got, *mine), read_as<float>(want, entry));
    }
    ++compared;
  }
  EXPECT_EQ(compared, got.entries().size()) << "a tensor was written that the reference does not have";
}

void expect_bf16_logits(const SafetensorsFile& got, const SafetensorsFile& want) {
  EXPECT_GE(cosine(read_as<float>(got, got.at("logits")), read_as<float>(want, want.at("logits"))), 0.999);
}

TEST_P(Golden, LogitsInBf16) { expect_bf16_logits(forward(DType::bf16, false), expected()); }

TEST_P(Golden, LogitsAndGradientsInBf16OnPortableKernels) {
  if (std::get<1>(GetParam()) != DeviceKind::cuda) GTEST_SKIP() << "they are a GPU's";
  const SafetensorsFile want = expected(), got = forward(DType::bf16, true, mtp_coeff(want), KernelChoice::portable),
                        hopper = forward(DType::bf16, true, mtp_coeff(want));
  expect_bf16_logits(got, want);
  // A gradient is as near to that of f32 as it is on the kernels that the GPU takes by itself: twice the angle and
  // a little, since an expert that is chosen by a narrow margin differs between any two roundings.
  for (const SafetensorsEntry& entry : want.entries()) {
    if (!entry.name.starts_with("grad.")) continue;
    const auto exact = read_as<float>(want, entry);
    const auto distance = [&](const SafetensorsFile& of) {
      return 1 - cosine(read_as<float>(of, of.at(entry.name)), exact);
    };
    EXPECT_LE(distance(got), 2 * distance(hopper) + 1e-3) << entry.name;
  }
}

TEST_P(Golden, WithoutGradientsLogitsAndLossAreTheSame) {
  const SafetensorsFile with = forward(DType::f32, true);
  const auto logits = read_as<float>(with, with.at("logits")), loss = read_as<float>(with, with.at("loss"));
  const SafetensorsFile without = forward(DType::f32, false);
  EXPECT_EQ(read_as<float>(without, without.at("logits")), logits);
  EXPECT_EQ(read_as<float>(without, without.at("loss")), loss);
}

std::vector<DeviceKind> devices() {
  std::vector<DeviceKind> all{DeviceKind::cpu};
  if (Accelerator::why_missing().empty()) all.push_back(DeviceKind::cuda);
  return all;
}

// Computes the first row token by token through the caches, which changes the order of sums. Cases
// with several documents in a row are left out, since generation has one document.
TEST_P(Golden, GenerationComputesTheSameLogits) {
  const std::string folder = kData + "/" + name();
  const SafetensorsFile tokens = SafetensorsFile::open(folder + "/tokens.safetensors"), want = expected();
  if (tokens.find("doc_start")) GTEST_SKIP() << "documents apart";
  const std::vector<int64_t> shape = want.at("logits").shape;  // [B, S, V]
  const int64_t S = shape[1], V = shape[2];
  const auto ids = read_as<int32_t>(tokens, tokens.at("tokens"));
  const auto all = read_as<float>(want, want.at("logits"));
  EngineSpec spec = generation_engine_spec(read_model_spec(folder), DType::f32, S, 2, 3);
  spec.device = std::get<1>(GetParam());
  Engine engine(spec);
  Stream s = engine.stream();
  load_weights(s, engine.model(), folder);
  std::vector<float> got(V);
  feed_tokens(engine, std::span(ids).first(S - 2), 0, got);  // in chunks of 3, and then one by one
  for (int64_t i = S - 2; i < S; ++i) feed_tokens(engine, std::span(ids).subspan(i, 1), i, got);
  const std::vector<float> last(all.begin() + (S - 1) * V, all.begin() + S * V);
  EXPECT_LE(max_abs_diff(got, last), 2e-5 * max_abs(last));
}

// Returns all cases on all devices, without the cases that a GPU refuses.
std::vector<std::tuple<std::string, DeviceKind>> cases_on_devices() {
  std::vector<std::tuple<std::string, DeviceKind>> all;
  for (const DeviceKind device : devices()) {
    for (const std::string& name : cases()) {
      try {
        check_device(read_model_spec(kData + "/" + name), device);
        all.emplace_back(name, device);
      } catch (const Error& e) {
        EXPECT_EQ(e.kind(), ErrorKind::usage) << e.what();
      }
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cases, Golden, testing::ValuesIn(cases_on_devices()), [](const auto& info) {
  return std::get<0>(info.param) + "_" + std::string(name_of(std::get<1>(info.param)));
});

TEST(GoldenData, HasAllItsCases) { EXPECT_EQ(cases().size(), 30u); }

}  // namespace
}  // namespace moebius
