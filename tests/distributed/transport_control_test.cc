#include "comm/control.h"

#include <gmock/gmock.h>

#include "tests/distributed/ranks.h"

namespace moebius {
namespace {

using testing::HasSubstr;

class ControlRanks : public Ranks {};
MOEBIUS_ON_RANKS(ControlRanks);

std::string error_of(ErrorKind kind, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    return e.what();
  }
  return "no error";
}

TEST_P(ControlRanks, TextsOfEveryLengthReachEveryRank) {
  run([](Transport& world) {
    Control control(world);
    std::vector<std::string> expected;
    for (int r = 0; r < world.size(); ++r) expected.push_back(std::string(3 * r, static_cast<char>('a' + r)));
    EXPECT_EQ(control.gather(expected[world.rank()]), expected);
    EXPECT_EQ(control.gather(""), std::vector<std::string>(world.size()));
    EXPECT_EQ(control.from_root("from " + std::to_string(world.rank())), "from 0");
    EXPECT_EQ(control.from_root(""), "");
    EXPECT_EQ(control.sum(3 + world.rank()), 3 * world.size() + world.size() * (world.size() - 1) / 2);
    EXPECT_EQ(control.max(-7 + world.rank()), -8 + world.size());
    control.barrier();
  });
}

// The last rank fails. Then all ranks fail, with its message and its number.
TEST_P(ControlRanks, OneFailsAllFail) {
  run([](Transport& world) {
    Control control(world);
    const int last = world.size() - 1;
    EXPECT_EQ(error_of(ErrorKind::input,
                       [&] { control.together([&] { MOEBIUS_CHECK(input, world.rank() != last, "no such file"); }); }),
              last == 0 ? "no such file" : fmt::format("rank {}: no such file", last));
    EXPECT_EQ(error_of(ErrorKind::io, [&] { control.together([] { MOEBIUS_FAIL(io, "the disk is full"); }); }),
              "the disk is full");
    int on_root = 0;
    control.on_root([&] { ++on_root; });
    EXPECT_EQ(on_root, control.is_root());
    EXPECT_EQ(error_of(ErrorKind::usage, [&] { control.on_root([] { MOEBIUS_FAIL(usage, "taken"); }); }), "taken");
    control.together([] {});
  });
}

TEST_P(ControlRanks, ClaimsThatDifferNameTheRanksAndTheLine) {
  run([](Transport& world) {
    Control control(world);
    check_agree(control, {"the recipe", "seed = 1\nlr = 2"});
    const int n = world.size();
    if (n == 1) return;
    const std::string mine = world.rank() == n - 1 ? "seed = 1\nlr = 3" : "seed = 1\nlr = 2";
    const std::string text = error_of(ErrorKind::usage, [&] { check_agree(control, {"the recipe", mine}); });
    EXPECT_THAT(text, HasSubstr("the ranks do not agree on the recipe: rank"));
    EXPECT_THAT(text, HasSubstr(fmt::format("0 against rank {}; line 2 of rank 0 is \"lr = 2\", of rank {} \"lr = 3\"",
                                            n - 1, n - 1)
                                    .substr(n == 2 ? 0 : 1)));
    const std::string more = world.rank() == 1 ? "seed = 1\nlr = 2\n\nx" : "seed = 1\nlr = 2";
    EXPECT_THAT(error_of(ErrorKind::usage,
                         [&] {
                           check_agree(control, {"the data", more});
                         }),
                HasSubstr("against rank 1; line 4 of rank 0 is \"\", of rank 1 \"x\""));
  });
}

}  // namespace
}  // namespace moebius
