#include "data/data_build.h"

#include <algorithm>
#include <atomic>
#include <filesystem>

#include "data/token_data.h"
#include "io/files.h"
#include "io/testing.h"

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
  EXPECT_EQ(built.documents, 4);
  EXPECT_EQ(built.tokens, 9);
  EXPECT_EQ(built.text_bytes, 6);
  const TokenDataset data = TokenDataset::open(dir.path("p"));
  EXPECT_EQ(data.type(), TokenType::u16);
  EXPECT_THAT(data.document_begins(), testing::ElementsAre(0, 4, 6, 6, 9));
  std::vector<int32_t> ids(9);
  data.read(0, 9, ids.data());
  EXPECT_THAT(ids, testing::ElementsAre('a', 'b', 'c', 256, 'd', 256, 'e', 'f', 256));
  const auto info = read_dataset_info(dir.path("p"));
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->tokenizer, "bytes");
  EXPECT_EQ(info->vocab_size, 257);
  EXPECT_EQ(info->documents, 4);
  EXPECT_EQ(info->tokens, 9);
  EXPECT_EQ(info->text_bytes, 6);
  EXPECT_EQ(info->largest_id, 256);
  EXPECT_TRUE(info->append_eod);
}

TEST(DataBuild, ADatasetWithIdsOutsideTheModelIsRefusedAsAWhole) {
  const TestDir dir;
  write_file_atomic(dir.path("a.txt"), "abc");
  const auto build = [&](bool append_eod) {
    build_dataset(
        {.inputs = {dir.path("a.txt")}, .out_prefix = dir.path("p"), .append_eod = append_eod, .replace = true},
        *open_tokenizer("bytes"));
  };
  build(/*append_eod=*/true);
  EXPECT_NO_THROW(check_vocabulary(dir.path("p"), 257, "data.train"));
  expect_error(ErrorKind::input,
               "data.train: " + dir.path("p") +
                   ": expected token ids in [0, 256), the model's vocabulary; got 256 as the largest id in " +
                   dir.path("p") + ".json; build the dataset with the model's tokenizer",
               [&] { check_vocabulary(dir.path("p"), 256, "data.train"); });
  build(/*append_eod=*/false);
  EXPECT_NO_THROW(check_vocabulary(dir.path("p"), 'c' + 1, "data.train"));
  std::filesystem::remove(dir.path("p.json"));
  EXPECT_NO_THROW(check_vocabulary(dir.path("p"), 1, "data.train")) << "the ids are then checked where they are read";
}

TEST(DataBuild, WithoutEndOfDocumentIds) {
  const TestDir dir;
  write_file_atomic(dir.path("a.txt"), "abc");
  build_dataset({.inputs = {dir.path("a.txt")}, .out_prefix = dir.path("p"), .append_eod = false},
                *open_tokenizer("bytes"));
  EXPECT_EQ(TokenDataset::open(dir.path("p")).num_tokens(), 3);
  EXPECT_FALSE(read_dataset_info(dir.path("p"))->append_eod);
}

// A tokenizer that begins each text with a special id, as many models need.
class BeginningBytes : public Tokenizer {
 public:
  std::string name() const override { return "beginning"; }
  int64_t vocab_size() const override { return 258; }
  int32_t eod_id() const override { return 256; }
  void encode(std::string_view text, std::vector<int32_t>* ids, TextPart part) const override {
    if (part != TextPart::end) ids->push_back(257);
    for (const char c : text) ids->push_back(static_cast<uint8_t>(c));
  }
  std::string decode(std::span<const int32_t>) const override { return ""; }
};

TEST(DataBuild, CompletionsAreTheTargets) {
  const TestDir dir;
  write_file_atomic(dir.path("a.jsonl"),
                    "{\"prompt\":\"ab\",\"completion\":\"c\"}\n{\"text\":\"d\"}\n"
                    "{\"completion\":\"\",\"prompt\":\"e\"}\n");
  const DatasetInfo built =
      build_dataset({.inputs = {dir.path("a.jsonl")}, .out_prefix = dir.path("p")}, BeginningBytes());
  EXPECT_EQ(built.documents, 3);
  EXPECT_EQ(built.tokens, 11);
  EXPECT_EQ(built.target_tokens, 6);
  EXPECT_EQ(built.text_bytes, 2);
  EXPECT_EQ(read_dataset_info(dir.path("p"))->target_tokens, 6);
  const TokenDataset data = TokenDataset::open(dir.path("p"));
  std::vector<int32_t> ids(11);
  data.read(0, 11, ids.data());
  EXPECT_THAT(ids, testing::ElementsAre(257, 'a', 'b', 'c', 256, 257, 'd', 256, 257, 'e', 256));
  EXPECT_TRUE(data.has_targets());
  EXPECT_THAT(data.target_spans(), testing::ElementsAre(TokenSpan{3, 8}, TokenSpan{10, 11}));
}

