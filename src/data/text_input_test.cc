#include "data/text_input.h"

#include <unistd.h>
#include <zstd.h>

#include "io/files.h"
#include "io/json_text.h"
#include "io/testing.h"
#include "io/utf8.h"

namespace moebius {
namespace {

std::string compressed(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 1));
  return out;
}

std::vector<std::string> documents(const std::string& path) {
  TextInput input(path);
  std::vector<std::string> all;
  for (TextBlock block; input.next(&block);) {
    for (const Document& document : documents_of(block)) all.push_back(document.text);
  }
  return all;
}

void refuse(const std::string& name, const std::string& contents, const std::string& text,
            ErrorKind kind = ErrorKind::input) {
  const TestDir dir;
  write_file_atomic(dir.path(name), contents);
  expect_error(kind, text, [&] { documents(dir.path(name)); });
}

// Returns text that is long and hard to compress, so that it spans chunks of the file and
// of the decoder.
std::string long_text(int64_t bytes) {
  std::string text(bytes, ' ');
  uint32_t x = 1;
  for (char& c : text) c = static_cast<char>('0' + ((x = x * 1664525 + 1013904223) >> 24) % 70);
  return text;
}

TEST(TextInput, APlainFileIsOneDocumentByteForByte) {
  const TestDir dir;
  const std::string text = "one\r\n\n\xff\x00two", path = dir.path("a.txt");
  write_file_atomic(path, text);
  EXPECT_THAT(documents(path), testing::ElementsAre(text));
  write_file_atomic(path, "");
  EXPECT_THAT(documents(path), testing::ElementsAre(""));
}

