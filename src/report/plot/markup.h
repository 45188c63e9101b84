// Builds HTML and SVG. All arguments are plain text, and are escaped.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "report/plot/text.h"

namespace moebius {

struct Attribute {
  std::string_view name;
  std::string value;
};

class Markup {
 public:
  Markup& open(std::string_view tag, std::initializer_list<Attribute> attributes = {});
  Markup& close(std::string_view tag);
  // Adds an SVG element without contents.
  Markup& leaf(std::string_view tag, std::initializer_list<Attribute> attributes);
  Markup& text(std::string_view text);
  // Adds an element that holds only this text.
  Markup& element(std::string_view tag, std::initializer_list<Attribute> attributes, std::string_view text);
  // Adds text that is markup already: from another Markup, or JSON whose strings were made by json_string.
  Markup& add(std::string_view markup);

  const std::string& str() const { return out_; }

 private:
  void begin(std::string_view tag, std::initializer_list<Attribute> attributes);
  std::string out_;
};

}  // namespace moebius