TEST(DataBuild, ChatsByTheTemplateOfTheTokenizer) {
  const TestDir dir;
  std::filesystem::copy_file(MOEBIUS_SOURCE_DIR "/tests/golden/data/tokenizers/qwen2/tokenizer.json",
                             dir.path("tokenizer.json"));
  write_file_atomic(dir.path("tokenizer_config.json"), R"({"eos_token": "<|im_end|>", "chat_template":
      "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"})");
  write_file_atomic(dir.path("a.jsonl"),
                    R"({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]})"
                    "\n{\"text\": \"plain\"}\n"
                    R"({"messages": [{"role": "user", "content": "no answer"}]})"
                    "\n");
  const DatasetInfo built =
      build_dataset({.inputs = {dir.path("a.jsonl")}, .out_prefix = dir.path("p"), .threads = 2, .seq_len = 10},
                    *open_tokenizer(dir.path(), {.parse_special = false}));
  EXPECT_EQ(built.documents, 3);
  EXPECT_GT(built.longest, 11);
  EXPECT_EQ(built.num_cut, 2) << "the chats, not the text";
  EXPECT_THAT(built.notice, testing::HasSubstr("1 chat is without a token that an assistant wrote"));
  EXPECT_THAT(built.notice, testing::HasSubstr("a.jsonl:3"));
  const TokenDataset data = TokenDataset::open(dir.path("p"));
  std::vector<int32_t> ids(static_cast<size_t>(built.tokens));
  data.read(0, built.tokens, ids.data());
  const auto tokenizer = open_tokenizer(dir.path(), {.parse_special = true, .add_special = false});
  ASSERT_EQ(data.target_spans().size(), 2u);
  const auto [begin, end] = data.target_spans()[0];
  std::vector<int32_t> answer;
  tokenizer->encode("yes<|im_end|>", &answer);
  EXPECT_EQ(std::vector<int32_t>(ids.begin() + begin, ids.begin() + end), answer);
  std::vector<int32_t> first;
  tokenizer->encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", &first);
  EXPECT_EQ(std::vector<int32_t>(ids.begin(), ids.begin() + begin), first);
}

TEST(DataBuild, GivenIdsAreTakenAsTheyAre) {
  const TestDir dir;
  write_file_atomic(dir.path("a.jsonl"),
                    "{\"input_ids\":[257,65,66,67,68],\"labels\":[-100,-100,66,67,-100],\"messages\":[]}\n"
                    "{\"input_ids\":[70,71,72],\"assistant_masks\":[1,0,1],\"attention_mask\":[1,1,true]}\n"
                    "{\"input_ids\":[73]}\n{\"input_ids\":[]}\n{\"input_ids\":[74],\"completion_mask\":[false]}\n");
  const DatasetInfo built =
      build_dataset({.inputs = {dir.path("a.jsonl")}, .out_prefix = dir.path("p")}, BeginningBytes());
  EXPECT_EQ(built.documents, 5);
  EXPECT_EQ(built.tokens, 10);
  EXPECT_EQ(built.target_tokens, 5);
  const TokenDataset data = TokenDataset::open(dir.path("p"));
  std::vector<int32_t> ids(10);
  data.read(0, 10, ids.data());
  EXPECT_THAT(ids, testing::ElementsAre(257, 65, 66, 67, 68, 70, 71, 72, 73, 74));
  EXPECT_THAT(data.target_spans(), testing::ElementsAre(TokenSpan{2, 4}, TokenSpan{5, 6}, TokenSpan{7, 9}));
  EXPECT_THAT(data.document_begins(), testing::ElementsAre(0, 5, 8, 9, 9, 10));
}

