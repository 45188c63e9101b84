#include "core/start_thread.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "core/error.h"

namespace moebius {
namespace {

TEST(StartThread, ReturnsTheThread) {
  bool ran = false;
  start_thread([&] { return std::thread([&] { ran = true; }); }).join();
  EXPECT_TRUE(ran);
}

TEST(StartThread, SaysWhatToDoIfTheSystemStartsNone) {
  try {
    start_thread([]() -> std::thread {
      throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
    });
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_THAT(e.what(), testing::HasSubstr("the system starts no more threads (Resource temporarily unavailable); "));
  }
}

}  // namespace
}  // namespace moebius
