#include "checkpoint/reader.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>

#include "checkpoint/list.h"
#include "checkpoint/manifest.h"
#include "checkpoint/store.h"
#include "io/files.h"
#include "io/hash.h"
#include "io/testing.h"

namespace moebius {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// One checkpoint of two shards, saved again for each test.
class CheckpointRead : public testing::Test {
 protected:
  CheckpointRead() {
    std::iota(w_.begin(), w_.end(), 1.f);
    CheckpointStore store(dir_.path(), 1, false, /*shard_bytes=*/24);
    store.save(12, tensors(), {{"model", "tiny"}});
  }
  std::vector<NamedTensor> tensors() { return {{"w", tensor_of(w_.data(), {2, 3})}, {"n", tensor_of(n_.data(), {2})}}; }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  void replace(const std::string& name, const std::string& contents) { write_file_atomic(path(name), contents); }
  // The manifest with another field, sealed again: what another writer could have made.
  void edit(const std::function<void(nlohmann::json&)>& change) {
    std::string text = read_file(path("manifest.json"));
    nlohmann::json json = nlohmann::json::parse(text);
    json.erase("manifest_xxh3");
    change(json);
    text = json.dump();
    text.pop_back();
    const std::string hash = to_hex(hash_bytes(text.data(), static_cast<int64_t>(text.size())));
    replace("manifest.json", text + ",\n \"manifest_xxh3\": \"" + hash + "\"\n}\n");
  }
  void refuse(const std::string& text) {
    expect_error(ErrorKind::input, text, [&] { CheckpointReader reader(folder_); });
    expect_error(ErrorKind::input, folder_, [&] { CheckpointReader reader(folder_); });
    EXPECT_THAT(verify_checkpoint(folder_).problems, ElementsAre(HasSubstr(text)));
  }

  std::vector<float> w_ = std::vector<float>(6);
  std::vector<int64_t> n_{-1, 5};
  TestDir dir_;
  std::string folder_ = dir_.path("step-00000012");
};

TEST_F(CheckpointRead, VerifyReportsStepTensorsFilesAndBytes) {
  const VerifyReport report = verify_checkpoint(folder_);
  EXPECT_TRUE(report.ok());
  EXPECT_EQ(report.step, 12);
  EXPECT_EQ(report.num_tensors, 2);
  EXPECT_EQ(report.num_files, 2);
  const std::string shards[] = {read_file(path("shard-00000.safetensors")), read_file(path("shard-00001.safetensors"))};
  EXPECT_EQ(report.bytes, static_cast<int64_t>(shards[0].size() + shards[1].size()));
}

TEST_F(CheckpointRead, RefusesAnotherNameShapeOrDtype) {
  const CheckpointReader reader(folder_);
  std::vector<float> other(6);
  reader.read("w", tensor_of(other.data(), {2, 3}));
  EXPECT_EQ(other, w_);
  expect_error(ErrorKind::input, "expected \"w\" to be f32[3, 2]; got f32[2, 3]", [&] {
    reader.read("w", tensor_of(other.data(), {3, 2}));
  });
  expect_error(ErrorKind::input, "expected \"n\" to be f32[2]; got i64[2]",
               [&] { reader.read("n", tensor_of(other.data(), {2})); });
  expect_error(ErrorKind::input, "expected a tensor \"x\"; got none of that name among 2",
               [&] { reader.read("x", tensor_of(other.data(), {2})); });
  Tensor elsewhere = tensor_of(other.data(), {2, 3});
  elsewhere.device = DeviceKind::cuda;
  expect_error(ErrorKind::usage, "expected CPU memory for \"w\"; got cuda", [&] { reader.read("w", elsewhere); });
}

// Blocks are of the global tensor, so a rank may need parts of them.
TEST(CheckpointCodes, AreReadInSlicesThatCutTheirBlocks) {
  constexpr int64_t kRows = 3, kWidth = 2 * kCodeBlock;
  std::vector<uint8_t> codes(kRows * kWidth);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 7);
  std::vector<float> scales{1, 2, 3, 4, 5, 6}, want(codes.size());
  decode_blocks(BlockCode::with_sign, want.data(), codes.data(), scales.data(), std::ssize(want));
  const TestDir dir;
  CheckpointStore store(dir.path(), 1, false);
  store.save(1, {{"m", tensor_of(codes.data(), {kRows, kWidth})}, {"m.scales", tensor_of(scales.data(), {kRows, 2})}},
             {});
  const CheckpointReader reader(dir.path("step-00000001"));
  for (const Shard& shard : {Shard{}, Shard{1, 0, 384}, Shard{1, 384, 128}, Shard{1, 128, 256}, Shard{0, 1, 2}}) {
    TensorSlice slice{.shape = {kRows, kWidth}, .shard = shard, .begin = 0, .end = 0};
    slice.end = block_numel(slice);
    const int64_t first = shard.dim == 1 ? shard.begin : 0, width = shard.dim == 1 ? shard.count : kWidth;
    const int64_t row = shard.dim == 0 ? shard.begin : 0;
    for (const auto& [begin, end] : {std::pair(int64_t{0}, slice.end), std::pair(int64_t{100}, slice.end - 1)}) {
      slice.begin = begin;
      slice.end = end;
      std::vector<float> got(end - begin), expected;
      for (int64_t i = begin; i < end; ++i) expected.push_back(want[(row + i / width) * kWidth + first + i % width]);
      reader.read(
          {.name = "m", .tensor = tensor_of(got.data(), {end - begin}), .slice = slice, .code = BlockCode::with_sign});
      EXPECT_EQ(got, expected) << slice_name("m", slice);
      slice.begin = 0;
      slice.end = block_numel(slice);
    }
  }
}

