#include "jinja/template.h"

#include <algorithm>

#include "io/utf8.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"

namespace moebius::jinja {
namespace {

bool has_generation(const Body& body) {
  return std::any_of(body.begin(), body.end(), [](const Statement& s) {
    return s.op == Statement::Op::generation || has_generation(s.body) || has_generation(s.otherwise) ||
           std::any_of(s.branches.begin(), s.branches.end(), [](const Branch& b) { return has_generation(b.body); });
  });
}

}  // namespace

struct Template::Tree {
  Body body;
};

Template::Template() = default;
Template::~Template() = default;
Template::Template(Template&&) noexcept = default;

Template Template::parse(std::string_view text, const std::string& who) {
  MOEBIUS_CHECK(input, find_invalid_utf8(text) < 0, "{}: expected a template in UTF-8; got other bytes; correct it",
                who);
  Template made;
  made.who_ = who;
  int line = 1;
  try {
    made.tree_ = std::make_unique<const Tree>(Tree{parse_template(text, &line)});
  } catch (const TemplateError& fault) {
    MOEBIUS_FAIL(input, "{}:{}: {}; correct the template", who, line, fault.what());
  }
  made.has_generation_ = jinja::has_generation(made.tree_->body);
  return made;
}

Rendered Template::render(const Dict& variables, const std::tm& now, const Limits& limits) const {
  Runtime runtime(limits, now);
  try {
    Rendered rendered{.text = runtime.render(tree_->body, variables), .generated = {}, .knows_generated = true};
    for (const OutputSpan& span : runtime.generated()) rendered.generated.push_back({span.begin, span.end});
    rendered.knows_generated = !runtime.lost_generation();
    return rendered;
  } catch (const TemplateError& fault) {
    MOEBIUS_FAIL(input, "{}:{}: {}", who_, runtime.line(), fault.what());
  }
}

}  // namespace moebius::jinja
