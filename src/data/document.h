// A line of jsonl as a document:
//   {"text": ...}                         all of it is learned
//   {"prompt": ..., "completion": ...}    the completion is learned
//   {"input_ids": [...]}                  ids that another program made, a chat for instance, with one of
//     "labels": [...]                     the id again where it is learned, -100 where not (not shifted)
//     "loss_mask", "assistant_masks"      1 or true where it is learned, 0 or false where not
//     "attention_mask": [...]             beside any of them, ones alone: a 0 is padding, no part of a document
// A text, or a prompt and a completion, excludes "messages". Other keys are passed over.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moebius {

struct Document {
  enum class Kind : uint8_t { text, completion, ids };
  Kind kind = Kind::text;
  std::string prompt, text;     // text: also the completion
  std::vector<int32_t> ids;     // of Kind::ids
  std::vector<bool> is_target;  // one for each of the ids
  std::string who;              // file:line of a line of jsonl
};

// Error{input} "WHO: ..." for a line that is none of these, "WHO:BYTE: ..." for invalid UTF-8 in it.
Document read_document(std::string_view line, const std::string& who);

}  // namespace moebius
