// State saved by the ranks of one layout and loaded by those of another, without an engine: what a
// rank holds is drawn at random, as layouts do it, and every element is a function of its tensor
// and its global place.
#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>

#include "checkpoint/list.h"
#include "checkpoint/reader.h"
#include "checkpoint/store.h"
#include "comm/control.h"
#include "comm/transport/threads.h"
#include "io/files.h"
#include "io/testing.h"

namespace moebius {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

struct GlobalTensor {
  std::string name;
  std::vector<int64_t> shape;
  bool is_state = false;  // the same on every rank of a stage, saved by one of them
};

float value_of(const GlobalTensor& t, int64_t element) {
  return static_cast<float>(std::hash<std::string>{}(t.name) % 1000) + static_cast<float>(element) / 16;
}

// Odd sizes; one tensor is longer than the piece that one hash covers.
const std::vector<GlobalTensor> kModel{{"embed", {13, 6}},         {"a.norm", {6}},
                                       {"a.up", {10, 6}},          {"a.down", {6, 10}},
                                       {"a.experts.0", {4, 3, 5}}, {"a.experts.1", {4, 3, 5}},
                                       {"a.bias", {4}, true},      {"b.norm", {6}},
                                       {"b.up", {10, 6}},          {"b.long", {1200, 1024}},
                                       {"none", {0, 3}},           {"one", {}},
                                       {"b.load", {4}, true}};

// pp stages of tp x dp ranks: a tensor is in one stage, its blocks on the tp ranks, ranges of them
// on the dp ranks.
struct Layout {
  int tp = 1, dp = 1, pp = 1;
  uint32_t seed = 0;  // of the ranges
  int world() const { return tp * dp * pp; }
};

struct Held {
  NamedTensor named;
  std::vector<float> values;
  const GlobalTensor* tensor;
};

// [begin, end) of numel elements for each of n ranks: any lengths, none too.
std::vector<std::pair<int64_t, int64_t>> random_ranges(std::mt19937& random, int64_t numel, int n) {
  std::vector<int64_t> cuts{0, numel};
  for (int i = 1; i < n; ++i) cuts.push_back(static_cast<int64_t>(random() % (numel + 1)));
  std::sort(cuts.begin(), cuts.end());
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (int i = 0; i < n; ++i) ranges.emplace_back(cuts[i], cuts[i + 1]);
  return ranges;
}

// Returns the tensors that a rank has of the model. Norms and state are whole on every tp rank; then only
// the first saves them.
std::vector<Held> held_by(const Layout& layout, int rank) {
  const int tp = rank % layout.tp, dp = rank / layout.tp % layout.dp, pp = rank / layout.tp / layout.dp;
  std::mt19937 random(layout.seed);  // the same on every rank
  std::vector<Held> held;
  for (size_t i = 0; i < kModel.size(); ++i) {
    const GlobalTensor& t = kModel[i];
    TensorSlice slice = whole_slice(t.shape);
    int dim = -1;
    for (int d = 0; d < static_cast<int>(t.shape.size()); ++d)
      if (t.shape[d] > 0 && t.shape[d] % layout.tp == 0 && (dim < 0 || random() % 2)) dim = d;
    const bool is_split = dim >= 0 && layout.tp > 1 && !t.is_state && t.shape.size() > 1;
    if (is_split) slice.shard = {dim, tp * (t.shape[dim] / layout.tp), t.shape[dim] / layout.tp};
    slice.end = block_numel(slice);
    const auto ranges = random_ranges(random, slice.end, layout.dp);
    if (static_cast<int>(i % layout.pp) != pp) continue;
    bool is_replica = t.is_state ? tp + dp > 0 : !is_split && tp > 0;
    if (!t.is_state) std::tie(slice.begin, slice.end) = ranges[dp];
    if (numel_of(t.shape) == 0) is_replica = tp + dp > 0;
    Held h{.values = std::vector<float>(slice.numel()), .tensor = &t};
    h.named = {.name = t.name, .slice = slice, .is_replica = is_replica};
    held.push_back(std::move(h));
  }
  for (Held& h : held) h.named.tensor = tensor_of(h.values.data(), {std::ssize(h.values)});
  return held;
}

std::vector<NamedTensor> named(const std::vector<Held>& held) {
  std::vector<NamedTensor> tensors;
  for (const Held& h : held) tensors.push_back(h.named);
  return tensors;
}

// fn(value, what it should be) for all that is held.
template <class Fn>
void for_each_value(std::vector<Held>& held, Fn&& fn) {
  for (Held& h : held) {
    for (const CommonRun& run : common_runs(whole_slice(h.tensor->shape), *h.named.slice))
      for (int64_t i = 0; i < run.count; ++i) fn(h.values[run.in_b + i], value_of(*h.tensor, run.in_a + i));
  }
}

void save(const std::string& dir, const Layout& layout, int64_t step, bool async_save = false) {
  run_threads(layout.world(), {.timeout_s = 60}, [&](Transport& world) {
    Control ranks(world);
    CheckpointStore store(ranks, dir, 0, async_save, /*shard_bytes=*/1 << 20);
    std::vector<Held> held = held_by(layout, world.rank());
    for_each_value(held, [](float& x, float expected) { x = expected; });
    store.save(step, named(held), {{"from", layout.world()}});
    for (Held& h : held) std::fill(h.values.begin(), h.values.end(), -1.f);  // the copies are what counts
    store.wait();
    EXPECT_EQ(store.list().size(), 1u);
  });
}

void expect_loads(const std::string& folder, const Layout& layout) {
  run_threads(layout.world(), {.timeout_s = 60}, [&](Transport& world) {
    Control ranks(world);
    std::vector<Held> held = held_by(layout, world.rank());
    CheckpointReader(folder, ranks.is_root()).read_all(ranks, named(held));
    int64_t num_wrong = 0;
    for_each_value(held, [&](float x, float expected) { num_wrong += x != expected; });
    EXPECT_EQ(num_wrong, 0) << "rank " << world.rank();
  });
}

const std::vector<Layout> kLayouts{{},
                                   {.tp = 2},
                                   {.dp = 3, .seed = 1},
                                   {.tp = 2, .dp = 2, .pp = 2, .seed = 2},
                                   {.pp = 4},
                                   {.tp = 5, .seed = 3},
                                   {.tp = 1, .dp = 7, .seed = 4}};

TEST(CheckpointLayouts, AnyLayoutIsReadByAnyOther) {
  for (size_t i = 0; i < kLayouts.size(); ++i) {
    const TestDir dir;
    save(dir.path(), kLayouts[i], 3, i % 2);
    const std::string folder = dir.path("step-00000003");
    const VerifyReport report = verify_checkpoint(folder);
    ASSERT_TRUE(report.ok()) << report.problems[0];
    EXPECT_EQ(report.num_tensors, std::ssize(kModel));
    const CheckpointReader reader(folder);
    EXPECT_EQ(reader.num_ranks(), kLayouts[i].world());
    int64_t bytes = 0, written = 0;
    for (const GlobalTensor& t : kModel) bytes += 4 * numel_of(t.shape);
    for (const auto& [name, tensor] : reader.tensors())
      for (const CheckpointPiece& piece : tensor.pieces) written += piece.bytes;
    EXPECT_EQ(written, bytes);  // each element once
    for (const Layout& to : kLayouts) {
      SCOPED_TRACE(fmt::format("layout {} to one of {} ranks", i, to.world()));
      expect_loads(folder, to);
    }
  }
}

TEST(CheckpointLayouts, OneRankReadsWholeTensorsByName) {
  const TestDir dir;
  save(dir.path(), kLayouts[3], 1);
  const CheckpointReader reader(dir.path("step-00000001"));
  std::vector<float> up(60);
  reader.read("a.up", tensor_of(up.data(), {10, 6}));
  for (size_t i = 0; i < up.size(); ++i) EXPECT_EQ(up[i], value_of(kModel[2], static_cast<int64_t>(i)));
}

// Damages an element of b.long in its file.
void spoil(const std::string& folder, int64_t element) {
  const CheckpointReader reader(folder);
  const CheckpointPiece& piece = reader.tensors().at("b.long").pieces[0];
  std::string bytes = read_file(folder + "/" + piece.file);
  bytes[piece.offset + 4 * element] ^= 1;
  write_file_atomic(folder + "/" + piece.file, bytes);
}

// Rows, so that each rank needs one stretch of the file; the second half of the tensor is damaged.
TEST(CheckpointLayouts, ReadsOnlyTheSliceAndAllRanksGetTheSameError) {
  const TestDir dir;
  save(dir.path(), {}, 1);
  const std::string folder = dir.path("step-00000001");
  spoil(folder, 1150 * 1024);
  const CheckpointReader reader(folder);
  std::vector<float> rows(600 * 1024);
  NamedTensor half{.name = "b.long", .tensor = tensor_of(rows.data(), {600, 1024})};
  half.slice = TensorSlice{.shape = {1200, 1024}, .shard = {0, 0, 600}, .begin = 0, .end = 600 * 1024};
  reader.read(half);
  EXPECT_EQ(rows.back(), value_of(kModel[9], 600 * 1024 - 1));
  half.slice->shard.begin = 600;
  expect_error(ErrorKind::input, "expected tensor \"b.long\", ", [&] { reader.read(half); });
  run_threads(3, {.timeout_s = 60}, [&](Transport& world) {
    Control ranks(world);
    std::vector<Held> held = held_by({.pp = 3}, world.rank());
    expect_error(ErrorKind::input, "rank 0: checkpoint " + folder,
                 [&] { CheckpointReader(folder, ranks.is_root()).read_all(ranks, named(held)); });
  });
}

TEST(CheckpointLayouts, TensorsThatNoRankRequestsAreUnexpected) {
  const TestDir dir;
  save(dir.path(), {}, 1);
  run_threads(2, {.timeout_s = 60}, [&](Transport& world) {
    Control ranks(world);
    std::vector<Held> held = held_by({.pp = 2}, world.rank());
    std::vector<NamedTensor> tensors = named(held);
    if (ranks.is_root()) tensors.erase(tensors.begin());  // embed
    expect_error(ErrorKind::input, "expected exactly the 12 tensors of this model; got 1 unexpected (embed)",
                 [&] { CheckpointReader(dir.path("step-00000001")).read_all(ranks, tensors); });
    tensors = named(held);
    if (!ranks.is_root()) tensors[0].name = "other";
    expect_error(ErrorKind::input, "rank 1: checkpoint " + dir.path("step-00000001"),
                 [&] { CheckpointReader(dir.path("step-00000001")).read_all(ranks, tensors); });
  });
}

class RankedSave : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Async, RankedSave, testing::Bool());

