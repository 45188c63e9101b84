#include "plan/sweep.h"

#include <gmock/gmock.h>

#include "plan/testing.h"

namespace moebius {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Sweeps, ValuesHaveNoSpacesAroundThem) {
  EXPECT_THAT(parse_sweep("parallel.ep=8, 16\n").values, ElementsAre("8", "16"));
  EXPECT_THAT(parse_sweep("run.dir=\" a, b\"").values, ElementsAre("\" a, b\""));
  EXPECT_THAT(refused([] { parse_sweep("parallel.ep=8, "); }), HasSubstr("expected values between the commas"));
}

// A quote that is not closed would hide the commas after it.
TEST(Sweeps, QuotesAndBracketsMustBeClosed) {
  for (const char* text : {"parallel.ep=\"8,4", "memory.recompute=[\"norm\",[", "memory.recompute=]"})
    EXPECT_THAT(refused([&] { parse_sweep(text); }), HasSubstr("expected each quote and bracket to be closed; got"))
        << text;
}

TEST(Sweeps, RefuseAValueInTwoSpellings) {
  PartLibrary parts;
  const SweepBase base{.recipe = kRecipes + "bench_olmoe_1b_7b.toml", .ranks = 4};
  EXPECT_THAT(refused([&] { sweep(parts, base, {parse_sweep("optimizer.lr=1,1.0")}, machine("h200"), {}); }),
              HasSubstr("--sweep optimizer.lr: 1.0 is given twice; leave one of them out"));
}

}  // namespace
}  // namespace moebius
