#include <gtest/gtest.h>

#include "comm/mesh.h"

namespace moebius {
namespace {

TEST(Mesh, OfOneRankHasEveryAxis) {
  const Mesh mesh(MeshShape{});
  ThreadPool pool(1);
  Stream s(DeviceKind::cpu, pool);
  for (int i = 0; i < kNumAxes; ++i) {
    Group& g = mesh.group(static_cast<Axis>(i));
    EXPECT_EQ(g.rank(), 0);
    EXPECT_EQ(g.size(), 1);
    float x[3] = {1, 2, 3}, y[3] = {};
    g.all_reduce_sum(s, tensor_of(x, {3}));
    g.all_gather(s, tensor_of(y, {3}), tensor_of(x, {3}));
    EXPECT_EQ(y[2], 3);
    EXPECT_THROW(g.reduce_scatter_sum(s, tensor_of(y, {2}), tensor_of(x, {3})), Error);
  }
}

TEST(Mesh, RefusesWhatItCannotHold) {
  try {
    Mesh(MeshShape{.tp = 2, .etp = 2});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_NE(std::string(e.what()).find("tp*cp*dp*pp = 2*1*1*1 = 2"), std::string::npos) << e.what();
  }
  EXPECT_THROW(Mesh(MeshShape{.tp = 2}), Error);
}

}  // namespace
}  // namespace moebius
