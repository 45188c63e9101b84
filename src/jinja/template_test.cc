#include "jinja/template.h"

#include <nlohmann/json.hpp>
#include <tuple>

#include "io/testing.h"
#include "jinja/json.h"

namespace moebius::jinja {
namespace {

Rendered render(const std::string& text, const char* variables = "{}", const Limits& limits = {}) {
  const Value value = value_of(nlohmann::ordered_json::parse(variables));
  return Template::parse(text, "t").render(value.dict(), std::tm{}, limits);
}

std::string repeated(const std::string& text, int count) {
  std::string all;
  for (int i = 0; i < count; ++i) all += text;
  return all;
}

TEST(Template, RendersAConversation) {
  const std::string text =
      "{%- for m in messages -%}\n<|{{ m.role }}|>{{ m['content'] | trim }}\n{% endfor -%}\n"
      "{% if add_generation_prompt %}<|assistant|>{% endif %}";
  EXPECT_EQ(render(text, R"({"messages": [{"role": "user", "content": " hi "}], "add_generation_prompt": true})").text,
            "<|user|>hi\n<|assistant|>");
}

TEST(Template, SpansOfGenerationAreBytesOfTheText) {
  const Rendered made = render(
      "\xC3\xA9{% generation %}\xC3\xBC"
      "1{% endgeneration %}-{% generation %}{% endgeneration %}");
  EXPECT_EQ(made.text,
            "\xC3\xA9\xC3\xBC"
            "1-");
  EXPECT_EQ(made.generated, (std::vector<Span>{{2, 5}, {6, 6}}));
  EXPECT_TRUE(made.knows_generated);
  EXPECT_FALSE(render("{% macro f() %}{% generation %}a{% endgeneration %}{% endmacro %}{{ f() }}").knows_generated);
  EXPECT_TRUE(Template::parse("{% if x %}{% generation %}{% endgeneration %}{% endif %}", "t").has_generation());
  EXPECT_FALSE(Template::parse("{# {% generation %} #}", "t").has_generation());
}

TEST(Template, ErrorsNameTheLine) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"a\n{% if x %}\n", "t:2: expected {%"},
      {"a\n\n{{ x", "t:3: "},
      {"{% endfor %}", "t:1: "},
      {"\n{{ 1 +* 2 }}", "t:2: "},
      {"\n{{ 'a }}", "t:2: "},
      {"\n\n{{ raise_exception('no ' ~ 'tools') }}", "t:3: the template refuses this: no tools"},
      {"\n{{ a.b.c }}", "t:2: "},
      {"{% for i in [1] %}\n{{ i // 0 }}{% endfor %}", "t:2: division by zero"},
      {"{% macro f() %}\n\n{{ none.x.y }}{% endmacro %}\n{{ f() }}", "t:3: "},
      {"\xff", "expected a template in UTF-8"},
  };
  for (const auto& [text, message] : cases) expect_error(ErrorKind::input, message, [&] { render(text); });
}

TEST(Template, RefusesUnsupportedFeaturesByName) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"\n{% include 'x' %}", "t:2: "},         {"{% extends 'x' %}", "extends"},
      {"{% import 'x' as y %}", "import"},      {"{% from 'x' import y %}", "from"},
      {"{% block b %}{% endblock %}", "block"}, {"{% do x.append(1) %}", "do"},
      {"{{ x | urlize }}", "urlize"},           {"{{ 1 if x is nosuchtest }}", "nosuchtest"},
      {"{{ 99999999999999999999 }}", "64"},     {"{{ lipsum() }}", "lipsum"},
  };
  for (const auto& [text, message] : cases) expect_error(ErrorKind::input, message, [&] { render(text); });
}

