#include "core/log.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace moebius {
namespace {

std::string logged(const std::string& text) {
  char* data = nullptr;
  size_t size = 0;
  std::FILE* out = open_memstream(&data, &size);
  Log(out, /*redraw=*/false).line(text);
  std::fclose(out);
  const std::string all(data, size);
  std::free(data);
  return all;
}

TEST(Log, ControlCharactersAreSpelledOut) {
  EXPECT_EQ(logged("role \x1b[31m\r\x7f"), "role \\x1b[31m\\x0d\\x7f\n");
  EXPECT_EQ(logged("\xc2\x9b"
                   "1A"),
            "\\x9b1A\n");
  EXPECT_EQ(logged("two\nlines\tof M\xc3\xb6"
                   "bius \xc2\xa0"),
            "two\nlines\tof M\xc3\xb6"
            "bius \xc2\xa0\n");
}

}  // namespace
}  // namespace moebius