TEST(DataBuild, RefusesInvalidIds) {
  const TestDir dir;
  const auto refuse = [&](const std::string& line, const std::string& text) {
    write_file_atomic(dir.path("a.jsonl"), line);
    const auto build = [&] {
      build_dataset({.inputs = {dir.path("a.jsonl")}, .out_prefix = dir.path("p")}, *open_tokenizer("bytes"));
    };
    expect_error(ErrorKind::input, text, build);
    expect_error(ErrorKind::input, dir.path("a.jsonl") + ":1: expected", build);
  };
  refuse(R"({"input_ids":[1,257]})",
         "expected ids in [0, 257), the tokenizer's vocabulary; got 257 at 1; use the tokenizer");
  refuse(R"({"input_ids":[-1]})", "expected ids in [0, 257)");
  refuse(R"({"input_ids":[1.5]})", "expected whole numbers in \"input_ids\"; got 1.5 at 0");
  refuse(R"({"input_ids":[5000000000]})", "got 5000000000 at 0");
  refuse(R"({"input_ids":["a"]})", "got \"a\" at 0");
  refuse(R"({"input_ids":7})", "expected \"input_ids\" with a list of ids; got number and nothing else");
  refuse(R"({"input_ids":[1,2],"labels":[1]})", "and \"labels\" with as many; got 2 ids and 1 of the other");
  refuse(R"({"input_ids":[1,2],"labels":[2,-100]})",
         "expected each of \"labels\" to be the id at the same place in \"input_ids\", or -100; got 2 for 1 at 0; "
         "labels must not be shifted");
  refuse(
      R"({"input_ids":[1],"prompt_mask":[1]})",
      "expected in addition to \"input_ids\" at most \"attention_mask\", \"special_tokens_mask\" and one of \"labels\", "
      "\"loss_mask\", \"assistant_masks\", \"completion_mask\"; got \"prompt_mask\"; rename or drop it");
  refuse(R"({"input_ids":[1],"loss_mask":[2]})", "expected 0 or 1 in \"loss_mask\"; got 2 at 0");
  refuse(R"({"input_ids":[1],"loss_mask":[1],"labels":[1]})", "expected one of \"labels\" and \"loss_mask\"; got both");
  refuse(R"({"input_ids":[1],"text":"a"})", "or \"input_ids\"; got more than one");
  refuse(R"({"input_ids":[1,2,3],"attention_mask":[1,1,0]})",
         "expected ones in \"attention_mask\"; got 0 at 2, which is padding; remove the padded");
  refuse(R"({"input_ids":[1,2],"attention_mask":[1]})", "with as many numbers as \"input_ids\", 2; got 1; correct");
  refuse(R"({"input_ids":[1],"attention_mask":null})", "with as many numbers as \"input_ids\", 1; got null");
  refuse(R"({"input_ids":[1],"attention_mask":["1"]})", "expected whole numbers in \"attention_mask\"; got \"1\" at 0");
  refuse(R"({"text":"x","messages":[]})", "expected one document; got a text and a chat in \"messages\", and either");
  refuse(R"({"prompt":"x","completion":"y","messages":[]})",
         "expected one document; got a text and a chat in \"messages\"");
  refuse(R"({"text":"x","conversations":[]})", "got a text and a chat in \"conversations\"");
  refuse(R"({"messages":[]})", "expected a tokenizer with a chat template, because the line is a chat; got \"bytes\"");
}

