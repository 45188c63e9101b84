#include "io/data_build.h"

#include "io/files.h"
#include "io/testing.h"
#include "io/token_data.h"

namespace moebius {
namespace {

TEST(Tokenizer, BytesRoundTripAndKnowTheEndOfADocument) {
  const auto tokenizer = open_tokenizer("bytes");
  EXPECT_EQ(tokenizer->name(), "bytes");
  EXPECT_EQ(tokenizer->vocab_size(), 257);
  EXPECT_EQ(tokenizer->eod_id(), 256);
  std::string text;
  for (int i = 0; i < 256; ++i) text.push_back(static_cast<char>(i));
  std::vector<int32_t> ids{7};
  tokenizer->encode(text, &ids);
  EXPECT_EQ(ids.size(), 257u);
  EXPECT_EQ(ids.back(), 255);
  ids[0] = 256;
  EXPECT_EQ(tokenizer->decode(ids), text);
}

TEST(Tokenizer, RefusesWhatItCannotDo) {
  const auto tokenizer = open_tokenizer("bytes");
  expect_error(ErrorKind::usage, "expected ids in [0, 256]; got 257",
               [&] { tokenizer->decode(std::vector<int32_t>{257}); });
  expect_error(ErrorKind::usage, "got -1", [&] { tokenizer->decode(std::vector<int32_t>{-1}); });
  expect_error(ErrorKind::input, "expected \"bytes\" or a folder with a tokenizer.json; got \"some/dir\"",
               [] { open_tokenizer("some/dir"); });
}

TEST(DataBuild, MakesADatasetAndItsSidecar) {
  const TestDir dir;
  write_file_atomic(dir.path("a.txt"), "abc");
  write_file_atomic(dir.path("b.jsonl"), "{\"text\":\"d\"}\n{\"text\":\"\"}\n{\"text\":\"ef\"}\n");
  const DatasetInfo built = build_dataset(
      {.inputs = {dir.path("a.txt"), dir.path("b.jsonl")}, .out_prefix = dir.path("p")}, *open_tokenizer("bytes"));
  EXPECT_EQ(built.documents, 3);
  EXPECT_EQ(built.tokens, 9);
  EXPECT_EQ(built.text_bytes, 6);
  const TokenDataset data = TokenDataset::open(dir.path("p"));
  EXPECT_EQ(data.type(), TokenType::u16);
  EXPECT_THAT(data.document_begins(), testing::ElementsAre(0, 4, 6, 9));
  std::vector<int32_t> ids(9);
  data.read(0, 9, ids.data());
  EXPECT_THAT(ids, testing::ElementsAre('a', 'b', 'c', 256, 'd', 256, 'e', 'f', 256));
  const auto info = read_dataset_info(dir.path("p"));
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->tokenizer, "bytes");
  EXPECT_EQ(info->vocab_size, 257);
  EXPECT_EQ(info->documents, 3);
  EXPECT_EQ(info->tokens, 9);
  EXPECT_EQ(info->text_bytes, 6);
  EXPECT_TRUE(info->append_eod);
}

TEST(DataBuild, WithoutEndOfDocumentIds) {
  const TestDir dir;
  write_file_atomic(dir.path("a.txt"), "abc");
  build_dataset({.inputs = {dir.path("a.txt")}, .out_prefix = dir.path("p"), .append_eod = false},
                *open_tokenizer("bytes"));
  EXPECT_EQ(TokenDataset::open(dir.path("p")).num_tokens(), 3);
  EXPECT_FALSE(read_dataset_info(dir.path("p"))->append_eod);
}

TEST(DataBuild, ABadInputLeavesTheOldDatasetAlone) {
  const TestDir dir;
  const auto bytes = open_tokenizer("bytes");
  write_file_atomic(dir.path("a.txt"), "abc");
  write_file_atomic(dir.path("bad.jsonl"), "{\"text\":\"d\"}\nnonsense\n");
  write_file_atomic(dir.path("empty.txt"), "");
  build_dataset({.inputs = {dir.path("a.txt")}, .out_prefix = dir.path("p")}, *bytes);
  const int64_t files = dir.num_files();
  expect_error(ErrorKind::input, "bad.jsonl:2: expected JSON", [&] {
    build_dataset({.inputs = {dir.path("a.txt"), dir.path("bad.jsonl")}, .out_prefix = dir.path("p")}, *bytes);
  });
  expect_error(ErrorKind::input, "p: expected some text; got none in 1 files",
               [&] { build_dataset({.inputs = {dir.path("empty.txt")}, .out_prefix = dir.path("p")}, *bytes); });
  EXPECT_EQ(dir.num_files(), files);
  EXPECT_EQ(TokenDataset::open(dir.path("p")).num_tokens(), 4);
}

TEST(DatasetInfo, MissingIsNothingAndWrongIsRefused) {
  const TestDir dir;
  EXPECT_FALSE(read_dataset_info(dir.path("p")).has_value());
  write_file_atomic(dir.path("p.json"), "{\"tokenizer\":\"bytes\"}");
  expect_error(ErrorKind::input, "p.json: expected the fields of a dataset's sidecar",
               [&] { read_dataset_info(dir.path("p")); });
  write_file_atomic(dir.path("p.json"), "{");
  expect_error(ErrorKind::input, "p.json: expected JSON", [&] { read_dataset_info(dir.path("p")); });
}

}  // namespace
}  // namespace moebius
