#include "cli/cpu_check.h"

#include <gtest/gtest.h>

namespace moebius {
namespace {

TEST(CpuCheck, ListsMissingCpuFeatures) {
  EXPECT_EQ(missing_cpu_features({{"a", true, true}, {"b", true, false}, {"c", false, false}, {"d", true, false}}),
            "b, d");
  EXPECT_EQ(missing_cpu_features({}), "");
}

// These tests and the program have one -march, so the table must require every feature that
// the compiler can use here.
TEST(CpuCheck, RequiresEveryFeatureEnabledByTheCompiler) {
  EXPECT_EQ(missing_cpu_features(built_for_features()), "");
  const auto needed = [](const std::string& name) {
    for (const BuiltForFeature& f : built_for_features()) {
      if (f.name == name) return f.needed;
    }
    return false;
  };
#ifdef __AVX2__
  EXPECT_TRUE(needed("avx2"));
#endif
#ifdef __AVX512VNNI__
  EXPECT_TRUE(needed("avx512vnni"));
#else
  EXPECT_FALSE(needed("avx512vnni"));
#endif
#ifdef __AVX512BF16__
  EXPECT_TRUE(needed("avx512bf16"));
#else
  EXPECT_FALSE(needed("avx512bf16"));
#endif
}

}  // namespace
}  // namespace moebius