TEST(TextInput, ReadsPipes) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const std::string text = "from a pipe";
  ASSERT_EQ(::write(ends[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  ::close(ends[1]);
  EXPECT_THAT(documents("/proc/self/fd/" + std::to_string(ends[0])), testing::ElementsAre(text));
  ::close(ends[0]);
}

TEST(TextInput, JsonlHasADocumentALine) {
  const TestDir dir;
  write_file_atomic(
      dir.path("a.jsonl"),
      "{\"text\":\"one\\n\\u00e9\",\"id\":7}\n\n  \r\n{\"meta\":{\"text\":1},\"text\":\"\"}\r\n{\"text\":\"last\"}");
  EXPECT_THAT(documents(dir.path("a.jsonl")), testing::ElementsAre("one\n\xc3\xa9", "", "last"));
}

TEST(TextInput, CompressedFilesReadAsTheirContents) {
  const TestDir dir;
  const std::string text = long_text(3'000'001);
  write_file_atomic(dir.path("a.txt.zst"), compressed(text) + compressed("second frame"));
  EXPECT_TRUE(documents(dir.path("a.txt.zst")).at(0) == text + "second frame");
  std::string lines;
  for (int i = 0; i < 3; ++i) lines += "{\"text\":\"" + long_text(700'000 + i).substr(i) + "\"}\n";
  std::erase(lines, '\\');
  write_file_atomic(dir.path("b.jsonl"), lines);
  write_file_atomic(dir.path("b.jsonl.zst"), compressed(lines));
  EXPECT_TRUE(documents(dir.path("b.jsonl.zst")) == documents(dir.path("b.jsonl")));
  EXPECT_EQ(documents(dir.path("b.jsonl")).size(), 3u);
  write_file_atomic(dir.path("c.zst"), compressed(""));
  EXPECT_THAT(documents(dir.path("c.zst")), testing::ElementsAre(""));
}

TEST(TextInputRefuse, CompressedFiles) {
  const std::string whole = compressed(long_text(5000));
  refuse("a.txt.zst", whole.substr(0, whole.size() - 1),
         "expected a whole zstd file; got one that ends inside a frame");
  refuse("a.txt.zst", whole.substr(0, 3), "ends inside a frame");
  refuse("a.txt.zst", "", "ends inside a frame");
  refuse("a.txt.zst", whole + whole.substr(0, 20), "ends inside a frame");
  refuse("a.txt.zst", "plain text", "expected zstd data; got Unknown frame descriptor");
  refuse("a.jsonl.zst", compressed("{\"text\":1}"), "a.jsonl.zst:1: expected an object");
}

TEST(TextInputRefuse, Lines) {
  refuse(
      "a.jsonl", "{\"text\":\"x\"}\n{\"txet\":\"y\"}\n",
      "a.jsonl:2: expected an object with a string \"text\", "
      "or with strings \"prompt\" and \"completion\", or with a chat in \"messages\" or \"conversations\"; got {\"txet\"");
  refuse("a.jsonl", "\n{\"text\":1}\n", "a.jsonl:2: expected an object with a string");
  for (const char* list : {"[1]\n", "[\n  {\"text\": \"x\"}\n]\n"})
    refuse("a.jsonl", list,
           "a.jsonl:1: expected an object on each line; got the beginning of a list; make a line of each element: "
           "jq -c '.[]' FILE > NAME.jsonl");
  refuse("a.jsonl", "{\"text\":\"x\"", "a.jsonl:1: expected JSON; got a parse error at line 1, column 12");
  refuse("a.jsonl", "{\"text\":\"x\"} {}", "a.jsonl:1: expected JSON");
  refuse("a.jsonl", "{\"text\":\"x\",\"text\":\"y\"}",
         "a.jsonl:1: expected JSON with distinct keys; got \"text\" twice");
  refuse("a.jsonl", "{\"text\":\"\\ud800\"}", "a.jsonl:1: expected JSON");
  refuse("a.jsonl", "{\"text\":\"x\"}\n{\"text\":\"x\xff\"}", "a.jsonl:2:11: expected UTF-8; got byte 0xff");
}

TEST(TextInputRefuse, OtherFormats) {
  refuse("a.jsonl.gz", "x", "expected text, .jsonl or either with .zst; got .gz; convert it, for", ErrorKind::usage);
  refuse("a.csv", "prompt,completion\n", "got .csv; convert it, for", ErrorKind::usage);
  refuse("a.json", "[]", "a.json > NAME.jsonl", ErrorKind::usage);
  refuse("a.parquet", "x", "a.parquet\").to_json(\"NAME.jsonl\")", ErrorKind::usage);
  refuse("a.csv.zst", "x", "got .csv; decompress it with zstd -d; then convert it, for", ErrorKind::usage);
  refuse("a.ndjson", "{}", "got .ndjson; rename it to .jsonl", ErrorKind::usage);
  refuse("a.ndjson.zst", "{}", "got .ndjson; rename it to .jsonl.zst", ErrorKind::usage);
  refuse("a.json.zst", "[]", "zstd -dc", ErrorKind::usage);
  expect_error(ErrorKind::input, "No such file", [] { TextInput("/no-such-file"); });
}

TEST(JsonText, RefusesDuplicateKeysAndDeepNesting) {
  EXPECT_EQ(parse_json("{\"a\":{\"k\":1},\"b\":[{\"k\":2},{\"k\":3}]}", "W")["b"][1]["k"], 3);
  expect_error(ErrorKind::input, "W: expected JSON with distinct keys; got \"k\" twice",
               [] { parse_json("{\"a\":{\"k\":1,\"k\":2}}", "W"); });
  expect_error(ErrorKind::input, "W: expected JSON nested at most 100 deep",
               [] { parse_json(std::string(100000, '['), "W"); });
  expect_error(ErrorKind::input, "W: expected JSON; got a parse error at line 2, column 2",
               [] { parse_json("{\n}}", "W"); });
}

TEST(Utf8, FollowsTheUnicodeStandard) {
  for (const char* good : {"", "plain ascii, more than eight", "\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf",
                           "\xee\x80\x80", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ(find_invalid_utf8(good), -1) << good;
  }
  for (const char* bad : {"\x80", "\xc0\x80", "\xc1\xbf", "\xc2", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xe1\x80",
                          "\xf0\x8f\xbf\xbf", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xc2\x41"}) {
    EXPECT_EQ(find_invalid_utf8(bad), 0) << bad;
    EXPECT_EQ(find_invalid_utf8(std::string("seven b") + bad), 7) << bad;
    EXPECT_EQ(find_invalid_utf8(std::string("\xc3\xa9") + bad), 2) << bad;
  }
}

}  // namespace
}  // namespace moebius
