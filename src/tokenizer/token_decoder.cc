#include "tokenizer/token_decoder.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "core/error.h"
#include "io/unicode.h"
#include "io/utf8.h"
#include "tokenizer/byte_level.h"

namespace moebius {
namespace {

using Tokens = std::vector<std::string>;

void decode_byte_level(Tokens* tokens) {
  std::string bytes;
  for (const std::string& token : *tokens) bytes += byte_level_bytes(token).value_or(token);
  *tokens = {replace_invalid_utf8(bytes)};
}

// The token "<0x0A>" is byte 10.
std::optional<char> fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token.back() != '>') return std::nullopt;
  uint8_t byte = 0;
  const auto [end, error] = std::from_chars(token.data() + 3, token.data() + 5, byte, 16);
  if (error != std::errc() || end != token.data() + 5) return std::nullopt;
  return static_cast<char>(byte);
}

// A run of byte tokens becomes text if all of it is valid UTF-8. Otherwise each of its
// bytes becomes U+FFFD.
void decode_byte_fallback(Tokens* tokens) {
  Tokens decoded;
  std::string run;
  const auto finish_run = [&] {
    if (find_invalid_utf8(run) < 0) {
      if (!run.empty()) decoded.push_back(run);
    } else {
      decoded.insert(decoded.end(), run.size(), "\xEF\xBF\xBD");
    }
    run.clear();
  };
  for (std::string& token : *tokens) {
    if (const auto byte = fallback_byte(token)) {
      run.push_back(*byte);
    } else {
      finish_run();
      decoded.push_back(std::move(token));
    }
  }
  finish_run();
  *tokens = std::move(decoded);
}

void fuse(Tokens* tokens) {
  std::string all;
  for (const std::string& token : *tokens) all += token;
  *tokens = {std::move(all)};
}

void strip(std::string* token, const std::string& content, int64_t from_start, int64_t from_stop) {
  size_t begin = 0;
  for (int64_t i = 0; i < from_start && std::string_view(*token).substr(begin).starts_with(content); ++i)
    begin += content.size();
  size_t end = token->size();
  for (int64_t i = 0; i < from_stop && std::string_view(*token).substr(begin, end - begin).ends_with(content); ++i)
    end -= content.size();
  *token = token->substr(begin, end - begin);
}

void replace(std::string* token, const TextPattern& pattern, const std::string& content, MatchScratch& scratch) {
  std::string out;
  pattern.for_each_span(*token, scratch, [&](size_t begin, size_t end, bool is_match) {
    out.append(is_match ? content : token->substr(begin, end - begin));
  });
  *token = std::move(out);
}

// Replaces markers by spaces. With `drops_first`, those of the first token are removed, because
// encoding added them.
void decode_metaspace(Tokens* tokens, char32_t marker, bool drops_first) {
  for (size_t i = 0; i < tokens->size(); ++i) {
    std::string text;
    for (size_t at = 0; at < (*tokens)[i].size();) {
      const char32_t c = next_char((*tokens)[i], &at);
      if (c != marker) {
        append_utf8(c, &text);
      } else if (i > 0 || !drops_first) {
        text.push_back(' ');
      }
    }
    (*tokens)[i] = std::move(text);
  }
}

bool prepends(const JsonField& field) {
  if (field.has("prepend_scheme")) return field.at("prepend_scheme").string() != "never";
  return field.boolean_or("add_prefix_space", true);
}

}  // namespace

TokenDecoder TokenDecoder::read(const JsonField& field) {
  TokenDecoder decoder;
  decoder.separator_ = "";
  decoder.add(field);
  return decoder;
}

void TokenDecoder::add(const JsonField& field) {
  const std::string& type = field.at("type").string();
  if (type == "ByteLevel") {
    steps_.push_back([](Tokens* tokens, MatchScratch&) { decode_byte_level(tokens); });
  } else if (type == "ByteFallback") {
    steps_.push_back([](Tokens* tokens, MatchScratch&) { decode_byte_fallback(tokens); });
  } else if (type == "Fuse") {
    steps_.push_back([](Tokens* tokens, MatchScratch&) { fuse(tokens); });
  } else if (type == "Strip") {
    std::string content;
    append_utf8(field.at("content").character(), &content);
    const int64_t start = field.at("start").integer(0, 1 << 20), stop = field.at("stop").integer(0, 1 << 20);
    steps_.push_back([=](Tokens* tokens, MatchScratch&) {
      for (std::string& token : *tokens) strip(&token, content, start, stop);
    });
  } else if (type == "Replace") {
    const TextPattern pattern = TextPattern::read(field.at("pattern"));
    steps_.push_back([pattern, content = field.at("content").string()](Tokens* tokens, MatchScratch& scratch) {
      for (std::string& token : *tokens) replace(&token, pattern, content, scratch);
    });
  } else if (type == "Metaspace") {
    const char32_t marker = field.at("replacement").character();
    const bool drops_first = prepends(field);
    steps_.push_back([=](Tokens* tokens, MatchScratch&) { decode_metaspace(tokens, marker, drops_first); });
  } else if (type == "Sequence") {
    for (const JsonField& item : field.at("decoders").items()) add(item);
  } else {
    field.at("type").fail("ByteLevel, ByteFallback, Fuse, Strip, Replace, Metaspace or Sequence",
                          "this decoder is not supported");
  }
}

std::string TokenDecoder::decode(std::vector<std::string> tokens, MatchScratch& scratch) const {
  for (const Step& step : steps_) step(&tokens, scratch);
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i) text += (i > 0 ? separator_ : "") + tokens[i];
  return text;
}

}  // namespace moebius
