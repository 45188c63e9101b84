#include "core/shared_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(SharedLibrary, IsFoundByItsNameOrByItsPath) {
  for (const auto& [name, path] : {std::pair{"libm.so.6", "/nowhere.so"}, {"libnowhere.so.1", "libm.so.6"}}) {
    const SharedLibrary m = open_library(name, path);
    EXPECT_EQ(m.why_missing, "");
    const auto cosine = find_function<double (*)(double)>(m, "cos");
    ASSERT_NE(cosine, nullptr);
    EXPECT_EQ(cosine(0), 1);
    EXPECT_EQ(find_symbol(m, "no_such_function"), nullptr);
  }
}

// A file that exists but is not a library must not be reported as "not found".
TEST(SharedLibrary, ReportsTheMessageOfTheLoader) {
  const SharedLibrary none = open_library("libnowhere.so.1", "/proc/self/comm");
  EXPECT_EQ(none.handle, nullptr);
  EXPECT_EQ(find_symbol(none, "cos"), nullptr);
  EXPECT_THAT(none.why_missing,
              HasSubstr("libnowhere.so.1 cannot be opened (libnowhere.so.1: cannot open shared object "
                        "file: No such file or directory; /proc/self/comm: "));
  EXPECT_THAT(none.why_missing, HasSubstr("); install it, or name its folder in LD_LIBRARY_PATH"));
}

}  // namespace
}  // namespace moebius
