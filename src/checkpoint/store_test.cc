#include "checkpoint/store.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "checkpoint/list.h"
#include "checkpoint/manifest.h"
#include "checkpoint/prune.h"
#include "checkpoint/reader.h"
#include "comm/control.h"
#include "comm/transport/threads.h"
#include "device/accelerator.h"
#include "io/files.h"
#include "io/safetensors.h"
#include "io/testing.h"
#include "ops/optimizer/rounding.h"

namespace moebius {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

// A training state of odd sizes; every byte is a function of the seed.
struct State {
  std::vector<float> w = std::vector<float>(3 * 7);
  std::vector<bf16> b = std::vector<bf16>(5);
  std::vector<int64_t> n = std::vector<int64_t>(1);
  std::vector<float> none;

  State() = default;
  explicit State(int seed) {
    std::iota(w.begin(), w.end(), 0.5f + seed);
    for (bf16& x : b) x.bits = static_cast<uint16_t>(100 * seed + (&x - b.data()));
    n[0] = -seed;
  }
  std::vector<NamedTensor> tensors() {
    return {{"w", tensor_of(w.data(), {3, 7})},
            {"b", tensor_of(b.data(), {5})},
            {"n", tensor_of(n.data(), {})},
            {"none", tensor_of(none.data(), {0, 4})}};
  }
  bool operator==(const State& other) const {
    return w == other.w && n == other.n && std::memcmp(b.data(), other.b.data(), b.size() * sizeof(bf16)) == 0;
  }
};

// Masters as weights and remainders: three more than are written at once.
struct Halves {
  static constexpr int64_t kNumel = CheckpointStore::kPieceBytes / 4 + 3;
  std::vector<float> values = std::vector<float>(kNumel);
  std::vector<bf16> weights = std::vector<bf16>(kNumel);
  std::vector<uint16_t> remainders = std::vector<uint16_t>(kNumel);

