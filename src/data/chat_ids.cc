#include "data/chat_ids.h"

#include <algorithm>
#include <optional>

#include "core/error.h"

namespace moebius {
namespace {

size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

size_t common_suffix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(std::mismatch(a.rbegin(), a.rend(), b.rbegin(), b.rend()).first - a.rbegin());
}

// The turns of one chat, found in its text.
class TurnFinder {
 public:
  TurnFinder(const ChatTemplate& chat_template, const Chat& chat, const std::string& text)
      : template_(chat_template), chat_(chat), text_(text) {}

  // Returns the spans of a turn: one, or two for a turn whose calls and content have results of tools between them.
  std::vector<jinja::Span> find(size_t i) const {
    const size_t begin = begin_of(i);
    if (i + 1 == chat_.messages.size()) return {{begin, after_end_token(begin, text_.size())}};
    const std::string until = template_.render(chat_, i + 1, false).text;
    if (const auto parts = parts_around_results(i, begin, until)) return *parts;
    return {{begin, after_end_token(begin, end_of(i, begin, until))}};
  }

 private:
  // The place of a message's content in a text. The text around it is the same for any content.
  struct Content {
    size_t begin = 0, end = 0;
  };

  [[noreturn]] void fail(size_t i, const char* why) const {
    MOEBIUS_FAIL(input,
                 "{}: expected to find the assistant's message {} in the text of the chat; got a template without {{% "
                 "generation %}} {}; enclose the answers in {{% generation %}} in the template, or drop the chat",
                 chat_.who, i, why);
  }

  // An answer begins where the prompt for it ends. A template may print more into the prompt than
  // into a chat, such as the beginning of a thought.
  size_t begin_of(size_t i) const {
    const std::string before = template_.render(chat_, i, false).text;
    const std::string prompt = template_.render(chat_, i, true).text;
    if (text_.starts_with(before)) return std::max(before.size(), common_prefix(text_, prompt));
    if (text_.starts_with(prompt)) return prompt.size();  // a chat without a prompt ends with a token of its own
    const bool has_header = prompt.size() > before.size() && prompt.starts_with(before);
    auto begin = has_header ? after_header(i, std::string_view(prompt).substr(before.size())) : std::nullopt;
    if (!begin) begin = without_header(i, before);
    if (!begin) fail(i, "that prints the messages before it in another way");
    return *begin;
  }

  // Returns the place of an answer without a header, such as one that follows the result of a tool: what the template
  // prints before the content of a plain answer, and prints without that answer too. The end of a turn that an answer
  // continues is not a part of it. If later messages change how earlier ones are printed, the message just before the
  // answer must still be printed alike.
  std::optional<size_t> without_header(size_t i, const std::string& before) const {
    Chat plain = chat_;
    plain.messages.resize(i);
    plain.messages.push_back(chat_message("assistant", "\x01"));
    const std::optional<std::string> answered = rendered(plain, i + 1);
    const size_t at = answered ? answered->rfind('\x01') : std::string::npos;
    if (at == std::string::npos || before.compare(0, at, *answered, 0, at) != 0) return std::nullopt;
    if (text_.compare(0, at, before, 0, at) == 0) return at;
    if (i == 0) return std::nullopt;
    const std::optional<Content> here = content_of(i - 1), there = content_of(i - 1, i, before);
    if (!here || !there || there->begin > at) return std::nullopt;
    const size_t count = at - there->begin;
    if (text_.compare(here->begin, count, before, there->begin, count) != 0) return std::nullopt;
    return here->begin + count;
  }

