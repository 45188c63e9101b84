#include "io/safetensors.h"

#include <cstring>
#include <fstream>

#include "io/testing.h"

namespace moebius {
namespace {

std::string file_of(const std::string& json, const std::string& data) {
  const uint64_t n = json.size();
  return std::string(reinterpret_cast<const char*>(&n), 8) + json + data;
}

void refuse(const std::string& contents, const std::string& text) {
  const TestDir dir;
  const std::string path = dir.path("m.safetensors");
  write_file_atomic(path, contents);
  expect_error(ErrorKind::input, text, [&] { SafetensorsFile::open(path); });
  expect_error(ErrorKind::input, "safetensors " + path, [&] { SafetensorsFile::open(path); });
}

// Expects `text` for one entry "a" with the given fields, before `bytes` of data.
void refuse_entry(const std::string& fields, int64_t bytes, const std::string& text) {
  refuse(file_of("{\"a\":{" + fields + "}}", std::string(bytes, 'x')), text);
}

TEST(Safetensors, RoundTripKeepsNamesTypesShapesBytesAndMetadata) {
  const TestDir dir;
  const std::string path = dir.path("m.safetensors");
  const std::vector<float> w{1, 2, 3, 4, 5, 6};
  const std::vector<uint8_t> b{7, 8, 9};
  const int64_t s = -5;
  write_safetensors(path,
                    {{{"b", DType::u8, {3}}, b.data()},
                     {{"w", DType::f32, {2, 1, 3}}, w.data()},
                     {{"empty", DType::bf16, {0, 4}}, nullptr},
                     {{"scalar", DType::i64, {}}, &s}},
                    {{"format", "pt"}});
  EXPECT_EQ(dir.num_files(), 1);
  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  ASSERT_EQ(file.entries().size(), 4u);
  EXPECT_EQ(file.entries()[0].name, "scalar");  // by falling element size, then by name
  EXPECT_EQ(file.entries()[1].name, "w");
  EXPECT_EQ(file.entries()[0].offset % 8, 0);
  EXPECT_EQ(file.at("w").shape, (std::vector<int64_t>{2, 1, 3}));
  EXPECT_EQ(file.at("empty").dtype, DType::bf16);
  std::vector<float> w_read(6);
  file.read(file.at("w"), w_read.data());
  EXPECT_EQ(w_read, w);
  int64_t s_read = 0;
  file.read(file.at("scalar"), &s_read);
  EXPECT_EQ(s_read, s);
  float part[2];
  file.read(file.at("w"), 4, 12, part);
  EXPECT_EQ(part[1], 3);
}

TEST(Safetensors, MissingTensorsAreErrors) {
  const TestDir dir;
  const uint8_t b = 1;
  write_safetensors(dir.path("m"), {{{"b", DType::u8, {1}}, &b}});
  const SafetensorsFile file = SafetensorsFile::open(dir.path("m"));
  EXPECT_EQ(file.find("c"), nullptr);
  expect_error(ErrorKind::input, "expected a tensor \"c\"; got none of that name among 1;", [&] { file.at("c"); });
  uint8_t dst[4];
  expect_error(ErrorKind::usage, "got [0, 2)", [&] { file.read(file.at("b"), 0, 2, dst); });
}

TEST(Safetensors, FileThatShrinksUnderTheReaderIsAnError) {
  const TestDir dir;
  const std::vector<uint8_t> b(100, 1);
  write_safetensors(dir.path("m"), {{{"b", DType::u8, {100}}, b.data()}});
  const SafetensorsFile file = SafetensorsFile::open(dir.path("m"));
  std::filesystem::resize_file(dir.path("m"), std::filesystem::file_size(dir.path("m")) - 1);
  std::vector<uint8_t> dst(100);
  expect_error(ErrorKind::io, "got 99 before the end of the file", [&] { file.read(file.at("b"), dst.data()); });
}

TEST(Safetensors, OffsetsAboveFourGibibytes) {
  const TestDir dir;
  const int64_t bytes = (int64_t{1} << 32) + 11;
  const SafetensorsWriter writer(dir.path("m"), {{"big", DType::u8, {bytes}}});
  std::filesystem::resize_file(dir.path("m"), writer.file_bytes());  // a hole, which needs no space
  std::fstream(dir.path("m"), std::ios::in | std::ios::out).seekp(writer.file_bytes() - 3) << "xyz";
  const SafetensorsFile file = SafetensorsFile::open(dir.path("m"));
  char tail[4];
  file.read(file.at("big"), bytes - 4, bytes, tail);
  EXPECT_EQ(std::string(tail, 4), std::string("\0xyz", 4));
}

TEST(Safetensors, ReadsTheFilesOfTheOriginalLibrary) {
  int num_files = 0;
  for (const auto& file : std::filesystem::recursive_directory_iterator(MOEBIUS_SOURCE_DIR "/tests/golden/data")) {
    if (file.path().extension() != ".safetensors") continue;
    EXPECT_GT(SafetensorsFile::open(file.path().string()).entries().size(), 0u);
    ++num_files;
  }
  EXPECT_GT(num_files, 0);
}

TEST(Safetensors, WriterStreamsInPiecesAndHashesThem) {
  const TestDir dir;
  const std::string bytes = "0123456789";
  SafetensorsWriter writer(dir.path("m"), {{"t", DType::u8, {10}}, {"u", DType::u8, {2}}});
  writer.write("t", bytes.data(), 4);
  writer.write("u", bytes.data(), 2);
  writer.write("t", bytes.data() + 4, 6);
  EXPECT_THAT(writer.hashes("t"), testing::ElementsAre(hash_bytes(bytes.data(), 10)));
  writer.close();
  EXPECT_EQ(static_cast<int64_t>(std::filesystem::file_size(dir.path("m"))), writer.file_bytes());
  const SafetensorsFile file = SafetensorsFile::open(dir.path("m"));
  std::string read(10, ' ');
  file.read(file.at("t"), read.data());
  EXPECT_EQ(read, bytes);
}

TEST(Safetensors, WriterHashesChunkByChunk) {
  constexpr int64_t kChunk = SafetensorsWriter::kHashedBytes;
  const TestDir dir;
  std::vector<uint8_t> bytes(2 * kChunk + 3);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * i >> 7);
  SafetensorsWriter writer(dir.path("m"), {{"t", DType::u8, {std::ssize(bytes)}}, {"none", DType::u8, {0}}});
  writer.write("t", bytes.data(), kChunk - 1);
  writer.write("t", bytes.data() + kChunk - 1, kChunk + 4);
  EXPECT_THAT(writer.hashes("t"),
              testing::ElementsAre(hash_bytes(bytes.data(), kChunk), hash_bytes(bytes.data() + kChunk, kChunk),
                                   hash_bytes(bytes.data() + 2 * kChunk, 3)));
  EXPECT_THAT(writer.hashes("none"), testing::ElementsAre(hash_bytes(nullptr, 0)));
}

TEST(Safetensors, WriterRefusesMisuse) {
  const TestDir dir;
  const std::string path = dir.path("m");
  expect_error(ErrorKind::usage, "expected distinct names", [&] {
    SafetensorsWriter(path, {{"t", DType::u8, {1}}, {"t", DType::u8, {1}}});
  });
  expect_error(ErrorKind::usage, "not reserved", [&] { SafetensorsWriter(path, {{"__metadata__", DType::u8, {1}}}); });
  expect_error(ErrorKind::usage, "got [-1] for \"t\"", [&] { SafetensorsWriter(path, {{"t", DType::u8, {-1}}}); });
  SafetensorsWriter writer(path, {{"t", DType::u8, {2}}});
  expect_error(ErrorKind::usage, "expected a declared tensor; got \"x\"", [&] { writer.write("x", "a", 1); });
  expect_error(ErrorKind::usage, "at most 2 more bytes of \"t\"; got 3", [&] { writer.write("t", "abc", 3); });
  writer.write("t", "a", 1);
  expect_error(ErrorKind::usage, "expected 2 bytes of \"t\" before close; got 1", [&] { writer.close(); });
}

TEST(Safetensors, ReportsAFullDisk) {
  expect_error(ErrorKind::io, "/dev/full: No space left on device; the disk is full", [] {
    SafetensorsWriter("/dev/full", {{"t", DType::u8, {2}}});
  });
}

TEST(Safetensors, AcceptsPaddingEmptyTensorsAnywhereAndAnyOrder) {
  const TestDir dir;
  const std::string json =
      R"({"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]},"e":{"shape":[0],"dtype":"F32","data_offsets":[1,1]},)"
      R"("a":{"dtype":"BOOL","shape":[],"data_offsets":[0,1]}}     )";
  write_file_atomic(dir.path("m"), file_of(json, "xyz"));
  const SafetensorsFile file = SafetensorsFile::open(dir.path("m"));
  EXPECT_EQ(file.entries().size(), 3u);
  char read[2];
  file.read(file.at("b"), read);
  EXPECT_EQ(read[1], 'z');
}