  Halves() {
    for (uint32_t i = 0; i < kNumel; ++i) {
      const uint32_t bits = i * 2654435761u;  // whose low half alone would repeat in the next piece
      values[i] = std::bit_cast<float>((bits ^ bits >> 15) & 0xbfffffffu);  // no infinity and no NaN
      const WeightAndRemainder both = split(values[i]);
      weights[i] = both.weight;
      remainders[i] = both.remainder;
    }
  }
  NamedTensor tensor() { return named(weights.data(), remainders.data(), DeviceKind::cpu); }
  static NamedTensor named(void* weights, void* remainders, DeviceKind device) {
    return {.name = "w",
            .tensor = {.data = weights, .shape = {kNumel}, .dtype = DType::bf16, .device = device},
            .converts = true,
            .remainder = Tensor{.data = remainders, .shape = {kNumel}, .dtype = DType::u16, .device = device}};
  }
  // Reads the values as f32, and as halves.
  void expect_saved_in(const std::string& folder) const {
    const CheckpointReader reader(folder);
    std::vector<float> read(kNumel);
    reader.read("w", tensor_of(read.data(), {kNumel}));
    EXPECT_TRUE(std::memcmp(read.data(), values.data(), kNumel * sizeof(float)) == 0);
    std::vector<bf16> high(kNumel);
    std::vector<uint16_t> low(kNumel);
    reader.read(named(high.data(), low.data(), DeviceKind::cpu));
    expect_halves(high, low);
  }
  void expect_halves(const std::vector<bf16>& high, const std::vector<uint16_t>& low) const {
    int64_t num_wrong = 0;
    for (size_t i = 0; i < kNumel; ++i)
      num_wrong += std::bit_cast<uint32_t>(joined(high[i], low[i])) != std::bit_cast<uint32_t>(values[i]);
    EXPECT_EQ(num_wrong, 0);
  }
};

State load(const std::string& folder) {
  State state;
  CheckpointReader(folder).read_all(state.tensors());
  return state;
}

void save(CheckpointStore& store, int64_t step, int seed = 0) {
  State state(seed ? seed : static_cast<int>(step));
  store.save(step, state.tensors(), {{"recipe", "steps = 7"}});
  store.wait();
}

std::vector<int64_t> steps_in(const std::string& dir) {
  std::vector<int64_t> steps;
  for (const CheckpointInfo& info : list_checkpoints(dir)) steps.push_back(info.step);
  return steps;
}

std::string shard_of(const std::string& folder, const std::string& tensor) {
  return folder + "/" + CheckpointReader(folder).tensors().at(tensor).pieces[0].file;
}

class Checkpoint : public testing::TestWithParam<bool> {
 protected:
  TestDir dir_;
  std::string path_ = dir_.path("run/checkpoints");  // made with its parents
  std::string folder(int64_t step) { return fmt::format("{}/step-{:08}", path_, step); }
};
INSTANTIATE_TEST_SUITE_P(Async, Checkpoint, testing::Bool());

TEST_P(Checkpoint, RoundTripKeepsEveryByte) {
  CheckpointStore store(path_, 2, GetParam());
  save(store, 100, 3);
  EXPECT_EQ(newest_checkpoint(path_, nullptr), folder(100));
  const CheckpointReader reader(folder(100));
  EXPECT_EQ(reader.step(), 100);
  EXPECT_EQ(reader.meta(), nlohmann::json({{"recipe", "steps = 7"}}));
  EXPECT_THAT(reader.tensors(), SizeIs(4));
  EXPECT_EQ(reader.tensors().at("b").dtype, DType::bf16);
  EXPECT_THAT(reader.tensors().at("w").shape, ElementsAre(3, 7));
  EXPECT_EQ(load(folder(100)), State(3));
  EXPECT_EQ(store.snapshot_bytes(), GetParam() ? 128 + 64 + 64 : 0);
}

TEST_P(Checkpoint, HalvesOfMoreThanAPieceAreSavedAsTheirValues) {
  Halves halves;
  CheckpointStore store(path_, 2, GetParam());
  store.save(1, {halves.tensor()}, {});
  if (GetParam()) std::fill(halves.remainders.begin(), halves.remainders.end(), uint16_t{0});  // saved is what was
  store.wait();
  halves.expect_saved_in(folder(1));
}

TEST_P(Checkpoint, SavesTheValuesAtTheTimeOfTheCall) {
  CheckpointStore store(path_, 0, GetParam());
  State state(1);
  store.save(1, state.tensors(), {});
  state = State(2);
  store.save(2, state.tensors(), {});  // waits for the first
  state = State(3);
  store.wait();
  EXPECT_EQ(load(folder(1)), State(1));
  EXPECT_EQ(load(folder(2)), State(2));
}

TEST_P(Checkpoint, TheEndOfAStoreWaitsForTheSaveInFlight) {
  {
    CheckpointStore store(path_, 2, GetParam());
    State state(5);
    store.save(5, state.tensors(), {});
  }
  EXPECT_EQ(load(folder(5)), State(5));
}

TEST_P(Checkpoint, ShardsAreCapped) {
  CheckpointStore store(path_, 2, GetParam(), /*shard_bytes=*/18);
  save(store, 1);
  const CheckpointReader reader(folder(1));
  EXPECT_EQ(reader.num_files(), 2);  // w is above the cap and alone; b, n and none have 18 bytes
  const auto piece = [&](const std::string& name) { return reader.tensors().at(name).pieces.at(0); };
  EXPECT_NE(piece("w").file, piece("b").file);
  EXPECT_EQ(piece("b").file, piece("n").file);
  EXPECT_EQ(load(folder(1)), State(1));
  const SafetensorsFile shard = SafetensorsFile::open(shard_of(folder(1), "b"));
  EXPECT_EQ(shard.at("b").offset, piece("b").offset);
}

TEST_P(Checkpoint, KeepsTheNewest) {
  CheckpointStore store(path_, 2, GetParam());
  for (int64_t step : {1, 2, 3, 10}) save(store, step);
  EXPECT_THAT(steps_in(path_), ElementsAre(3, 10));
  EXPECT_EQ(load(folder(3)), State(3));
}

TEST_P(Checkpoint, KeepZeroKeepsAll) {
  CheckpointStore store(path_, 0, GetParam());
  for (int64_t step : {0, 1, 2}) save(store, step);
  EXPECT_THAT(steps_in(path_), ElementsAre(0, 1, 2));
}

TEST_P(Checkpoint, DamagedCheckpointsDoNotCountTowardsKeep) {
  CheckpointStore store(path_, 2, GetParam());
  save(store, 1);
  save(store, 2);
  std::filesystem::remove(folder(2) + "/manifest.json");
  save(store, 3);
  EXPECT_THAT(steps_in(path_), ElementsAre(1, 2, 3));  // 1 and 3 are kept; 2 goes when it is the oldest
  save(store, 4);
  EXPECT_THAT(steps_in(path_), ElementsAre(3, 4));
}

// A run that started over must not resume from the checkpoints of the run before it.
TEST_P(Checkpoint, AnAbandonedHistoryIsRemoved) {
  CheckpointStore store(path_, 0, GetParam());
  for (int64_t step : {5, 200, 300}) save(store, step);
  save(store, 10);
  EXPECT_THAT(steps_in(path_), ElementsAre(5, 10));
}

TEST_P(Checkpoint, CheckpointsThatAreSetAsideAreMovedAndNeverRemoved) {
  write_file_atomic(dir_.path("notes"), "mine");
  {
    CheckpointStore store(path_, 0, GetParam());
    EXPECT_EQ(store.set_aside(), "") << "there is none";
    save(store, 1, 3);
    save(store, 2, 4);
    EXPECT_EQ(store.set_aside({dir_.path("notes"), dir_.path("none")}), path_ + "/old-1");
    EXPECT_THAT(steps_in(path_), ElementsAre());
    save(store, 1, 5);
    EXPECT_EQ(store.set_aside(), path_ + "/old-2");
    save(store, 1, 6);
  }
  CheckpointStore store(path_, 1, GetParam());  // a start
  save(store, 2, 7);                            // and a save that prunes
  EXPECT_THAT(steps_in(path_), ElementsAre(2));
  EXPECT_THAT(steps_in(path_ + "/old-1"), ElementsAre(1, 2));
  EXPECT_EQ(load(path_ + "/old-1/step-00000002"), State(4));
  EXPECT_EQ(load(path_ + "/old-2/step-00000001"), State(5));
  EXPECT_EQ(read_file(path_ + "/old-1/notes"), "mine");
}

TEST_P(Checkpoint, SavingAStepAgainReplacesIt) {
  CheckpointStore store(path_, 2, GetParam());
  save(store, 7, 1);
  save(store, 7, 2);
  EXPECT_EQ(load(folder(7)), State(2));
  EXPECT_THAT(steps_in(path_), ElementsAre(7));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path_), {}), 2);  // it and the lock
}

