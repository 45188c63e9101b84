#include "data/token_data.h"

#include <cstring>

#include "io/testing.h"

namespace moebius {
namespace {

template <class T>
std::string raw(std::initializer_list<T> values) {
  return std::string(reinterpret_cast<const char*>(values.begin()), values.size() * sizeof(T));
}

// An index written by hand: two documents, and sequences of 2, 0 and 3 u16 tokens.
struct Parts {
  std::string magic = std::string("MMIDIDX\0\0", 9), version = raw<uint64_t>({1}), code = raw<uint8_t>({8}),
              n_seq = raw<uint64_t>({3}), n_doc = raw<uint64_t>({3}), lengths = raw<int32_t>({2, 0, 3}),
              pointers = raw<int64_t>({0, 4, 4}), documents = raw<int64_t>({0, 2, 3});
  std::string idx() const { return magic + version + code + n_seq + n_doc + lengths + pointers + documents; }
};

void refuse(const Parts& parts, const std::string& text, int64_t bin_bytes = 10) {
  expect_error(ErrorKind::input, text, [&] { parse_token_index(parts.idx(), bin_bytes, "P.idx"); });
}

TEST(TokenData, ReadsAnIndexWrittenByHand) {
  const TestDir dir;
  write_file_atomic(dir.path("p.idx"), Parts().idx());
  write_file_atomic(dir.path("p.bin"), raw<uint16_t>({1, 2, 3, 4, 65535}));
  const TokenDataset data = TokenDataset::open(dir.path("p"));
  EXPECT_EQ(data.num_sequences(), 3);
  EXPECT_EQ(data.num_documents(), 2);
  EXPECT_EQ(data.num_tokens(), 5);
  EXPECT_THAT(data.document_begins(), testing::ElementsAre(0, 2, 5));
  int32_t ids[3];
  data.read(2, 3, ids);
  EXPECT_THAT(ids, testing::ElementsAre(3, 4, 65535));
}

TEST(TokenData, RoundTripInEveryType) {
  for (const TokenType type :
       {TokenType::u8, TokenType::i8, TokenType::i16, TokenType::u16, TokenType::i32, TokenType::i64}) {
    const TestDir dir;
    TokenDatasetWriter writer(dir.path("p"), type);
    const std::vector<int32_t> a{1, 2, 127}, b{3};
    writer.add_tokens(a);
    writer.end_document();
    writer.end_document();  // empty
    writer.add_tokens(b);
    writer.add_tokens(a);
    writer.end_document();
    writer.close();
    EXPECT_EQ(dir.num_files(), 2);
    const TokenDataset data = TokenDataset::open(dir.path("p"));
    EXPECT_EQ(data.type(), type);
    EXPECT_THAT(data.document_begins(), testing::ElementsAre(0, 3, 3, 7));
    std::vector<int32_t> ids(7);
    data.read(0, 7, ids.data());
    EXPECT_THAT(ids, testing::ElementsAre(1, 2, 127, 3, 1, 2, 127));
  }
}

TEST(TokenData, WriterMakesTheBytesOfTheFormat) {
  const TestDir dir;
  TokenDatasetWriter writer(dir.path("p"), TokenType::u16);
  const std::vector<int32_t> ids{1, 2, 3, 4, 65535};
  writer.add_tokens(std::span(ids).first(2));
  writer.end_document();
  writer.add_tokens(std::span(ids).subspan(2));
  writer.end_document();
  writer.close();
  Parts parts;
  parts.n_seq = raw<uint64_t>({2});
  parts.lengths = raw<int32_t>({2, 3});
  parts.pointers = raw<int64_t>({0, 4});
  parts.documents = raw<int64_t>({0, 1, 2});
  EXPECT_EQ(read_file(dir.path("p.idx")), parts.idx());
  EXPECT_EQ(read_file(dir.path("p.bin")), raw<uint16_t>({1, 2, 3, 4, 65535}));
}

TEST(TokenData, AWriterThatIsNotClosedLeavesNothing) {
  const TestDir dir;
  {
    TokenDatasetWriter writer(dir.path("p"), TokenType::i32);
    writer.add_tokens(std::vector<int32_t>{1});
    EXPECT_GT(dir.num_files(), 0);
  }
  EXPECT_EQ(dir.num_files(), 0);
}

TEST(TokenData, WriterRefusesMisuse) {
  const TestDir dir;
  TokenDatasetWriter writer(dir.path("p"), TokenType::u16);
  expect_error(ErrorKind::usage, "at least one token; got 0 tokens", [&] { writer.close(); });
  expect_error(ErrorKind::usage, "expected ids that fit 2 bytes; got 65536", [&] {
    writer.add_tokens(std::vector<int32_t>{1, 65536});
  });
  expect_error(ErrorKind::usage, "expected ids that fit 2 bytes; got -1",
               [&] { writer.add_tokens(std::vector<int32_t>{-1}); });
}

TEST(TokenData, WriterRefusesToCloseOverAnOpenDocument) {
  const TestDir dir;
  TokenDatasetWriter writer(dir.path("p"), TokenType::u16);
  writer.add_tokens(std::vector<int32_t>{7});
  expect_error(ErrorKind::usage, "got 1 tokens, 1 of them in an open document", [&] { writer.close(); });
}

TEST(TokenData, TypeFollowsTheVocabulary) {
  EXPECT_EQ(token_type_for_vocab(65499), TokenType::u16);
  EXPECT_EQ(token_type_for_vocab(65500), TokenType::i32);
}

TEST(TokenData, IdsOutsideTheVocabularyAreRefusedWithTheirPlace) {
  const std::vector<int32_t> ids{0, 256, 257, 5};
  check_token_ids(ids, 258, 1000, "P");
  expect_error(ErrorKind::input,
               "token dataset P: expected ids in [0, 257), the model's vocabulary; got 257 at token 1002",
               [&] { check_token_ids(ids, 257, 1000, "P"); });
  expect_error(ErrorKind::input, "got -1 at token 0", [] { check_token_ids(std::vector<int32_t>{-1}, 9, 0, "P"); });
}

TEST(TokenData, WideIdsThatDoNotFitBecomeInvalidOnes) {
  const TestDir dir;
  Parts parts;
  parts.code = raw<uint8_t>({5});
  parts.pointers = raw<int64_t>({0, 16, 16});
  write_file_atomic(dir.path("p.idx"), parts.idx());
  write_file_atomic(dir.path("p.bin"), raw<int64_t>({1, int64_t{1} << 32, 3, 4, 5}));
  const TokenDataset data = TokenDataset::open(dir.path("p"));
  std::vector<int32_t> ids(5);
  data.read(0, 5, ids.data());
  expect_error(ErrorKind::input, "at token 1", [&] { check_token_ids(ids, 100, 0, "P"); });
}

TEST(TokenDataRefuse, Header) {
  Parts parts;
  parts.magic[0] = 'X';
  refuse(parts, "token index P.idx: expected a Megatron index that starts with MMIDIDX");
  parts = {};
  parts.version = raw<uint64_t>({2});
  refuse(parts, "expected version 1; got 2");
  for (const uint8_t code : {0, 6, 7, 9, 255}) {
    parts = {};
    parts.code = raw<uint8_t>({code});
    refuse(parts, "expected an integer dtype code");
  }
  expect_error(ErrorKind::input, "got 33 other bytes",
               [] { parse_token_index(Parts().idx().substr(0, 33), 10, "P.idx"); });
}

TEST(TokenDataRefuse, Counts) {
  Parts parts;
  for (const uint64_t n : {uint64_t{4}, uint64_t{1} << 62, uint64_t{1} << 63, ~uint64_t{0}}) {
    parts = {};
    parts.n_seq = raw<uint64_t>({n});
    refuse(parts, "expected 34 + 12 n_seq + 8 n_doc bytes");
    parts = {};
    parts.n_doc = raw<uint64_t>({n});
    refuse(parts, "expected 34 + 12 n_seq + 8 n_doc bytes");
  }
  parts = {};
  parts.documents += '\0';
  refuse(parts, "it is truncated, damaged or multimodal");
}

TEST(TokenDataRefuse, Sequences) {
  Parts parts;
  parts.lengths = raw<int32_t>({2, -1, 3});
  refuse(parts, "expected a length >= 0; got -1 for sequence 1");
  parts = {};
  parts.pointers = raw<int64_t>({0, 4, 1000});
  refuse(parts, "expected sequence 2 to begin at byte 4, where the one before it ends; got 1000");
  parts.pointers = raw<int64_t>({0, -4, 4});
  refuse(parts, "got -4");
  refuse(Parts(), "expected a .bin of 10 bytes, 5 tokens of 2; got 9 bytes", 9);
  refuse(Parts(), "got 12 bytes", 12);
}

TEST(TokenDataRefuse, Documents) {
  Parts parts;
  parts.documents = raw<int64_t>({1, 2, 3});
  refuse(parts, "expected document indices that rise from 0 to 3 sequences; got 1 for document 0");
  parts.documents = raw<int64_t>({0, 2, 2});
  refuse(parts, "got 2 for document 2");
  parts.documents = raw<int64_t>({0, 5, 3});
  refuse(parts, "got 5 for document 1");
  parts.documents = raw<int64_t>({0, -1, 3});
  refuse(parts, "got -1 for document 1");
  parts.n_doc = raw<uint64_t>({1});
  parts.documents = raw<int64_t>({3});
  refuse(parts, "expected at least one document; got none");
  parts = {.n_seq = raw<uint64_t>({0}),
           .n_doc = raw<uint64_t>({2}),
           .lengths = "",
           .pointers = "",
           .documents = raw<int64_t>({0, 0})};
  refuse(parts, "expected at least one token; got none", 0);
}

TEST(TokenDataRefuse, Reading) {
  const TestDir dir;
  expect_error(ErrorKind::input, "p.bin: No such file", [&] { TokenDataset::open(dir.path("p")); });
  write_file_atomic(dir.path("p.bin"), raw<uint16_t>({1, 2, 3, 4, 5}));
  expect_error(ErrorKind::input, "p.idx: No such file", [&] { TokenDataset::open(dir.path("p")); });
  write_file_atomic(dir.path("p.idx"), Parts().idx());
  const TokenDataset data = TokenDataset::open(dir.path("p"));
  int32_t ids[8];
  expect_error(ErrorKind::usage, "inside its 5 tokens; got 4 at 2", [&] { data.read(2, 4, ids); });
  expect_error(ErrorKind::usage, "got 1 at -1", [&] { data.read(-1, 1, ids); });
  std::filesystem::resize_file(dir.path("p.bin"), 9);
  expect_error(ErrorKind::io, "before the end of the file", [&] { data.read(4, 1, ids); });
}

std::string fingerprint_of(const TestDir& dir, const std::string& name, const std::vector<uint16_t>& ids,
                           const std::string& idx) {
  write_file_atomic(dir.path(name + ".bin"), std::string(reinterpret_cast<const char*>(ids.data()), 2 * ids.size()));
  write_file_atomic(dir.path(name + ".idx"), idx);
  return TokenDataset::open(dir.path(name)).fingerprint();
}

TEST(TokenData, TheFingerprintFollowsTheDataAndNotThePath) {
  const TestDir dir;
  const std::string print = fingerprint_of(dir, "p", {1, 2, 3, 4, 5}, Parts().idx());
  EXPECT_THAT(print, testing::MatchesRegex("tokens=5 documents=2 idx=[0-9a-f]+ bin_ends=[0-9a-f]+"));
  EXPECT_EQ(fingerprint_of(dir, "elsewhere", {1, 2, 3, 4, 5}, Parts().idx()), print);
  EXPECT_NE(fingerprint_of(dir, "p", {9, 2, 3, 4, 5}, Parts().idx()), print);
  EXPECT_NE(fingerprint_of(dir, "p", {1, 2, 3, 4, 9}, Parts().idx()), print);
  // The same tokens in other documents.
  EXPECT_NE(fingerprint_of(dir, "p", {1, 2, 3, 4, 5}, Parts{.documents = raw<int64_t>({0, 1, 3})}.idx()), print);
}

// The file is longer than the two MiB that are read. Both ends count, to their last byte.
TEST(TokenData, TheFingerprintReadsBothEndsOfALargeFile) {
  const TestDir dir;
  constexpr int64_t n = 3 << 20;  // u8 tokens
  const auto print_with = [&](int64_t changed) {
    TokenDatasetWriter writer(dir.path("p"), TokenType::u8);
    std::vector<int32_t> ids(n, 7);
    if (changed >= 0) ids[changed] = 8;
    writer.add_tokens(ids);
    writer.end_document();
    writer.close();
    return TokenDataset::open(dir.path("p")).fingerprint();
  };
  const std::string print = print_with(-1);
  for (const int64_t changed : {int64_t{0}, (n / 3) - 1, n - n / 3, n - 1}) EXPECT_NE(print_with(changed), print);
}

}  // namespace
}  // namespace moebius