  // Finds the header of an answer between the content of the message before it and that of the next one. A template may
  // print messages before the answer in another way if others follow, for example without their thoughts.
  // Returns the end of the header's part that is there, which is at least its first line that is not empty.
  std::optional<size_t> after_header(size_t i, std::string_view header) const {
    const size_t first = header.find_first_not_of('\n');
    if (i == 0 || first == header.npos) return std::nullopt;
    const std::optional<Content> before = content_of(i - 1);
    std::optional<Content> after = content_of(i);
    if (!after && i + 1 < chat_.messages.size()) after = content_of(i + 1);
    if (!before || !after || before->end >= after->begin) return std::nullopt;
    const std::string_view between = std::string_view(text_).substr(before->end, after->begin - before->end);
    const size_t at = between.find(header.substr(0, header.find('\n', first)));
    if (at == between.npos) return std::nullopt;
    return before->end + at + common_prefix(between.substr(at), header);
  }

  size_t end_of(size_t i, size_t begin, const std::string& until) const {
    if (until.size() >= begin && text_.starts_with(until)) return until.size();
    if (const size_t size = without_end_token(until).size();
        size >= begin && text_.starts_with(without_end_token(until)))
      return size;
    return has_calls(i) ? end_of_calls(i, begin, until) : end_of_content(i, begin, until);
  }

  bool has_calls(size_t i) const {
    const jinja::Value* calls = chat_.messages[i].dict().find(std::string("tool_calls"));
    return calls != nullptr && !(calls->is_list() && calls->items().empty());
  }

  // A template may print the end-of-text token after the last message alone.
  std::string_view without_end_token(std::string_view text) const {
    if (text.ends_with(template_.eos_token())) text.remove_suffix(template_.eos_token().size());
    return text;
  }

  size_t end_of_content(size_t i, size_t begin, const std::string& until) const {
    const jinja::Value* text = chat_.messages[i].dict().find(std::string("content"));
    if (text == nullptr || !text->is_text()) fail(i, "that prints it in another way when messages follow");
    const std::optional<Content> content = content_of(i);
    if (!content || content->end < begin) fail(i, "that does not print its content");
    const std::optional<std::string> rest = rest_of_turn(i, until);
    if (rest && text_.compare(content->end, rest->size(), *rest) == 0) return content->end + rest->size();
    const std::string& token = template_.eos_token();
    return text_.compare(content->end, token.size(), token) == 0 ? content->end + token.size() : content->end;
  }

  // Returns what a turn prints after its content in a chat that ends with it.
  std::optional<std::string> rest_of_turn(size_t i, const std::string& until) const {
    const std::optional<Content> content = content_of(i, i + 1, until);
    return content ? std::optional(until.substr(content->end)) : std::nullopt;
  }

  // Calls of tools follow the content. They end where the text up to the next content is that of a chat which ends with
  // the next message; otherwise the end-of-text token follows them.
  size_t end_of_calls(size_t i, size_t begin, const std::string& until) const {
    const std::optional<Content> next = content_of(i + 1);
    if (!next || next->begin <= begin) fail_at_calls(i);
    const std::string with_next = template_.render(chat_, i + 2, false).text;
    const std::string_view text(text_),
        after = std::string_view(with_next).substr(std::min(until.size(), with_next.size()));
    for (size_t end = next->begin; end > begin && with_next.starts_with(until); --end)
      if (until.ends_with(text.substr(begin, end - begin)) && after.starts_with(text.substr(end, next->begin - end)))
        return end;
    if (const auto end = end_before_next_header(i, begin, until)) return *end;
    const std::string& token = template_.eos_token();
    const size_t at = token.empty() ? text.npos : text.substr(0, next->begin).rfind(token);
    if (at == text.npos || at < begin) fail_at_calls(i);
    return at + token.size();
  }