// Rank 1's disk is full, or a file of its shard cannot be made: every rank gets the error, nothing
// is left, and the store continues.
TEST_P(RankedSave, OneRankThatFailsFailsAll) {
  const TestDir dir;
  save(dir.path(), {.dp = 2}, 1);
  run_threads(2, {.timeout_s = 60}, [&](Transport& world) {
    Control ranks(world);
    CheckpointStore store(ranks, dir.path(), 0, GetParam());
    std::vector<Held> held = held_by({.dp = 2}, world.rank());
    std::vector<NamedTensor> tensors = named(held);
    if (world.rank() == 1) tensors[0].name = "__metadata__", tensors[0].slice.reset();
    const auto fail = [&] {
      store.save(2, tensors, {});
      store.wait();
    };
    expect_error(ErrorKind::usage, "rank 1: checkpoint: save of step 2, ", fail);
    EXPECT_EQ(store.list().size(), 1u);
    store.save(3, named(held), {});
    store.wait();
    EXPECT_EQ(store.list().back().folder, dir.path("step-00000003"));
    EXPECT_EQ(dir.num_files(), 3);  // two checkpoints and the lock
    ranks.barrier();
  });
}

// A tensor that every rank holds alike is saved once; where two ranks save it, their elements must
// be the same.
TEST_P(RankedSave, DivergedReplicasAreFound) {
  const TestDir dir;
  run_threads(2, {.timeout_s = 60}, [&](Transport& world) {
    Control ranks(world);
    CheckpointStore store(ranks, dir.path(), 0, GetParam());
    std::vector<float> w(5, 1.f);
    const auto save = [&] {
      store.save(1, {{"w", tensor_of(w.data(), {5})}}, {});
      store.wait();
    };
    save();
    w[3] += static_cast<float>(world.rank());
    expect_error(ErrorKind::distributed,
                 "expected w to be the same on every rank that holds it; got different elements", save);
  });
  EXPECT_EQ(CheckpointReader(dir.path("step-00000001")).tensors().at("w").pieces.size(), 1u);
}

TEST_P(RankedSave, ASaveWithAMissingPieceIsNotPublished) {
  const TestDir dir;
  run_threads(2, {.timeout_s = 60}, [&](Transport& world) {
    Control ranks(world);
    CheckpointStore store(ranks, dir.path(), 0, GetParam());
    std::vector<float> w(2);
    const TensorSlice slice{.shape = {5}, .shard = {}, .begin = 2 * world.rank(), .end = 2 * world.rank() + 2};
    expect_error(ErrorKind::input, "expected pieces that hold each element of \"w\" once", [&] {
      store.save(1, {{.name = "w", .tensor = tensor_of(w.data(), {2}), .slice = slice}}, {});
      store.wait();
    });
    EXPECT_TRUE(store.list().empty());
  });
}

TEST(RankedStore, EveryRankRefusesAFolderThatIsInUse) {
  const TestDir dir;
  const CheckpointStore other(dir.path(), 1, false);
  run_threads(2, {.timeout_s = 60}, [&](Transport& world) {
    Control ranks(world);
    expect_error(ErrorKind::usage, "to be used by one run at a time",
                 [&] { CheckpointStore(ranks, dir.path(), 1, false); });
  });
}

}  // namespace
}  // namespace moebius
