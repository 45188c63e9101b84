#include "tokenizer/hf_tokenizer.h"

#include <thread>

#include "io/files.h"
#include "io/testing.h"

namespace moebius {
namespace {

using testing::ElementsAre;

// The vocabulary is a, b, the space, "ab" and " ab". There are one special and one
// plain added token.
const char* const kTiny = R"({
  "added_tokens": [
    {"id": 7, "content": "<end>", "special": true, "normalized": false, "lstrip": false, "rstrip": false, "single_word": false},
    {"id": 9, "content": "ba", "special": false, "normalized": true, "lstrip": true, "rstrip": false, "single_word": true}
  ],
  "normalizer": null,
  "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true},
  "post_processor": {"type": "ByteLevel", "trim_offsets": true},
  "decoder": {"type": "ByteLevel"},
  "model": {"type": "BPE", "dropout": null, "unk_token": null, "vocab": {"a": 0, "b": 1, "\u0120": 2, "ab": 3, "\u0120ab": 4},
            "merges": ["a b", ["\u0120", "ab"]]}
})";

class HfTokenizerTest : public testing::Test {
 protected:
  std::unique_ptr<Tokenizer> open(const std::string& json, const TokenizerOptions& options = {}) {
    write_file_atomic(dir_.path("tokenizer.json"), json);
    return open_tokenizer(dir_.path(), options);
  }

  // Opens kTiny with a JSON merge patch applied.
  std::unique_ptr<Tokenizer> open_patched(const std::string& patch, const TokenizerOptions& options = {}) {
    nlohmann::json json = nlohmann::json::parse(kTiny);
    json.merge_patch(nlohmann::json::parse(patch));
    return open(json.dump(), options);
  }

  void expect_refused(const std::string& patch, const std::string& message) {
    expect_error(ErrorKind::input, message, [&] { open_patched(patch); });
  }

  TestDir dir_;
};

TEST_F(HfTokenizerTest, CountsTheBytesThatNoTokenHas) {
  EXPECT_EQ(open(kTiny)->num_lost_bytes("ab \xC3\xA9!"), 3);
  EXPECT_EQ(open_patched(R"({"model": {"unk_token": "a"}})")->num_lost_bytes("ab \xC3\xA9!"), 0);
  EXPECT_EQ(open_patched(R"({"normalizer": {"type": "Lowercase"}})")->num_lost_bytes("AB"), 0);
  EXPECT_EQ(open_patched(R"({"pre_tokenizer": null})")->num_lost_bytes("xyz"), 0) << "not byte-level";
}

std::vector<int32_t> encode(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> ids;
  tokenizer.encode(text, &ids);
  return ids;
}

TEST_F(HfTokenizerTest, MergesOfBothSpellingsAndAddedTokens) {
  const auto tokenizer = open(kTiny);
  EXPECT_EQ(tokenizer->vocab_size(), 10);
  EXPECT_EQ(tokenizer->name(), dir_.path());
  EXPECT_THAT(encode(*tokenizer, "ab ab b"), ElementsAre(3, 4, 2, 1));
  EXPECT_THAT(encode(*tokenizer, "a<end>b"), ElementsAre(0, 7, 1));
  // lstrip includes the spaces, and "ba" inside "aba" is no single word.
  EXPECT_THAT(encode(*tokenizer, "a  ba aba"), ElementsAre(0, 9, 4, 0));
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{3, 7, 4, 9}), "ab abba");
  EXPECT_EQ(open(kTiny, {.show_special = true})->decode(std::vector<int32_t>{3, 7, 4, 9}), "ab<end> abba");
}

TEST_F(HfTokenizerTest, IdsWithoutATokenGiveNoTextAndThoseBeyondAreRefused) {
  const auto tokenizer = open(kTiny);
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{0, 8, 1}), "ab");
  expect_error(ErrorKind::usage, "expected ids in [0, 9]; got 10",
               [&] { tokenizer->decode(std::vector<int32_t>{10}); });
}