  // A template may print the results of tools between the calls of a turn and its content, as those of Gemma 4 do. Then
  // the turn has two spans. The first may end with the text that follows the content in a chat of the messages up to
  // this turn, and the second with the text that follows the content in a chat that ends with the results. Returns
  // nothing for other turns.
  std::optional<std::vector<jinja::Span>> parts_around_results(size_t i, size_t begin, const std::string& until) const {
    if (!has_calls(i) || text_.starts_with(until)) return std::nullopt;
    const std::optional<Content> own = content_of(i), there = content_of(i, i + 1, until);
    if (!own || !there) return std::nullopt;
    size_t num_messages = i + 1, first_result = own->begin;
    for (; num_messages < chat_.messages.size(); ++num_messages) {
      const std::optional<Content> result = content_of(num_messages);
      if (!result || result->begin >= own->begin) break;
      first_result = std::min(first_result, result->begin);
    }
    if (num_messages == i + 1) return std::nullopt;
    const std::string_view text(text_), with_calls = std::string_view(until).substr(0, there->begin);
    size_t end = first_result;
    while (end > begin && !with_calls.ends_with(text.substr(begin, end - begin))) --end;
    if (end <= begin) return std::nullopt;
    const std::string with_results = template_.render(chat_, num_messages, false).text;
    const std::optional<Content> last = content_of(i, num_messages, with_results);
    const auto followed_by = [&](size_t at, std::string_view rest) {
      return text.substr(at).starts_with(rest) ? at + rest.size() : at;
    };
    end = followed_by(end, std::string_view(until).substr(there->end));
    const size_t own_end = followed_by(own->end, last ? std::string_view(with_results).substr(last->end) : "");
    return {{{begin, after_end_token(begin, end)}, {own->begin, after_end_token(own->begin, own_end)}}};
  }

  // Returns the place before the text that the next message prints before its content in a chat that ends with it.
  // Returns nothing if there is no such text after `least`.
  std::optional<size_t> end_before_next_header(size_t i, size_t least, const std::string& until) const {
    const std::optional<Content> next = content_of(i + 1);
    if (!next || next->begin <= least) return std::nullopt;
    const std::string with_next = template_.render(chat_, i + 2, false).text;
    const std::optional<Content> there = content_of(i + 1, i + 2, with_next);
    if (!there || !with_next.starts_with(until) || there->begin <= until.size()) return std::nullopt;
    const std::string_view header = std::string_view(with_next).substr(until.size(), there->begin - until.size());
    const std::string_view between = std::string_view(text_).substr(least, next->begin - least);
    if (!between.ends_with(header)) return std::nullopt;
    return next->begin - header.size();
  }
  [[noreturn]] void fail_at_calls(size_t i) const {
    fail(i, "that prints its calls of tools in another way when messages follow");
  }

  std::optional<Content> content_of(size_t i) const { return content_of(i, chat_.messages.size(), text_); }
  // The same in `text`, that of the first n messages. Returns nothing for a message without a text, and for a text that
  // the template does not print.
  std::optional<Content> content_of(size_t i, size_t n, const std::string& text) const {
    const jinja::Value* content = chat_.messages[i].dict().find(std::string("content"));
    if (content == nullptr || !content->is_text()) return std::nullopt;
    Chat other = chat_;
    auto message = std::make_shared<jinja::Dict>(chat_.messages[i].dict());
    message->set("content", content->text() == "\x01" ? "\x02" : "\x01");
    other.messages[i] = jinja::DictPtr(message);
    const std::optional<std::string> changed = rendered(other, n);
    if (!changed || *changed == text) return std::nullopt;
    return Content{common_prefix(text, *changed), text.size() - common_suffix(text, *changed)};
  }

  // Returns nothing if the template refuses the first n messages.
  std::optional<std::string> rendered(const Chat& chat, size_t n) const {
    try {
      return template_.render(chat, n, false).text;
    } catch (const Error&) {
      return std::nullopt;
    }
  }

  // Returns the position after the end-of-text token, since no text after it is ever generated.
  size_t after_end_token(size_t begin, size_t end) const {
    const std::string& token = template_.eos_token();
    if (token.empty()) return end;
    const size_t at = std::string_view(text_).substr(begin, end - begin).rfind(token);
    return at == std::string::npos ? end : begin + at + token.size();
  }