// A mask has a number for each id. Without ids it cannot be honoured, and the loss would be on all of the text.
TEST(DataBuild, RefusesMasksOfTheLossWithoutIds) {
  const TestDir dir;
  int builds = 0;
  const auto build = [&](const std::string& line) {
    write_file_atomic(dir.path("a.jsonl"), "{\"text\":\"first\"}\n" + line + "\n");
    const std::string prefix = dir.path(fmt::format("p{}", ++builds));
    return build_dataset({.inputs = {dir.path("a.jsonl")}, .out_prefix = prefix}, *open_tokenizer("bytes"));
  };
  for (const std::string mask : {R"("loss_mask":[0,1])", R"("assistant_masks":[1])", R"("completion_mask":[true])",
                                 R"("prompt_mask":[1])", R"("labels":[-100,4])"}) {
    for (const std::string document :
         {R"("text":"ab")", R"("prompt":"a","completion":"b")", R"("messages":[{"role":"user","content":"a"}])"}) {
      const std::string key = mask.substr(0, mask.find(':'));
      expect_error(
          ErrorKind::input,
          fmt::format(
              "{}:2: expected \"input_ids\" with {}, which has a number for each id; got a text, a "
              "prompt or a chat; put the ids of the text into \"input_ids\"{}, or drop {}",
              dir.path("a.jsonl"), key,
              document.find("prompt") == document.npos ? ", split the text into \"prompt\" and \"completion\"" : "",
              key),
          [&] { build("{" + document + "," + mask + "}"); });
    }
  }
  // These are no masks of the loss: classes of a text, a key without a value, what tokenizers write, and other columns.
  for (const std::string other : {R"("labels":[3,27])", R"("labels":"spam")", R"("loss_mask":null)",
                                  R"("attention_mask":[1,1])", R"("mask_of":1)", R"("privacy_mask":[{"value":"b"}])",
                                  R"("mask":"<mask>")", R"("has_mask":true)", R"("image_mask":[])"})
    EXPECT_EQ(build(R"({"text":"ab",)" + other + "}").documents, 2) << other;
}

TEST(DataBuild, RefusesPromptsWithoutACompletion) {
  const TestDir dir;
  const auto refuse = [&](const std::string& line, const std::string& text) {
    write_file_atomic(dir.path("a.jsonl"), line);
    expect_error(ErrorKind::input, text, [&] {
      build_dataset({.inputs = {dir.path("a.jsonl")}, .out_prefix = dir.path("p"), .append_eod = false},
                    *open_tokenizer("bytes"));
    });
  };
  refuse(R"({"prompt":"a"})", "a.jsonl:1: expected an object with a string \"text\", or with strings \"prompt\" and");
  refuse(R"({"completion":"a"})", "got {\"completion\":\"a\"}");
  refuse(R"({"instruction":"a","input":"","output":"b"})", "; make \"prompt\" of instruction and input, as the model");
  refuse(R"({"prompt":"a","chosen":"b","rejected":"c"})", "; there is no training on preferences, so make");
  refuse(R"({"prompt":[{"role":"user","content":"a"}],"completion":[{"role":"assistant","content":"b"}]})",
         "; put the messages of both into one list, \"messages\"");
  refuse(R"({"prompt":"a","completion":1})", "or with strings \"prompt\" and \"completion\"");
  refuse(R"({"prompt":"a","completion":"b","text":"c"})",
         "a \"text\", or a \"prompt\" and a \"completion\", or \"input_ids\"; got more");
  refuse(R"({"prompt":"a","completion":""})",
         "expected a completion or an answer of an assistant that is not empty; got none");
}

// There are many blocks, and the last one to be read is the first one to be done.
TEST(DataBuild, TheSameForAnyNumberOfThreads) {
  const TestDir dir;
  std::string lines;
  for (int i = 0; i < 3000; ++i)
    lines += fmt::format("{{\"text\":\"{}\"}}\n", std::string((3000 - i) % 997, static_cast<char>('a' + i % 26)));
  write_file_atomic(dir.path("a.jsonl"), lines);
  write_file_atomic(dir.path("b.txt"), "the end");
  const auto build = [&](int threads) {
    build_dataset({.inputs = {dir.path("a.jsonl"), dir.path("b.txt"), dir.path("a.jsonl")},
                   .out_prefix = dir.path("p"),
                   .replace = true,
                   .threads = threads},
                  *open_tokenizer("bytes"));
    return read_file(dir.path("p.bin")) + read_file(dir.path("p.idx")) + read_file(dir.path("p.json"));
  };
  const std::string want = build(1);
  for (const int threads : {2, 5}) EXPECT_TRUE(build(threads) == want) << threads;
}

// If several lines are bad, the first of them is named, whichever thread finds one first.
TEST(DataBuild, TheFirstBadLineIsNamedWithAnyNumberOfThreads) {
  const TestDir dir;
  std::string lines;
  for (int i = 1; i <= 9000; ++i)
    lines += i >= 4000 && i % 1000 == 0 ? "nonsense\n" : "{\"text\":\"" + std::string(200, 'x') + "\"}\n";
  write_file_atomic(dir.path("a.jsonl"), lines);
  for (const int threads : {1, 4}) {
    expect_error(ErrorKind::input, "a.jsonl:4000: expected JSON", [&] {
      build_dataset({.inputs = {dir.path("a.jsonl")}, .out_prefix = dir.path("p"), .threads = threads},
                    *open_tokenizer("bytes"));
    });
    EXPECT_EQ(dir.num_files(), 1);
  }
}