TEST_F(HfTokenizerTest, SpecialTokensCanBeLeftInTheText) {
  const std::string patch =
      R"({"model": {"vocab": {"<": 5, "e": 6, "n": 10, "d": 11, ">": 12}}, "post_processor": {"type": "TemplateProcessing",
          "single": [{"SpecialToken": {"id": "<end>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                     {"SpecialToken": {"id": "<end>", "type_id": 0}}],
          "special_tokens": {"<end>": {"id": "<end>", "ids": [7], "tokens": ["<end>"]}}}})";
  EXPECT_THAT(encode(*open_patched(patch), "a<end>"), ElementsAre(7, 0, 7, 7));
  EXPECT_THAT(encode(*open_patched(patch, {.parse_special = false}), "a<end>"), ElementsAre(7, 0, 5, 6, 10, 11, 12, 7));
  EXPECT_THAT(encode(*open_patched(patch, {.add_special = false}), "a<end>"), ElementsAre(0, 7));
  // Such a tokenizer also reports special tokens that it leaves as letters.
  const auto letters = open_patched(patch, {.parse_special = false});
  EXPECT_EQ(letters->unparsed_special("a b<<end>"), "<end>");
  EXPECT_EQ(letters->unparsed_special("ba <end ba"), "") << "a plain added token is always found";
  EXPECT_EQ(open_patched(patch)->unparsed_special("a<end>"), "");
  std::vector<int32_t> ids;
  open_patched(patch)->encode("a", &ids, TextPart::beginning);
  open_patched(patch)->encode("a", &ids, TextPart::end);
  EXPECT_THAT(ids, ElementsAre(7, 0, 0, 7));
}

TEST_F(HfTokenizerTest, NamesThatAreNoFolderOfATokenizer) {
  open(kTiny);
  expect_error(ErrorKind::input, "got \"" + dir_.path("tokenizer.json") + "\"; give its folder, " + dir_.path(),
               [&] { open_tokenizer(dir_.path("tokenizer.json")); });
  expect_error(ErrorKind::input, "got \"nowhere\"; correct the name", [&] { open_tokenizer("nowhere"); });
  std::filesystem::create_directory(dir_.path("other"));
  expect_error(ErrorKind::input, "this folder has none; complete its download, or let transformers write one: ", [&] {
    open_tokenizer(dir_.path("other"));
  });
  write_file_atomic(dir_.path("other/tokenizer.model"), "\n");
  expect_error(ErrorKind::input,
               "its tokenizer.model is a SentencePiece model, which is not supported; in transformers, ",
               [&] { open_tokenizer(dir_.path("other")); });
  expect_error(ErrorKind::input, "tokenizer.json: expected JSON; got a Git LFS pointer to it; run git lfs pull",
               [&] { open("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 11\n"); });
}

TEST_F(HfTokenizerTest, TheEndOfADocument) {
  expect_error(ErrorKind::input, "expected an end-of-document token; got no eos_token", [&] { open(kTiny)->eod_id(); });
  write_file_atomic(dir_.path("config.json"), R"({"eos_token_id": [3, 7]})");
  EXPECT_EQ(open(kTiny)->eod_id(), 3);
  EXPECT_EQ(open(kTiny)->decode(std::vector<int32_t>{0, 3}), "a");
  write_file_atomic(dir_.path("special_tokens_map.json"), R"({"eos_token": "b"})");
  EXPECT_EQ(open(kTiny)->eod_id(), 1);
  write_file_atomic(dir_.path("tokenizer_config.json"), R"({"eos_token": {"content": "<end>"}})");
  EXPECT_EQ(open(kTiny)->eod_id(), 7);
  write_file_atomic(dir_.path("tokenizer_config.json"), R"({"eos_token": "<stop>"})");
  expect_error(ErrorKind::input, "tokenizer_config.json: expected an eos_token of tokenizer.json; got \"<stop>\"",
               [&] { open(kTiny); });
  write_file_atomic(dir_.path("tokenizer_config.json"), R"({"eos_token": null})");
  write_file_atomic(dir_.path("special_tokens_map.json"), "{}");
  write_file_atomic(dir_.path("config.json"), R"({"eos_token_id": 10})");
  expect_error(ErrorKind::input, "config.json: eos_token_id: expected an integer in [0, 9]; got 10",
               [&] { open(kTiny); });
  write_file_atomic(dir_.path("config.json"), R"({"eos_token_id": []})");
  expect_error(ErrorKind::input, "config.json: eos_token_id: expected an id; got []", [&] { open(kTiny); });
}

