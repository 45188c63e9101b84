// Compares templates with Python's jinja2 as transformers sets it up, on the cases of
// tests/golden/data/jinja.json, written by tools/jinja_golden.py.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "io/files.h"
#include "jinja/json.h"
#include "jinja/template.h"

namespace moebius::jinja {
namespace {

constexpr const char* kCases = MOEBIUS_SOURCE_DIR "/tests/golden/data/jinja.json";

// Returns the time that the tool used: Saturday 2026-03-07, 09:05:02.
std::tm golden_time() {
  std::tm now{};
  now.tm_year = 126;
  now.tm_mon = 2;
  now.tm_mday = 7;
  now.tm_hour = 9;
  now.tm_min = 5;
  now.tm_sec = 2;
  now.tm_wday = 6;
  now.tm_yday = 65;
  return now;
}

// The spans of the tool count characters.
std::vector<Span> in_characters(const Rendered& rendered) {
  const std::string_view text = rendered.text;
  std::vector<Span> spans;
  for (const Span& span : rendered.generated)
    spans.push_back({static_cast<size_t>(count_characters(text.substr(0, span.begin))),
                     static_cast<size_t>(count_characters(text.substr(0, span.end)))});
  return spans;
}

TEST(JinjaGolden, TextSpansAndErrorsEqualThoseOfJinja2) {
  const auto cases = nlohmann::ordered_json::parse(read_file(kCases));
  ASSERT_GT(cases.size(), 100u);
  for (const auto& one : cases) {
    const std::string text = one.at("template");
    SCOPED_TRACE(text.substr(0, 300) + "\n" + one.at("variables").dump().substr(0, 600));
    const Value variables = value_of(one.at("variables"));
    const auto rendered = [&] { return Template::parse(text, "test").render(variables.dict(), golden_time()); };
    if (one.contains("error")) {
      EXPECT_THROW(rendered(), Error);
      continue;
    }
    try {
      const Rendered got = rendered();
      EXPECT_EQ(got.text, one.at("text").get<std::string>());
      if (!one.contains("spans") || !got.knows_generated) continue;
      std::vector<Span> want;
      for (const auto& span : one.at("spans")) want.push_back({span[0], span[1]});
      EXPECT_EQ(in_characters(got), want);
    } catch (const Error& error) {
      ADD_FAILURE() << "expected " << one.at("text") << "; got the error " << error.what();
    }
  }
}

}  // namespace
}  // namespace moebius::jinja
