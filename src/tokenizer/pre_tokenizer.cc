#include "tokenizer/pre_tokenizer.h"

#include "core/error.h"
#include "io/unicode.h"
#include "tokenizer/split_behavior.h"

namespace moebius {
namespace {

constexpr std::string_view kGpt2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
// The classes \w and \s of Rust's regex crate.
const char* const kWords =
    R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]+|[^\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}\p{White_Space}]+)";

SplitBehavior behavior_of(const JsonField& field) {
  const std::string& name = field.string();
  if (name == "Removed") return SplitBehavior::removed;
  if (name == "Isolated") return SplitBehavior::isolated;
  if (name == "MergedWithPrevious") return SplitBehavior::merged_with_previous;
  if (name == "MergedWithNext") return SplitBehavior::merged_with_next;
  if (name == "Contiguous") return SplitBehavior::contiguous;
  field.fail("Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

// A cutter for which each character of a class is a match.
struct ClassCutter {
  bool (*is_in)(char32_t);

  template <class Fn>
  void for_each_span(std::string_view text, MatchScratch&, Fn&& fn) const {
    size_t done = 0;
    for (size_t at = 0; at < text.size();) {
      const size_t begin = at;
      if (!is_in(next_char(text, &at))) continue;
      if (done < begin) fn(done, begin, false);
      fn(begin, at, true);
      done = at;
    }
    if (done < text.size()) fn(done, text.size(), false);
  }
};

enum class Prepend { always, first, never };

Prepend prepend_of(const JsonField& field) {
  if (!field.has("prepend_scheme"))
    return field.boolean_or("add_prefix_space", true) ? Prepend::always : Prepend::never;
  const std::string& name = field.at("prepend_scheme").string();
  if (name == "always") return Prepend::always;
  if (name == "first") return Prepend::first;
  if (name == "never") return Prepend::never;
  field.at("prepend_scheme").fail("always, first or never");
}

// Replaces spaces by the marker, and puts a marker in front if `prepend`.
std::string mark_spaces(std::string_view text, std::string_view marker, bool prepend) {
  std::string marked;
  marked.reserve(text.size() + text.size() / 2);
  if (prepend && !text.starts_with(marker) && !text.starts_with(' ')) marked.append(marker);
  for (const char c : text) {
    if (c == ' ') {
      marked.append(marker);
    } else {
      marked.push_back(c);
    }
  }
  return marked;
}

}  // namespace

PreTokenizer PreTokenizer::read(const JsonField& field) {
  PreTokenizer pre_tokenizer;
  pre_tokenizer.add(field);
  return pre_tokenizer;
}

void PreTokenizer::split(std::string_view piece, bool is_first, MatchScratch& scratch, WordSink* sink) const {
  run({.text = piece, .is_first = is_first}, {.scratch = scratch, .sink = sink});
}

void PreTokenizer::run(const Piece& piece, const Run& to) const {
  if (piece.text.empty()) return;
  if (piece.stage == stages_.size()) return to.sink->word(piece.text);
  stages_[piece.stage](*this, piece, to);
}

template <class Cutter>
void PreTokenizer::add_split(Cutter cutter, SplitBehavior behavior, bool invert) {
  stages_.push_back([cutter, behavior, invert](const PreTokenizer& self, const Piece& piece, const Run& to) {
    SpanMerger merger(behavior, [&](size_t begin, size_t end) {
      self.run({.text = piece.text.substr(begin, end - begin),
                .is_first = piece.is_first && begin == 0,
                .stage = piece.stage + 1},
               to);
    });
    cutter.for_each_span(piece.text, to.scratch,
                         [&](size_t begin, size_t end, bool is_match) { merger.add(begin, end, is_match != invert); });
    merger.finish();
  });
}

void PreTokenizer::add(const JsonField& field) {
  const std::string& type = field.at("type").string();
  if (is_byte_level_ && type != "Sequence")
    field.at("type").fail("nothing after ByteLevel", "this order is not supported");
  if (type == "ByteLevel") {
    add_byte_level(field);
  } else if (type == "Split") {
    add_split(TextPattern::read(field.at("pattern")), behavior_of(field.at("behavior")),
              field.boolean_or("invert", false));
  } else if (type == "Digits") {
    const bool individual = field.boolean_or("individual_digits", false);
    add_split(ClassCutter{is_numeric}, individual ? SplitBehavior::isolated : SplitBehavior::contiguous);
  } else if (type == "Punctuation") {
    const bool named = field.has("behavior");
    add_split(ClassCutter{is_punctuation}, named ? behavior_of(field.at("behavior")) : SplitBehavior::isolated);
  } else if (type == "Whitespace") {
    add_split(TextPattern::pcre(kWords), SplitBehavior::removed, /*invert=*/true);
  } else if (type == "WhitespaceSplit") {
    add_split(ClassCutter{is_white_space}, SplitBehavior::removed);
  } else if (type == "Metaspace") {
    add_metaspace(field);
  } else if (type == "Sequence") {
    for (const JsonField& item : field.at("pretokenizers").items()) add(item);
  } else {
    field.at("type").fail("ByteLevel, Split, Digits, Punctuation, Whitespace, WhitespaceSplit, Metaspace or Sequence",
                          "this pre-tokenizer is not supported");
  }
}

void PreTokenizer::add_byte_level(const JsonField& field) {
  is_byte_level_ = true;
  if (field.boolean_or("add_prefix_space", true)) {
    stages_.push_back([](const PreTokenizer& self, const Piece& piece, const Run& to) {
      const Piece next{.text = piece.text, .is_first = piece.is_first, .stage = piece.stage + 1};
      if (piece.text.starts_with(' ')) return self.run(next, to);
      const std::string prefixed = ' ' + std::string(piece.text);
      self.run({.text = prefixed, .is_first = piece.is_first, .stage = piece.stage + 1}, to);
    });
  }
  if (field.boolean_or("use_regex", true)) add_split(TextPattern::regex(kGpt2, field.path()), SplitBehavior::isolated);
}

void PreTokenizer::add_metaspace(const JsonField& field) {
  std::string marker;
  append_utf8(field.at("replacement").character(), &marker);
  const Prepend scheme = prepend_of(field);
  stages_.push_back([marker, scheme](const PreTokenizer& self, const Piece& piece, const Run& to) {
    const bool prepend = scheme == Prepend::always || (scheme == Prepend::first && piece.is_first);
    const std::string marked = mark_spaces(piece.text, marker, prepend);
    self.run({.text = marked, .is_first = piece.is_first, .stage = piece.stage + 1}, to);
  });
  if (field.boolean_or("split", true)) add_split(TextPattern::literal(marker), SplitBehavior::merged_with_next);
}

}  // namespace moebius
