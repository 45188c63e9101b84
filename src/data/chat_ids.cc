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

  jinja::Span find(size_t i) const {
    const size_t begin = begin_of(i), end = end_of(i, begin);
    return {begin, after_end_token(begin, end)};
  }

 private:
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
    if (!begin) begin = as_in_a_shorter_chat(i, before);
    if (!begin) fail(i, "that prints the messages before it in another way");
    return *begin;
  }

  // Returns the place of an answer without a header, such as one that follows the result of a tool, if the text from the
  // content of the message before it to its own is that of a chat which ends with it.
  std::optional<size_t> as_in_a_shorter_chat(size_t i, const std::string& before) const {
    if (i == 0) return std::nullopt;
    Chat shorter = chat_;
    shorter.messages.resize(i + 1);
    const std::string until = template_.render(shorter, i + 1, false).text;
    const TurnFinder in_shorter(template_, shorter, until);
    const std::optional<Content> previous = content_of(i - 1), own = content_of(i),
                                 previous_there = in_shorter.content_of(i - 1), there = in_shorter.content_of(i);
    if (!previous || !own || !previous_there || !there || previous->end > own->begin) return std::nullopt;
    const size_t first = previous_there->begin, count = there->begin - std::min(first, there->begin);
    const bool is_in_order = first <= before.size() && previous_there->end <= before.size() &&
                             before.size() <= there->begin && until.starts_with(before);
    if (!is_in_order || own->begin - previous->begin != count) return std::nullopt;
    if (text_.compare(previous->begin, count, until, first, count) != 0) return std::nullopt;
    return previous->begin + (before.size() - first);
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

  size_t end_of(size_t i, size_t begin) const {
    if (i + 1 == chat_.messages.size()) return text_.size();
    const std::string until = template_.render(chat_, i + 1, false).text;
    if (until.size() >= begin && text_.starts_with(until)) return until.size();
    if (const size_t size = without_end_token(until).size();
        size >= begin && text_.starts_with(without_end_token(until)))
      return size;
    const jinja::Value* calls = chat_.messages[i].dict().find(std::string("tool_calls"));
    const bool has_calls = calls != nullptr && !(calls->is_list() && calls->items().empty());
    return has_calls ? end_of_calls(i, begin, until) : end_of_content(i, begin, until);
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
    Chat shorter = chat_;
    shorter.messages.resize(i + 1);
    const std::optional<Content> content = TurnFinder(template_, shorter, until).content_of(i);
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

  // Returns the place before the text that the next message prints before its content in a chat that ends with it.
  // Returns nothing if there is no such text after `least`.
  std::optional<size_t> end_before_next_header(size_t i, size_t least, const std::string& until) const {
    const std::optional<Content> next = content_of(i + 1);
    if (!next || next->begin <= least) return std::nullopt;
    Chat shorter = chat_;
    shorter.messages.resize(i + 2);
    const std::string with_next = template_.render(shorter, i + 2, false).text;
    const std::optional<Content> there = TurnFinder(template_, shorter, with_next).content_of(i + 1);
    if (!there || !with_next.starts_with(until) || there->begin <= until.size()) return std::nullopt;
    const std::string_view header = std::string_view(with_next).substr(until.size(), there->begin - until.size());
    const std::string_view between = std::string_view(text_).substr(least, next->begin - least);
    if (!between.ends_with(header)) return std::nullopt;
    return next->begin - header.size();
  }
  [[noreturn]] void fail_at_calls(size_t i) const {
    fail(i, "that prints its calls of tools in another way when messages follow");
  }

  // The place of a message's content: the text around it is the same for any content.
  struct Content {
    size_t begin = 0, end = 0;
  };

  // Returns nothing for a message without a text, and for a text that the template does not print.
  std::optional<Content> content_of(size_t i) const {
    const jinja::Value* content = chat_.messages[i].dict().find(std::string("content"));
    if (content == nullptr || !content->is_text()) return std::nullopt;
    Chat other = chat_;
    auto message = std::make_shared<jinja::Dict>(chat_.messages[i].dict());
    message->set("content", content->text() == "\x01" ? "\x02" : "\x01");
    other.messages[i] = jinja::DictPtr(message);
    const std::optional<std::string> changed = rendered(other);
    if (!changed || *changed == text_) return std::nullopt;
    return Content{common_prefix(text_, *changed), text_.size() - common_suffix(text_, *changed)};
  }

  // Returns nothing for a chat that the template refuses.
  std::optional<std::string> rendered(const Chat& chat) const {
    try {
      return template_.render(chat, chat.messages.size(), false).text;
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
  for (size_t t = 0; t < turns.size(); ++t)
    if (has_loss(turns[t])) spans.push_back(is_generated ? whole.generated[t] : finder.find(turns[t]));
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
