#include "report/plot/markup.h"

#include "io/html_text.h"

namespace moebius {

void Markup::begin(std::string_view tag, std::initializer_list<Attribute> attributes) {
  out_.append("<").append(tag);
  for (const Attribute& each : attributes)
    out_.append(" ").append(each.name).append("=\"").append(escape_html(each.value)).append("\"");
}

Markup& Markup::open(std::string_view tag, std::initializer_list<Attribute> attributes) {
  begin(tag, attributes);
  out_ += ">";
  return *this;
}

Markup& Markup::close(std::string_view tag) {
  out_.append("</").append(tag).append(">");
  return *this;
}

Markup& Markup::leaf(std::string_view tag, std::initializer_list<Attribute> attributes) {
  begin(tag, attributes);
  out_ += "/>";
  return *this;
}

Markup& Markup::text(std::string_view text) { return add(escape_html(text)); }

Markup& Markup::element(std::string_view tag, std::initializer_list<Attribute> attributes, std::string_view text) {
  return open(tag, attributes).text(text).close(tag);
}

Markup& Markup::add(std::string_view markup) {
  out_ += markup;
  return *this;
}

}  // namespace moebius