TEST(SafetensorsRefuse, PointersOfGitLfs) {
  refuse("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n",
         "got a Git LFS pointer to them; run git");
}

TEST(SafetensorsRefuse, Sizes) {
  refuse("1234567", "expected at least 8 bytes; got 7");
  refuse(file_of("{}", "").substr(0, 9), "got 2");                    // header cut off
  refuse(std::string(8, '\xff') + "{}", "got 18446744073709551615");  // 8 + N wraps
  const uint64_t big = 100'000'001;
  refuse(std::string(reinterpret_cast<const char*>(&big), 8) + "{}", "at most 100000000 bytes");
  refuse(file_of("", ""), "starts with '{'");
  refuse(file_of(" {}", ""), "starts with '{'");
  refuse(file_of("{}", "x"), "followed by other bytes");
  refuse_entry(R"("dtype":"U8","shape":[4],"data_offsets":[0,4])", 3, "truncated");
}

TEST(SafetensorsRefuse, Json) {
  refuse(file_of("{\"a\xff\":{}}", ""), "in UTF-8");
  refuse(file_of("{", ""), "expected a JSON header");
  refuse(file_of("{}{}", ""), "expected a JSON header");
  refuse(file_of(R"({"a":null})", ""), "got a null at \"a\"");
  refuse(file_of(R"({"a":true})", ""), "got a boolean");
  refuse(file_of(R"({"a":"x"})", ""), "got a string");
  refuse(file_of(R"({"a":[]})", ""), "got an array");
  refuse(file_of(R"({"a":{"shape":{}}})", ""), "got an object inside");
  std::string deep;
  for (int i = 0; i < 100000; ++i) deep += "{\"a\":";
  refuse(file_of(deep, ""), "got an unknown field in \"a\"");
  refuse(file_of("{\"a\":" + std::string(100000, '['), ""), "got an array");
}

