// Import, export and upcycling that are asked to end.
#include "core/stopped.h"

#include <gtest/gtest.h>

#include "io/files.h"
#include "io/testing.h"
#include "weights/export.h"
#include "weights/import.h"
#include "weights/upcycle.h"

namespace moebius {
namespace {

const std::string kModel = MOEBIUS_SOURCE_DIR "/tests/golden/data/llama_v4";

// Ends the work before its third tensor.
template <class Work>
void expect_nothing_left(const Work& work) {
  const TestDir dir;
  int asked = 0;
  EXPECT_THROW(work(dir.path("new/folders/out"), [&] { return ++asked == 3; }), Stopped);
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(dir.num_files(), 0);
}

TEST(Stopped, AnImportLeavesNothing) {
  expect_nothing_left([](const std::string& out, const ShouldStop& stop) {
    import_hugging_face({.out = out, .model = kModel, .should_stop = stop});
  });
}

TEST(Stopped, AnExportLeavesNothing) {
  expect_nothing_left([](const std::string& out, const ShouldStop& stop) {
    export_hugging_face({.out = out, .model = kModel, .should_stop = stop});
  });
}

TEST(Stopped, AnUpcyclingLeavesNothing) {
  expect_nothing_left([](const std::string& out, const ShouldStop& stop) {
    upcycle({.out = out, .model = kModel, .num_experts = 2, .top_k = 1, .should_stop = stop});
  });
}

TEST(Stopped, StopIsCheckedWhileOtherFilesAreCopied) {
  const TestDir dir, files;
  write_file_atomic(files.path("tokenizer.json"), "{}");
  int64_t asked = 0, tensors = 0;
  const auto run = [&](int64_t last) {
    asked = 0;
    return export_hugging_face({.out = dir.path("out" + std::to_string(last)),
                                .model = kModel,
                                .files = files.path(),
                                .should_stop = [&, last] { return ++asked == last; }});
  };
  tensors = run(0).num_tensors;
  EXPECT_EQ(asked, tensors + 1);
  EXPECT_THROW(run(tensors + 1), Stopped);
  EXPECT_EQ(dir.num_files(), 1);
}

}  // namespace
}  // namespace moebius
