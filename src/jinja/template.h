// Jinja templates, as models use them for chats. The output has the same bytes as that of transformers, which renders
// with Jinja's sandbox, trim_blocks, lstrip_blocks, loop controls and its own tojson.
//
// These features are not supported, and an error gives their name and line: inheritance, include and import, {% do %},
// the filters and methods that filters.cc and methods.cc list, and integers above 64 bits.
// Source: apply_chat_template of transformers, and the documentation of Jinja,
// https://jinja.palletsprojects.com/en/stable/templates/
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "jinja/budget.h"
#include "jinja/value.h"

namespace moebius::jinja {

struct Span {
  size_t begin = 0, end = 0;  // bytes of a text: [begin, end)
  bool operator==(const Span&) const = default;
};

struct Rendered {
  std::string text;
  std::vector<Span> generated;  // the parts that {% generation %} encloses, in rising order
  bool knows_generated = true;  // false after {% generation %} in a macro or another captured block
};

class Template {
 public:
  // `who` names the template in messages, such as its file.
  // Throws Error{input} "WHO:LINE: ..." for a syntax error, and for features that are not supported.
  static Template parse(std::string_view text, const std::string& who);
  ~Template();
  Template(Template&&) noexcept;

  // Renders with these variables; `now` is the time of strftime_now. It may be called from several
  // threads at once.
  // Throws Error{input} "WHO:LINE: ..." when the template refuses the variables with
  // raise_exception, fails on them, or exceeds the limits.
  Rendered render(const Dict& variables, const std::tm& now, const Limits& limits = {}) const;
  bool has_generation() const { return has_generation_; }

 private:
  struct Tree;
  Template();
  std::string who_;
  std::unique_ptr<const Tree> tree_;
  bool has_generation_ = false;
};

}  // namespace moebius::jinja