  const ChatTemplate& template_;
  const Chat& chat_;
  const std::string& text_;
};

// The ids that are in [begin, end) at least in part, where the tokenizer knows where ids begin.
void mark(const std::vector<size_t>& starts, size_t num_bytes, const jinja::Span& span, std::vector<bool>* is_target) {
  for (size_t i = 0; i < starts.size(); ++i) {
    const size_t end = i + 1 < starts.size() ? starts[i + 1] : num_bytes;
    if (starts[i] < span.end && end > span.begin) (*is_target)[i] = true;
  }
}

// Returns the number of ids before a place of the text: those that the text up to there has too.
size_t ids_before(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, std::string_view text) {
  std::vector<int32_t> before;
  tokenizer.encode(text, &before);
  return static_cast<size_t>(std::mismatch(before.begin(), before.end(), ids.begin(), ids.end()).first -
                             before.begin());
}

}  // namespace

std::vector<jinja::Span> assistant_spans(const ChatTemplate& chat_template, const Chat& chat,
                                         const jinja::Rendered& whole) {
  std::vector<size_t> turns;
  for (size_t i = 0; i < chat.messages.size(); ++i)
    if (role_of(chat.messages[i]) == "assistant") turns.push_back(i);
  const auto has_loss = [&](size_t i) {  // read_chat() admits 0 and 1 alone
    const jinja::Value* weight = chat.messages[i].dict().find(std::string("weight"));
    return !weight || !weight->is_integer() || weight->integer() != 0;
  };
  const bool is_generated = chat_template.has_generation(chat) && whole.knows_generated;
  if (is_generated && std::all_of(turns.begin(), turns.end(), has_loss)) return whole.generated;
  // The numbers of blocks and turns are compared at the end of each turn, since one turn may have two blocks.
  const auto has_one_block_a_turn = [&] {
    if (whole.generated.size() != turns.size()) return false;
    for (size_t t = 0; t < turns.size(); ++t)
      if (chat_template.render(chat, turns[t] + 1, /*with_prompt=*/false).generated.size() != t + 1) return false;
    return true;
  };
  MOEBIUS_CHECK(input, !is_generated || has_one_block_a_turn(),
                "{}: expected one {{% generation %}} for each of {} messages of the assistant, since a \"weight\" of 0 "
                "excludes some; got {} from the template; drop the weights or the chat",
                chat.who, turns.size(), whole.generated.size());
  const TurnFinder finder(chat_template, chat, whole.text);
  std::vector<jinja::Span> spans;
  for (size_t t = 0; t < turns.size(); ++t) {
    if (!has_loss(turns[t])) continue;
    const std::vector<jinja::Span> found = is_generated ? std::vector{whole.generated[t]} : finder.find(turns[t]);
    spans.insert(spans.end(), found.begin(), found.end());
  }
  return spans;
}

ChatIds chat_ids(const ChatTemplate& chat_template, const Tokenizer& tokenizer, const Chat& chat) {
  const jinja::Rendered whole = chat_template.render(chat, chat.messages.size(), /*with_prompt=*/false);
  const std::vector<jinja::Span> spans = assistant_spans(chat_template, chat, whole);
  ChatIds made;
  std::vector<size_t> starts;
  const bool knows_starts = tokenizer.encode_with_starts(whole.text, &made.ids, &starts);
  made.is_target.resize(made.ids.size());
  for (const jinja::Span& span : spans) {
    if (span.begin == span.end) continue;
    if (knows_starts) {
      mark(starts, whole.text.size(), span, &made.is_target);
      continue;
    }
    const std::string_view text = whole.text;
    const size_t begin = ids_before(tokenizer, made.ids, text.substr(0, span.begin));
    const size_t end = ids_before(tokenizer, made.ids, text.substr(0, span.end));
    std::fill(made.is_target.begin() + static_cast<std::ptrdiff_t>(begin),
              made.is_target.begin() + static_cast<std::ptrdiff_t>(std::max(begin, end)), true);
  }
  return made;
}

}  // namespace moebius