TEST_F(CheckpointRead, ReadAllRefusesMissingUnexpectedAndDifferentTensors) {
  const CheckpointReader reader(folder_);
  std::vector<NamedTensor> into = tensors();
  into[1].name.back() = 'm';
  into[0].tensor.shape = {6};
  w_[0] = 77;
  expect_error(
      ErrorKind::input,
      "expected exactly the 2 tensors of this model; got 1 missing (m) 1 unexpected (n) 1 different (w: f32[6] "
      "asked, f32[2, 3] saved)",
      [&] { reader.read_all(into); });
  EXPECT_EQ(w_[0], 77);  // nothing is read before all fits
}

TEST_F(CheckpointRead, ALongListIsCut) {
  std::vector<NamedTensor> into = tensors();
  for (int i = 10; i < 31; ++i) into.push_back({fmt::format("x{}", i), tensor_of(w_.data(), {6})});
  expect_error(ErrorKind::input, "got 21 missing (x10, ", [&] { CheckpointReader(folder_).read_all(into); });
  expect_error(ErrorKind::input, ", x29, ...)", [&] { CheckpointReader(folder_).read_all(into); });
}

// A flip of any single bit of any file is found, and reported as bad input.
TEST_F(CheckpointRead, EveryBitFlipIsFound) {
  int64_t num_flips = 0;
  for (const std::string name : {"manifest.json", "shard-00000.safetensors", "shard-00001.safetensors"}) {
    const std::string whole = read_file(path(name));
    File file = File::create(path(name));
    file.write_at(whole.data(), static_cast<int64_t>(whole.size()), 0);
    for (size_t bit = 0; bit < whole.size() * 8; ++bit, ++num_flips) {
      const char flipped = static_cast<char>(whole[bit / 8] ^ (1 << bit % 8));
      file.write_at(&flipped, 1, static_cast<int64_t>(bit / 8));
      ASSERT_FALSE(verify_checkpoint(folder_).ok()) << name << " bit " << bit;
      file.write_at(&whole[bit / 8], 1, static_cast<int64_t>(bit / 8));
    }
  }
  EXPECT_GT(num_flips, 8 * 48);
  EXPECT_TRUE(verify_checkpoint(folder_).ok());
}

TEST_F(CheckpointRead, ADamagedTensorIsNamedWithBothHashes) {
  const std::string name = CheckpointReader(folder_).tensors().at("w").pieces[0].file;
  const std::string expected = CheckpointReader(folder_).tensors().at("w").pieces[0].xxh3[0];
  std::string contents = read_file(path(name));
  contents.back() ^= 1;
  replace(name, contents);
  const CheckpointReader reader(folder_);
  const auto read = [&] { reader.read_all(tensors()); };
  expect_error(ErrorKind::input, path(name) + ": expected tensor \"w\", 24 bytes at ", read);
  expect_error(ErrorKind::input, "with XXH3 " + expected + "; got ", read);
  expect_error(ErrorKind::input, "the file is damaged, remove the folder or use the checkpoint before it", read);
  EXPECT_THAT(verify_checkpoint(folder_).problems, ElementsAre(HasSubstr("expected tensor \"w\"")));
}

TEST_F(CheckpointRead, FilesThatAreMissingCutOrLonger) {
  const std::string name = "shard-00001.safetensors", whole = read_file(path(name));
  std::filesystem::remove(path(name));
  refuse("No such file");
  replace(name, whole.substr(0, whole.size() - 1));
  refuse(fmt::format("{}: expected {} bytes; got {}", path(name), whole.size(), whole.size() - 1));
  replace(name, whole + "x");
  refuse(fmt::format("expected {} bytes; got {}", whole.size(), whole.size() + 1));
  replace(name, whole);
  replace("notes.txt", "a file of somebody's own");
  EXPECT_TRUE(verify_checkpoint(folder_).ok());
}

