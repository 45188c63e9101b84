// A document is a line of jsonl:
//   {"text": ...}                         the loss is on all tokens
//   {"prompt": ..., "completion": ...}    the loss is on the completion
//   {"input_ids": [...]}                  ids from another program, such as a chat, with one of
//     "labels": [...]                     the id where the loss is on it, else -100 (not shifted)
//     "loss_mask", "assistant_masks"      1 or true where the loss is on the id, else 0 or false
//     "attention_mask": [...]             allowed with any of them; all ones, since a 0 would be padding
//   {"messages": [...]}                   a chat (data/chat.h): the loss is on the assistant's turns
//   {"conversations": [...]}              the same, with ShareGPT's keys too
// A text, or a prompt and a completion, excludes a chat. With ids a chat is ignored. Masks of the loss need ids.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moebius {

struct Document {
  enum class Kind : uint8_t { text, completion, ids, chat };
  Kind kind = Kind::text;
  std::string prompt, text;     // text: also the completion; of a chat the whole line
  std::vector<int32_t> ids;     // ids of a document of Kind::ids
  std::vector<bool> is_target;  // one for each of the ids
  std::string who;              // file:line of a line of jsonl; else the file
};

// Throws Error{input} "WHO:BYTE: ..." for a line that is not UTF-8.
void check_utf8(std::string_view line, const std::string& who);

// Throws Error{input} "WHO: ..." for a line that is none of these, and "WHO:BYTE: ..." for invalid
// UTF-8 in it.
Document read_document(std::string_view line, const std::string& who);

}  // namespace moebius