// Each of these would run for hours, or need gigabytes.
TEST(Template, TooManyStepsAreAnError) {
  const Limits few{.steps = 10'000};
  for (const char* text : {"\n{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
                           "\n{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
                           "\n{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}"}) {
    EXPECT_THROW(render(text, "{}", few), Error) << text;
  }
  expect_error(ErrorKind::input, "t:2: expected at most 10000 steps; got more", [&] {
    render("\n{% for i in range(999) %}{% for j in range(999) %}{% endfor %}{% endfor %}", "{}", few);
  });
}

TEST(Template, TooMuchMemoryIsAnError) {
  const Limits small{.bytes = 1 << 20};
  for (const char* text :
       {"{% set n = namespace(x='ab') %}\n{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}\n{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "\n{{ 'a' * 999999999999 }}", "\n{{ [1] * 999999999999 }}", "\n{{ range(999999999999) | list }}",
        "\n{{ 'a' | center(999999999999) }}", "\n{{ 'a' | indent(999999999999) }}", "\n{{ '%999999999d' % 1 }}",
        "\n{{ ('a' * 99999).replace('', 'b' * 99999) }}", "\n{{ ('a' * 99999) | replace('a', 'b' * 99999) }}",
        "\n{{ ('b' * 9999).join('a' * 9999) }}", "\n{{ [1] | tojson(indent=999999999999) }}",
        "\n{% for i in range(999999) %}{{ 'a' * 1000 }}{% endfor %}", "\n{{ 'a'.ljust(999999999999) }}"}) {
    expect_error(ErrorKind::input, "t:2: ", [&] { render(text, "{}", small); });
  }
}

TEST(Template, TooDeepNestingIsAnError) {
  const int deep = 100'000;
  for (const std::string& text :
       {"{{ " + repeated("(", deep) + "1" + repeated(")", deep) + " }}", "{{ " + repeated("[", deep) + " }}",
        "{{ " + repeated("-", deep) + "1 }}", "{{ " + repeated("not ", deep) + "1 }}",
        "{{ x" + repeated(".y", deep) + " }}", "{{ x" + repeated("|trim", deep) + " }}",
        "{{ x" + repeated("()", deep) + " }}", "{{ 1" + repeated(" + 1", deep) + " }}",
        "{{ 1" + repeated(" ** 1", deep) + " }}", "{{ 1" + repeated(" if 1 else 1", deep) + " }}",
        repeated("{% if 1 %}", deep), repeated("{% for i in [1] %}", deep),
        std::string("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        std::string("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}"),
        std::string("{% set n = namespace(x=[]) %}{% for i in range(9999) %}{% set n.x = [n.x] %}{% endfor %}"),
        std::string("{% set n = namespace() %}{% set n.x = n %}{{ n | tojson }}")}) {
    EXPECT_THROW(render(text), Error) << text.substr(0, 40);
  }
}

TEST(Template, IntegerOverflowIsAnErrorAndSlicesAreClamped) {
  for (const char* text :
       {"{{ 9223372036854775807 + 1 }}", "{{ -9223372036854775807 - 2 }}", "{{ 9223372036854775807 * 2 }}",
        "{{ 2 ** 99999999 }}", "{{ (-9223372036854775807 - 1) // -1 }}", "{{ 1 % 0 }}", "{{ 1.0 / 0 }}",
        "{{ [1][::0] }}", "{{ range(1, 2, 0) }}", "{{ -(-9223372036854775807 - 1) }}"}) {
    expect_error(ErrorKind::input, "t:1: ", [&] { render(text); });
  }
  EXPECT_EQ(render("{{ [1,2,3][-9223372036854775807:9223372036854775807] }}").text, "[1, 2, 3]");
  EXPECT_EQ(render("{{ [1,2,3][::-9223372036854775807] }}").text, "[3]");
  EXPECT_EQ(render("{{ [1,2,3][::9223372036854775807] }}").text, "[1]");
  EXPECT_EQ(render("{{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }}").text, "-4 2 -2");
}

// A template that Python refuses is not rendered with a part left out, which nobody would see. Found by templates
// that were drawn at random.
TEST(Template, WhatPythonRefusesIsRefused) {
  for (const char* text : {"{{ x[1:] }}", "{{ m[:1] }}", "{{ none_[::-1] }}", "{{ x | indent }}", "{{ no | int }}",
                           "{{ no | float }}", "{{ s is odd }}", "{{ x is divisibleby(0.0) }}"}) {
    expect_error(ErrorKind::input, "t:1: ", [&] { render(text, R"({"x": 3, "m": {}, "none_": null, "s": "a"})"); });
  }
}

TEST(Template, RemaindersOfRealNumbers) {
  EXPECT_EQ(render("{{ 3.0 is odd }} {{ -1 is odd }} {{ 2.5 is even }} {{ 7.5 is divisibleby(2.5) }}").text,
            "True True False True");
}

// {% else %} follows where no round of the loop reached its end.
TEST(Template, ElseRunsIfNoIterationCompletes) {
  const std::string loop = "{% for i in x %}{% if i > 1 %}{% continue %}{% endif %}{{ i }}{% else %}none{% endfor %}";
  EXPECT_EQ(render(loop, R"({"x": [2, 3]})").text, "none");
  EXPECT_EQ(render(loop, R"({"x": [1, 3]})").text, "1");
  EXPECT_EQ(render("{% for i in [1] %}{% break %}{% else %}none{% endfor %}").text, "none");
}

TEST(Template, VariablesOutside64BitsAreRefused) {
  expect_error(ErrorKind::input, "64", [] { render("{{ x }}", R"({"x": 18446744073709551615})"); });
}

}  // namespace
}  // namespace moebius::jinja
