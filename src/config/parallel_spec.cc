#include "config/parallel_spec.h"

#include "core/error.h"

namespace moebius {

const char* name_of(PipelineSchedule schedule) { return schedule == PipelineSchedule::zb_h1 ? "zb_h1" : "1f1b"; }

namespace {

void check_degree(const char* name, int64_t degree) {
  MOEBIUS_CHECK(usage, degree >= 1 && degree <= INT32_MAX, "parallel.{} must be from 1 to {}; got {}", name, INT32_MAX,
                degree);
}

// Returns "; the nearest are 2 and 4": the numbers of ranks next to n that have whole groups of a * b * pp.
std::string nearest_ranks(int64_t n, int64_t a, int64_t b, int64_t pp) {
  constexpr int64_t kMax = INT32_MAX;
  if (a > kMax / b || a * b > kMax / pp) return "";
  const int64_t of = a * b * pp, below = n / of * of;
  return below == 0 ? fmt::format("; the nearest is {}", of)
                    : fmt::format("; the nearest are {} and {}", below, below + of);
}

// One view of the ranks, a * b * pp of them at a time. It divides in steps, since the product of
// the degrees may not fit int64.
void check_view(const char* names, int64_t a, int64_t b, int64_t pp, int64_t world_size) {
  const bool divides = world_size % pp == 0 && world_size / pp % a == 0 && world_size / pp / a % b == 0;
  MOEBIUS_CHECK(usage, divides,
                "parallel: the number of ranks must be divisible by {} = {} * {} * {}; got {}{}; start another number "
                "of ranks or lower a degree",
                names, a, b, pp, world_size, nearest_ranks(world_size, a, b, pp));
}

}  // namespace

namespace {

// The ranks that hold the same weights of a layer; larger groups of them are sharded in blocks of fsdp_shard.
void check_fsdp_shard(const ParallelSpec& p, int64_t world_size) {
  const int64_t shard = p.fsdp_shard, dp_cp = p.dp(world_size) * p.cp, edp = p.edp(world_size);
  MOEBIUS_CHECK(usage, shard == 0 || shard >= 2,
                "parallel.fsdp_shard: expected at least 2 ranks, or 0 for all that hold the same weights; got {}",
                shard);
  if (shard == 0) return;
  const std::pair<const char*, int64_t> groups[] = {
      {"dp * cp", dp_cp}, {"tp * dp * cp", p.tp * dp_cp}, {"edp", edp}, {"etp * edp", p.etp * edp}};
  for (const auto& [name, size] : groups)
    MOEBIUS_CHECK(usage, size <= shard || size % shard == 0,
                  "parallel.fsdp_shard = {} must divide the {} = {} ranks that hold the same weights; set it to a "
                  "divisor of {}, or to 0 for all of them",
                  shard, name, size, size);
}

}  // namespace

void ParallelSpec::check(int64_t world_size) const {
  MOEBIUS_CHECK(usage, world_size >= 1, "parallel: the number of ranks must be at least 1; got {}", world_size);
  check_degree("tp", tp);
  check_degree("cp", cp);
  check_degree("pp", pp);
  check_degree("vpp", vpp);
  check_degree("ep", ep);
  check_degree("etp", etp);
  MOEBIUS_CHECK(usage, vpp == 1 || pp > 1,
                "parallel.vpp = {} splits the stages of a pipeline; got pp = 1; set parallel.pp", vpp);
  check_view("tp * cp * pp", tp, cp, pp, world_size);
  check_view("etp * ep * pp", etp, ep, pp, world_size);
  check_fsdp_shard(*this, world_size);
}

int64_t ParallelSpec::dp(int64_t world_size) const { return div_exact(world_size, tp * cp * pp, "parallel: dp"); }
int64_t ParallelSpec::edp(int64_t world_size) const { return div_exact(world_size, etp * ep * pp, "parallel: edp"); }

}  // namespace moebius
