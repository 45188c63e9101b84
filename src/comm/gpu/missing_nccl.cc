// Replaces the NCCL part of this folder in builds without NCCL.
#include "comm/gpu/nccl.h"
#include "core/error.h"

namespace moebius {
namespace {

[[noreturn]] void missing() { MOEBIUS_FAIL(internal, "nccl: {}", NcclLinks::why_missing()); }

}  // namespace

struct NcclLinks::Impl {};

std::string NcclLinks::why_missing() {
  return "this program was built without NCCL (its header nccl.h must be installed next to CUDA's)";
}
std::string NcclLinks::version() { return ""; }
NcclLinks::NcclLinks(Transport&, Accelerator&, GpuSums) { missing(); }
NcclLinks::~NcclLinks() = default;
std::unique_ptr<Group> NcclLinks::make_group(std::unique_ptr<Group>, const NcclUse&) { missing(); }
void NcclLinks::abandon() {}

}  // namespace moebius
