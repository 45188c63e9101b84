#include "weights/fingerprint.h"
#include "io/convert_elements.h"

#include <cstring>
#include <map>
#include <set>

#include "io/testing.h"
#include "weights/adapter.h"
#include "weights/import.h"
#include "weights/load.h"

namespace moebius {
namespace {

const std::string kData = MOEBIUS_SOURCE_DIR "/tests/golden/data/";

// Tensors in memory, with the numbers i / 8.
class InMemory final : public WeightsReader {
 public:
  explicit InMemory(std::vector<WeightsEntry> entries) : entries_(std::move(entries)) {
    for (const WeightsEntry& e : entries_) {
      std::vector<float>& values = values_.emplace_back(static_cast<size_t>(e.shape.numel()));
      for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1024) / 8;
    }
  }
  const std::vector<WeightsEntry>& entries() const override { return entries_; }
  void read(size_t entry, void* dst) const override {
    const std::vector<float>& values = values_[entry];
    convert_elements(dst, entries_[entry].dtype, values.data(), DType::f32, std::ssize(values), "test");
  }
  float& at(size_t entry, int64_t i) { return values_[entry][static_cast<size_t>(i)]; }

 private:
  std::vector<WeightsEntry> entries_;
  std::vector<std::vector<float>> values_;
};

const WeightsEntry kNorm{"model.norm.weight", {64}}, kLarge{"model.embed_tokens.weight", {300, 200}};

WeightsFingerprint of(const WeightsReader& weights) { return fingerprint_of(weights, ModelSpec{}); }

TEST(Fingerprint, SamplesPiecesOfRowsAtEvenDistances) {
  EXPECT_EQ(sampled_elements("norm", {4096}), (std::vector<ElementRange>{{0, 4096}}));
  EXPECT_EQ(sampled_elements("none", {0}), (std::vector<ElementRange>{{0, 0}}));
  const std::vector<ElementRange> two = sampled_elements("a", {100, 41});
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0], (ElementRange{25 * 41, 41}));  // a row is shorter than a piece
  EXPECT_EQ(two[1], (ElementRange{75 * 41, 41}));
  const int64_t rows = 16 << 10, cols = 2048;
  std::set<int64_t> columns;
  const std::vector<ElementRange> eight = sampled_elements("b", {rows, cols});
  ASSERT_EQ(eight.size(), 8u);
  for (int64_t i = 0; i < 8; ++i) {
    EXPECT_EQ(eight[i].begin / cols, (2 * i + 1) * rows / 16);
    EXPECT_EQ(eight[i].count, 64);
    EXPECT_LE(eight[i].begin % cols + 64, cols);
    columns.insert(eight[i].begin % cols);
  }
  EXPECT_EQ(columns.size(), 8u);
  EXPECT_NE(sampled_elements("c", {rows, cols})[0], eight[0]);
  EXPECT_EQ(sampled_elements("d", {1 << 20, cols}).size(), 64u);
}

TEST(Fingerprint, ShowsEveryOtherTensor) {
  const InMemory model({kNorm, kLarge});
  const WeightsFingerprint print = of(model);
  EXPECT_EQ(of(InMemory({kLarge, kNorm})), print);  // in another order
  const auto differs = [&](const WeightsReader& other) {
    EXPECT_NE(of(other).values, print.values);
    EXPECT_NE(of(other).exact, print.exact);
  };
  differs(InMemory({kNorm}));
  differs(InMemory({kNorm, {kLarge.name, {200, 300}}}));
  differs(InMemory({kNorm, {"lm_head.weight", kLarge.shape}}));
  for (int64_t i = 0; i < 64; ++i) {
    InMemory other({kNorm, kLarge});
    other.at(0, i) += 1;
    differs(other);
  }
  for (const ElementRange& range : sampled_elements(kLarge.name, kLarge.shape)) {
    InMemory other({kNorm, kLarge});
    other.at(1, range.end() - 1) += 1;
    differs(other);
  }
}

TEST(Fingerprint, ValuesAreThoseInBf16) {
  const InMemory wide({kNorm, kLarge}), narrow({{kNorm.name, kNorm.shape, DType::bf16}, kLarge});
  EXPECT_EQ(of(narrow).values, of(wide).values);
  EXPECT_NE(of(narrow).exact, of(wide).exact);
  InMemory rounded({kNorm, kLarge});
  rounded.at(0, 9) *= 1 + 0x1p-12f;
  EXPECT_EQ(of(rounded).values, of(wide).values);
  EXPECT_NE(of(rounded).exact, of(wide).exact);
}

TEST(Fingerprint, LeavesOutWhatFoldersOfOneModelMayLack) {
  ModelSpec model;
  model.num_layers = 2;
  model.num_mtp_layers = 1;
  const WeightsFingerprint print = fingerprint_of(InMemory({kNorm}), model);
  EXPECT_EQ(fingerprint_of(InMemory({kNorm, {"model.layers.2.enorm.weight", {8}}}), model), print);
  EXPECT_EQ(fingerprint_of(InMemory({kNorm, {"model.layers.1.mlp.gate.last_load", {8}}}), model), print);
  EXPECT_NE(fingerprint_of(InMemory({kNorm, {"model.layers.1.mlp.gate.weight", {8}}}), model), print);
}