TEST_P(Checkpoint, NewestSkipsIncompleteCheckpoints) {
  CheckpointStore store(path_, 0, GetParam());
  for (int64_t step : {1, 2, 3, 4}) save(store, step);
  std::filesystem::remove(folder(4) + "/manifest.json");
  const std::string shard = shard_of(folder(3), "w");
  std::filesystem::resize_file(shard, std::filesystem::file_size(shard) - 1);
  std::filesystem::create_directory(path_ + "/step-00000009.tmp-0123456789abcdef");
  std::filesystem::create_directory(path_ + "/step-9");
  std::vector<std::string> rejected;
  EXPECT_EQ(newest_checkpoint(path_, &rejected), folder(2));
  EXPECT_THAT(rejected, ElementsAre(HasSubstr("step-00000004: expected manifest.json, the mark of a finished save"),
                                    HasSubstr("step-00000003/shard-00000.safetensors: expected")));
  const std::vector<CheckpointInfo> infos = list_checkpoints(path_);
  ASSERT_THAT(infos, SizeIs(4));
  EXPECT_EQ(infos[1].problem, "");
  EXPECT_GT(infos[1].bytes, 100);
  EXPECT_THAT(infos[2].problem, HasSubstr("remove the folder or use the checkpoint before it"));
}

TEST_P(Checkpoint, TheNextSaveRemovesLeftoversOfACrash) {
  CheckpointStore store(path_, 2, GetParam());
  const std::string left = path_ + "/step-00000009.tmp-0123456789abcdef";
  std::filesystem::create_directories(left);
  write_file_atomic(left + "/shard-00000.safetensors", "half");
  save(store, 1);
  EXPECT_FALSE(std::filesystem::exists(left));
}

// It may hold the space that a run needs before its first save.
TEST_P(Checkpoint, OpeningRemovesLeftoversOfACrash) {
  {
    CheckpointStore store(path_, 2, GetParam());
    save(store, 1);
  }
  const std::string left = path_ + "/step-00000009.tmp-0123456789abcdef";
  std::filesystem::create_directories(left);
  write_file_atomic(left + "/shard-00000.safetensors", "half");
  CheckpointStore store(path_, 2, GetParam());
  EXPECT_FALSE(std::filesystem::exists(left));
  EXPECT_EQ(load(folder(1)), State(1));
}

