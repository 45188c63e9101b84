// The checkpoint store against crashes, failing writes and full disks: after each, the newest
// checkpoint is whole, and it is the one that the commit point says.
#include "checkpoint/list.h"
#include "checkpoint/reader.h"
#include "checkpoint/store.h"

#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "io/files.h"
#include "io/testing.h"
#include "tests/faults/forked.h"

namespace moebius {
namespace {

using testing::HasSubstr;

// The state of a run after `step` steps: three tensors in two shards.
struct State {
  std::vector<float> w = std::vector<float>(11), m = std::vector<float>(3);
  std::vector<int64_t> n = std::vector<int64_t>(2);

  State() = default;
  explicit State(int64_t value) {
    for (size_t i = 0; i < w.size(); ++i) w[i] = static_cast<float>(value) / static_cast<float>(i + 1);
    m.assign(m.size(), static_cast<float>(-value));
    n.assign(n.size(), value);
  }
  std::vector<NamedTensor> tensors() {
    return {{"w", tensor_of(w.data(), {11})}, {"m", tensor_of(m.data(), {3, 1})}, {"n", tensor_of(n.data(), {2})}};
  }
  bool operator==(const State&) const = default;
};

void save(CheckpointStore& store, int64_t step, int64_t value) {
  State state(value);
  store.save(step, state.tensors(), {});
  store.wait();
}

State newest(const std::string& dir) {
  State state;
  const auto folder = newest_checkpoint(dir, nullptr);
  if (folder) CheckpointReader(*folder).read_all(state.tensors());
  return state;
}

std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

bool has_unfinished(const std::string& dir) {
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    if (entry.path().filename().string().find(".tmp-") != std::string::npos) return true;
  }
  return false;
}

// Step 1 is stored. A save of step `second` with the value 2 meets a fault.
struct Scenario {
  const char* name;
  int64_t second;  // 2: a new step, which prunes step 1; 1: the same step again
  bool async_save;
};

class CheckpointFaults : public testing::TestWithParam<Scenario> {
 protected:
  void first_save(const std::string& dir) {
    ASSERT_EQ(run_forked({},
                         [&] {
                           CheckpointStore store(dir, 1, false);
                           save(store, 1, 1);
                         }),
              0);
  }
  void second_save(const std::string& dir) {
    CheckpointStore store(dir, 1, GetParam().async_save, /*shard_bytes=*/60);
    save(store, GetParam().second, 2);
  }
  // Returns "point:count" for each point that the second save reaches, in order.
  std::vector<std::string> all_points() {
    const TestDir dir;
    first_save(dir.path());
    EXPECT_EQ(run_forked({.log = dir.path("log")}, [&] { second_save(dir.path()); }), 0);
    std::vector<std::string> points;
    std::map<std::string, int> count;
    for (const std::string& name : lines_of(dir.path("log")))
      points.push_back(fmt::format("{}:{}", name, ++count[name]));
    return points;
  }
  // The rename is the commit point. A failure before it leaves 1, and a failure after it leaves 2.
  void expect_newest(const std::string& dir, bool committed) {
    const auto folder = newest_checkpoint(dir, nullptr);
    ASSERT_EQ(folder, dir + (committed && GetParam().second == 2 ? "/step-00000002" : "/step-00000001"));
    EXPECT_TRUE(verify_checkpoint(*folder).ok());
    EXPECT_EQ(newest(dir), State(committed ? 2 : 1));
  }
  // A run that starts again uses the folder, saves, and removes what the crash left.
  void expect_mended(const std::string& dir) {
    EXPECT_EQ(run_forked({},
                         [&] {
                           CheckpointStore store(dir, 1, GetParam().async_save);
                           save(store, 3, 3);
                         }),
              0);
    EXPECT_EQ(newest(dir), State(3));
    EXPECT_EQ(list_checkpoints(dir).size(), 1u);
    EXPECT_FALSE(has_unfinished(dir));
  }
};
INSTANTIATE_TEST_SUITE_P(All, CheckpointFaults,
                         testing::Values(Scenario{"New", 2, false}, Scenario{"NewAsync", 2, true},
                                         Scenario{"Same", 1, false}, Scenario{"SameAsync", 1, true}),
                         [](const auto& info) { return info.param.name; });

TEST_P(CheckpointFaults, FaultPointsCoverEveryStageOfASave) {
  std::vector<std::string> expected{"after_mkdir:1",    "mid_shard:1",     "mid_shard:2",       "after_shard:1",
                                    "mid_shard:3",      "after_shard:2",   "before_manifest:1", "mid_manifest:1",
                                    "after_manifest:1", "before_rename:1", "after_rename:1",    "before_prune:1"};
  if (GetParam().second == 2) expected.push_back("mid_prune:1");
  for (std::string& name : expected) name = "checkpoint." + name;
  EXPECT_EQ(all_points(), expected);
}

TEST_P(CheckpointFaults, KilledAnywhereTheOldOrTheNewCheckpointIsWhole) {
  bool committed = false;
  for (const std::string& point : all_points()) {
    SCOPED_TRACE(point);
    committed |= point == "checkpoint.after_rename:1";
    const TestDir dir;
    first_save(dir.path());
    EXPECT_EQ(run_forked({.fault = point}, [&] { second_save(dir.path()); }), kKilled);
    expect_newest(dir.path(), committed);
    expect_mended(dir.path());
  }
}

std::pair<ErrorKind, std::string> failure_of(const std::string& mode) {
  if (mode == ":throw") return {ErrorKind::io, "Input/output error"};
  if (mode == ":enospc") return {ErrorKind::io, "No space left on device"};
  return {ErrorKind::usage, "out of memory of the host; free some, or raise its limits"};
}

TEST_P(CheckpointFaults, AFailureAnywhereIsAnErrorAndLeavesNothingHalf) {
  bool committed = false;
  for (const std::string& point : all_points()) {
    committed |= point == "checkpoint.after_rename:1";
    for (const std::string mode : {":throw", ":enospc", ":nomem"}) {
      SCOPED_TRACE(point + mode);
      const TestDir dir;
      first_save(dir.path());
      EXPECT_EQ(run_forked({.fault = point + mode},
                           [&] {
                             const auto [kind, text] = failure_of(mode);
                             expect_error(kind, text, [&] { second_save(dir.path()); });
                             EXPECT_TRUE(committed || !has_unfinished(dir.path()));
                           }),
                0);
      expect_newest(dir.path(), committed);
      expect_mended(dir.path());
    }
  }
}

TEST(CheckpointFault, AFailedSaveIsNamedAndTheStoreStaysUsable) {
  const TestDir dir;
  EXPECT_EQ(run_forked({.fault = "checkpoint.mid_shard:2:throw"},
                       [&] {
                         CheckpointStore store(dir.path(), 1, true);
                         expect_error(ErrorKind::io, "save of step 5, 3 tensors of 72 bytes, to " + dir.path(),
                                      [&] { save(store, 5, 5); });
                         save(store, 6, 6);
                         EXPECT_EQ(newest(dir.path()), State(6));
                       }),
            0);
}

// The process is killed at random times. A checkpoint that wait() has reported must
// be there, whole.
TEST(CheckpointFault, KilledAtRandomTimesNoFinishedSaveIsLost) {
  std::mt19937 random(7);
  int64_t num_promised = 0;
  for (int round = 0; round < 10; ++round) {
    const TestDir dir;
    const std::string log = dir.path("saved");
    const pid_t run = start_forked({}, [&] {
      CheckpointStore store(dir.path("run"), 2, true);
      const File saved = File::open_append(log);
      for (int64_t step = 1;; ++step) {
        save(store, step, step);
        saved.append("x", 1);
      }
    });
    ::usleep(50'000 + random() % 150'000);
    ::kill(run, SIGKILL);
    ASSERT_EQ(end_of(run), kKilled);
    const auto folder = newest_checkpoint(dir.path("run"), nullptr);
    const int64_t promised = std::filesystem::exists(log) ? static_cast<int64_t>(std::filesystem::file_size(log)) : 0;
    num_promised += promised;
    const int64_t step = folder ? CheckpointReader(*folder).step() : 0;
    EXPECT_TRUE(step == promised || step == promised + 1) << step << " of " << promised << ", round " << round;
    EXPECT_EQ(newest(dir.path("run")), State(step));
  }
  EXPECT_GT(num_promised, 0);
}

// State of 512 KiB, which fills a small disk.
struct Big {
  std::vector<float> x;
  explicit Big(float value) : x(std::vector<float>(1 << 17, value)) {}
  std::vector<NamedTensor> tensors() { return {{"x", tensor_of(x.data(), {1 << 17})}}; }
};

void save_big(CheckpointStore& store, int64_t step) {
  Big big(static_cast<float>(step));
  store.save(step, big.tensors(), {});
  store.wait();
}

void expect_big(const std::string& dir, int64_t step) {
  const auto folder = newest_checkpoint(dir, nullptr);
  ASSERT_TRUE(folder);
  EXPECT_FALSE(has_unfinished(dir));
  Big big(0);
  CheckpointReader(*folder).read_all(big.tensors());
  EXPECT_EQ(big.x, Big(static_cast<float>(step)).x);
}

// The system itself refuses a write. A limit on the size of files does that without privileges.
TEST(CheckpointFault, AWriteThatTheSystemRefusesKeepsTheOldCheckpoint) {
  const TestDir dir;
  EXPECT_EQ(run_forked({},
                       [&] {
                         CheckpointStore store(dir.path(), 1, true);
                         save_big(store, 1);
                         ::signal(SIGXFSZ, SIG_IGN);
                         rlimit limit{};
                         ::getrlimit(RLIMIT_FSIZE, &limit);
                         limit.rlim_cur = 100'000;
                         ::setrlimit(RLIMIT_FSIZE, &limit);
                         expect_error(ErrorKind::io, "File too large", [&] { save_big(store, 2); });
                         expect_big(dir.path(), 1);
                         limit.rlim_cur = limit.rlim_max;
                         ::setrlimit(RLIMIT_FSIZE, &limit);
                         save_big(store, 3);
                         expect_big(dir.path(), 3);
                       }),
            0);
}

TEST(CheckpointFault, AFullDiskKeepsTheOldCheckpoint) {
  const TestDir dir;
  const int status = run_forked({}, [&] {
    if (!mount_small(dir.path(), "size=1600k")) ::_exit(77);
    CheckpointStore store(dir.path(), 1, true);
    save_big(store, 1);
    std::ofstream(dir.path("others")) << std::string(700'000, 'x');
    const auto fail = [&] { save_big(store, 2); };
    expect_error(ErrorKind::io, "write of 524288 bytes at ", fail);
    expect_error(ErrorKind::io, "/shard-00000.safetensors: No space left on device; the disk is full", fail);
    expect_error(ErrorKind::io, "save of step 2, 1 tensors of 524288 bytes", fail);
    expect_big(dir.path(), 1);
    std::filesystem::remove(dir.path("others"));
    save_big(store, 3);
    expect_big(dir.path(), 3);
  });
  if (status == 77) GTEST_SKIP() << "this system does not allow a mount";
  EXPECT_EQ(status, 0);
}

// A crash leaves files on a disk that is nearly full. The next save has space, since it
// removes them first.
TEST(CheckpointFault, LeftoversOfACrashAreRemovedToFreeSpace) {
  const TestDir dir;
  const int status = run_forked({}, [&] {
    if (!mount_small(dir.path(), "size=1600k")) ::_exit(77);
    EXPECT_EQ(run_forked({.fault = "checkpoint.after_shard:2"},
                         [&] {
                           CheckpointStore store(dir.path(), 1, false);
                           save_big(store, 1);
                           save_big(store, 2);
                         }),
              kKilled);
    std::ofstream(dir.path("others")) << std::string(300'000, 'x');
    CheckpointStore store(dir.path(), 1, false);
    save_big(store, 2);
    expect_big(dir.path(), 2);
  });
  if (status == 77) GTEST_SKIP() << "this system does not allow a mount";
  EXPECT_EQ(status, 0);
}

TEST(CheckpointFault, ARunThatWasKilledDoesNotKeepTheFolder) {
  const TestDir dir;
  EXPECT_EQ(run_forked({},
                       [&] {
                         CheckpointStore store(dir.path(), 1, false);
                         EXPECT_EQ(run_forked({},
                                              [&] {
                                                expect_error(ErrorKind::usage, "used by one run at a time",
                                                             [&] { CheckpointStore(dir.path(), 1, false); });
                                              }),
                                   0);
                         ::raise(SIGKILL);
                       }),
            kKilled);
  CheckpointStore(dir.path(), 1, false);
}

}  // namespace
}  // namespace moebius
