#include "train/memory_forecast.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "ops/gemm/gemm.h"

namespace moebius {
namespace {

// Sums over the ranks that are threads of this rank's process. All ranks of the world call it together.
struct OfProcess {
  int64_t sum(int64_t mine) const {
    char host[256] = {};
    ::gethostname(host, sizeof host - 1);
    const std::string process = fmt::format("{} {} ", ::getpid(), host);
    int64_t total = 0;
    for (const std::string& said : control.gather(process + std::to_string(mine)))
      if (said.starts_with(process)) total += std::stoll(said.substr(process.size()));
    return total;
  }
  Control& control;
};

// Computes small products of each kind: of a forward pass, and of the gradients of inputs and of weights; with adapters
// also of their few columns. The BLAS library loads its pages and generates its code at the first product of a kind,
// some 5 MiB in f32. So they are part of the program's memory when that is read.
void load_products(Stream s, DType compute, int64_t lora_rank) {
  constexpr int64_t kSize = 128;
  std::vector<float> a(kSize * kSize), b(kSize * kSize), c(kSize * kSize);  // large enough for each dtype
  const auto matrix = [](std::vector<float>& of, Shape shape, DType dtype) { return Tensor{of.data(), shape, dtype}; };
  const auto load = [&](int64_t M, int64_t N, int64_t K) {
    gemm(s, {.c_MN = matrix(c, {M, N}, compute),
             .a = matrix(a, {M, K}, compute),
             .b = matrix(b, {N, K}, compute),
             .trans_b = true});
    gemm(s, {.c_MN = matrix(c, {M, K}, compute), .a = matrix(a, {M, N}, compute), .b = matrix(b, {N, K}, compute)});
    gemm(s, {.c_MN = matrix(c, {N, K}, DType::f32),
             .a = matrix(a, {M, N}, compute),
             .b = matrix(b, {M, K}, compute),
             .trans_a = true,
             .accumulate = true});
  };
  load(kSize, kSize, kSize);
  if (lora_rank > 0) load(kSize, std::min(lora_rank, kSize), kSize);
}

// Outside the plan, in MiB: the heap's buffers of files, logs and products, and in f32 the blocks that the BLAS library
// packs and the code that it generates for further shapes. They were read from the pages of runs with one and two
// threads (docs/measurements/memory.md).
constexpr double kHeap = 2.75, kOfF32 = 4;
// The same of a thread: its heap, and blocks that the library packs for products with few columns.
constexpr double kHeapOfThread = 0.25, kFewColumns = 2.1;

int64_t bytes_of(double mib) { return static_cast<int64_t>(mib * 1024 * 1024); }

// All ranks of a process share its heap.
int64_t process_bytes(DType compute) { return bytes_of(kHeap + (compute == DType::f32 ? kOfF32 : 0)); }

int64_t threads_bytes(int threads, const LoraSpec& lora) {
  return std::min(threads, num_available_cpus()) * bytes_of(kHeapOfThread + (lora.rank > 0 ? kFewColumns : 0));
}

}  // namespace

void MemoryForecast::predict(CheckpointStore& store, bool async_save) {
  const bool on_gpu = engine_.spec().device == DeviceKind::cuda;
  const HostMemory host = host_memory(engine_, async_save);
  if (on_gpu) control_.together([&] { store.hold_piece(); });
  const HostMemory here = of_this_machine(control_, host);
  control_.together([&] {
    const int64_t available = available_memory_bytes();
    check_snapshot(here, engine_.plan(), available);
    check_spill(here, engine_.plan(), available);
  });
  on_gpu ? predict_gpu(host) : predict_process(host);
}

void MemoryForecast::predict_gpu(const HostMemory& host) {
  const DeviceMemory gpu = engine_.shared_device_memory();
  predicted_bytes_ = gpu.total_bytes();
  log_.info("memory: {}; {}", gpu.text(), host.text());
}

// At this point the process has loaded the program and the indices of the datasets; the plan's pages are allocated at
// their first use. Ranks that are threads of the process are measured together.
void MemoryForecast::predict_process(const HostMemory& host) {
  const EngineSpec& spec = engine_.spec();
  load_products(engine_.stream(), spec.precision.compute, spec.lora.rank);
  const int64_t held = current_rss_bytes();
  const OfProcess of{control_};
  const int64_t num_ranks = of.sum(1), plan = of.sum(engine_.plan().total_bytes());
  const int64_t program = held + process_bytes(spec.precision.compute) + of.sum(threads_bytes(spec.threads, spec.lora));
  const int64_t snapshot = of.sum(host.snapshot_bytes);
  predicted_bytes_ = program + plan + snapshot;
  log_.info("memory: predicted peak {} (plan {}, program and data indices {}, checkpoint snapshot {}){}",
            bytes_text(predicted_bytes_), bytes_text(plan), bytes_text(program), bytes_text(snapshot),
            num_ranks == 1 ? "" : fmt::format(", of the {} ranks of this process", num_ranks));
}

void MemoryForecast::compare() {
  engine_.sample_peak_memory();
  const int64_t measured = engine_.peak_bytes();
  log_.info("memory: predicted peak {}, measured {}, {:+.1f} %", bytes_text(predicted_bytes_), bytes_text(measured),
            100.0 * (static_cast<double>(measured) / static_cast<double>(predicted_bytes_) - 1));
}

}  // namespace moebius
