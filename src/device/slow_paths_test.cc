#include "device/slow_paths.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

TEST(SlowPaths, OpsOfOneReasonAreToldTogether) {
  const SlowPaths slow{.why = {{"a_fwd", "odd"}, {"b", "biases"}, {"a_bwd", "odd"}}};
  EXPECT_EQ(slow_paths_text(slow, DType::bf16), "slower kernels than this GPU has: b: biases; a_bwd, a_fwd: odd");
  EXPECT_EQ(slow_paths_text({}, DType::bf16), "");
}

TEST(SlowPaths, F32IsToldOnce) {
  EXPECT_EQ(slow_paths_text({}, DType::f32), "slower kernels than this GPU has: f32: no tensor cores (bf16 has them)");
}

TEST(SlowPaths, RanksThatDifferAreNamed) {
  using Texts = std::vector<std::string>;
  EXPECT_EQ(slow_paths_of_ranks({"x", "x"}), Texts{"x"});
  EXPECT_EQ(slow_paths_of_ranks({"", ""}), Texts{});
  EXPECT_EQ(slow_paths_of_ranks({"", "x", "y", "x"}), (Texts{"ranks 1, 3: x", "rank 2: y"}));
}

}  // namespace
}  // namespace moebius