TEST_F(HfTokenizerTest, OneObjectServesManyThreads) {
  const auto tokenizer = open(kTiny);
  std::string text;
  for (int i = 0; i < 300; ++i) text += "ab ba a<end> bb"[i * 7 % 15];
  const std::vector<int32_t> alone = encode(*tokenizer, text);
  std::vector<std::vector<int32_t>> together(4);
  {
    std::vector<std::jthread> threads;
    for (auto& ids : together)
      threads.emplace_back([&] {
        for (int i = 0; i < 20; ++i) ids = encode(*tokenizer, text);
      });
  }
  for (const auto& ids : together) EXPECT_EQ(ids, alone);
}

TEST_F(HfTokenizerTest, InvalidUtf8) {
  const auto tokenizer = open(kTiny);
  expect_error(ErrorKind::input, "expected UTF-8 text; got an invalid byte at offset 2",
               [&] { encode(*tokenizer, "ab\xff"); });
  // A token may be a part of a character. Its bytes are replaced as often as the
  // Unicode standard recommends.
  const auto bytes = open_patched(R"({"model": {"vocab": {"\u00e4": 5, "\u00bd": 6}}})");
  EXPECT_EQ(bytes->decode(std::vector<int32_t>{5, 6, 0, 6}),
            "\xEF\xBF\xBD"
            "a"
            "\xEF\xBF\xBD");
}

// -- rejected files
// --------------------------------------------------------------------------------------

TEST_F(HfTokenizerTest, BrokenFiles) {
  expect_error(ErrorKind::input, "tokenizer.json: expected JSON", [&] { open("{"); });
  expect_error(ErrorKind::input, "tokenizer.json: expected an object; got []", [&] { open("[]"); });
  expect_error(ErrorKind::input, "tokenizer.json: expected the key \"model\"; got none", [&] { open("{}"); });
  expect_error(ErrorKind::input, "tokenizer.json: expected JSON; got a ",
               [&] { open(R"({"model": {"vocab": {"\ud800": 1}}})"); });
}

TEST_F(HfTokenizerTest, BrokenVocabularies) {
  expect_refused(R"({"model": {"vocab": null}})", "model: expected the key \"vocab\"; got none");
  expect_refused(R"({"model": {"vocab": {"c": 3}}})",
                 "model.vocab: expected a unique id for each token; got 3 for \"ab\" and \"c\"");
  expect_refused(R"({"model": {"vocab": {"c": -1}}})",
                 "model.vocab.\"c\": expected an integer in [0, 16777215]; got -1");
  expect_refused(R"({"model": {"vocab": {"c": 1.5}}})", "got 1.5");
  expect_refused(R"({"model": {"vocab": {"c": 18446744073709551615}}})", "got 18446744073709551615");
  expect_refused(R"({"model": {"vocab": []}})", "model.vocab: expected an object of tokens and their ids; got []");
}

TEST_F(HfTokenizerTest, BrokenMerges) {
  expect_refused(R"({"model": {"merges": null}})", "model: expected the key \"merges\"; got none");
  expect_refused(R"({"model": {"merges": ["a c"]}})", "merges[0]: expected tokens of the vocabulary; got \"c\"");
  expect_refused(R"({"model": {"merges": ["a b", "b a"]}})",
                 "merges[1]: expected tokens of the vocabulary; got \"ba\"");
  expect_refused(R"({"model": {"merges": ["ab"]}})",
                 "merges[0]: expected two tokens with one space between them; got \"ab\"");
  expect_refused(R"({"model": {"merges": [["a", "b", "a"]]}})", "merges[0]: expected two tokens; got");
  expect_refused(R"({"model": {"merges": [7]}})", "merges[0]: expected a string; got 7");
  expect_refused(R"({"model": {"merges": {}}})", "merges: expected a list; got {}");
}

