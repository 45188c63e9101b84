// Splits a template into text and the tokens of its tags, with trim_blocks and lstrip_blocks on, as
// transformers sets them. Newlines become \n, and one newline at the end is dropped.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moebius::jinja {

struct Token {
  enum class Kind {
    text,
    print_begin,
    print_end,
    block_begin,
    block_end,
    name,
    text_literal,
    integer,
    real,
    symbol,
    end
  };
  Kind kind;
  std::string text;  // the value of a literal; the spelling of a symbol or a name
  int line;
};

// Throws TemplateError for text that is no token. Then *line is the line of the error.
std::vector<Token> tokens_of(std::string_view source, int* line);

bool is_python_space(char32_t character);  // the same rule as Python's str.isspace()

}  // namespace moebius::jinja
