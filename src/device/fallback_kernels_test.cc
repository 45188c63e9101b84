#include "device/fallback_kernels.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

TEST(FallbackKernels, OpsOfOneReasonAreListedTogether) {
  const FallbackKernels slow{.why = {{"a_fwd", "odd"}, {"b", "biases"}, {"a_bwd", "odd"}}};
  EXPECT_EQ(fallback_kernels_text(slow, DType::bf16), "fallback kernels: b: biases; a_bwd, a_fwd: odd");
  EXPECT_EQ(fallback_kernels_text({}, DType::bf16), "");
}

TEST(FallbackKernels, F32IsReportedOnce) {
  EXPECT_EQ(fallback_kernels_text({}, DType::f32), "fallback kernels: f32: no tensor cores (bf16 has them)");
}

TEST(FallbackKernels, RanksThatDifferAreNamed) {
  using Texts = std::vector<std::string>;
  EXPECT_EQ(fallback_kernels_of_ranks({"x", "x"}), Texts{"x"});
  EXPECT_EQ(fallback_kernels_of_ranks({"", ""}), Texts{});
  EXPECT_EQ(fallback_kernels_of_ranks({"", "x", "y", "x"}), (Texts{"ranks 1, 3: x", "rank 2: y"}));
}

}  // namespace
}  // namespace moebius