TEST_F(HfTokenizerTest, ModelsThatAreNotSupported) {
  expect_refused(R"({"model": {"type": "Unigram"}})",
                 "model.type: expected BPE; got \"Unigram\"; this model is not supported");
  expect_refused(R"({"model": {"dropout": 0.1}})",
                 "model.dropout: expected null; got 0.1; BPE dropout is not supported");
  expect_refused(R"({"model": {"end_of_word_suffix": "</w>"}})", "end_of_word_suffix: expected null; got \"</w>\"");
  expect_refused(R"({"model": {"continuing_subword_prefix": "##"}})", "continuing_subword_prefix: expected null");
  expect_refused(R"({"model": {"unk_token": "<unk>"}})",
                 "unk_token: expected a token of the vocabulary; got \"<unk>\"");
  expect_refused(R"({"model": {"fuse_unk": 1}})", "model.fuse_unk: expected true or false; got 1");
  EXPECT_NO_THROW(open_patched(R"({"model": {"dropout": 0.0, "end_of_word_suffix": ""}})"));
}

TEST_F(HfTokenizerTest, PartsThatAreNotSupported) {
  expect_refused(R"({"normalizer": {"type": "Precompiled"}})", "got \"Precompiled\"; this normalizer is not supported");
  expect_refused(R"({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Nmt"}]}})",
                 "normalizer.normalizers[1].type: expected NFC, ");
  expect_refused(R"({"pre_tokenizer": {"type": "BertPreTokenizer"}})", "this pre-tokenizer is not supported");
  expect_refused(
      R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]}})",
      "pretokenizers[1].type: expected nothing after ByteLevel; got \"Digits\"");
  expect_refused(R"({"post_processor": {"type": "RobertaProcessing"}})", "this post-processor is not supported");
  expect_refused(R"({"decoder": {"type": "WordPiece"}})", "this decoder is not supported");
  expect_refused(R"({"version": "2.0"})", "version: expected 1.0; got \"2.0\"");
  expect_refused(R"({"truncation": 5})", "truncation: expected an object or null; got 5");
  expect_refused(R"({"padding": []})", "padding: expected an object or null; got []");
}

// Transformers, too, applies neither where a call does not ask for it.
TEST_F(HfTokenizerTest, IgnoresTruncationAndPaddingWithANotice) {
  const auto both = open_patched(R"({"truncation": {"max_length": 2, "strategy": "LongestFirst"},
                                     "padding": {"strategy": {"Fixed": 9}, "pad_id": 7}, "added_tokens": []})");
  EXPECT_THAT(encode(*both, "ab ab b"), ElementsAre(3, 4, 2, 1));
  EXPECT_EQ(both->notice(), dir_.path("tokenizer.json") +
                                ": truncation and padding are not applied: ids are neither truncated nor padded, "
                                "which is the default of transformers too");
  EXPECT_THAT(open_patched(R"({"padding": {}})")->notice(), testing::HasSubstr("padding is not applied"));
  EXPECT_EQ(open_patched(R"({"added_tokens": []})")->notice(), "");
}

TEST_F(HfTokenizerTest, BrokenParts) {
  expect_refused(R"({"normalizer": {"type": "Replace", "pattern": {}, "content": ""}})",
                 "normalizer.pattern: expected {\"Regex\": ...} or {\"String\": ...}; got {}");
  expect_refused(
      R"({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated"}})",
      "pre_tokenizer.pattern.Regex: expected a regular expression; got \"(a\", which is invalid at character 2");
  expect_refused(
      R"({"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "Sideways"}})",
      "behavior: expected Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous; got \"Sideways\"");
  expect_refused(R"({"pre_tokenizer": {"type": "Metaspace", "replacement": "__"}})",
                 "replacement: expected a string of one character; got \"__\"");
  expect_refused(R"({"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "last"}})",
                 "prepend_scheme: expected always, first or never; got \"last\"");
  expect_refused(R"({"decoder": {"type": "Strip", "content": " ", "start": -1, "stop": 0}})",
                 "decoder.start: expected an integer in [0, 1048576]; got -1");
}

