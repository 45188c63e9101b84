#include "cli/cpu_check.h"

namespace moebius {
namespace {

void require(std::string& missing, const char* name, bool has) {
  if (!has) missing += (missing.empty() ? "" : ", ") + std::string(name);
}

}  // namespace

// The compiler's own macros say what -march asked for: not a feature of ours, a fact of the build.
std::string missing_cpu_features() {
  std::string missing;
  __builtin_cpu_init();
#ifdef __AVX2__
  require(missing, "avx2", __builtin_cpu_supports("avx2"));
#endif
#ifdef __FMA__
  require(missing, "fma", __builtin_cpu_supports("fma"));
#endif
#ifdef __AVX512F__
  require(missing, "avx512f", __builtin_cpu_supports("avx512f"));
#endif
#ifdef __AVX512BW__
  require(missing, "avx512bw", __builtin_cpu_supports("avx512bw"));
#endif
#ifdef __AVX512VL__
  require(missing, "avx512vl", __builtin_cpu_supports("avx512vl"));
#endif
  return missing;
}

}  // namespace moebius