TEST_P(Checkpoint, AFailedSaveIsAnErrorOnceAndLeavesNothing) {
  CheckpointStore store(path_, 2, GetParam());
  save(store, 1);
  State state(2);
  write_file_atomic(folder(2), "a file where the folder should go");
  const auto fail = [&] {
    store.save(2, state.tensors(), {});
    store.wait();
  };
  expect_error(ErrorKind::io, "save of step 2, 4 tensors of 102 bytes, to " + path_, fail);
  expect_error(ErrorKind::io, "the checkpoints before it are as they were", fail);
  std::filesystem::remove(folder(2));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(path_), {}), 2);  // step 1 and the lock
  save(store, 2);
  EXPECT_EQ(load(folder(2)), State(2));
}

TEST(CheckpointStoreErrors, TheErrorOfAnAsynchronousSaveComesWithTheNextSave) {
  const TestDir dir;
  CheckpointStore store(dir.path(), 2, true);
  write_file_atomic(dir.path("step-00000002"), "a file where the folder should go");
  State state(2);
  store.save(2, state.tensors(), {});
  expect_error(ErrorKind::io, "save of step 2", [&] { store.save(3, state.tensors(), {}); });
  store.save(4, state.tensors(), {});
  store.wait();
  EXPECT_THAT(steps_in(dir.path()), ElementsAre(4));
}

TEST(CheckpointStoreErrors, ASecondStoreOfAFolderIsRefused) {
  const TestDir dir;
  {
    CheckpointStore store(dir.path(), 2, true);
    save(store, 1);
    store.wait();
    expect_error(ErrorKind::usage, fmt::format("got a second one besides process {} on ", ::getpid()),
                 [&] { CheckpointStore(dir.path(), 2, true); });
    expect_error(ErrorKind::usage, "choose another run.dir", [&] { prune_checkpoints(dir.path(), 1); });
  }
  CheckpointStore(dir.path(), 2, true);
}

// Each rank says what it finds where the lock of rank 0 should be: nothing, another, one that
// was there before.
TEST(CheckpointStoreErrors, AFolderThatRanksDoNotShare) {
  const TestDir dir;
  const auto open_as = [&](const std::vector<std::string>& folders) {
    run_threads(static_cast<int>(folders.size()), {}, [&](Transport& world) {
      Control ranks(world);
      CheckpointStore(ranks, dir.path(folders[world.rank()]), 2, true);
    });
  };
  EXPECT_NO_THROW(open_as({"run", "run", "run"}));
  EXPECT_NO_THROW(open_as({"run", "run/../run"}));
  const std::string shared = "run.dir must be one folder, under the same name, on a file system that all ranks share";
  expect_error(ErrorKind::usage,
               "rank 2: checkpoint: expected " + dir.path("none") + "/lock to be that of rank 0; got ", [&] {
                 open_as({"run", "run", "none"});
               });
  expect_error(ErrorKind::usage, shared, [&] { open_as({"run", "none"}); });
  { const CheckpointStore of_another_run(dir.path("other"), 2, true); }
  expect_error(ErrorKind::usage, "other/lock to be that of rank 0; got another; " + shared, [&] {
    open_as({"run", "other"});
  });
  expect_error(ErrorKind::usage, "rank 1: ", [&] { open_as({"other", "run"}); });
}

TEST(CheckpointStoreErrors, WrongArguments) {
  const TestDir dir;
  expect_error(ErrorKind::usage, "got keep -1", [&] { CheckpointStore(dir.path(), -1, true); });
  CheckpointStore store(dir.path(), 2, false);
  State state(1);
  std::vector<NamedTensor> tensors = state.tensors();
  expect_error(ErrorKind::usage, "expected a step >= 0; got -1", [&] { store.save(-1, tensors, {}); });
  tensors.push_back(tensors[0]);
  expect_error(ErrorKind::usage, "each name once; got \"w\", f32[3, 7] on cpu", [&] { store.save(1, tensors, {}); });
  tensors.pop_back();
  tensors[1].tensor.device = DeviceKind::cuda;
  expect_error(ErrorKind::usage, "got \"b\", bf16[5] on cuda", [&] { store.save(1, tensors, {}); });
  write_file_atomic(dir.path("file"), "");
  expect_error(ErrorKind::io, "checkpoint: create folder " + dir.path("file/x"),
               [&] { CheckpointStore(dir.path("file/x"), 2, true); });
}

