// The "post_processor" of a tokenizer.json, for one text: the ids that go before and after its own.
// Read: TemplateProcessing ByteLevel Sequence.
#pragma once

#include <cstdint>
#include <vector>

#include "io/json_field.h"

namespace moebius {

struct PostProcessor {
  std::vector<int32_t> before, after;

  // Error{input} naming the type when it is none of the above, and for templates that use the text never or twice.
  static PostProcessor read(const JsonField& field);
};

}  // namespace moebius
