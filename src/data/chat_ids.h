// The ids of a chat, and which of them an assistant wrote.
#pragma once

#include <cstdint>
#include <vector>

#include "data/chat.h"
#include "tokenizer/tokenizer.h"

namespace moebius {

struct ChatIds {
  std::vector<int32_t> ids;
  std::vector<bool> is_target;  // for each id, whether it counts in the loss
};

// Returns the spans of the assistant's turns, in bytes of the rendered chat `whole`.
//
// If the template has {% generation %}, the turns are the parts that it encloses. Otherwise a turn begins where the
// template would ask the assistant to answer. It ends at the end of the chat rendered up to that turn, or after the
// last end-of-text token there. A token that follows only the last message of a chat is no part of an earlier turn.
// If a later message changes how the template prints the turn, the turn ends after its content and what follows that
// in a chat which ends there, or after its calls of tools, before the header of the next message. A turn has two
// spans if the template prints the results of tools between its calls and its content.
// Throws Error{input} "WHO: ..." if a turn cannot be found.
std::vector<jinja::Span> assistant_spans(const ChatTemplate& chat_template, const Chat& chat,
                                         const jinja::Rendered& whole);

// Renders and encodes a chat. Every id that is at least in part in a turn of the assistant is a target.
// transformers differs where a turn begins with a space and offsets are trimmed, or ends with a
// character of several ids (tools/chat_golden.py).
// tokenizer: opened with parse_special, and without add_special, as the template writes such tokens.
ChatIds chat_ids(const ChatTemplate& chat_template, const Tokenizer& tokenizer, const Chat& chat);

}  // namespace moebius
