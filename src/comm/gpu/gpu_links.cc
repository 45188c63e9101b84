#include "comm/gpu/gpu_links.h"

#include "comm/gpu/staged_group.h"

namespace moebius {
namespace {

// Returns the first rank's reason why NCCL cannot be used, the same on every rank;
// empty when there is none.
std::string why_staged(GpuRanks& ranks) {
  if (!ranks.each_has_its_own()) return "ranks share a GPU";
  for (const std::string& why : ranks.control().gather(NcclLinks::why_missing()))
    if (!why.empty()) return why;
  return "";
}

}  // namespace

GpuLinks::GpuLinks(Transport& world, Accelerator& gpu, GpuRanks& ranks, GpuSums sums) : world_(world) {
  const std::string why = why_staged(ranks);
  MOEBIUS_CHECK(usage, why.empty() || sums == GpuSums::ranks,
                "parallel.sums = \"nccl\": expected ranks that use NCCL; but {}; set parallel.sums = \"ranks\"", why);
  if (why.empty()) nccl_ = std::make_unique<NcclLinks>(world, gpu, sums);
  text_ = nccl_ ? "NCCL " + NcclLinks::version() : "messages through host memory, since " + why;
  if (sums == GpuSums::nccl) text_ += ", which adds in its own order (parallel.sums)";
}

std::unique_ptr<Group> GpuLinks::make_group(std::string name, std::vector<int> world_ranks, const NcclUse& use) {
  std::unique_ptr<Group> over = world_.make_group(std::move(name), std::move(world_ranks), use.node);
  if (nccl_) return nccl_->make_group(std::move(over), use);
  return std::make_unique<StagedGroup>(std::move(over));
}

void GpuLinks::abandon() {
  if (nccl_) nccl_->abandon();
}

}  // namespace moebius