TEST_F(CheckpointRead, DamagedHeader) {
  const std::string name = "shard-00000.safetensors";
  std::string contents = read_file(path(name));
  contents[9] ^= 1;
  replace(name, contents);
  refuse(path(name) + ": expected a header of ");
}

TEST_F(CheckpointRead, ManifestMissingCutOrEmpty) {
  const std::string whole = read_file(path("manifest.json"));
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{40}, whole.size() / 2, whole.size() - 1}) {
    replace("manifest.json", whole.substr(0, bytes));
    refuse(fmt::format("expected {} bytes that end with their own hash; got others", bytes));
  }
  std::filesystem::remove(path("manifest.json"));
  refuse("expected manifest.json, the mark of a finished save; got none");
}

TEST_F(CheckpointRead, ManifestOfAnotherVersion) {
  edit([](nlohmann::json& j) { j["version"] = 3; });
  refuse("expected format moebius-checkpoint version 1 or 2; got \"moebius-checkpoint\" version 3");
}

TEST_F(CheckpointRead, ManifestThatPointsElsewhere) {
  const auto with = [&](const char* key, const nlohmann::json& value) {
    const std::string whole = read_file(path("manifest.json"));
    edit([&](nlohmann::json& j) {
      nlohmann::json& w = j["tensors"]["w"];
      (key == std::string("shape") ? w : w["pieces"][0])[key] = value;
    });
    refuse("expected every tensor inside a file of the manifest; got \"w\"");
    replace("manifest.json", whole);
  };
  with("file", "other");
  with("offset", -1);
  with("offset", INT64_MAX);
  with("bytes", 25);
  with("bytes", INT64_MAX);
  with("shape", {-2, -3});
  with("shape", {int64_t{1} << 32, int64_t{1} << 32});
  with("block", {2, 0, 1});
  with("block", {0, 1, 2});
  with("block", {1, -1, 3});
  with("range", {0, 7});
  with("range", {2, 1});
  with("range", {0, 5});
  with("xxh3", nlohmann::json::array());
  with("xxh3", {"", ""});
  edit([](nlohmann::json& j) { j["files"]["../x"] = j["files"]["shard-00000.safetensors"]; });
  refuse("expected files of this folder with a header inside; got \"../x\"");
}

TEST_F(CheckpointRead, RefusesPiecesWithGapsOrOverlaps) {
  const std::string whole = read_file(path("manifest.json"));
  edit([](nlohmann::json& j) { j["tensors"]["w"]["pieces"].push_back(j["tensors"]["w"]["pieces"][0]); });
  refuse("expected pieces that hold each element of \"w\" once; got others: the ranges do not tile the block of it");
  replace("manifest.json", whole);
  edit([](nlohmann::json& j) { j["tensors"]["w"]["pieces"].clear(); });
  refuse("expected pieces that hold each element of \"w\" once; got others: nothing holds it");
}

// One rank wrote version 1 of the manifest.
TEST_F(CheckpointRead, ThePreviousVersionIsReadable) {
  edit([](nlohmann::json& j) {
    j["version"] = 1;
    for (auto& [name, t] : j["tensors"].items()) {
      const nlohmann::json piece = t["pieces"][0];
      t.erase("pieces");
      t.update(piece);
      t["xxh3"] = piece["xxh3"][0];
    }
  });
  EXPECT_TRUE(verify_checkpoint(folder_).ok());
  const std::vector<float> saved = w_;
  w_.assign(6, 0);
  n_.assign(2, 0);
  CheckpointReader(folder_).read_all(tensors());
  EXPECT_EQ(w_, saved);
  EXPECT_THAT(n_, ElementsAre(-1, 5));
}

TEST_F(CheckpointRead, RefusesAManifestWithoutMetadata) {
  edit([](nlohmann::json& j) { j.erase("meta"); });
  refuse("expected the manifest of a checkpoint; got ");
}

TEST_F(CheckpointRead, NewestSkipsAFolderNamedAfterAnotherStep) {
  std::filesystem::rename(folder_, dir_.path("step-00000013"));
  std::vector<std::string> rejected;
  EXPECT_EQ(newest_checkpoint(dir_.path(), &rejected), std::nullopt);
  EXPECT_THAT(rejected, ElementsAre(HasSubstr("expected step 13, as the folder says; got step 12")));
  EXPECT_EQ(CheckpointReader(dir_.path("step-00000013")).step(), 12);
}

}  // namespace
}  // namespace moebius