TEST(DataBuild, ABadInputKeepsTheOldDataset) {
  const TestDir dir;
  const auto bytes = open_tokenizer("bytes");
  write_file_atomic(dir.path("a.txt"), "abc");
  write_file_atomic(dir.path("bad.jsonl"), "{\"text\":\"d\"}\nnonsense\n");
  write_file_atomic(dir.path("empty.txt"), "");
  build_dataset({.inputs = {dir.path("a.txt")}, .out_prefix = dir.path("p")}, *bytes);
  const int64_t files = dir.num_files();
  expect_error(ErrorKind::input, "bad.jsonl:2: expected JSON", [&] {
    build_dataset({.inputs = {dir.path("a.txt"), dir.path("bad.jsonl")}, .out_prefix = dir.path("p"), .replace = true},
                  *bytes);
  });
  expect_error(ErrorKind::input, "p: expected some text; got none in 1 file;", [&] {
    build_dataset({.inputs = {dir.path("empty.txt")}, .out_prefix = dir.path("p"), .replace = true}, *bytes);
  });
  EXPECT_EQ(dir.num_files(), files);
  EXPECT_EQ(TokenDataset::open(dir.path("p")).num_tokens(), 4);
}

TEST(DataBuild, TheFileThatIsNotUtf8IsNamed) {
  const TestDir dir;
  write_file_atomic(dir.path("good.txt"), "abc");
  write_file_atomic(dir.path("bad.txt"), "caf\xe9");
  const auto tokenizer = open_tokenizer(MOEBIUS_SOURCE_DIR "/tests/golden/data/tokenizers/qwen2");
  const DataBuild build{
      .inputs = {dir.path("good.txt"), dir.path("bad.txt")}, .out_prefix = dir.path("p"), .append_eod = false};
  expect_error(ErrorKind::input, dir.path("bad.txt") + ": expected UTF-8 text",
               [&] { build_dataset(build, *tokenizer); });
  build_dataset(build, *open_tokenizer("bytes"));
}

TEST(DataBuild, ABuildThatIsStoppedLeavesNothing) {
  const TestDir dir;
  for (const char* file : {"a.txt", "b.txt", "c.txt"}) write_file_atomic(dir.path(file), "abc");
  const int64_t files = dir.num_files();
  int asked = 0;
  const DataBuild build{.inputs = {dir.path("a.txt"), dir.path("b.txt"), dir.path("c.txt")},
                        .out_prefix = dir.path("p"),
                        .should_stop = [&] { return ++asked == 2; }};
  EXPECT_THROW(build_dataset(build, *open_tokenizer("bytes")), Stopped);
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(dir.num_files(), files);
}

// A text file is one block. Another thread finds the end of the input while it is encoded.
TEST(DataBuild, AStopDuringTheLastBlockLeavesNothing) {
  const TestDir dir;
  write_file_atomic(dir.path("a.txt"), "abc");
  const int64_t files = dir.num_files();
  std::atomic<int> asked{0};
  const DataBuild build{.inputs = {dir.path("a.txt")}, .out_prefix = dir.path("p"), .threads = 2, .should_stop = [&] {
                          return ++asked >= 3;
                        }};
  EXPECT_THROW(build_dataset(build, *open_tokenizer("bytes")), Stopped);
  EXPECT_EQ(dir.num_files(), files);
}

TEST(DataBuild, ADatasetIsReplacedOnlyWhenAsked) {
  const TestDir dir;
  const auto bytes = open_tokenizer("bytes");
  write_file_atomic(dir.path("a.jsonl"), R"({"prompt":"ab","completion":"c"})");
  write_file_atomic(dir.path("b.txt"), "text");
  build_dataset({.inputs = {dir.path("a.jsonl")}, .out_prefix = dir.path("p")}, *bytes);
  DataBuild again{.inputs = {dir.path("b.txt")}, .out_prefix = dir.path("p")};
  expect_error(ErrorKind::usage, "p: expected no dataset of this name; got " + dir.path("p") + ".bin; choose another",
               [&] { build_dataset(again, *bytes); });
  EXPECT_TRUE(TokenDataset::open(dir.path("p")).has_targets()) << "as it was";
  again.replace = true;
  build_dataset(again, *bytes);
  EXPECT_EQ(TokenDataset::open(dir.path("p")).num_tokens(), 5);
  EXPECT_FALSE(has_target_spans(dir.path("p")));
  write_file_atomic(dir.path("mine.json"), "[\"not a sidecar\"]");
  again = {.inputs = {dir.path("b.txt")}, .out_prefix = dir.path("mine")};
  expect_error(ErrorKind::usage, "mine.json; choose another --out", [&] { build_dataset(again, *bytes); });
}

