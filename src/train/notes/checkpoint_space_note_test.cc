#include "train/notes/checkpoint_space_note.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

RunSpec run_of(int64_t steps, int64_t every, int64_t keep) {
  RunSpec run;
  run.dir = "d";
  run.train.steps = steps;
  run.checkpoint.every = every;
  run.checkpoint.keep = keep;
  return run;
}

// At most keep + 1 are there at once: a new one is complete before the oldest is removed.
TEST(CheckpointSpaceNote, CountsTheCheckpointsThatARunAdds) {
  EXPECT_EQ(added_checkpoints(run_of(100, 10, 2), 1, 0), 3);
  EXPECT_EQ(added_checkpoints(run_of(100, 10, 2), 31, 2), 1);
  EXPECT_EQ(added_checkpoints(run_of(100, 10, 2), 31, 5), 1) << "keep was lowered";
  EXPECT_EQ(added_checkpoints(run_of(100, 50, 2), 1, 0), 2) << "of steps 50 and 100";
  EXPECT_EQ(added_checkpoints(run_of(100, 0, 2), 1, 0), 1);
  EXPECT_EQ(added_checkpoints(run_of(100, 10, 0), 1, 0), 10);
  EXPECT_EQ(added_checkpoints(run_of(95, 10, 0), 1, 0), 10) << "that of the last step too";
  EXPECT_EQ(added_checkpoints(run_of(95, 10, 0), 91, 9), 1);
  EXPECT_EQ(added_checkpoints(run_of(95, 10, 0), 96, 10), 0) << "only an evaluation is left";
}

TEST(CheckpointSpaceNote, SaysWhichSaveFailsAndWhatHelps) {
  const RunSpec run = run_of(100, 10, 2);
  const int64_t mib = 1 << 20;
  EXPECT_FALSE(checkpoint_space_note(run, 1, {.bytes = 5 * mib, .free_bytes = 15 * mib}));
  EXPECT_FALSE(checkpoint_space_note(run, 1, {.bytes = 5 * mib, .free_bytes = -1})) << "not known";
  EXPECT_FALSE(checkpoint_space_note(run, 31, {.bytes = 5 * mib, .free_bytes = 5 * mib, .num_there = 2}));
  const auto later = checkpoint_space_note(run, 1, {.bytes = 5 * mib, .free_bytes = 14 * mib});
  ASSERT_TRUE(later);
  EXPECT_TRUE(later->is_warning);
  EXPECT_EQ(later->text,
            "run.dir: d has 14.0 MiB free, and a checkpoint takes 5.0 MiB, and the run adds up to 3 (checkpoint.keep = "
            "2): a later save fails and ends the run; free space, keep fewer checkpoints, or choose another run.dir");
  const auto first = checkpoint_space_note(run, 31, {.bytes = 5 * mib, .free_bytes = 4 * mib, .num_there = 2});
  ASSERT_TRUE(first);
  EXPECT_EQ(first->text,
            "run.dir: d has 4.0 MiB free, and a checkpoint takes 5.0 MiB: the first save fails and ends the run; free "
            "space, or choose another run.dir");
}

}  // namespace
}  // namespace moebius