WeightsFingerprint of_folder(const std::string& path) {
  const ModelSpec model = read_model_spec(path);
  return fingerprint_of(*open_weights(find_weights(path), ModelCatalog(model)), model);
}

TEST(Fingerprint, IsASumOfShares) {
  const ModelSpec model = read_model_spec(kData + "qwen3_moe_v5");
  const auto weights = open_weights(find_weights(kData + "qwen3_moe_v5"), ModelCatalog(model));
  WeightsFingerprint sum;
  for (size_t first : {2, 0, 1}) sum = sum + fingerprint_of(*weights, model, {first, 3});
  EXPECT_EQ(sum, of_folder(kData + "qwen3_moe_v5"));
}

// Forms in which folders hold matrices: a tensor for each expert, one for all in either orientation, and few bits.
const std::vector<std::string> kForms{"qwen3_v5_bias",     "qwen3_moe_v4_step2", "qwen3_moe_v5",    "qwen3_moe_packed",
                                      "gpt_oss_v5_packed", "gpt_oss_mxfp4",      "deepseek_v3_fp8", "deepseek_v3_mtp"};

TEST(Fingerprint, IsTheSameForEveryFormOfAModel) {
  for (const std::string& name : kForms) {
    const TestDir dir;
    import_hugging_face({.out = dir.path("imported"), .model = kData + name});
    EXPECT_EQ(of_folder(dir.path("imported")), of_folder(kData + name)) << name;
  }
}

// Compares slices of all tensors with the whole ones: parts of rows and more than a row, of shards and of all.
void expect_slices_of_tensors(const WeightsReader& weights, const std::string& who) {
  for (size_t i = 0; i < weights.entries().size(); ++i) {
    const WeightsEntry& e = weights.entries()[i];
    const int64_t size = size_of(e.dtype);
    std::vector<char> whole(static_cast<size_t>(e.bytes()));
    weights.read(i, whole.data());
    for (int dim = -1; dim < std::min(2, e.shape.rank()); ++dim) {
      TensorSlice slice = whole_slice(dims_of(e.shape));
      if (dim >= 0) slice.shard = shard_of(e.shape, dim, /*r=*/1, /*n=*/3);
      const int64_t n = block_numel(slice);
      for (const auto& [begin, end] : {std::pair{n / 3, n / 3 + 2}, {n / 5, n - 1}, {int64_t{0}, n}}) {
        slice.begin = begin;
        slice.end = std::min(end, n);
        if (slice.begin >= slice.end) continue;
        std::vector<char> expected(static_cast<size_t>(slice.numel() * size)), read = expected, sample = expected;
        for (const CommonRun& run : common_runs(whole_slice(slice.shape), slice))
          std::memcpy(expected.data() + run.in_b * size, whole.data() + run.in_a * size, run.count * size);
        weights.read_slice(i, slice, read.data());
        weights.read_sample(i, slice, sample.data());
        ASSERT_TRUE(read == expected) << who << " " << slice_name(e.name, slice);
        ASSERT_TRUE(sample == expected) << who << " " << slice_name(e.name, slice);
      }
    }
  }
}

TEST(WeightsReader, SlicesAndSamplesAreElementsOfTensors) {
  for (const std::string& name : kForms) {
    const TestDir dir;
    import_hugging_face({.out = dir.path("imported"), .model = kData + name});
    for (const std::string& folder : {kData + name, dir.path("imported")})
      expect_slices_of_tensors(*open_weights(find_weights(folder), ModelCatalog(read_model_spec(folder))), folder);
  }
  for (const std::string name : {"qwen3_moe_all", "qwen3_moe_fused", "gpt_oss_fused", "deepseek_v3_latent"}) {
    const std::string folder = kData + "peft/" + name;
    const ModelCatalog catalog(read_model_spec(folder));
    expect_slices_of_tensors(*open_merged(find_weights(folder), {.path = folder + "/adapter"}, catalog), folder);
  }
}

TEST(Fingerprint, IsATextOfTwoWords) {
  const WeightsFingerprint print{.values = {.high = 1, .low = 0xabcdef}, .exact = {.high = ~0ull, .low = 0}};
  EXPECT_EQ(to_text(print), "00000000000000010000000000abcdef ffffffffffffffff0000000000000000");
  EXPECT_EQ(parse_fingerprint(to_text(print), "test"), print);
  std::string bad = to_text(print);
  for (const std::string& text : {std::string(), bad + "0", bad.replace(0, 1, "x"), std::string(65, '0')})
    expect_error(ErrorKind::input,
                 "test: expected a fingerprint of weights, two words of 32 hexadecimal digits; got \"",
                 [&] { parse_fingerprint(text, "test"); });
}

}  // namespace
}  // namespace moebius