TEST(SafetensorsRefuse, Names) {
  const std::string entry = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  refuse(file_of("{\"a\":" + entry + ",\"a\":" + entry + "}", ""), "got a repeated name at \"a\"");
  refuse(file_of("{\"../a\":" + entry + "}", ""), "a name with \"..\"");
  refuse(file_of("{\"a\\u0000b\":" + entry + "}", ""), "a name with a NUL");
  refuse(file_of(R"({"__metadata__":{"k":1}})", ""), "got the number 1");
  refuse(file_of(R"({"__metadata__":{"k":{}}})", ""), "got an object inside");
  refuse(file_of(R"({"__metadata__":{"k":"1","k":"2"}})", ""), "a repeated __metadata__ key \"k\"");
  refuse(file_of(R"({"__metadata__":{},"__metadata__":{}})", ""), "got a repeated name");
}

TEST(SafetensorsRefuse, Fields) {
  refuse_entry(R"("dtype":"U8","shape":[1])", 1, "without dtype, shape or data_offsets");
  refuse_entry(R"("dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1])", 1, "a repeated field in \"a\"");
  refuse_entry(R"("shape":[1],"shape":[1],"dtype":"U8","data_offsets":[0,1])", 1, "a repeated field in \"a\"");
  refuse_entry(R"("dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1)", 1, "an unknown field in \"a\"");
  refuse_entry(R"("dtype":"U9","shape":[1],"data_offsets":[0,1])", 1, "got U9");
  refuse_entry(R"("dtype":["U8"],"shape":[1],"data_offsets":[0,1])", 1, "got an array");
  refuse_entry(R"("dtype":1,"shape":[1],"data_offsets":[0,1])", 1, "got the number 1");
  refuse_entry(R"("dtype":"U8","shape":"1","data_offsets":[0,1])", 1, "got a string");
  refuse_entry(R"("dtype":"U8","shape":[[1]],"data_offsets":[0,1])", 1, "got an array");
}

TEST(SafetensorsRefuse, Numbers) {
  refuse_entry(R"("dtype":"U8","shape":[1.0],"data_offsets":[0,1])", 1, "got the number 1.0");
  refuse_entry(R"("dtype":"U8","shape":[-1],"data_offsets":[0,1])", 1, "got the negative number -1");
  refuse_entry(R"("dtype":"U8","shape":[9223372036854775808],"data_offsets":[0,1])", 1,
               "9223372036854775808, too large");
  refuse_entry(R"("dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1])", 1,
               "got the number 99999999999999999999");
  std::string ones = "1";
  for (int i = 0; i < 1000000; ++i) ones += ",1";
  refuse_entry(R"("dtype":"U8","shape":[)" + ones + R"(],"data_offsets":[0,1])", 1, "more than 32 numbers");
}

TEST(SafetensorsRefuse, Offsets) {
  refuse_entry(R"("dtype":"U8","shape":[1],"data_offsets":[0])", 1,
               "expected data_offsets [begin, end] for \"a\"; got [0]");
  refuse_entry(R"("dtype":"U8","shape":[1],"data_offsets":[0,1,1])", 1, "got [0, 1, 1]");
  refuse_entry(R"("dtype":"U8","shape":[1],"data_offsets":[2,1])", 2, "got [2, 1]");
  refuse_entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])", 4,
               "expected 8 bytes for \"a\", F32 [2]; got data_offsets over 4");
  refuse_entry(R"("dtype":"U8","shape":[1],"data_offsets":[1,2])", 2, "a hole");
  refuse(
      file_of(
          R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
          "xyz"),
      "an overlap");
  // These products wrap to 0, or have a zero that hides the overflow.
  refuse_entry(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0])", 0, "less than 2^63 bytes");
  refuse_entry(R"("dtype":"F64","shape":[2305843009213693952],"data_offsets":[0,0])", 0, "less than 2^63 bytes");
  refuse_entry(R"("dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0])", 0, "less than 2^63 bytes");
}

}  // namespace
}  // namespace moebius
