// Replaces the CUDA part of this folder in builds without CUDA.
#include "comm/gpu/cuda/sum_of_ranks.h"
#include "comm/gpu/gpu_identity.h"
#include "comm/gpu/peer_round.h"
#include "core/error.h"

namespace moebius {

namespace {

[[noreturn]] void missing() { MOEBIUS_FAIL(internal, "comm: a build without CUDA knows no GPU"); }

}  // namespace

void cuda::sum_of_ranks(void*, Tensor, const RankParts&) { missing(); }
std::string gpu_identity(int) { missing(); }
std::string gpu_identity_of(const void*) { missing(); }

struct GpuRounds::Impl {};
GpuRounds::GpuRounds(Stream&, const RoundFlags&, std::function<double()>, std::function<void()>,
                     std::function<void()>) {
  missing();
}
GpuRounds::~GpuRounds() = default;
void GpuRounds::launch(Stream&, int) { missing(); }
std::shared_ptr<PeerTraffic> GpuRounds::traffic() const { missing(); }
std::optional<RoundReport> GpuRounds::report() const { missing(); }

}  // namespace moebius
