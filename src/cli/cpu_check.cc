#include "cli/cpu_check.h"

#include <string_view>

namespace moebius {
namespace {

// The compiler defines __NAME__ as 1 if -march has a feature; else the text is
// the name itself.
#define TEXT_OF(text) #text
#define TEXT(macro) TEXT_OF(macro)
#define FEATURE(name, macro) \
  { name, std::string_view(TEXT(macro)) == "1", __builtin_cpu_supports(name) != 0 }

}  // namespace

std::vector<BuiltForFeature> built_for_features() {
  __builtin_cpu_init();
  return {
      FEATURE("avx2", __AVX2__),
      FEATURE("fma", __FMA__),
      FEATURE("bmi", __BMI__),
      FEATURE("bmi2", __BMI2__),
      FEATURE("avx512f", __AVX512F__),
      FEATURE("avx512bw", __AVX512BW__),
      FEATURE("avx512vl", __AVX512VL__),
      FEATURE("avx512dq", __AVX512DQ__),
      FEATURE("avx512cd", __AVX512CD__),
      FEATURE("avx512vnni", __AVX512VNNI__),
      FEATURE("avx512vbmi", __AVX512VBMI__),
      FEATURE("avx512vbmi2", __AVX512VBMI2__),
      FEATURE("avx512bf16", __AVX512BF16__),
      FEATURE("avx512ifma", __AVX512IFMA__),
      FEATURE("avx512bitalg", __AVX512BITALG__),
      FEATURE("avx512vpopcntdq", __AVX512VPOPCNTDQ__),
  };
}

std::string missing_cpu_features(const std::vector<BuiltForFeature>& features) {
  std::string missing;
  for (const BuiltForFeature& f : features) {
    if (f.needed && !f.present) missing += (missing.empty() ? "" : ", ") + std::string(f.name);
  }
  return missing;
}

}  // namespace moebius
