// The "post_processor" of a tokenizer.json for a single text: the ids that go before and after the
// text's own.
// Supported: TemplateProcessing ByteLevel Sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "io/json_field.h"

namespace moebius {

struct PostProcessor {
  std::vector<int32_t> before, after;

  // Throws Error{input} that names the type when it is none of the above.
  // Throws Error{input} too for templates that do not use the text exactly once.
  static PostProcessor read(const JsonField& field);
};

}  // namespace moebius