// Tensors of a GPU are copied a piece at a time, or all of them first; the bytes of the moment of
// the save are written.
TEST(CheckpointStoreOnGpu, WritesTensorsOfAGpu) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  ThreadPool pool(1);
  Accelerator gpu;
  Stream s(gpu, pool);
  // One larger than a piece, by an odd number of bytes, and one without any.
  std::vector<uint8_t> bytes(CheckpointStore::kPieceBytes + 12345);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 2654435761u >> 13);
  const int64_t size = static_cast<int64_t>(bytes.size());
  const Buffer held(DeviceKind::cuda, size);
  copy_to_device(s, held.data(), bytes.data(), size);
  synchronize(s);
  const std::vector<NamedTensor> tensors{
      {.name = "w", .tensor = {.data = held.data(), .shape = {size}, .dtype = DType::u8, .device = DeviceKind::cuda}},
      {.name = "none", .tensor = {.shape = {0}, .dtype = DType::f32, .device = DeviceKind::cuda}}};
  for (const bool async : {false, true}) {
    const TestDir dir;
    CheckpointStore store(dir.path(), 1, async);
    store.hold_piece();
    EXPECT_EQ(store.pinned_bytes(), async ? 0 : CheckpointStore::kPieceBytes);
    store.save(1, tensors, {}, &s);
    store.wait();
    EXPECT_EQ(store.snapshot_bytes(), async ? CheckpointStore::snapshot_bytes_of(tensors) : 0);
    std::vector<uint8_t> read(bytes.size());
    CheckpointReader(dir.path("step-00000001")).read("w", tensor_of(read.data(), {size}));
    EXPECT_EQ(read, bytes) << "async " << async;
  }
}

// A piece in the host buffer has both halves.
TEST(CheckpointStoreOnGpu, WritesHalvesOfAGpu) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  ThreadPool pool(1);
  Accelerator gpu;
  Stream s(gpu, pool);
  Halves halves;
  constexpr int64_t kBytes = 2 * Halves::kNumel;
  const Buffer high(DeviceKind::cuda, kBytes), low(DeviceKind::cuda, kBytes);
  const NamedTensor tensor = Halves::named(high.data(), low.data(), DeviceKind::cuda);
  for (const bool async : {false, true}) {
    const TestDir dir;
    copy_to_device(s, high.data(), halves.weights.data(), kBytes);
    copy_to_device(s, low.data(), halves.remainders.data(), kBytes);
    synchronize(s);
    CheckpointStore store(dir.path(), 1, async);
    store.save(1, {tensor}, {}, &s);
    store.wait();
    halves.expect_saved_in(dir.path("step-00000001"));
    const Buffer read_high(DeviceKind::cuda, kBytes), read_low(DeviceKind::cuda, kBytes);
    CheckpointReader(dir.path("step-00000001"))
        .read(Halves::named(read_high.data(), read_low.data(), DeviceKind::cuda), &s);
    std::vector<bf16> weights(Halves::kNumel);
    std::vector<uint16_t> remainders(Halves::kNumel);
    copy_to_host(s, weights.data(), read_high.data(), kBytes);
    copy_to_host(s, remainders.data(), read_low.data(), kBytes);
    halves.expect_halves(weights, remainders);
  }
}

TEST(CheckpointList, NoFolderIsNoCheckpoint) {
  const TestDir dir;
  EXPECT_THAT(list_checkpoints(dir.path("none")), SizeIs(0));
  EXPECT_EQ(newest_checkpoint(dir.path("none"), nullptr), std::nullopt);
}

TEST(CheckpointPrune, WritesNothingToAFolderWithoutCheckpoints) {
  const TestDir dir;
  expect_error(ErrorKind::input, "expected a folder of checkpoints; got none in " + dir.path(),
               [&] { prune_checkpoints(dir.path(), 1); });
  EXPECT_EQ(dir.num_files(), 0);
}

TEST(CheckpointPrune, OnlyCheckpointsThatVerifyCountAsKept) {
  const TestDir dir;
  {
    CheckpointStore store(dir.path(), 0, false);
    for (int64_t step : {1, 2, 3, 4}) save(store, step);
  }
  std::fstream shard(shard_of(dir.path("step-00000004"), "w"), std::ios::in | std::ios::out | std::ios::binary);
  shard.seekp(-1, std::ios::end);
  shard.put('x');
  shard.close();
  EXPECT_THAT(prune_checkpoints(dir.path(), 4), SizeIs(0));
  EXPECT_THAT(prune_checkpoints(dir.path(), 2), ElementsAre(dir.path("step-00000001")));
  EXPECT_THAT(steps_in(dir.path()), ElementsAre(2, 3, 4));
  expect_error(ErrorKind::usage, "at least 1 to be kept; got 0", [&] { prune_checkpoints(dir.path(), 0); });
}

}  // namespace
}  // namespace moebius