// Each letter is an id. "<end>" is a special token that stays letters.
class LettersOfSpecial : public BeginningBytes {
 public:
  std::string_view unparsed_special(std::string_view text) const override {
    return text.find("<end>") == text.npos ? "" : "<end>";
  }
};

TEST(DataBuild, SpecialTokensEncodedAsTextAreReported) {
  const TestDir dir;
  write_file_atomic(dir.path("a.jsonl"),
                    "{\"prompt\":\"a<end>\",\"completion\":\"b<end>\"}\n{\"text\":\"<end\"}\n{\"text\":\"<end>\"}\n");
  write_file_atomic(dir.path("b.txt"), "<end");
  const auto notice = [&](const std::string& input) {
    return build_dataset({.inputs = {dir.path(input)}, .out_prefix = dir.path(input)}, LettersOfSpecial()).notice;
  };
  EXPECT_THAT(notice("a.jsonl"),
              testing::StartsWith("2 documents spell out special tokens such as \"<end>\", encoded as "));
  EXPECT_EQ(notice("b.txt"), "");
}

// Has no token for "x".
class LettersWithoutX : public BeginningBytes {
 public:
  int64_t num_lost_bytes(std::string_view text) const override { return std::count(text.begin(), text.end(), 'x'); }
};

TEST(DataBuild, BytesThatNoTokenHasAreReported) {
  const TestDir dir;
  write_file_atomic(dir.path("a.jsonl"), "{\"text\":\"a\"}\n{\"prompt\":\"ax\",\"completion\":\"xx\"}\n");
  write_file_atomic(dir.path("b.txt"), "ab");
  const auto notice = [&](const std::string& input) {
    return build_dataset({.inputs = {dir.path(input)}, .out_prefix = dir.path(input)}, LettersWithoutX()).notice;
  };
  EXPECT_THAT(notice("a.jsonl"), testing::StartsWith("3 bytes of text are left out, since the tokenizer has no token "
                                                     "for them; the first are in " +
                                                     dir.path("a.jsonl") + ":2; "));
  EXPECT_EQ(notice("b.txt"), "");
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

// Folders are distinguished by the contents of tokenizer.json, not by their names or the white
// space in the file.
TEST(DatasetInfo, AnotherTokenizerIsRefused) {
  const TestDir dir;
  write_file_atomic(dir.path("a.txt"), "abc");
  build_dataset({.inputs = {dir.path("a.txt")}, .out_prefix = dir.path("p")}, *open_tokenizer("bytes"));
  const auto put = [&](const std::string& name, const std::string& text) {
    std::filesystem::create_directories(dir.path(name));
    write_file_atomic(dir.path(name + "/tokenizer.json"), text);
    return dir.path(name);
  };
  const std::string one = put("one", R"({"a": 1, "b": 2})");
  check_tokenizer(dir.path("p"), "bytes", "who");
  check_tokenizer(dir.path("p"), dir.path("gone"), "who");
  expect_error(ErrorKind::input,
               "p: expected the tokenizer that built the dataset, \"bytes\" (257 ids, hash bytes); got \"" + one,
               [&] { check_tokenizer(dir.path("p"), one, "who"); });
  EXPECT_EQ(tokenizer_hash(one), tokenizer_hash(put("moved", R"({"b":2,"a":1})")));
  EXPECT_NE(tokenizer_hash(one), tokenizer_hash(put("changed", R"({"a":1,"b":3})")));
  write_file_atomic(
      dir.path("p.json"),  // built before there were hashes
      R"({"tokenizer":"bytes","vocab_size":257,"append_eod":true,"documents":1,"tokens":4,"text_bytes":3})");
  check_tokenizer(dir.path("p"), one, "who");
}

}  // namespace
}  // namespace moebius
