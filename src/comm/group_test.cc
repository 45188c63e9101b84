#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/gpu/staged_group.h"
#include "comm/mesh.h"

namespace moebius {
namespace {

using testing::HasSubstr;

template <class F>
std::string usage_text(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    return e.what();
  }
  return "no error";
}

struct OneRank {
  std::unique_ptr<Transport> self = make_self_transport();
  std::unique_ptr<Group> group = self->make_group("dp", {0});
  ThreadPool pool{1};
  Stream s{DeviceKind::cpu, pool};
};

TEST(Group, OfOneRankCopies) {
  OneRank one;
  Group& g = *one.group;
  float x[3] = {1, 2, 3}, y[3] = {};
  g.all_reduce_sum(one.s, tensor_of(x, {3}));
  g.all_gather(one.s, tensor_of(y, {3}), tensor_of(x, {3}));
  EXPECT_THAT(y, testing::ElementsAre(1, 2, 3));
  x[1] = 7;
  g.reduce_scatter_sum(one.s, tensor_of(y, {3}), tensor_of(x, {3}));
  EXPECT_EQ(y[1], 7);
  const int64_t rows[] = {2};
  float z[3] = {};
  g.all_to_all_v(one.s, {.out = tensor_of(z, {3}), .in = tensor_of(x, {3}), .recv_rows = rows, .send_rows = rows});
  EXPECT_THAT(z, testing::ElementsAre(1, 7, 0));
  g.broadcast(one.s, tensor_of(x, {3}), 0);
  g.barrier();
  EXPECT_EQ(g.sent_bytes(), 0);
}

TEST(Group, RefusesWrongShapesAndTypes) {
  OneRank one;
  Group& g = *one.group;
  float x[4] = {};
  uint8_t u[3] = {};
  const Tensor x4 = tensor_of(x, {4}), x3 = tensor_of(x, {3}), u3 = tensor_of(u, {3});
  EXPECT_THAT(usage_text([&] { g.all_reduce_sum(one.s, u3); }),
              HasSubstr("all_reduce_sum of group dp: sums take f32, f64, i64 or bf16; got u8[3]"));
  EXPECT_THAT(usage_text([&] { g.reduce_scatter_sum(one.s, x3, u3); }), HasSubstr("got u8[3]"));
  EXPECT_THAT(usage_text([&] { g.reduce_scatter_sum(one.s, x3, x4); }),
              HasSubstr("reduce_scatter_sum of group dp: in must have 1 times the rows of out and its dtype; got in "
                        "f32[4], out f32[3]"));
  EXPECT_THAT(usage_text([&] { g.all_gather(one.s, x4, x3); }), HasSubstr("out must have 1 times the rows of in"));
  EXPECT_THAT(usage_text([&] { g.all_gather(one.s, x3, u3); }), HasSubstr("got out f32[3], in u8[3]"));
  EXPECT_THAT(usage_text([&] { g.broadcast(one.s, x3, 1); }),
              HasSubstr("broadcast: root: a rank of group dp must be from 0 to 0; got 1"));
  EXPECT_THAT(usage_text([&] { (void)g.send(one.s, x3, 0); }), HasSubstr("send of group dp: rank 0 sends to itself"));
  EXPECT_THAT(usage_text([&] { (void)g.recv(one.s, x3, -1); }),
              HasSubstr("recv: from: a rank of group dp must be from 0 to 0"));
  EXPECT_THAT(usage_text([&] { (void)g.recv(one.s, x3, 0); }), HasSubstr("receives from itself"));
}

TEST(Group, RefusesCountsThatDoNotFit) {
  OneRank one;
  float x[4] = {}, y[4] = {};
  const auto text = [&](std::vector<int64_t> recv, std::vector<int64_t> send, int64_t columns = 1) {
    return usage_text([&] {
      one.group->all_to_all_v(one.s, {.out = tensor_of(y, {4 / columns, columns}),
                                      .in = tensor_of(x, {4, 1}),
                                      .recv_rows = recv,
                                      .send_rows = send});
    });
  };
  EXPECT_EQ(text({4}, {4}), "no error");
  EXPECT_THAT(text({4}, {5}), HasSubstr("send_rows must have 1 count, with a sum of at most the rows of f32[4, 1]; got "
                                        "1 count with the sum 5"));
  EXPECT_THAT(text({5}, {4}), HasSubstr("recv_rows must have 1 count"));
  EXPECT_THAT(text({-1}, {-1}), HasSubstr("with the sum -1"));
  EXPECT_THAT(text({1, 1}, {2}), HasSubstr("got 2 counts"));
  EXPECT_THAT(text({1}, {2}), HasSubstr("rank 0 sends itself 2 rows but expects 1"));
  EXPECT_THAT(text({1}, {1}, 2), HasSubstr("out must have the rows of in; got out f32[2, 2], in f32[4, 1]"));
}

TEST(Group, OverMessagesRefusesGpuMemory) {
  OneRank one;
  float x[2] = {};
  Tensor elsewhere = tensor_of(x, {2});
  elsewhere.device = DeviceKind::cuda;
  EXPECT_THAT(usage_text([&] { one.group->all_gather(one.s, elsewhere, tensor_of(x, {2})); }),
              HasSubstr("all_gather of group dp: messages carry memory of the CPU; "
                        "got f32[2] of cuda on a stream of cpu"));
  Stream null(DeviceKind::null, one.pool);
  one.group->all_gather(null, Tensor{.shape = {2}, .device = DeviceKind::null},
                        Tensor{.shape = {2}, .device = DeviceKind::null});
  one.group->all_reduce_sum(null, Tensor{.shape = {2}, .device = DeviceKind::null});
}

TEST(Group, ThatIsStagedSendsCpuMemoryDirectly) {
  OneRank one;
  StagedGroup staged(std::move(one.group));
  float x[3] = {1, 2, 3}, y[3] = {};
  staged.all_gather(one.s, tensor_of(y, {3}), tensor_of(x, {3}));
  EXPECT_THAT(y, testing::ElementsAre(1, 2, 3));
  EXPECT_EQ(staged.name(), "dp");
  Stream null(DeviceKind::null, one.pool);
  staged.all_reduce_sum(null, Tensor{.shape = {2}, .device = DeviceKind::null});
  EXPECT_THAT(usage_text([&] { (void)staged.send(one.s, tensor_of(x, {3}), 0); }), HasSubstr("sends to itself"));
}

TEST(Group, CanOnlyBeMadeByAMember) {
  OneRank one;
  EXPECT_THAT(usage_text([&] {
                one.self->make_group("ep", {1, 2});
              }),
              HasSubstr("group ep: rank 0 makes it, so it must be one of its 2 ranks"));
}

TEST(Mesh, OfOneRankHasEveryAxis) {
  const Mesh mesh(MeshShape{});
  for (int i = 0; i < kNumAxes; ++i) {
    const Group& g = mesh.group(static_cast<Axis>(i));
    EXPECT_EQ(g.rank(), 0);
    EXPECT_EQ(g.size(), 1);
    EXPECT_EQ(g.name(), name_of(static_cast<Axis>(i)));
  }
}

TEST(Mesh, RefusesAShapeForAnotherNumberOfRanks) {
  EXPECT_THAT(usage_text([] { Mesh(MeshShape{.tp = 2, .etp = 2}); }),
              HasSubstr("mesh: a single rank must have tp*cp*dp*pp = 1; got 2*1*1*1 = 2"));
  EXPECT_THAT(usage_text([] { Mesh(MeshShape{.tp = 2}); }), HasSubstr("tp*cp*dp = 2*1*1 = 2, etp*ep*edp = 1*1*1 = 1"));
  OneRank one;
  EXPECT_THAT(usage_text([&] { Mesh(MeshShape{.tp = 2, .etp = 2}, *one.self); }),
              HasSubstr("mesh: tp*cp*dp*pp = 2*1*1*1 = 2 must equal the number of ranks; got 1 rank"));
}

TEST(CollectiveFlightRecorder, KeepsTheLast) {
  CollectiveFlightRecorder recorder;
  EXPECT_EQ(recorder.text(), "  none\n");
  for (int i = 0; i < CollectiveFlightRecorder::kSize + 2; ++i) {
    const int64_t record = recorder.begin({.op = "barrier", .group = "dp", .number = i});
    if (i != CollectiveFlightRecorder::kSize + 1) recorder.end(record);
  }
  const std::string text = recorder.text();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), CollectiveFlightRecorder::kSize);
  EXPECT_THAT(text, testing::StartsWith("  barrier 2 of group dp (u8 x 0)\n"));
  EXPECT_EQ(recorder.text(2), "  barrier 64 of group dp (u8 x 0)\n  barrier 65 of group dp (u8 x 0): not ended\n");
  recorder.end(0);  // already overwritten: the record in its place stays as it is
  EXPECT_THAT(recorder.text(1), HasSubstr("not ended"));
}

TEST(CollectiveFlightRecorder, KeepsUnfinishedCollectives) {
  CollectiveFlightRecorder recorder;
  const int64_t open = recorder.begin({.op = "recv", .group = "pp", .number = 7});
  for (int i = 0; i < 2 * CollectiveFlightRecorder::kSize; ++i)
    recorder.end(recorder.begin({.op = "barrier", .group = "dp", .number = i}));
  EXPECT_EQ(to_string(recorder.at(open)), "recv 7 of group pp (u8 x 0)");
  EXPECT_EQ(recorder.text(1), "  recv 7 of group pp (u8 x 0): not ended\n  barrier 127 of group dp (u8 x 0)\n");
  recorder.end(open);
  EXPECT_EQ(recorder.text(1), "  barrier 127 of group dp (u8 x 0)\n");
  EXPECT_THAT(recorder.text(), testing::Not(HasSubstr("not ended")));
}

}  // namespace
}  // namespace moebius
