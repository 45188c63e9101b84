// The contrasts of the page's colours, in light and in dark: WCAG 2.2, level AA.
#include "report/page_style.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <regex>
#include <string>

namespace moebius {
namespace {

using Colours = std::map<std::string, std::string>;

// The custom properties of a part of the style sheet that are colours.
Colours colours_in(const std::string& css) {
  Colours colours;
  const std::regex property("--([a-z]+[0-9]*):(#[0-9a-f]+)");
  for (std::sregex_iterator at(css.begin(), css.end(), property), end; at != end; ++at)
    colours[(*at)[1].str()] = (*at)[2].str();
  return colours;
}

// The relative luminance of "#rgb" or "#rrggbb", in [0, 1].
double luminance(const std::string& colour) {
  const bool is_short = colour.size() == 4;
  double sum = 0;
  for (int i = 0; i < 3; ++i) {
    const std::string digits = is_short ? std::string(2, colour[1 + i]) : colour.substr(1 + 2 * i, 2);
    const double c = std::stoi(digits, nullptr, 16) / 255.0;
    sum += std::array{0.2126, 0.7152, 0.0722}[i] * (c <= 0.04045 ? c / 12.92 : std::pow((c + 0.055) / 1.055, 2.4));
  }
  return sum;
}

double contrast(const std::string& a, const std::string& b) {
  const auto [low, high] = std::minmax({luminance(a), luminance(b)});
  return (high + 0.05) / (low + 0.05);
}

class PageStyle : public ::testing::TestWithParam<bool> {
 protected:
  PageStyle() {
    const std::string css = kPageStyle;
    const size_t dark = css.find("@media(prefers-color-scheme:dark)"), end = css.find("}}", dark);
    EXPECT_NE(end, std::string::npos);
    colours_ = colours_in(GetParam() ? css.substr(dark, end - dark) : css.substr(0, dark));
  }
  const std::string& colour(const std::string& name) const { return colours_.at(name); }
  void expect_contrast(const std::string& name, const std::string& behind, double least) const {
    EXPECT_GE(contrast(colour(name), colour(behind)), least) << name << " on " << behind;
  }
  Colours colours_;
};
INSTANTIATE_TEST_SUITE_P(Schemes, PageStyle, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "dark" : "light"; });

// Success criterion 1.4.3. The names at the ends of lines are text in the colours of the lines.
TEST_P(PageStyle, TextHasAContrastOfFourAndAHalf) {
  for (const char* behind : {"card", "bg"}) {
    for (const char* name : {"ink", "soft", "warn"}) expect_contrast(name, behind, 4.5);
  }
  expect_contrast("card", "ink", 4.5);  // the tip
  for (int i = 0; i < 8; ++i) expect_contrast("c" + std::to_string(i), "card", 4.5);
}

// Success criterion 1.4.11: axes, limits and the lines of plots; the state of a watched run on the page's background.
TEST_P(PageStyle, GraphicsHaveAContrastOfThree) {
  expect_contrast("mark", "card", 3);
  for (const char* name : {"c0", "c1", "c2"}) expect_contrast(name, "bg", 3);
}

// So a reader can distinguish values without their hues.
TEST_P(PageStyle, HeatMapsChangeInLuminanceFromStepToStep) {
  const auto of = [&](const std::string& name) { return luminance(colour(name)); };
  for (int i = 1; i < 10; ++i) {
    const double before = of("s" + std::to_string(i - 1)), here = of("s" + std::to_string(i));
    EXPECT_TRUE(GetParam() ? here > before : here < before) << "s" << i;
  }
  for (int i = 1; i <= 5; ++i) {
    for (const int side : {-1, 1}) {
      const double inner = of("d" + std::to_string(5 + side * (i - 1))), outer = of("d" + std::to_string(5 + side * i));
      EXPECT_TRUE(GetParam() ? outer > inner : outer < inner) << "d" << 5 + side * i;
    }
  }
}

TEST(Contrast, IsThatOfTheStandard) {
  EXPECT_NEAR(contrast("#000", "#ffffff"), 21, 1e-9);
  EXPECT_NEAR(contrast("#777777", "#fff"), 4.48, 0.005);
}

}  // namespace
}  // namespace moebius
