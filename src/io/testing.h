// Tools for the tests of this folder: a scratch folder, and a check of an error's text.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "core/error.h"

namespace moebius {

// A scratch folder, removed with the object.
class TestDir {
 public:
  TestDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "moebius-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TestDir() { std::filesystem::remove_all(path_); }
  TestDir(const TestDir&) = delete;
  TestDir& operator=(const TestDir&) = delete;
  std::string path(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }
  int64_t num_files() const {
    return std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator());
  }

 private:
  std::string path_;
};

// Expects that call() throws an Error of this kind whose message contains `text`.
template <class Call>
void expect_error(ErrorKind kind, const std::string& text, Call&& call) {
  try {
    call();
    ADD_FAILURE() << "expected an error that says: " << text;
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    EXPECT_THAT(error.what(), testing::HasSubstr(text));
  }
}

}  // namespace moebius
