// The Accelerator of a build without CUDA: there is no GPU, and every call reports that.
#include "core/error.h"
#include "device/accelerator.h"
#include "device/gpu_limits.h"
#include "device/gpu_mark.h"
#include "device/gpus_found.h"
#include "device/peer_memory.h"
#include "device/pinned_memory.h"
#include "device/side_copies.h"
#include "device/side_stream.h"
#include "device/spill_buffer.h"
#include "device/streamed_work.h"

namespace moebius {
namespace {

[[noreturn]] void missing() {
  MOEBIUS_FAIL(usage, "run.device: {}; or set run.device = \"cpu\"", Accelerator::why_missing());
}

}  // namespace

GpusFound gpus_found() { return {}; }
GpuLimits query_gpu_limits() { missing(); }

struct Accelerator::Impl {};

Accelerator::Accelerator(int) { missing(); }
Accelerator::~Accelerator() = default;
int Accelerator::count() { return 0; }
bool Accelerator::is_built_in() { return false; }
std::string Accelerator::why_missing() {
  return "this build has no CUDA backend (where nvcc is installed, ./dev build --cuda on builds it)";
}
AcceleratorInfo Accelerator::describe(int) { missing(); }
AcceleratorInfo Accelerator::info() const { return {}; }
void* Accelerator::native_stream() const { return nullptr; }
void Accelerator::begin_op(const char*, bool) {}
void Accelerator::end_op(const char*, Trace*, Cost) {}
void Accelerator::end_phase(const std::string&, Trace*) {}

CudaGraph::CudaGraph(Accelerator&, GraphCapture&, const std::function<void()>&) { missing(); }
void CudaGraph::replay(Accelerator&) const { missing(); }
void run_on_side_stream(Accelerator&, const std::function<void()>&) { missing(); }
void join_side_stream(Accelerator&) { missing(); }
void run_on_stream(Accelerator&, void*, const std::function<void()>&) { missing(); }
void GpuEvent::record(Accelerator&) { missing(); }
double GpuEvent::seconds_since(const GpuEvent&) const { missing(); }
void GpuMark::set(Accelerator&) { missing(); }
void GpuMark::wait() const { missing(); }

namespace cuda {

void* allocate(int64_t) { missing(); }
void release(void*) noexcept {}
void* allocate_spilling(int64_t, const std::vector<SpillBuffer::Range>&) { missing(); }
void* allocate_pinned(int64_t) { missing(); }
void release_pinned(void*) noexcept {}
std::shared_ptr<void> map_pinned(int64_t) { missing(); }
std::unique_ptr<SideCopies> make_side_copies(Accelerator&) { missing(); }
std::unique_ptr<StreamedWork> make_streamed_work(Accelerator&, int, int64_t) { missing(); }
void copy_to_device(Accelerator&, void*, const void*, int64_t) { missing(); }
void copy_to_host(Accelerator&, void*, const void*, int64_t) { missing(); }
void synchronize(Accelerator&) { missing(); }
double time_ms(Accelerator&, const std::function<void()>&) { missing(); }
std::array<std::byte, 64> ipc_handle(void*) { missing(); }
void* open_ipc(const std::array<std::byte, 64>&) { missing(); }
void close_ipc(void*) noexcept {}
void enable_peer_access(const void*) { missing(); }

}  // namespace cuda

}  // namespace moebius
