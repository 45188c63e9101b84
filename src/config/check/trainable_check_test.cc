#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/run_spec.h"
#include "config/testing.h"

namespace moebius {
namespace {

using testing::HasSubstr;

TEST(CheckTrainable, NamesMissingTrainingKeys) {
  const auto text = [](const Sets& sets) {
    return error_text(ErrorKind::usage, [&] { parse(sets).check_trainable(); });
  };
  EXPECT_THAT(text({}), HasSubstr("run.dir must be given"));
  EXPECT_THAT(text({}), HasSubstr("metrics; data.train must be given"));
  EXPECT_THAT(text({"run.dir=d"}), HasSubstr("data.train must be given"));
  EXPECT_THAT(text({"run.dir=d", "data.train=[\"p\"]", "train.eval_every=3"}),
              HasSubstr("train.eval_every = 3 needs data.valid"));
  EXPECT_THAT(text({"run.dir=d", "data.train=[\"p\"]", "train.eval_batches=3"}),
              HasSubstr("train.eval_batches = 3 needs data.valid"));
  EXPECT_NO_THROW(parse({"run.dir=d", "data.train=[\"p\"]"}).check_trainable());
}

TEST(CheckTrainable, TheTokenizerMustBeThereToTrainAndNotToPlan) {
  const auto run = [](const std::string& tokenizer) {
    return parse({"run.dir=d", "data.train=[\"p\"]", "data.tokenizer=" + tokenizer});
  };
  EXPECT_THAT(error_text(ErrorKind::usage, [&] { run("nodir").check_trainable(); }),
              HasSubstr("data.tokenizer must be \"bytes\" or a folder with a tokenizer.json; got \"nodir\" [--set]"));
  EXPECT_THAT(error_text(ErrorKind::usage, [&] { run("nodir/tokenizer.json").check_trainable(); }),
              HasSubstr("got \"nodir/tokenizer.json\"; give its folder [--set]"));
  EXPECT_NO_THROW(run("nodir").check(1));
  EXPECT_NO_THROW(run(MOEBIUS_SOURCE_DIR "/tests/golden/data/tokenizers/qwen2").check_trainable());
}

TEST(CheckTrainable, FolderOfTheTraceMustExistAndBeWritable) {
  const auto run = [](const std::string& trace) {
    return parse({"run.dir=d/e", "data.train=[\"p\"]", "log.trace=" + trace});
  };
  const auto text = [&](const std::string& trace) {
    return error_text(ErrorKind::usage, [&] { run(trace).check_trainable(); });
  };
  const std::string folder = testing::TempDir();
  EXPECT_THAT(text("/nowhere/at/all.json"), HasSubstr("/nowhere/at must be a folder that may be written to; make it"));
  EXPECT_THAT(text("/proc/self/status/t.json"), HasSubstr("must be a folder that may be written to"));
  EXPECT_THAT(text("d/t.json"), HasSubstr("must be a folder that may be written to"));
  EXPECT_THAT(text(folder), HasSubstr("must be a file; got a folder"));
  EXPECT_NO_THROW(run(folder + "/t.json").check_trainable());
  EXPECT_NO_THROW(run("t.json").check_trainable());
  EXPECT_NO_THROW(run("d/e/t.json").check_trainable());  // the run makes its folder
}

}  // namespace
}  // namespace moebius
