#include "engine/engine_memory.h"

#include <malloc.h>

#include <algorithm>
#include <mutex>

#include "comm/machine.h"
#include "ops/attention/attention_scratch.h"

namespace moebius {

MemoryUse memory_use(const EngineSpec& spec) {
  return {.model = spec.model,
          .training = spec.use == ModelUse::training,
          .batch = spec.shape.batch,
          .recompute = spec.recompute,
          .freezes = !spec.freeze.empty(),
          .has_adapters = spec.lora.is_on()};
}

bool runs_cudnn(const EngineSpec& spec) {
  const ModelSpec& m = spec.model;
  const int64_t T = spec.shape.tokens();
  const auto heads = [&](int64_t n, int64_t width) {  // those of a rank of tp
    return Tensor{.shape = {T, std::max<int64_t>(1, n / spec.mesh.tp), width}, .dtype = spec.precision.compute};
  };
  AttentionFwd attention{.q_THd = heads(m.num_heads, m.head_dim),
                         .k_UGd = heads(m.num_kv_heads, m.head_dim),
                         .v_UGd = heads(m.num_kv_heads, m.is_latent() ? m.v_head_dim : m.head_dim),
                         .batch = spec.shape.batch};
  if (spec.shape.documents) attention.doc_start_T = {.shape = {T}, .dtype = DType::i32};
  const AttentionBwd backward{.q_THd = attention.q_THd,
                              .k_TGd = attention.k_UGd,
                              .v_TGd = attention.v_UGd,
                              .doc_start_T = attention.doc_start_T,
                              .batch = attention.batch};
  if (spec.target != DeviceKind::cuda) return false;
  const GpuKernels on = gpu_kernels(spec);
  return uses_cudnn(on, attention) || uses_cudnn(on, backward);
}

KeptOnHost kept_on_host(const EngineSpec& spec) {
  return {
      .states = !spec.offload_weights || (spec.optimizer && (spec.optimizer->offload || spec.optimizer->offload_grad)),
      .weights = spec.offload_weights};
}

namespace {

// The available memory is read before any rank may have allocated.
void check_memory_of_cpu(const MemoryPlan& plan, int64_t stack_bytes, const EngineSpec& spec) {
  const MemoryUse use = memory_use(spec);
  const int64_t available = available_memory_bytes();
  if (!spec.world || spec.world->size() == 1) return check_host_memory(plan, stack_bytes, available, use);
  Control control(*spec.world);
  const int64_t mine = needed_host_bytes(plan, stack_bytes),
                by_others = sum_of_ranks(control, ranks_of_machine(control), mine) - mine;
  control.together([&] { check_host_memory(plan, stack_bytes, available, use, by_others); });
}

}  // namespace

void check_memory(MemoryPlan& plan, int64_t stack_bytes, const EngineSpec& spec, const Accelerator* gpu,
                  GpuRanks* ranks) {
  if (spec.device == DeviceKind::cpu) return check_memory_of_cpu(plan, stack_bytes, spec);
  if (!gpu) return;
  const MemoryUse use = memory_use(spec);
  const int64_t free = gpu->info().free_bytes, pinned = plan.bytes(Life::host);
  if (!ranks) {
    check_pinned_memory(plan, available_memory_bytes(), 0, kept_on_host(spec));
    return check_device_memory(plan, stack_bytes, free, use);
  }
  const int64_t pinned_by_others = ranks->sum_of_machine(pinned) - pinned;
  ranks->control().together(
      [&] { check_pinned_memory(plan, available_memory_bytes(), pinned_by_others, kept_on_host(spec)); });
  const int64_t mine = needed_bytes(plan, stack_bytes), others = ranks->sum_of_sharing(mine) - mine;
  ranks->control().together([&] { check_device_memory(plan, stack_bytes, free - others, use); });
}

PeakMemory::PeakMemory(const Accelerator* gpu) : gpu_(gpu) {
  if (gpu_) before_ = in_use();
}

int64_t PeakMemory::in_use() const {
  const AcceleratorInfo info = gpu_->info();
  return info.memory_bytes - info.free_bytes;
}

void PeakMemory::sample() {
  if (gpu_) peak_ = std::max(peak_, in_use() - before_);
}

int64_t PeakMemory::bytes() const { return gpu_ ? peak_ : peak_rss_bytes(); }

void HeapGaps::close() {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) return;
  {
    // A call visits the heaps of all threads, so threads take turns. Under a sanitizer, which replaces malloc(), the
    // first call initialises the heap of glibc, and two first calls at the same time crash.
    static std::mutex one_at_a_time;
    const std::lock_guard lock(one_at_a_time);
    ::malloc_trim(0);
  }
  next_ = now + std::chrono::milliseconds(100);
}

}  // namespace moebius