TEST_F(HfTokenizerTest, BrokenTemplates) {
  const auto refuse = [&](const std::string& single, const std::string& message) {
    expect_refused(R"({"post_processor": {"type": "TemplateProcessing", "single": )" + single +
                       R"(, "special_tokens": {"x": {"ids": [8]}}}})",
                   message);
  };
  refuse(R"([])", "post_processor.single: expected a template with the sequence A; got []");
  refuse(R"([{"Sequence": {"id": "B"}}])", "single[0]: expected exactly one sequence A; got");
  refuse(R"([{"Sequence": {"id": "A"}}, {"Sequence": {"id": "A"}}])", "single[1]: expected exactly one sequence A");
  refuse(R"([{"SpecialToken": {"id": "y"}}])", "special_tokens: expected the key \"y\"; got none");
  refuse(R"([{"SpecialToken": {"id": "x"}}, {"Sequence": {"id": "A"}}])",
         "post_processor: expected ids of tokens; got 8, which is no token");
}

TEST_F(HfTokenizerTest, AddedTokensThatLeaveAGapAreNoted) {
  const auto notice = [&](int end, int ba, const std::string& content = "ba") {
    nlohmann::json json = nlohmann::json::parse(kTiny);
    json["added_tokens"][0]["id"] = end;
    json["added_tokens"][1]["id"] = ba;
    json["added_tokens"][1]["content"] = content;
    return open(json.dump())->notice();
  };
  EXPECT_EQ(notice(5, 6), "");
  EXPECT_EQ(notice(6, 5), "") << "in the order of ids";
  EXPECT_EQ(notice(5, 1, "b"), "") << "of the vocabulary";
  EXPECT_THAT(notice(5, 7),
              testing::HasSubstr("added_tokens: \"ba\" has id 7 here, as in the file, but 6 in Hugging "));
  EXPECT_THAT(notice(7, 9), testing::HasSubstr("\"<end>\" has id 7 here, as in the file, but 5 in Hugging Face's"));
}

TEST_F(HfTokenizerTest, BrokenAddedTokens) {
  const auto refuse = [&](const std::string& changes, const std::string& message) {
    nlohmann::json json = nlohmann::json::parse(kTiny);
    json["added_tokens"][1].merge_patch(nlohmann::json::parse(changes));
    expect_error(ErrorKind::input, message, [&] { open(json.dump()); });
  };
  refuse(R"({"id": 7})", "added_tokens[1].id: expected a unique id for each added token; got 7");
  refuse(R"({"id": 0})",
         "added_tokens[1]: expected a unique id, or the token's id in the vocabulary; got 0 for \"ba\"");
  refuse(R"({"content": "ab"})", "got 9 for \"ab\"");
  refuse(R"({"content": "<end>"})", "added_tokens[1].content: expected each added token once; got \"<end>\"");
  refuse(R"({"content": ""})", "added_tokens[1].content: expected some text; got \"\"");
  refuse(R"({"id": 16777216})", "added_tokens[1].id: expected an integer in [0, 16777215]");
  refuse(R"({"special": null})", "added_tokens[1]: expected the key \"special\"; got none");
}

// -- hostile text ----------------------------------------------------------------------------------------

// A quadratic rule would need minutes for these texts. The time limit allows for a sanitizer.
TEST_F(HfTokenizerTest, LongTextsTakeLinearTime) {
  const size_t size = 100'000;
  const std::string regex =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+)";
  const auto tokenizer = open_patched(
      R"({"normalizer": {"type": "NFC"}, "model": {"vocab": {"aa": 20, "aaaa": 21}, "merges": ["a a", "aa aa", "a b"]},
          "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": ")" +
      regex + R"("}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]}})");
  std::string marks, ends;
  while (marks.size() < size) marks += "\xCC\x81\xCC\xA3";  // classes 230 and 220, in the wrong order
  while (ends.size() < size) ends += "<end";
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(encode(*tokenizer, std::string(size, 'a')).size(), size / 4);
  EXPECT_EQ(encode(*tokenizer, std::string(size, ' ')).size(), size);
  EXPECT_EQ(encode(*tokenizer, std::string(size, ' ') + "a").size(), size + 1);
  encode(*tokenizer, std::string(size, '\n'));
  encode(*tokenizer, std::string(size, '<'));
  encode(*tokenizer, marks);
  encode(*tokenizer, ends);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

}  // namespace
}  // namespace moebius
